"""What a gateway is told about a request: new tokens, and exactly one end."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from services.common.errors import EngineError


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a request.

    Attributes:
        reason: Why.
        num_prompt_tokens: Length of the prompt.
        num_output_tokens: Length of the output, with the end token if one was drawn.
        num_cached_tokens: Prompt tokens that the first admission found in the prefix cache.
        stop_token_id: The end token, for STOP; it is the last of the output.
        error: What went wrong, for ERROR.
        num_draft_tokens: How many output tokens were guessed in advance.
        num_accepted_tokens: How many of the guesses came true.
    """

    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    stop_token_id: int | None = None
    error: EngineError | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class RequestEvent(NamedTuple):
    """News of one request: ``token_ids`` are the output positions from ``seq`` on; ``finish`` is set in the last event.

    A named tuple, not a dataclass, since one is made for every token.
    """

    request_id: str
    gateway: str
    seq: int
    token_ids: tuple[int, ...]
    finish: Finish | None
