"""Compiles the native library with the system's C++ compiler.

Run by the build hook (``hatch_build.py``) at installation; ``python build.py`` in this directory does the same by hand.
Imports nothing of ours, so that it works before anything is installed. Each instruction set is a file of its own with
its own flags; what a compiler does not know is left out, and the library chooses among the rest when it is loaded.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
SOURCE_DIRECTORY = _HERE / "native"
LIBRARY_PATH = _HERE / "libtreadle_cpu.so"

# No contraction: whether a product and a sum are fused is written in the source, not left to the compiler.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-pthread")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=512")
# Hardly ever used on these machines, and five times as long to compile otherwise.
_PLAIN = ("-O2",)
_FLAGS_BY_STEM: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "isa_plain": _PLAIN,
        "isa_avx2": _AVX2,
        "isa_avx_vnni": (*_AVX2, "-mavxvnni"),
        "isa_avx512": _AVX512,
        "isa_amx": (*_AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8", "-mavx512bf16", "-mavx512vbmi"),
    },
    "aarch64": {
        "isa_plain": _PLAIN,
        "isa_neon": ("-march=armv8.2-a+dotprod",),
        "isa_neon_i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
    },
}
# Lines are all that a report names; where each variable lives takes as long to compile again.
SANITIZER_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1", "-O1")


class BuildError(RuntimeError):
    """There is no library; the text says why."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """One file to compile; ``flags`` are tried first, and left out if the compiler does not know them."""

    source: Path
    flags: tuple[str, ...]


def build(library_path: Path = LIBRARY_PATH, extra_flags: tuple[str, ...] = ()) -> Path:
    """Compile the library, unless it is newer than its sources.

    Args:
        library_path: Where it goes; replaced at once, so that processes that have it loaded keep the old one.
        extra_flags: For every file.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    sources = sorted(SOURCE_DIRECTORY.glob("*.cpp"))
    inputs = [*SOURCE_DIRECTORY.iterdir(), Path(__file__)]
    if library_path.exists() and library_path.stat().st_mtime > max(path.stat().st_mtime for path in inputs):
        return library_path
    compiler = find_compiler()
    flags_by_stem = _FLAGS_BY_STEM.get(_machine_of(compiler), {})
    units = [_Unit(source, flags_by_stem.get(source.stem, ())) for source in sources]
    with tempfile.TemporaryDirectory(dir=library_path.parent) as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda unit: _compile(compiler, unit, Path(scratch), extra_flags), units))
        linked = Path(scratch) / library_path.name
        _run([compiler, "-shared", "-pthread", *extra_flags, "-o", str(linked), *map(str, objects)])
        linked.replace(library_path)
    return library_path


def find_compiler() -> str:
    """Return the C++ compiler: ``$CXX``, else the first of c++, g++, clang++.

    Raises:
        BuildError: there is none.
    """
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for candidate in candidates:
        if found := shutil.which(candidate):
            return found
    raise BuildError(f"no C++17 compiler found (looked for {', '.join(candidates)}); install g++ or clang++")


def _machine_of(compiler: str) -> str:
    """Return the kind of machine that the compiler compiles for, which need not be this one."""
    triple = subprocess.run([compiler, "-dumpmachine"], check=False, capture_output=True, text=True).stdout
    machine = triple.split("-")[0].strip().lower()
    return "aarch64" if machine == "arm64" else machine


def _compile(compiler: str, unit: _Unit, directory: Path, extra_flags: tuple[str, ...]) -> Path:
    target = directory / f"{unit.source.stem}.o"
    end = [*extra_flags, "-c", str(unit.source), "-o", str(target)]
    try:
        _run([compiler, *_FLAGS, *unit.flags, *end])
    except BuildError:
        if _knows(compiler, unit.flags):
            raise
        _run([compiler, *_FLAGS, *end])  # without its flags, the file says that the instruction set is not there
    return target


def _knows(compiler: str, flags: tuple[str, ...]) -> bool:
    try:
        _run([compiler, *flags, "-x", "c++", "-fsyntax-only", os.devnull])
    except BuildError:
        return False
    return True


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{' '.join(command)} failed:\n{error.stderr[-4000:]}") from error


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
