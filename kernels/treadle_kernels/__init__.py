"""The tensor operations of Treadle's models: typed, checked, each with a plain PyTorch reference.

One package an operation: ``__init__`` is the typed op and its contract, ``reference`` the oracle that states the
formula, any other module a faster implementation that must agree with it. ``dispatch`` picks one by device. ``cpu`` is
the native engine, which needs no torch; so nothing is imported here, and each operation comes from its own package.
Guarantees: imports torch and numpy only. A row's result is a function of that row alone, as far as the matrix library
under it allows: no operation here chooses shapes or algorithms by what else is in the batch.
"""
