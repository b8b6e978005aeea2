"""Whole steps of the CPU engine: against the float32 reference, and against themselves over batches and chunks."""

import functools
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.kernels.cpu_models import (
    Request,
    disjoint_tables,
    load_native,
    load_reference,
    logits_of,
    make_cache,
    reference_logits,
)
from tests.kernels.cpu_references import ISAS, make_rows
from tests.model_files import random_weights, tiny_config, write_gguf_file
from treadle_kernels import cpu
from treadle_kernels.cpu import SAMPLING_DTYPE, ActivationFormat, KvDtype, ThreadPool

pytestmark = [
    pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable_reason())),
    pytest.mark.slow,
]

LENGTHS = (150, 33, 70)
TERMS = {ActivationFormat.INT8: 2, ActivationFormat.SPLIT: 2, ActivationFormat.ROTATED: 1, ActivationFormat.BF16: 1}
# The float32 path differs in summation order only; quantised ones also see 8-bit activations.
TOLERANCE = {"F32": 2e-4, "F16": 2e-4, "BF16": 2e-4, "Q8_0": 0.3, "Q4_1": 0.3}


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cpu_models")
    torch.set_num_threads(1)

    @functools.cache
    def write(family, type_name):
        config = tiny_config(family, tie_word_embeddings=family == "qwen3")
        path = directory / f"{family}-{type_name}.gguf"
        return write_gguf_file(path, config, random_weights(config, seed=5), type_name=type_name)

    return write


def make_requests(rng, lengths=LENGTHS, vocab_size=280):
    tables = disjoint_tables(rng, lengths)
    return [
        Request([int(token) for token in rng.integers(3, vocab_size, length)], table)
        for length, table in zip(lengths, tables, strict=True)
    ]


@pytest.mark.parametrize("type_name", list(TOLERANCE))
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_are_the_references_in_every_family(model_file, family, type_name):
    path = model_file(family, type_name)
    reference, model = load_reference(path), load_native(path, ThreadPool(2))
    requests = make_requests(np.random.default_rng(1))
    plan = [[(0, 100), (1, 20)], [(0, 50), (2, 69)], [(1, 13), (2, 1)]]
    for request, logits in zip(requests, logits_of(model, make_cache(model, 2), requests, plan), strict=True):
        expected = reference_logits(reference, request.token_ids)
        spread = expected.std()
        np.testing.assert_allclose(logits / spread, expected / spread, atol=TOLERANCE[type_name], rtol=0)


@pytest.mark.parametrize("kv_dtype", [KvDtype.BF16, KvDtype.INT8], ids=lambda d: d.name)
def test_short_kv_formats_stay_close_to_the_reference(model_file, kv_dtype):
    path = model_file("llama", "F32")
    reference, model = load_reference(path), load_native(path, ThreadPool(2))
    requests = make_requests(np.random.default_rng(2), (120,))
    (logits,) = logits_of(model, make_cache(model, 2, dtype=kv_dtype), requests, [[(0, 120)]])
    expected = reference_logits(reference, requests[0].token_ids)
    assert np.abs(logits - expected).max() < 0.05 * expected.std()


PLANS = [
    [[(0, 150), (1, 33), (2, 70)]],
    [[(0, 16), (1, 1), (2, 5)], [(0, 64), (1, 31)], [(0, 69), (2, 64)], [(0, 1), (1, 1), (2, 1)]],
    [[(2, 70), (0, 131)], *([[(0, 1), (1, 1)]] * 19), [(1, 14)]],
]


