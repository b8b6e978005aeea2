"""From a validated request to scheduler requests: prompts become tokens, limits are settled, seeds are chosen.

Everything that can be refused without the scheduler is refused here, before the first byte of an answer. Every surface
goes through ``TextGenerator``.
"""

import secrets
from dataclasses import dataclass

from services.common.errors import EngineError, ErrorReason
from services.gateway.chat_template import ChatTemplate
from services.gateway.generation import Backing, PreparedRequest, TextGeneration
from services.gateway.metrics import GatewayMetrics
from services.gateway.output_fold import OutputRule
from services.gateway.ports import CHOICE_SEPARATOR, Sampling, SchedulerRequest, ServedModel
from services.gateway.validated_request import ChatPrompt, OutputLimit, Prompt, TokenPrompt, ValidatedRequest
from services.gateway.validation import invalid

_UINT64_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """What the operator decides about generations."""

    tenant: str = "default"
    """Identity of every client while there is no authentication; also the scope of shared prefix blocks."""

    default_timeout_s: float = 600.0
    """Longest time, in seconds, that a request without a deadline may take; as long as OpenAI's client waits."""


class TextGenerator:
    """Prepares and opens generations.

    Args:
        backing: What they stand on.
        template: The served model's chat template.
        settings: The operator's decisions.
    """

    def __init__(self, backing: Backing, template: ChatTemplate, settings: GenerationSettings) -> None:
        self._backing = backing
        self._tokenizer = backing.tokenizer
        self._template = template
        self._settings = settings

    @property
    def metrics(self) -> GatewayMetrics:
        """Where refusals are counted, which no generation sees."""
        return self._backing.metrics

    @property
    def tenant(self) -> str:
        """On whose account requests run."""
        return self._settings.tenant

    def now_unix_s(self) -> int:
        """Return the time, in whole seconds since the epoch."""
        return self._backing.clock.unix_ms() // 1000

    async def tokenize(self, prompt: Prompt, max_num_tokens: int | None = None) -> list[int]:
        """Turn a prompt into token ids; long texts on a thread.

        Args:
            prompt: What to tokenize.
            max_num_tokens: A text that certainly has more is refused without the work of finding out how many.

        Raises:
            EngineError: INVALID_REQUEST or UNSUPPORTED_PARAMETER naming the field, from tokenizer or template;
                PROMPT_TOO_LONG.
        """
        match prompt:
            case TokenPrompt(token_ids):
                return list(token_ids)
            case ChatPrompt(messages, adds_generation_prompt, adds_special_tokens, field):
                text = self._template.render(messages, add_generation_prompt=adds_generation_prompt)
            case _:
                text, adds_special_tokens, field = prompt.text, prompt.adds_special_tokens, prompt.field
        num_tokens = self._tokenizer.min_num_tokens(text)
        if max_num_tokens is not None and num_tokens > max_num_tokens:
            raise _too_long(field, f"at least {num_tokens}", max_num_tokens)
        return await self._tokenizer.encode_async(text, add_special_tokens=adds_special_tokens, field=field)

    async def prepare(self, validated: ValidatedRequest, request_id: str) -> tuple[PreparedRequest, ...]:
        """Turn every sample of every prompt into a scheduler request; submits nothing.

        Choices come in OpenAI's order: all samples of the first prompt, then those of the second.

        Args:
            validated: The request.
            request_id: Its id; with several choices each gets ``#<index>`` appended.

        Raises:
            EngineError: PROMPT_TOO_LONG, INVALID_REQUEST, UNSUPPORTED_PARAMETER.
        """
        timeout_s = validated.timeout_s or self._settings.default_timeout_s
        deadline_unix_ms = self._backing.clock.unix_ms() + round(timeout_s * 1000)
        rule = self._output_rule(validated)
        prepared: list[PreparedRequest] = []
        for prompt in validated.prompts:
            token_ids = tuple(await self.tokenize(prompt, max_num_tokens=validated.model.max_model_len))
            max_tokens = _max_tokens(validated.limit, len(token_ids), validated.model, prompt.field)
            wish = validated.sampling
            # Without the client's seed each prompt gets its own, so that equal prompts are independent samples.
            seed = secrets.randbits(63) if wish.seed is None else wish.seed
            leader_id: str | None = None
            for sample_index in range(validated.num_samples):
                request = SchedulerRequest(
                    request_id=_choice_id(request_id, validated, len(prepared)),
                    tenant=self._settings.tenant,
                    idempotency_key=None,
                    deadline_unix_ms=deadline_unix_ms,
                    priority=validated.priority,
                    cache_scope=self._settings.tenant,
                    model=validated.model.name,
                    weight_version=validated.model.weight_version,
                    prompt_token_ids=token_ids,
                    sampling=Sampling(
                        wish.temperature, wish.top_p, wish.top_k, wish.min_p, seed & _UINT64_MASK, sample_index
                    ),
                    max_tokens=max_tokens,
                    min_tokens=0,
                    eos_token_ids=frozenset() if validated.stop.ignores_eos else self._tokenizer.eos_token_ids,
                    stop_token_ids=validated.stop.token_ids | rule.stop_text_by_id.keys(),
                    leader_request_id=leader_id,
                    is_max_tokens_implied=validated.limit.max_tokens is None,
                )
                leader_id = leader_id or request.request_id
                prepared.append(PreparedRequest(validated.surface, request, rule, seed))
        return tuple(prepared)

    def open(self, prepared: PreparedRequest, *, yields_every_token: bool = False) -> TextGeneration:
        """Return the generation of a prepared request, not yet submitted.

        Args:
            prepared: What to run.
            yields_every_token: Whether tokens come out while their text is still held back, with an empty text.
        """
        return TextGeneration(prepared, self._backing, yields_every_token=yields_every_token)

    def _output_rule(self, validated: ValidatedRequest) -> OutputRule:
        stop = validated.stop
        # A stop string that is a special token would never show up in text that leaves special tokens out.
        stop_text_by_id = {
            token_id: text for text in stop.strings if (token_id := self._tokenizer.special_token_id(text)) is not None
        }
        return OutputRule(
            stop_strings=stop.strings,
            stop_text_by_id=stop_text_by_id,
            stop_token_ids=stop.token_ids,
            includes_stop=stop.is_included,
            skips_special_tokens=validated.reply.skips_special_tokens,
            at_text_start=isinstance(validated.prompts[0], ChatPrompt),
        )


