"""Answers of the OpenAI API that are no streams, as typed objects, and the usage that both forms report."""

from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.generation import PreparedRequest, TextEnd
from services.gateway.validated_request import Reply, Surface


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Where prompt tokens came from."""

    cached_tokens: int


class UsageReply(msgspec.Struct, frozen=True):
    """What an answer cost: each prompt once, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatMessage(msgspec.Struct, frozen=True):
    """The assistant's turn."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    finish_reason: str
    stop_reason: str | int | None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    logprobs: None = None


class CompletionChoice(msgspec.Struct, frozen=True):
    """One continuation. ``seed`` is the one that drew it; without the client's seed each choice has its own."""

    index: int
    text: str
    finish_reason: str
    stop_reason: str | int | None
    seed: int
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    logprobs: None = None


class ChatCompletion(msgspec.Struct, frozen=True):
    """Answer of ``/v1/chat/completions``."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    seed: int
    choices: list[ChatChoice]
    usage: UsageReply
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    """Answer of ``/v1/completions``."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    seed: int
    choices: list[CompletionChoice]
    usage: UsageReply


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What is the same in every chunk and in the whole answer.

    Attributes:
        id: ``chatcmpl-`` or ``cmpl-`` and the request's id.
        created_unix_s: When the request was accepted.
        model: Served name.
        system_fingerprint: Build, weights, and how they are computed.
        seed: Of the first choice.
    """

    id: str
    created_unix_s: int
    model: str
    system_fingerprint: str
    seed: int


@dataclass(frozen=True, slots=True)
class CollectedChoice:
    """One whole answer."""

    prepared: PreparedRequest
    text: str
    token_ids: tuple[int, ...]
    end: TextEnd


def usage_reply(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> UsageReply:
    """Build the usage object."""
    total = num_prompt_tokens + num_output_tokens
    return UsageReply(num_prompt_tokens, num_output_tokens, total, PromptTokensDetails(num_cached_tokens))


def whole_answer(surface: Surface, head: AnswerHead, reply: Reply, collected: list[CollectedChoice]) -> bytes:
    """Encode the answer of a request that asked for no stream."""
    leaders = [choice for choice in collected if choice.prepared.is_first_sample]
    usage = usage_reply(
        sum(choice.end.usage.num_prompt_tokens for choice in leaders),
        sum(choice.end.usage.num_output_tokens for choice in collected),
        sum(choice.end.usage.num_cached_tokens for choice in leaders),
    )
    if surface is Surface.CHAT:
        chat_choices = [_chat_choice(index, choice, reply) for index, choice in enumerate(collected)]
        prompt_ids = collected[0].prepared.request.prompt_token_ids
        return msgspec.json.encode(
            ChatCompletion(
                head.id,
                "chat.completion",
                head.created_unix_s,
                head.model,
                head.system_fingerprint,
                head.seed,
                chat_choices,
                usage,
                prompt_ids if reply.returns_token_ids else UNSET,
            )
        )
    choices = [_completion_choice(index, choice, reply) for index, choice in enumerate(collected)]
    return msgspec.json.encode(
        Completion(
            head.id,
            "text_completion",
            head.created_unix_s,
            head.model,
            head.system_fingerprint,
            head.seed,
            choices,
            usage,
        )
    )


def _chat_choice(index: int, choice: CollectedChoice, reply: Reply) -> ChatChoice:
    return ChatChoice(
        index,
        ChatMessage("assistant", choice.text),
        choice.end.reason.value,
        choice.end.stop_reason,
        choice.token_ids if reply.returns_token_ids else UNSET,
    )


def _completion_choice(index: int, choice: CollectedChoice, reply: Reply) -> CompletionChoice:
    return CompletionChoice(
        index,
        choice.text,
        choice.end.reason.value,
        choice.end.stop_reason,
        choice.prepared.seed,
        choice.token_ids if reply.returns_token_ids else UNSET,
        choice.prepared.request.prompt_token_ids if reply.returns_token_ids else UNSET,
    )