@pytest.mark.parametrize("type_name", ["F32", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("kv_dtype", list(KvDtype), ids=lambda d: d.name)
def test_logits_have_the_same_bits_for_every_batch_chunking_and_number_of_threads(isa, model_file, type_name, kv_dtype):
    models = [load_native(model_file("llama", type_name), ThreadPool(count)) for count in (1, 2, 3)]
    requests = make_requests(np.random.default_rng(3))
    alone = [[[(index, len(request.token_ids))]] for index, request in enumerate(requests)]
    cache = make_cache(models[0], 2, dtype=kv_dtype)
    expected = logits_of(models[0], cache, requests, [step for plan in alone for step in plan])
    for model, plan in zip(models, PLANS, strict=True):
        results = logits_of(model, make_cache(model, 2, dtype=kv_dtype), requests, plan)
        for logits, of_request in zip(results, expected, strict=True):
            np.testing.assert_array_equal(logits, of_request)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_every_family_keeps_its_bits_in_every_batch(isa, model_file, family):
    model = load_native(model_file(family, "Q4_1"), ThreadPool(2))
    requests = make_requests(np.random.default_rng(4))
    expected = logits_of(
        model, make_cache(model, 2), requests, [[(i, len(r.token_ids))] for i, r in enumerate(requests)]
    )
    for plan in PLANS:
        for logits, of_request in zip(logits_of(model, make_cache(model, 2), requests, plan), expected, strict=True):
            np.testing.assert_array_equal(logits, of_request)


@pytest.mark.parametrize("type_name", ["Q4_1", "Q8_0", "BF16"])
@pytest.mark.parametrize(
    "activations", [ActivationFormat.SPLIT, ActivationFormat.ROTATED, ActivationFormat.BF16], ids=lambda a: a.name
)
def test_activations_of_tiles_keep_their_bits_in_every_batch_and_on_every_instruction_set(
    model_file, type_name, activations
):
    settings = {"activations": activations, "activation_terms": TERMS[activations]}
    model = load_native(model_file("qwen2", type_name), ThreadPool(2), **settings)
    requests = make_requests(np.random.default_rng(7))
    before = cpu.current_isa()
    results = []
    for name in ISAS:
        cpu.select_isa(name)
        if name != "plain":
            results += [logits_of(model, make_cache(model, 2), requests, plan) for plan in PLANS]
    cpu.select_isa(before)
    for result in results[1:]:
        for logits, expected in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("activations", ActivationFormat, ids=lambda a: a.name)
def test_bits_are_the_same_where_each_thread_has_rows_of_its_own(model_file, activations):
    settings = {"activations": activations, "activation_terms": TERMS[activations]}
    requests = make_requests(np.random.default_rng(9), (301, 118))
    one, two, three = (load_native(model_file("mistral", "Q4_1"), ThreadPool(n), **settings) for n in (1, 2, 3))
    small = [[(0, 200)], [(0, 101), (1, 17)], [(1, 101)]]
    expected = logits_of(one, make_cache(one, 2), requests, small)
    for model in (one, two, three):
        results = logits_of(model, make_cache(model, 2), requests, [[(0, 301), (1, 118)]])
        for logits, of_request in zip(results, expected, strict=True):
            np.testing.assert_array_equal(logits, of_request)


def test_the_more_bits_the_closer_to_the_reference(model_file):
    path = model_file("llama", "Q4_1")
    reference = load_reference(path)
    requests = make_requests(np.random.default_rng(8), (120,))
    expected = reference_logits(reference, requests[0].token_ids)
    errors = []
    for activations in (ActivationFormat.ROTATED, ActivationFormat.BF16, ActivationFormat.SPLIT):
        settings = {"activations": activations, "activation_terms": TERMS[activations]}
        model = load_native(path, ThreadPool(2), **settings)
        (logits,) = logits_of(model, make_cache(model, 2), requests, [[(0, 120)]])
        errors.append(np.abs(logits - expected).max() / expected.std())
    assert errors[2] < 1e-3 < errors[1] < errors[0] / 2 < 0.1


@pytest.mark.parametrize("type_name", ["F32", "Q4_1", "Q8_0"])
def test_instruction_sets_with_fused_products_give_the_same_bits(model_file, type_name):
    requests = make_requests(np.random.default_rng(5))
    model = load_native(model_file("qwen3", type_name), ThreadPool(2))
    before = cpu.current_isa()
    results = []
    for name in ISAS:
        cpu.select_isa(name)
        if name != "plain":
            results.append(logits_of(model, make_cache(model, 2, dtype=KvDtype.BF16), requests, PLANS[1]))
    cpu.select_isa(before)
    for result in results[1:]:
        for logits, expected in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(logits, expected)


def test_seeded_tokens_do_not_depend_on_the_batch(model_file):
    model = load_native(model_file("llama", "Q4_1"), ThreadPool(2))
    requests = make_requests(np.random.default_rng(6))
    rows = np.zeros(3, dtype=SAMPLING_DTYPE)
    rows["seed"], rows["position"], rows["temperature"], rows["top_p"] = [5, 6, 7], 3, 1.5, 0.9
    ends = np.cumsum(LENGTHS) - 1

    def sample(indices):
        chosen = rows[indices].copy()
        lengths = [LENGTHS[index] for index in indices]
        chosen["token_index"] = np.cumsum(lengths) - 1
        tokens = [token for index in indices for token in requests[index].token_ids]
        step = make_rows([(n, n) for n in lengths], [requests[index].table for index in indices])
        return model.step(make_cache(model, 2), step, np.array(tokens, dtype=np.int32), chosen).tolist()

    assert ends[-1] == sum(LENGTHS) - 1
    assert sample([0, 1, 2]) == [sample([index])[0] for index in range(3)] == sample([2, 0, 1])[1:] + sample([2])


@pytest.mark.parametrize("activations", ActivationFormat, ids=lambda a: a.name)
@pytest.mark.parametrize("kv_dtype", list(KvDtype), ids=lambda d: d.name)
def test_what_is_not_sampled_from_changes_no_bit_of_what_is(isa, model_file, activations, kv_dtype):
    settings = {"activations": activations, "activation_terms": TERMS[activations]}
    model = load_native(model_file("llama", "Q4_1"), ThreadPool(2), **settings)
    rng = np.random.default_rng(11)
    counts = (140, 1, 37, 20, 1)  # of new tokens; tables are those of 48 older ones besides
    tables = disjoint_tables(rng, [count + 48 for count in counts])
    older, newer = (
        make_rows([(n, 48 + m) for n, m in sizes], tables)
        for sizes in ([(48, 0)] * len(counts), [(count, count) for count in counts])
    )
    old_tokens, new_tokens = (rng.integers(0, 288, n).astype(np.int32) for n in (48 * len(counts), sum(counts)))
    all_of_them = np.arange(len(new_tokens))
    # The last of a row, some on the way, one twice, in no order; nothing of the third row.
    some = np.array([198, 139, 60, 140, 61, 197, 139])

    def step(token_indexes):
        cache = make_cache(model, 2, dtype=kv_dtype)
        model.step(cache, older, old_tokens, np.zeros(0, dtype=SAMPLING_DTYPE))
        sampling = np.zeros(len(token_indexes), dtype=SAMPLING_DTYPE)
        sampling["top_p"], sampling["token_index"] = 1, token_indexes
        logits = np.empty((len(token_indexes), model.shape.vocab_size), dtype=np.float32)
        model.step(cache, newer, new_tokens, sampling, logits)
        return logits, cache.memory.copy()

    expected, memory = step(all_of_them)
    logits, memory_of_some = step(some)
    np.testing.assert_array_equal(logits, expected[some])
    np.testing.assert_array_equal(memory_of_some, memory)


def test_a_step_may_sample_nothing_or_hold_nothing(model_file):
    model = load_native(model_file("llama", "F32"), ThreadPool(2))
    none = np.zeros(0, dtype=SAMPLING_DTYPE)
    cache = make_cache(model, 2)
    assert model.step(cache, make_rows([(3, 3)], [[4]]), np.array([5, 6, 7], np.int32), none).shape == (0,)
    assert model.step(cache, make_rows([], []), np.zeros(0, np.int32), none).shape == (0,)


def step_with(model, **changes):
    sampling = np.zeros(1, dtype=SAMPLING_DTYPE)
    sampling["top_p"] = 1
    sampling["token_index"] = changes.get("token_index", 2)
    rows = make_rows(changes.get("rows", [(3, 3)]), changes.get("tables", [[4]]))
    cache = changes.get("cache") or make_cache(model, 2)
    return model.step(cache, rows, np.array(changes.get("tokens", [5, 6, 7]), dtype=np.int32), sampling)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [5, 288, 7]}, "token_ids\\[1\\] must be from 0 to"),
        ({"tokens": [5, -1, 7]}, "token_ids\\[1\\] must be from 0 to"),
        ({"token_index": 3}, "token_index must be from 0 to 2, is 3"),
        ({"rows": [(3, 1025)], "tables": [[1] * 65]}, "row 0: context of 1025 exceeds 1024 positions"),
        ({"rows": [(3, 3)], "tables": [[]]}, "row 0: 0 blocks of 16 slots do not hold a context of 3"),
        ({"tokens": [5] * 513, "rows": [(513, 513)], "tables": [[1] * 33]}, "has 513 tokens, at most 512 are allowed"),
    ],
)
def test_a_wrong_step_is_refused_in_words_and_changes_nothing(model_file, changes, message):
    model = load_native(model_file("llama", "F32"), ThreadPool(1))
    cache = make_cache(model, 2)
    with pytest.raises(ValueError, match=message):
        step_with(model, cache=cache, **changes)
    assert (cache.memory == 0xFF).all()


