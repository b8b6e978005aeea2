"""The ``treadle`` command: starts and supervises the mesh, keeps the models, chats.

Owns: the processes of a local mesh, its run directory, and the model files in the user's cache.
Guarantees: no process outlives the launcher; no half-written model file is ever visible.
Imports ``services.common`` only; services are started as processes by module name.
"""

__all__: list[str] = []
