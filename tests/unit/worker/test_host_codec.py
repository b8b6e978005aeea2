"""Blocks in host memory: as they were, or within the stated error."""

import numpy as np
import pytest

from services.worker.host_codec import Int8Codec, PlainCodec, make_codec

HEAD_DIM = 8
NUM_ROWS = 12


def float_rows() -> np.ndarray:
    generator = np.random.default_rng(3)
    rows = generator.standard_normal((2, NUM_ROWS, HEAD_DIM)).astype(np.float32)
    return rows * np.logspace(-3, 3, NUM_ROWS, dtype=np.float32)[:, None]


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Cut to the upper half; returns uint16."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_plain_codec_returns_the_very_bytes():
    blocks = np.arange(20, dtype=np.uint8).reshape(2, 10)
    codec = PlainCodec(10)
    assert (codec.decode(codec.encode(blocks)) == blocks).all()


def test_int8_codec_is_off_by_half_a_step_at_most():
    rows = float_rows()
    codec = Int8Codec(NUM_ROWS * HEAD_DIM * 4, HEAD_DIM, "float32")
    returned = codec.decode(codec.encode(rows.reshape(2, -1).view(np.uint8))).view(np.float32).reshape(rows.shape)
    step = np.abs(rows).max(axis=2, keepdims=True) / 127
    assert (np.abs(returned - rows) <= step / 2 * (1 + 1e-5)).all()


def test_int8_codec_of_bfloat16_is_off_by_half_a_step_and_a_rounding_at_most():
    bits = to_bfloat16(float_rows())
    rows = from_bfloat16(bits)
    codec = Int8Codec(NUM_ROWS * HEAD_DIM * 2, HEAD_DIM, "bfloat16")
    returned = codec.decode(codec.encode(bits.reshape(2, -1).view(np.uint8))).view(np.uint16)
    error = np.abs(from_bfloat16(returned).reshape(rows.shape) - rows)
    step = np.abs(rows).max(axis=2, keepdims=True) / 127
    assert (error <= step / 2 + np.abs(rows) * 2**-8 + step * 2**-8).all()


def test_int8_codec_stores_a_byte_a_number_and_four_a_row():
    codec = Int8Codec(NUM_ROWS * HEAD_DIM * 2, HEAD_DIM, "bfloat16")
    assert codec.stored_bytes == NUM_ROWS * (HEAD_DIM + 4)
    encoded = codec.encode(np.zeros((3, NUM_ROWS * HEAD_DIM * 2), dtype=np.uint8))
    assert encoded.shape == (3, codec.stored_bytes)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_int8_codec_returns_zeros_as_zeros_and_rows_that_are_not_finite_as_nan(number):
    rows = np.zeros((1, 2, HEAD_DIM), dtype=np.float32)
    rows[0, 1, 3] = number
    codec = Int8Codec(2 * HEAD_DIM * 4, HEAD_DIM, "float32")
    returned = codec.decode(codec.encode(rows.reshape(1, -1).view(np.uint8))).view(np.float32).reshape(2, HEAD_DIM)
    assert (returned[0] == 0).all()
    assert np.isnan(returned[1]).any()


def test_int8_codec_refuses_blocks_that_are_not_whole_rows():
    with pytest.raises(ValueError, match="not made of rows of 8 float32 numbers"):
        Int8Codec(100, HEAD_DIM, "float32")


def test_blocks_of_int8_numbers_are_not_compressed_again():
    assert isinstance(make_codec("int8", 100, HEAD_DIM, "int8"), PlainCodec)
    assert isinstance(make_codec("none", 100, HEAD_DIM, "float32"), PlainCodec)
    assert isinstance(make_codec("int8", 64, HEAD_DIM, "bfloat16"), Int8Codec)
