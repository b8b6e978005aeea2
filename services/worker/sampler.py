"""Chooses each sampling row's token from its logits.

Guarantees: a row's token is a pure function of its logits, its parameters, its seed and its output position. Greedy
rows are one argmax each; other rows are worked on one at a time, so no neighbour can reach them, and no row's
parameters shape another's tensors. A row whose logits hold NaN fails alone.

Order of processing, as in Hugging Face and vLLM: temperature, min_p, top_k, top_p.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.worker.generator import uniforms
from services.worker.plan import Handle, RowError, SampledToken, SamplingParams

GREEDY_TEMPERATURE = 1e-5
"""Below this a row is greedy: a logit lead of 1e-3 already decides beyond what 53 random bits can tell."""

FIRST_NUM_CANDIDATES = 256
"""Most nuclei are smaller, and finding so many best tokens is far cheaper than sorting the vocabulary."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What a row brings along besides its logits.

    Attributes:
        handle: Whose token it will be.
        params: How to choose.
        position: 0-based output position of the token.
    """

    handle: Handle
    params: SamplingParams
    position: int


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken | RowError]:
    """Choose one token a row. Pure.

    Args:
        logits: float32 ``[num_rows, vocab_size]``.
        rows: One for each row of logits.

    Returns:
        One outcome a row, in order; a `RowError` where the logits hold NaN or no finite value.
    """
    is_finite = logits.amax(dim=-1).isfinite().tolist()  # amax passes NaN on
    best_ids = logits.argmax(dim=-1).tolist()  # on ties the lowest id
    draws = uniforms(
        [row.params.seed for row in rows],
        [row.params.sample_index for row in rows],
        [row.position for row in rows],
    )
    outcomes: list[SampledToken | RowError] = []
    for index, (row, best_id) in enumerate(zip(rows, best_ids, strict=True)):
        if not is_finite[index]:
            outcomes.append(
                RowError(row.handle, f"The model's logits at output position {row.position} are not finite.")
            )
        elif row.params.temperature < GREEDY_TEMPERATURE:
            outcomes.append(SampledToken(row.handle, best_id))
        else:
            outcomes.append(SampledToken(row.handle, choose_token(logits[index], row.params, float(draws[index]))))
    return outcomes


def choose_token(logits: torch.Tensor, params: SamplingParams, draw: float) -> int:
    """Invert the distribution function of one row's processed distribution. Pure.

    Args:
        logits: float32 ``[vocab_size]``, at least one finite, none NaN.
        params: With a temperature that is not greedy.
        draw: In [0, 1).

    Returns:
        The token id.
    """
    weights = ((logits - logits.max()) / params.temperature).exp_()  # unnormalised; the best token weighs 1
    if params.min_p > 0:
        weights = weights.where(weights >= params.min_p, 0.0)
    if 0 < params.top_k < weights.numel() or params.top_p < 1:
        weights, token_ids = _best_tokens(weights, params)
        return int(token_ids[_invert(weights, draw)])
    return _invert(weights, draw)


def _best_tokens(weights: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and ids of the tokens that top_k and top_p keep, best first, lower ids first among equals."""
    vocab_size = weights.numel()
    is_top_k_on = 0 < params.top_k < vocab_size
    num_candidates = params.top_k if is_top_k_on else min(FIRST_NUM_CANDIDATES, vocab_size)
    total = weights.sum(dtype=torch.float64)
    while True:
        token_ids = _best_ids(weights, num_candidates)
        best = weights[token_ids].sort(descending=True, stable=True)
        mass = best.values.cumsum(0, dtype=torch.float64)
        if params.top_p >= 1:
            return best.values, token_ids[best.indices]
        wanted = params.top_p * (mass[-1] if is_top_k_on else total)
        if mass[-1] >= wanted or num_candidates == vocab_size:
            num_kept = min(int(torch.searchsorted(mass, wanted)) + 1, num_candidates)
            return best.values[:num_kept], token_ids[best.indices[:num_kept]]
        num_candidates = min(8 * num_candidates, vocab_size)


def _best_ids(weights: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the ``count`` largest weights, ascending; of equals at the border the lower ids (topk takes any)."""
    border = weights.topk(count, sorted=False).values.min()
    above, equal = (weights > border).nonzero()[:, 0], (weights == border).nonzero()[:, 0]
    return torch.cat([above, equal[: count - above.numel()]]).sort().values


def _invert(weights: torch.Tensor, draw: float) -> int:
    """Index of the first weight at which the running sum exceeds ``draw`` of the total; never one that weighs 0."""
    mass = weights.cumsum(0, dtype=torch.float64)
    # draw <= 1 - 2^-53, so that the product stays below the total in float64.
    return int(torch.searchsorted(mass, draw * mass[-1], right=True))
