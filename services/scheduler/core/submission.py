"""What a gateway hands in: one request, validated and tokenized."""

from dataclasses import dataclass
from enum import Enum

from services.scheduler.core.batch_plan import SamplingParams


class PriorityClass(Enum):
    """How urgent a request is, in its tenant's eyes."""

    VIP = "vip"
    NORMAL = "normal"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as submitted.

    Attributes:
        request_id: Unique among live requests.
        gateway: Where its events go.
        tenant: On whose account it runs.
        cache_scope: Within which prefixes may be shared.
        model: A model's name; empty means whichever is served.
        prompt_token_ids: The prompt, at least one token.
        output_token_ids: Tokens that the client has already, when the request is resumed; they count as output.
        max_tokens: Bound of all output tokens together, >= 1.
        min_tokens: An end token does not end the output while it is shorter than this.
        eos_token_ids: The model's own end tokens; empty when they are to be ignored.
        stop_token_ids: Further end tokens, of the client.
        sampling: How to draw tokens.
        priority: Class among the waiting.
        deadline_ms: Unix time after which nobody wants the answer.
        is_resumable: Whether the request outlives its gateway.
        is_max_tokens_implied: Whether the client named no limit, so that the output may be cut for want of quota.
        leader_request_id: A sample of the same prompt whose computed prompt this one shares; it waits for that.
    """

    request_id: str
    gateway: str
    tenant: str
    cache_scope: str
    model: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    priority: PriorityClass = PriorityClass.NORMAL
    deadline_ms: int | None = None
    is_resumable: bool = False
    leader_request_id: str | None = None
    is_max_tokens_implied: bool = False
