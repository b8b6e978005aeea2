"""A request after validation: what every surface hands to ``generation.py``, and what everything behind may rely on.

Guarantees: types and ranges are checked against the served model; only the prompt's length, which needs the tokenizer,
is still open. Built by ``openai_schema.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from services.gateway.ports import Priority, ServedModel


class Surface(Enum):
    """Where a request came in; values are metric labels."""

    CHAT = "chat"
    COMPLETION = "completion"
    GRPC = "grpc"


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to continue.

    Attributes:
        text: As given.
        adds_special_tokens: Whether the model's own tokens (such as a beginning-of-sequence token) go around it.
        field: Name of the request field, for errors.
    """

    text: str
    adds_special_tokens: bool
    field: str = "prompt"


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids to continue; each is a real token of the model.

    Attributes:
        token_ids: At least one.
        field: Name of the request field, for errors.
    """

    token_ids: tuple[int, ...]
    field: str = "prompt"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the model's chat template.

    Attributes:
        messages: Objects with a known ``role`` and, where the role needs it, ``content``.
        adds_generation_prompt: Whether the template opens the assistant's turn at the end.
        adds_special_tokens: Whether the model's own tokens go around the rendered text, which usually holds them.
        field: Name of the request field, for errors.
    """

    messages: tuple[Mapping[str, object], ...]
    adds_generation_prompt: bool
    adds_special_tokens: bool
    field: str = "messages"


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """The client's wishes for drawing tokens, normalised.

    Attributes:
        temperature: >= 0; 0 is greedy.
        top_p: In (0, 1].
        top_k: >= 0; 0 is off.
        min_p: In [0, 1].
        seed: int64 or uint64 as the client wrote it, or None to have one chosen for each choice.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends the output before its limit.

    Attributes:
        strings: Non-empty texts.
        token_ids: The client's end tokens.
        is_included: Whether what stopped the output stays in it.
        ignores_eos: Whether the model's own end tokens are ordinary.
    """

    strings: tuple[str, ...]
    token_ids: frozenset[int]
    is_included: bool
    ignores_eos: bool


@dataclass(frozen=True, slots=True)
class OutputLimit:
    """How many tokens may come out.

    Attributes:
        max_tokens: The client's limit, or None.
        default: Limit when the client gave none; None is what the context leaves.
        field: Name of the field that set it, for errors.
    """

    max_tokens: int | None
    default: int | None
    field: str = "max_tokens"


@dataclass(frozen=True, slots=True)
class Reply:
    """How the client wants its answer.

    Attributes:
        is_stream: As server-sent events.
        includes_usage: A chunk with the usage at the end of the stream.
        has_continuous_usage: The usage so far on every chunk.
        returns_token_ids: Token ids beside the text.
        skips_special_tokens: Control tokens are left out of the text.
    """

    is_stream: bool
    includes_usage: bool
    has_continuous_usage: bool
    returns_token_ids: bool
    skips_special_tokens: bool


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """One client's request; every sample of every prompt becomes one choice.

    Attributes:
        surface: Where it came in.
        model: Who answers.
        request_id: The client's, or None to have one chosen.
        prompts: At least one.
        num_samples: Samples of each prompt, >= 1.
        sampling: How tokens are drawn.
        stop: What ends the output.
        limit: How much may come out.
        reply: How it is delivered.
        priority: Service class.
        timeout_s: The client's bound in seconds, > 0, or None.
    """

    surface: Surface
    model: ServedModel
    request_id: str | None
    prompts: tuple[Prompt, ...]
    num_samples: int
    sampling: SamplingChoice
    stop: StopRule
    limit: OutputLimit
    reply: Reply
    priority: Priority
    timeout_s: float | None
