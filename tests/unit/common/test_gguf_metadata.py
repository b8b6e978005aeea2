"""The metadata reader against the gguf package as the oracle, and against damaged files."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from services.common.errors import EngineError, ErrorReason
from services.common.gguf_metadata import GgufMetadata


def write_file(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.uint8", 255)
    writer.add_int8("a.int8", -128)
    writer.add_uint16("a.uint16", 65_535)
    writer.add_int16("a.int16", -32_768)
    writer.add_uint32("a.uint32", 2**32 - 1)
    writer.add_int32("a.int32", -(2**31))
    writer.add_uint64("a.uint64", 2**64 - 1)
    writer.add_int64("a.int64", -(2**63))
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.true", True)
    writer.add_bool("a.false", False)
    writer.add_string("a.text", "日本 \n")
    writer.add_array("a.strings", ["", "Ġt", "👋"])
    writer.add_array("a.integers", [-1, 0, 7])
    writer.add_array("a.floats", [0.5, -2.0])
    writer.add_string("z.last", "end")
    writer.add_tensor("x.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("y.weight", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_file(tmp_path / "model.gguf")


def refusal(path: Path) -> str:
    with pytest.raises(EngineError) as caught, GgufMetadata(path) as metadata:
        metadata.tensor_infos()
    assert caught.value.reason is ErrorReason.MODEL_LOAD_FAILED
    assert str(path) in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("a.uint8", 255),
        ("a.int8", -128),
        ("a.uint16", 65_535),
        ("a.int16", -32_768),
        ("a.uint32", 2**32 - 1),
        ("a.int32", -(2**31)),
        ("a.uint64", 2**64 - 1),
        ("a.int64", -(2**63)),
    ],
)
def test_integers_of_every_width_are_read(file, key, value):
    with GgufMetadata(file) as metadata:
        assert metadata.integer(key) == value


def test_other_scalars_are_read(file):
    with GgufMetadata(file) as metadata:
        assert metadata.floating("a.float32") == 0.5
        assert metadata.floating("a.float64") == 0.1
        assert metadata.floating("a.uint8") == 255.0
        assert metadata.boolean("a.true") is True
        assert metadata.boolean("a.false") is False
        assert metadata.string("a.text") == "日本 \n"


def test_arrays_are_read_and_what_follows_them(file):
    with GgufMetadata(file) as metadata:
        assert metadata.strings("a.strings") == ["", "Ġt", "👋"]
        assert metadata.integers("a.integers") == [-1, 0, 7]
        assert metadata.floats("a.floats") == [0.5, -2.0]
        assert metadata.num_items("a.strings") == 3
        assert metadata.string("z.last") == "end"


def test_absent_keys_are_none(file):
    with GgufMetadata(file) as metadata:
        assert metadata.string("b") is None
        assert metadata.integers("b") is None
        assert metadata.num_items("b") is None
        assert not metadata.is_array("b")


def test_value_of_another_type_is_refused_by_name(file):
    with (
        GgufMetadata(file) as metadata,
        pytest.raises(EngineError, match=r"'a\.text' should be an integer and is STRING"),
    ):
        metadata.integer("a.text")


def test_array_for_a_scalar_is_refused_by_name(file):
    with GgufMetadata(file) as metadata, pytest.raises(EngineError, match=r"'a\.strings' should be a string and is an"):
        metadata.string("a.strings")


def test_tensor_directory_equals_that_of_the_gguf_package(file):
    with GgufMetadata(file) as metadata:
        ours = [(t.name, t.shape, t.type_id, t.offset_bytes) for t in metadata.tensor_infos()]
    theirs = [
        (t.name, tuple(int(n) for n in t.shape), int(t.tensor_type), int(t.data_offset))
        for t in gguf.GGUFReader(file).tensors
    ]
    assert ours == theirs


def test_keys_equal_those_of_the_gguf_package(file):
    with GgufMetadata(file) as metadata:
        assert list(metadata.keys) == [k for k in gguf.GGUFReader(file).fields if not k.startswith("GGUF.")]


def test_every_truncation_of_the_header_is_refused(file, tmp_path):
    with GgufMetadata(file) as metadata:
        data_start = min(t.offset_bytes for t in metadata.tensor_infos())
    whole = file.read_bytes()
    # Less the padding before the data. The step is a prime, so that cuts fall everywhere within the fields.
    for length in range(0, data_start - 32, 13):
        path = tmp_path / "short.gguf"
        path.write_bytes(whole[:length])
        refusal(path)


def test_foreign_file_is_refused(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "not a GGUF file" in refusal(path)


def test_empty_and_absent_files_are_refused(tmp_path):
    (tmp_path / "empty.gguf").touch()
    assert "cannot be read" in refusal(tmp_path / "empty.gguf")
    assert "cannot be read" in refusal(tmp_path / "absent.gguf")


def test_unknown_version_is_refused(file):
    data = bytearray(file.read_bytes())
    data[4] = 9
    file.write_bytes(data)
    assert "version 9 is not supported" in refusal(file)


def test_absurd_counts_are_refused_without_being_believed(file):
    data = bytearray(file.read_bytes())
    data[16:24] = (2**63).to_bytes(8, "little")
    file.write_bytes(data)
    refusal(file)
