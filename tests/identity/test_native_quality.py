"""The default model as the native engine runs it, beside the float32 reference, on a text in the public domain.

`scripts/quality.py` measures every format; here is what must not get worse for the default.
"""

import numpy as np
import pytest
import torch

from scripts.quality import NativeModel, ReferenceModel, common_lengths, compare, windows
from services.worker.weights import open_checkpoint

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.mark.parametrize(("settings", "divergence"), [({}, 0.0005), ({"activation_bits": 32}, 0.0001)], ids=str)
def test_perplexity_of_the_stored_format_is_the_references_within_a_tenth_of_a_percent(
    model_path, settings, divergence
):
    torch.set_num_threads(1)
    checkpoint, texts = open_checkpoint(model_path), windows(model_path, 512)[:3]
    reference_model = ReferenceModel(checkpoint)
    reference = [reference_model.log_probabilities(text) for text in texts]
    found = compare(texts, reference, NativeModel(checkpoint, {"num_threads": 1, **settings}, max_num_tokens=512))
    assert sum(map(len, texts)) > 1000
    assert found.perplexity_ratio == pytest.approx(1.0, abs=0.001)
    assert found.divergence < divergence
    assert found.agreement > 0.99


def test_float32_gives_the_references_probabilities(model_path):
    torch.set_num_threads(1)
    checkpoint, text = open_checkpoint(model_path), windows(model_path, 64)[0]
    expected = ReferenceModel(checkpoint).log_probabilities(text)
    found = NativeModel(checkpoint, {"dtype": "float32", "num_threads": 1}, max_num_tokens=64).log_probabilities(text)
    assert np.abs(found - expected).max() < 2e-3
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()


def test_common_lengths_count_tokens_before_the_first_that_differs():
    assert common_lengths([[1, 2, 3], [1, 9, 3], [7, 2, 3]], [[1, 2, 3]] * 3) == [3, 1, 0]
