"""The KV-cache manager: owns which request holds which block, on every worker, and what each full block contains.

State it owns: one block pool per worker (reference counts, eviction order), the prefix index of each pool, and one
lease per admitted request (its block table and known tokens). It never touches tensor bytes and decides nothing about
who runs.

When it dies, its state is gone: the scheduler recomputes every running request against freshly opened pools. ``core``
is the pure state machine; the modules around it speak gRPC.
"""