def _choice_id(request_id: str, validated: ValidatedRequest, index: int) -> str:
    return (
        request_id if len(validated.prompts) * validated.num_samples == 1 else f"{request_id}{CHOICE_SEPARATOR}{index}"
    )


def _max_tokens(limit: OutputLimit, num_prompt_tokens: int, model: ServedModel, field: str) -> int:
    """Settle the output limit against the model's context.

    Raises:
        EngineError: PROMPT_TOO_LONG, when nothing is left for the output; INVALID_REQUEST, when the prompt is empty or
            the client's limit does not fit.
    """
    if num_prompt_tokens == 0:
        raise invalid(field, "has no tokens; write something to continue")
    num_left = model.max_model_len - num_prompt_tokens
    if num_left < 1:
        raise _too_long(field, str(num_prompt_tokens), model.max_model_len)
    if limit.max_tokens is None:
        return num_left if limit.default is None else min(limit.default, num_left)
    if limit.max_tokens > num_left:
        problem = (
            f"is {limit.max_tokens}, but after a prompt of {num_prompt_tokens} tokens {model.name} has room for "
            f"{num_left} of its {model.max_model_len}"
        )
        raise invalid(limit.field, problem)
    return limit.max_tokens


def _too_long(field: str, num_prompt_tokens: str, max_model_len: int) -> EngineError:
    text = (
        f"{field} has {num_prompt_tokens} tokens; the model takes {max_model_len} for prompt and output together. "
        "Shorten the prompt."
    )
    return EngineError(
        ErrorReason.PROMPT_TOO_LONG,
        text,
        field=field,
        num_prompt_tokens=num_prompt_tokens,
        max_model_len=str(max_model_len),
    )
