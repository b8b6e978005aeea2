"""Packed weights in a file: what is read is what was written, and nothing else is taken for it."""

import numpy as np
import pytest

from tests.kernels.cpu_references import random_floats, random_raw
from treadle_kernels import cpu
from treadle_kernels.cpu import PackedFile, PackedFileWriter, ThreadPool, WeightFormat

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable_reason()))


@pytest.fixture
def packed(tmp_path):
    rng = np.random.default_rng(1)
    path = tmp_path / "model.packed"
    raw, bias, norm = random_raw(rng, WeightFormat.Q4_K, 21, 256), random_floats(rng, 21), random_floats(rng, 7)
    with PackedFileWriter(path, "abc") as writer:
        writer.add_vector("norm", norm)
        writer.add_linear("layer", WeightFormat.Q4_K, raw, 21, 256, bias)
        writer.add_linear("head", WeightFormat.Q8_0, random_raw(rng, WeightFormat.Q8_0, 5, 64), 5, 64)
    return path, cpu.pack_linear(WeightFormat.Q4_K, raw, 21, 256, bias=bias), norm


def test_a_file_gives_back_what_was_packed(packed):
    path, layer, norm = packed
    file = PackedFile(path, "abc")
    x = random_floats(np.random.default_rng(2), 3, 256)
    read = file.linear("layer")
    np.testing.assert_array_equal(read.data, layer.data)
    np.testing.assert_array_equal(file.vector("norm"), norm)
    np.testing.assert_array_equal(cpu.linear(ThreadPool(1), read, x), cpu.linear(ThreadPool(1), layer, x))
    assert "layer.bias" in file
    assert file.linear("head").bias is None
    with pytest.raises(KeyError):
        file.linear("tail")


def test_arrays_outlive_the_file_object(packed):
    path, layer, _ = packed
    read = PackedFile(path, "abc").linear("layer")
    path.unlink()
    np.testing.assert_array_equal(read.data, layer.data)


def test_the_same_weights_make_the_same_file(packed, tmp_path):
    path, _, _ = packed
    rng = np.random.default_rng(1)
    raw, bias, norm = random_raw(rng, WeightFormat.Q4_K, 21, 256), random_floats(rng, 21), random_floats(rng, 7)
    with PackedFileWriter(tmp_path / "again.packed", "abc") as writer:
        writer.add_vector("norm", norm)
        writer.add_linear("layer", WeightFormat.Q4_K, raw, 21, 256, bias)
        writer.add_linear("head", WeightFormat.Q8_0, random_raw(rng, WeightFormat.Q8_0, 5, 64), 5, 64)
    assert (tmp_path / "again.packed").read_bytes() == path.read_bytes()


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    def fail_halfway():
        with PackedFileWriter(tmp_path / "model.packed", "abc") as writer:
            writer.add_vector("norm", np.ones(3, dtype=np.float32))
            writer.add_linear("layer", WeightFormat.Q4_K, b"", 21, 256)

    with pytest.raises(ValueError, match="raw weights must have"):
        fail_halfway()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], "no packed model, or it is truncated"),
        (lambda data: data[:20], "too short"),
        (lambda data: b"GGUF" + data[4:], "no packed model"),
        (lambda data: data[:-1] + b"!", "damaged index"),
        (lambda data: data.replace(b'"key": "abc"', b'"key": "abd"'), "was packed from abd by version 1, not from abc"),
        (lambda data: data.replace(b'"packing": 1', b'"packing": 2'), "by version 2"),
    ],
)
def test_a_foreign_or_damaged_file_is_refused_in_words(packed, change, message):
    path, _, _ = packed
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        PackedFile(path, "abc")
