"""The gateway: the mesh's public surface, HTTP with SSE and gRPC.

Owns client connections, validation, chat templates, text <-> tokens, stop strings, response framing and the client-side
journal of each stream. It knows no block and no worker. When it dies, the scheduler finishes or cancels what it had
submitted; nothing of it needs recovery.
"""