def test_a_cache_of_another_model_is_refused(model_file):
    model = load_native(model_file("llama", "F32"), ThreadPool(1))
    with pytest.raises(ValueError, match="the KV cache is for 3 layers, 2 heads of 16; the model has 2, 2 of 16"):
        step_with(model, cache=make_cache(model, 3))


def test_phases_tell_where_a_steps_time_went(model_file):
    model = load_native(model_file("llama", "Q4_1"), ThreadPool(2))
    step_with(model)
    seconds = model.phase_seconds()
    assert (seconds > 0).all()
    assert model.scratch_bytes > 0


@pytest.mark.parametrize("activations", ActivationFormat, ids=lambda a: a.name)
def test_inputs_of_linear_layers_can_be_observed_whatever_they_are_computed_with(model_file, activations):
    requests = make_requests(np.random.default_rng(10), (40,))
    exact = load_native(model_file("qwen2", "F32"), ThreadPool(1))
    model = load_native(
        model_file("qwen2", "Q8_0"), ThreadPool(2), activations=activations, activation_terms=TERMS[activations]
    )
    before = logits_of(model, make_cache(model, 2), requests, [[(0, 40)]])
    with exact.observed() as expected, model.observed() as found:
        logits_of(exact, make_cache(exact, 2), requests, [[(0, 40)]])
        seen = logits_of(model, make_cache(model, 2), requests, [[(0, 40)]])
    np.testing.assert_array_equal(seen[0], before[0])
    for layer, of_exact in zip(found.layers, expected.layers, strict=True):
        for squares, of_input in zip(layer, of_exact, strict=True):
            np.testing.assert_allclose(squares, of_input, rtol=0.3, atol=0.02 * of_input.mean())
    np.testing.assert_allclose(found.head, expected.head, rtol=0.3, atol=0.02 * expected.head.mean())
    squares = found.head.copy()
    logits_of(model, make_cache(model, 2), requests, [[(0, 20)]])
    np.testing.assert_array_equal(found.head, squares)


def test_the_environment_chooses_the_instruction_set():
    code = "from treadle_kernels import cpu; print(cpu.current_isa())"
    for name in ISAS:
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={"TREADLE_CPU_ISA": name, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.strip() == name
