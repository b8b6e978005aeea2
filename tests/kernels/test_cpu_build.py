"""The native library's build: what a compiler does not know is left out, what is wrong is said."""

import ctypes
import platform

import pytest

from treadle_kernels.cpu import build as native_build

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="only x86-64 has files with flags of their own"
)
SOURCE = """extern "C" __attribute__((visibility("default"))) int answer() {
#ifdef __AVX2__
    return 1;
#else
    return 2;
#endif
}
"""


@pytest.fixture
def sources(tmp_path, monkeypatch):
    directory = tmp_path / "native"
    directory.mkdir()
    monkeypatch.setattr(native_build, "SOURCE_DIRECTORY", directory)
    return directory


def test_a_file_is_compiled_with_the_flags_of_its_instruction_set(sources, tmp_path):
    (sources / "isa_avx2.cpp").write_text(SOURCE)
    assert ctypes.CDLL(str(native_build.build(tmp_path / "a.so"))).answer() == 1


def test_flags_that_the_compiler_does_not_know_are_left_out(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(native_build, "_FLAGS_BY_STEM", {"x86_64": {"isa_new": ("-mno-such-instructions",)}})
    (sources / "isa_new.cpp").write_text(SOURCE)
    assert ctypes.CDLL(str(native_build.build(tmp_path / "a.so"))).answer() == 2


def test_an_error_that_only_an_instruction_set_shows_is_not_taken_for_an_unknown_flag(sources, tmp_path):
    (sources / "isa_avx2.cpp").write_text("#ifdef __AVX2__\n#error this file is broken\n#endif\n")
    with pytest.raises(native_build.BuildError, match="this file is broken"):
        native_build.build(tmp_path / "a.so")
