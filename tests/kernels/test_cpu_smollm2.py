"""The default model on the CPU engine against the same file dequantised to float32 in PyTorch."""

import numpy as np
import pytest
import torch

from services.gateway.tokenizer import load_tokenizer
from tests.kernels.cpu_models import (
    Request,
    disjoint_tables,
    load_native,
    load_reference,
    logits_of,
    make_cache,
    reference_logits,
)
from tests.kernels.public_domain_text import ALICE, TEXTS
from treadle_kernels import cpu
from treadle_kernels.cpu import KvDtype, ThreadPool

pytestmark = [
    pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable_reason())),
    pytest.mark.model,
    pytest.mark.slow,
]

NUM_LAYERS = 30
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a",
    "Water boils at a temperature of",
    "def fibonacci(n):",
    "The largest planet in the solar system is",
    "To be, or not to be, that is the",
    "The chemical symbol for gold is",
    "Photosynthesis is the process by which plants",
    "In 1969, the first man to walk on the moon was",
    "The opposite of hot is",
    "A triangle has three",
    "The quick brown fox jumps over the lazy",
    "import numpy as",
    "The author of Romeo and Juliet is William",
    "The Pacific is the world's largest",
    "Two plus two equals",
    "The sun rises in the",
    "Bees make",
    "The first president of the United States was George",
    "An apple a day keeps the doctor",
]


@pytest.fixture(scope="module")
def tokenizer(model_path):
    return load_tokenizer(model_path)


@pytest.fixture(scope="module")
def native(model_path):
    return load_native(model_path, ThreadPool(2))


@pytest.fixture(scope="module")
def reference(model_path):
    torch.set_num_threads(2)
    yield load_reference(model_path)
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def texts(tokenizer):
    return [tokenizer.encode(text, add_special_tokens=False)[:480] for text in TEXTS]


@pytest.fixture(scope="module")
def expected_surprise(reference, texts):
    return np.concatenate([surprise(reference_logits(reference, token_ids), token_ids) for token_ids in texts])


def surprise(logits, token_ids):
    """Minus the log-probability of each token after the first; to 1e-6, as float32 exponentials are far faster."""
    shifted = logits[:-1] - logits[:-1].max(axis=1, keepdims=True)
    log_sums = np.log(np.exp(shifted).sum(axis=1, dtype=np.float64))
    return log_sums - shifted[np.arange(len(shifted)), token_ids[1:]]


@pytest.mark.parametrize("kv_dtype", list(KvDtype), ids=lambda d: d.name)
def test_perplexity_is_within_half_a_percent_of_float32(native, texts, expected_surprise, kv_dtype):
    cache = make_cache(native, NUM_LAYERS, dtype=kv_dtype)
    found = []
    for token_ids in texts:
        request = Request(token_ids, disjoint_tables(np.random.default_rng(1), [len(token_ids)])[0])
        (logits,) = logits_of(native, cache, [request], [[(0, len(token_ids))]])
        found.append(surprise(logits, token_ids))
    change = np.concatenate(found) - expected_surprise
    relative, error = float(np.expm1(change.mean())), float(change.std() / len(change) ** 0.5)
    print(
        f"perplexity over {len(change)} tokens: {relative:+.3%} ± {error:.3%} of {np.exp(expected_surprise.mean()):.3f}"
    )
    assert abs(relative) < 0.005


def test_first_tokens_agree_with_float32_on_most_prompts(native, reference, tokenizer):
    encoded = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in PROMPTS]
    tables = disjoint_tables(np.random.default_rng(2), [len(tokens) for tokens in encoded])
    requests = [Request(tokens, table) for tokens, table in zip(encoded, tables, strict=True)]
    plan = [[(index, len(tokens)) for index, tokens in enumerate(encoded)]]
    found = [int(logits[-1].argmax()) for logits in logits_of(native, make_cache(native, NUM_LAYERS), requests, plan)]
    expected = [int(reference_logits(reference, tokens)[-1].argmax()) for tokens in encoded]
    num_equal = sum(a == b for a, b in zip(found, expected, strict=True))
    print(f"{num_equal} of {len(PROMPTS)} first tokens agree")
    assert num_equal >= 19


def test_a_decoded_prompt_has_the_bits_of_a_whole_one(native, tokenizer):
    token_ids = tokenizer.encode(ALICE, add_special_tokens=False)[:150]
    request = Request(token_ids, disjoint_tables(np.random.default_rng(3), [150])[0])
    (whole,) = logits_of(native, make_cache(native, NUM_LAYERS, dtype=KvDtype.BF16), [request], [[(0, 150)]])
    cache = make_cache(native, NUM_LAYERS, dtype=KvDtype.BF16)
    (parts,) = logits_of(native, cache, [request], [[(0, 120)], *([[(0, 1)]] * 30)])
    np.testing.assert_array_equal(parts, whole)
