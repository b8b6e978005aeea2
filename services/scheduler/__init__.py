"""The scheduler: owns every request from submission to its last token, and decides what each worker computes next.

State it owns: the waiting queues, the running requests of each worker with all their known tokens, and the plans in
flight. It knows blocks only as numbers that the KV-cache manager granted, and text not at all.

When it dies, gateways submit their live requests again with the tokens already emitted. ``core`` is the pure state
machine; the modules around it speak gRPC and own the step loop.
"""
