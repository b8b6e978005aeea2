"""The CPU library under the address and undefined-behaviour sanitizers, driven through every operation."""

import ctypes.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from treadle_kernels import cpu
from treadle_kernels.cpu import build

pytestmark = [
    pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable_reason())),
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # compiles the library a second time
]

TESTS_RUN = (
    "test_cpu_linear.py",
    "test_cpu_attention.py",
    "test_cpu_rows.py",
    "test_cpu_sampling.py",
)


def runtime_of(name: str, compiler: str) -> str:
    """Where the compiler keeps a sanitizer's shared library."""
    result = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(result.stdout.strip())
    if not path.is_absolute():
        pytest.skip(f"{compiler} has no {name}")
    return str(path)


def test_no_operation_reads_or_writes_out_of_bounds(tmp_path):
    compiler = build.find_compiler()
    runtimes = [runtime_of(name, compiler) for name in ("libasan.so", "libubsan.so")]
    library = build.build(tmp_path / "libtreadle_cpu.so", build.SANITIZER_FLAGS)
    environment = os.environ | {
        "TREADLE_CPU_LIBRARY": str(library),
        "LD_PRELOAD": " ".join(runtimes),
        # Python itself keeps memory at exit, and torch, which the tests load, has code that the sanitizer dislikes.
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    assert ctypes.util.find_library("c")
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=1500"]
    result = subprocess.run(
        [*command, "-k", "not every_batch", *(str(here / name) for name in TESTS_RUN)],
        env=environment,
        cwd=here.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    assert " passed" in result.stdout
