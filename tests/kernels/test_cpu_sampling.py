"""Sampling of the CPU engine: the same draws and the same tokens as the worker's sampler, for any batch."""

import math

import numpy as np
import pytest
import torch

from services.worker.generator import uniforms
from services.worker.plan import Handle, SampledToken, SamplingParams
from services.worker.sampler import SamplingRow
from services.worker.sampler import sample as sample_in_torch
from tests.kernels.cpu_references import random_floats
from treadle_kernels import cpu
from treadle_kernels.cpu import SAMPLING_DTYPE, ThreadPool

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable_reason()))


def parameters(num_rows, *, temperature=1.0, min_p=0.0, top_p=1.0, top_k=0, seed=0):
    rows = np.zeros(num_rows, dtype=SAMPLING_DTYPE)
    rows["temperature"], rows["min_p"], rows["top_p"], rows["top_k"] = temperature, min_p, top_p, top_k
    rows["seed"] = seed + np.arange(num_rows) * 7919
    rows["position"] = np.arange(num_rows)
    return rows


def test_the_draw_equals_the_workers_generator_to_the_bit():
    rng = np.random.default_rng(1)
    seeds = [0, 1, 2**64 - 1, *(int(seed) for seed in rng.integers(0, 2**64, 40, dtype=np.uint64))]
    samples = [int(sample) for sample in rng.integers(0, 2**32, len(seeds))]
    positions = [0, 2**32, 2**64 - 1, *(int(position) for position in rng.integers(0, 2**40, len(seeds) - 3))]
    expected = uniforms(seeds, samples, positions)
    drawn = [cpu.uniform(*key) for key in zip(seeds, samples, positions, strict=True)]
    assert drawn == expected.tolist()


@pytest.mark.parametrize("vocab_size", [1, 5, 97, 1024, 5003])
def test_a_greedy_row_takes_the_largest_logit_and_the_lowest_id_among_equals(isa, vocab_size):
    logits = np.round(random_floats(np.random.default_rng(2), 20, vocab_size))
    tokens = cpu.sample(ThreadPool(2), logits, parameters(20, temperature=0.0))
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 3.0, "min_p": 0.05},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 400, "top_p": 0.7},
        {"top_p": 0.9},
        {"top_p": 0.999, "temperature": 2.0},
        {"top_p": 0.5, "min_p": 0.01, "top_k": 50, "temperature": 1.3},
    ],
    ids=str,
)
def test_tokens_equal_the_workers_sampler(isa, options):
    num_rows = 200
    logits = 3 * random_floats(np.random.default_rng(3), num_rows, 2000)
    rows = parameters(num_rows, **options)
    params = {"temperature": 1.0} | options
    sampling_rows = [
        SamplingRow(Handle(i), SamplingParams(seed=int(rows["seed"][i]), **params), int(rows["position"][i]))
        for i in range(num_rows)
    ]
    expected = []
    for outcome in sample_in_torch(torch.from_numpy(logits), sampling_rows):
        assert isinstance(outcome, SampledToken)
        expected.append(outcome.token_id)
    tokens = cpu.sample(ThreadPool(3), logits, rows)
    # Weights may differ in the last bits between the two exponentials; a draw within 1e-7 of a border may then fall on
    # the other side. None of these does.
    np.testing.assert_array_equal(tokens, expected)


def test_a_choice_does_not_depend_on_the_rows_around_it(isa):
    logits = random_floats(np.random.default_rng(4), 33, 1000)
    rows = parameters(33, top_p=0.95)
    rows["temperature"][::3] = 0
    whole = cpu.sample(ThreadPool(3), logits, rows)
    alone = [int(cpu.sample(ThreadPool(1), logits[i : i + 1], rows[i : i + 1])[0]) for i in range(33)]
    assert whole.tolist() == alone


def test_tokens_come_in_proportion_to_their_probability(isa):
    logits = np.tile(np.log(np.array([1, 2, 5, 0.5], dtype=np.float32)), (4000, 1))
    counts = np.bincount(cpu.sample(ThreadPool(2), logits, parameters(4000)), minlength=4) / 4000
    for count, probability in zip(counts, np.array([1, 2, 5, 0.5]) / 8.5, strict=True):
        assert abs(count - probability) < 4 * math.sqrt(probability * (1 - probability) / 4000)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [32, 100])
def test_only_rows_whose_logits_are_not_finite_have_no_token(isa, temperature, vocab_size):
    logits = random_floats(np.random.default_rng(5), 5, vocab_size)
    logits[1, 17] = np.nan
    logits[2, 3] = np.inf
    logits[3, :] = -np.inf
    logits[4, 5:] = -np.inf  # masked tokens are no fault
    tokens = cpu.sample(ThreadPool(1), logits, parameters(5, temperature=temperature))
    assert (tokens[[1, 2, 3]] == -1).all()
    assert tokens[0] >= 0
    assert 0 <= tokens[4] < 5


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -1, "temperature must be at least 0"),
        ("temperature", math.nan, "temperature must be at least 0, is nan"),
        ("min_p", 1.5, "min_p must be from 0 to 1, is 1.5"),
        ("top_p", 0, "top_p must be above 0 and at most 1, is 0"),
        ("top_k", -2, "top_k must be at least 0, is -2"),
    ],
)
def test_a_wrong_parameter_is_refused_in_words(field, value, message):
    rows = parameters(3)
    rows[field][2] = value
    with pytest.raises(ValueError, match=r"sampling\[2\]: " + message):
        cpu.sample(ThreadPool(1), np.zeros((3, 4), dtype=np.float32), rows)
