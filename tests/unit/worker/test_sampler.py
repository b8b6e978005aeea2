"""The sampler: greedy rows, the order of filters, the distribution, and that rows do not meet."""

import pytest
import torch

from services.worker.plan import Handle, RowError, SampledToken, SamplingParams
from services.worker.sampler import SamplingRow, choose_token, sample

GREEDY = SamplingParams(temperature=0.0)


def row(params=GREEDY, *, handle=1, position=0):
    return SamplingRow(Handle(handle), params, position)


def tokens(logits, rows):
    return [outcome.token_id for outcome in sample(torch.as_tensor(logits, dtype=torch.float32), rows)]


def reachable(logits, params, num_draws=401):
    """Ids that some draw leads to."""
    logits = torch.tensor(logits)
    return {choose_token(logits, params, index / num_draws) for index in range(num_draws)}


def test_greedy_takes_the_best_token():
    assert tokens([[0.0, 3.0, 1.0]], [row()]) == [1]


def test_greedy_takes_the_lowest_id_on_ties_alone_and_among_others():
    logits = torch.zeros(1000)
    logits[[300, 700]] = 5.0
    noisy = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    others = [row(SamplingParams(temperature=1.0, top_p=0.9, seed=index)) for index in range(3)]
    assert tokens(logits[None], [row()]) == [300]
    assert tokens(torch.cat([noisy, logits[None]]), [*others, row()])[-1] == 300


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_behave_as_greedy(temperature):
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0))
    logits[123] = logits.max() + 0.1
    rows = [row(SamplingParams(temperature=temperature, seed=seed)) for seed in range(20)]
    assert tokens(logits.expand(20, -1), rows) == [123] * 20


def test_temperature_comes_before_top_p():
    """With [3, 2, 1], top_p 0.8 and T 0.5 the first token alone has 0.867; without T it has 0.665."""
    assert reachable([3.0, 2.0, 1.0], SamplingParams(temperature=0.5, top_p=0.8)) == {0}
    assert reachable([3.0, 2.0, 1.0], SamplingParams(temperature=1.0, top_p=0.8)) == {0, 1}


def test_temperature_comes_before_min_p():
    assert reachable([3.0, 2.0, 1.0], SamplingParams(temperature=0.5, min_p=0.2)) == {0}  # e^-2 < 0.2
    assert reachable([3.0, 2.0, 1.0], SamplingParams(temperature=1.0, min_p=0.2)) == {0, 1}  # e^-1 > 0.2


def test_top_p_counts_what_min_p_and_top_k_left():
    """Of four equal tokens top_k leaves two, of which 0.5 is one."""
    assert reachable([1.0, 1.0, 1.0, 1.0], SamplingParams(top_k=2, top_p=0.5)) == {0}
    assert reachable([2.0, 2.0, 0.0, 0.0], SamplingParams(min_p=0.5, top_p=0.5)) == {0}


@pytest.mark.parametrize("top_k", [0, 3, 4, 10_000_000])
def test_top_k_of_the_vocabulary_or_more_is_off(top_k):
    assert reachable([1.0, 1.5, 2.0], SamplingParams(top_k=top_k)) == {0, 1, 2}


def test_top_k_of_one_is_greedy():
    assert reachable([1.0, 2.0, 1.9], SamplingParams(temperature=5.0, top_k=1)) == {1}


def test_top_k_keeps_the_best_tokens():
    assert reachable([1.0, 2.0, 1.9, 0.0], SamplingParams(top_k=3)) == {0, 1, 2}


def test_a_token_of_zero_probability_is_never_chosen():
    minus_infinity = float("-inf")
    logits = [minus_infinity, 0.0, minus_infinity, 0.0, minus_infinity]
    assert reachable(logits, SamplingParams()) == {1, 3}
    assert choose_token(torch.tensor(logits), SamplingParams(), 0.0) == 1
    assert choose_token(torch.tensor(logits), SamplingParams(), 1 - 2**-53) == 3


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_nucleus_larger_than_the_first_candidates_equals_a_full_sort(top_p):
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(1)) * 0.5
    probabilities = logits.double().softmax(0)
    ranked, order = probabilities.sort(descending=True, stable=True)
    mass = ranked.cumsum(0)
    kept = order[: int((mass < top_p).sum()) + 1].tolist()
    params = SamplingParams(top_p=top_p)
    assert choose_token(logits, params, 0.0) == kept[0]
    assert choose_token(logits, params, 1 - 2**-53) == kept[-1]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.15, top_p=0.95, top_k=6),
    ],
)
def test_samples_follow_the_processed_distribution(params):
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -4.0])
    expected = expected_distribution(logits, params)
    num_samples = 4000
    keyed = SamplingParams(params.temperature, params.top_p, params.top_k, params.min_p, seed=11)
    rows = [row(keyed, position=position) for position in range(num_samples)]
    drawn = torch.tensor(tokens(logits.expand(num_samples, -1), rows))
    counts = torch.bincount(drawn, minlength=8).double()
    is_possible = expected > 0
    assert counts[~is_possible].sum() == 0
    wanted = expected[is_possible] * num_samples
    chi_square = ((counts[is_possible] - wanted) ** 2 / wanted).sum()
    assert chi_square < 24.4  # 7 degrees of freedom at most, p = 0.001


def expected_distribution(logits, params):
    """The processed distribution by full sorts, in the order temperature, min_p, top_k, top_p."""
    probabilities = (logits.double() / params.temperature).softmax(0)
    probabilities[probabilities < params.min_p * probabilities.max()] = 0
    order = probabilities.argsort(descending=True, stable=True)
    if params.top_k:
        probabilities[order[params.top_k :]] = 0
    probabilities /= probabilities.sum()
    before = probabilities[order].cumsum(0) - probabilities[order]
    probabilities[order[before >= params.top_p]] = 0
    return probabilities / probabilities.sum()


def test_sampled_tokens_do_not_depend_on_the_batch():
    logits = torch.randn(6, 400, generator=torch.Generator().manual_seed(5))
    rows = [
        row(GREEDY),
        row(SamplingParams(seed=1), position=3),
        row(SamplingParams(top_p=0.9, seed=2), position=4),
        row(SamplingParams(temperature=0.3, top_k=7, seed=2**63, sample_index=2)),
        row(SamplingParams(min_p=0.1, seed=9), position=10**6),
        row(GREEDY),
    ]
    together = tokens(logits, rows)
    assert together == [tokens(logits[index : index + 1], [of_row])[0] for index, of_row in enumerate(rows)]
    assert together[::-1] == tokens(logits.flip(0), rows[::-1])


def test_position_and_sample_index_give_other_tokens():
    logits = torch.zeros(64, 1000)
    by_position = tokens(logits, [row(SamplingParams(seed=3), position=position) for position in range(64)])
    by_index = tokens(logits, [row(SamplingParams(seed=3, sample_index=index)) for index in range(64)])
    assert len(set(by_position)) > 50
    assert len(set(by_index)) > 50
    assert by_position[0] == by_index[0]


def test_a_row_of_nan_fails_alone():
    logits = torch.zeros(3, 10)
    logits[1, 4] = float("nan")
    logits[:, 7] = 1.0
    outcomes = sample(logits, [row(handle=1), row(handle=2, position=8), row(handle=3)])
    assert outcomes[0] == SampledToken(Handle(1), 7)
    assert outcomes[1] == RowError(Handle(2), "The model's logits at output position 8 are not finite.")
    assert outcomes[2] == SampledToken(Handle(3), 7)
