"""RMS norm, rotary, silu_mul and kv_write: fast paths against references, references against the formula by hand."""

import math

import pytest
import torch

from treadle_kernels.kv_write import kv_write
from treadle_kernels.kv_write import reference as kv_write_reference
from treadle_kernels.rms_norm import reference as rms_norm_reference
from treadle_kernels.rms_norm import rms_norm
from treadle_kernels.rotary import reference as rotary_reference
from treadle_kernels.rotary import rotary_
from treadle_kernels.silu_mul import reference as silu_mul_reference
from treadle_kernels.silu_mul import silu_mul

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[actual.dtype], rtol=TOLERANCE[actual.dtype])


def randn(*shape, dtype=torch.float32, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_rms_norm_divides_by_the_root_of_the_mean_square():
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    root = math.sqrt(12.5 + 0.5)
    for op in (rms_norm, rms_norm_reference.rms_norm):
        torch.testing.assert_close(op(x, weight, 0.5), torch.tensor([[3 / root, 8 / root]]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 5, 64), (17, 576)])
def test_rms_norm_equals_its_reference(shape, dtype):
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=4)
    assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_names_a_weight_that_does_not_fit():
    with pytest.raises(ValueError, match=r"rms_norm: weight must have shape \[8\], has \[7\]"):
        rms_norm(randn(2, 8), randn(7), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 10), (2, 4, 6), (5, 3072)])
def test_silu_mul_equals_its_reference(shape, dtype):
    gate_up = randn(*shape, dtype=dtype)
    assert_close(silu_mul(gate_up), silu_mul_reference.silu_mul(gate_up))


def test_silu_mul_is_gate_times_its_sigmoid_times_up():
    assert silu_mul(torch.tensor([[2.0, 3.0]])).item() == pytest.approx(2 / (1 + math.exp(-2)) * 3)


def test_silu_mul_refuses_an_odd_width():
    with pytest.raises(ValueError, match="even last dimension"):
        silu_mul(randn(2, 3))


def rotation_tables(angles, dtype=torch.float32):
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


@pytest.mark.parametrize("op", [rotary_, rotary_reference.rotary_])
def test_rotary_turns_each_pair_by_its_angle(op):
    heads = torch.tensor([[[1.0, 10.0, 0.0, 0.0]]])  # pairs (1, 0) and (10, 0)
    op(heads, *rotation_tables(torch.tensor([[math.pi / 2, math.pi]])))
    torch.testing.assert_close(heads, torch.tensor([[[0.0, -10.0, 1.0, 0.0]]]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), [(1, 1, 2), (3, 5, 8), (7, 12, 64)])
def test_rotary_equals_its_reference_on_a_strided_view(num_tokens, num_heads, head_dim, dtype):
    qkv = randn(num_tokens, num_heads + 2, head_dim, dtype=dtype)
    expected = qkv.clone()
    tables = rotation_tables(randn(num_tokens, head_dim // 2), dtype)
    rotary_(qkv[:, :num_heads], *tables)
    rotary_reference.rotary_(expected[:, :num_heads], *tables)
    assert_close(qkv, expected)


def test_rotary_names_a_table_that_does_not_fit():
    with pytest.raises(ValueError, match=r"rotary_: cos must have shape \[2, 8\], has \[2, 4\]"):
        rotary_(randn(2, 3, 8), randn(2, 4), randn(2, 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_write_equals_its_reference_and_leaves_other_slots_alone(dtype):
    qkv = randn(4, 9, 8, dtype=dtype)
    key_value = qkv[:, 5:].view(4, 2, 2, 8)
    slots = torch.tensor([4, 13, 6, 7])
    cache, expected = torch.zeros(4, 4, 2, 2, 8, dtype=dtype), torch.zeros(4, 4, 2, 2, 8, dtype=dtype)
    kv_write(key_value, cache, slots)
    kv_write_reference.kv_write(key_value, expected, slots)
    assert torch.equal(cache, expected)
    assert torch.equal(cache[3, 1], key_value[1])
    assert cache.flatten(0, 1)[[0, 1, 2, 3, 5, 8, 9, 10, 11, 12, 14, 15]].abs().sum() == 0


def test_kv_write_names_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"slot_mapping must have shape \[3\], has \[2\]"):
        kv_write(randn(3, 2, 1, 4), torch.zeros(2, 4, 2, 1, 4), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"key_value must have shape \[1, 2, 2, 4\], has \[1, 2, 1, 4\]"):
        kv_write(randn(1, 2, 1, 4), torch.zeros(2, 4, 2, 2, 4), torch.tensor([5]))
