"""The CPU engine on 64-bit Arm: compiled for it, run in an emulator, and held bit for bit against this machine's."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from treadle_kernels import cpu
from treadle_kernels.cpu import build
from treadle_kernels.cpu.library import LIBRARY_PATH

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
SYSTEM_ROOT = "/usr/aarch64-linux-gnu"  # of the compiler's package
HOST_ISA = cpu.available_isas()[-1] if cpu.is_available() else "plain"

pytestmark = [
    pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable_reason())),
    pytest.mark.skipif(platform.machine() == "aarch64", reason="here every other test of the engine runs on NEON"),
    pytest.mark.skipif(HOST_ISA == "plain", reason="this machine has no fused products, so its bits are its own"),
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
        reason="needs a cross compiler and an emulator: apt-get install g++-aarch64-linux-gnu qemu-user-static",
    ),
    pytest.mark.slow,
    pytest.mark.timeout(900),  # compiles the library a second time
]


def compile_digests(compiler: str, library: Path, program: Path) -> Path:
    source = Path(__file__).with_name("isa_digests.cpp")
    options = ["-std=c++17", "-O1", f"-I{build.SOURCE_DIRECTORY}", f"-Wl,-rpath,{library.parent}"]
    subprocess.run([compiler, *options, str(source), str(library), "-o", str(program)], check=True)
    return program


def digests(*command: str) -> dict[str, str]:
    """The digest of each operation."""
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {operation: digest for _, operation, digest in map(str.split, lines)}


@pytest.fixture(scope="module")
def host_digests(tmp_path_factory) -> dict[str, str]:
    program = tmp_path_factory.mktemp("host") / "isa_digests"
    return digests(str(compile_digests(build.find_compiler(), LIBRARY_PATH, program)), HOST_ISA)


@pytest.fixture(scope="module")
def arm_program(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("arm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "CXX", COMPILER)
        library = build.build(directory / "libtreadle_cpu.so")
    return compile_digests(COMPILER, library, directory / "isa_digests")


@pytest.mark.parametrize("isa", ["neon", "neon_i8mm", "plain"])
def test_arm_gives_the_bits_of_this_machine(isa, host_digests, arm_program):
    of_arm = digests(EMULATOR, "-cpu", "max", "-L", SYSTEM_ROOT, str(arm_program), isa)
    assert len(of_arm) > 50
    assert of_arm == host_digests
