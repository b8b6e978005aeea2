"""The worker: the device and everything on it.

Owns weights, keys and values, the forward pass and sampling; takes no decision about who runs. It executes batch plans
strictly in order, on one thread, so its event loop answers health during a step of any length. When it dies, the
scheduler runs its requests elsewhere or again when it returns; nothing of it needs recovery.
"""
