"""The threads that share the library's work."""

import ctypes
import weakref

from treadle_kernels.cpu.library import call, load

DEFAULT_SPIN_US = 50
"""Longer than any serial stretch within a step, far shorter than the gap between two steps of an idle worker."""


class ThreadPool:
    """Threads that sleep when there is nothing to do. One caller at a time.

    Args:
        num_threads: The caller's included.
        spin_us: Microseconds that an idle thread looks for work before it sleeps.
    """

    def __init__(self, num_threads: int, *, spin_us: int = DEFAULT_SPIN_US) -> None:
        self.num_threads = num_threads
        handle = ctypes.c_void_p()
        call("treadle_pool_create", num_threads, spin_us, ctypes.byref(handle))
        self.handle = handle
        self._finalizer = weakref.finalize(self, load().treadle_pool_destroy, handle)

    def measure_fork_join_s(self, num_rounds: int = 1000) -> float:
        """Seconds that an empty fork and join takes."""
        seconds = ctypes.c_double()
        call("treadle_pool_measure", self.handle, num_rounds, ctypes.byref(seconds))
        return seconds.value
