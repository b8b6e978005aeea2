"""Requests of the OpenAI API and its usual extensions, from decoded fields to ``ValidatedRequest``.

Guarantees: a known field with a wrong type or value is refused by name; a known field that is not served is refused
unless it asks for nothing; an unknown field is accepted, logged once and ignored, as OpenAI clients expect. The gRPC
surface uses the same names and goes through the same checks.
"""

import logging
from collections.abc import Mapping

from services.common.errors import EngineError, ErrorReason
from services.gateway.openai_fields import CHAT_FIELDS, COMPLETION_FIELDS, KnownFields
from services.gateway.openai_prompts import chat_prompt, parse_prompt
from services.gateway.ports import Priority, SchedulerPort, ServedModel
from services.gateway.tokenizer import Tokenizer
from services.gateway.validated_request import (
    OutputLimit,
    Prompt,
    Reply,
    SamplingChoice,
    StopRule,
    Surface,
    ValidatedRequest,
)
from services.gateway.validation import FieldReader, invalid, is_int, is_int_list, shown, unsupported

logger = logging.getLogger(__name__)

MAX_STOPS = 16
MAX_SAMPLES = 128
MAX_CHOICES = 256
"""Choices of one request: each is a generation of its own, and a bound keeps one client from filling the queue."""

MAX_STOP_LENGTH = 4096
MAX_STOP_TOKEN_IDS = 128
MAX_TIMEOUT_S = 86_400.0
MAX_TEMPERATURE = 100.0
"""Beyond this every distribution is uniform to many digits; a larger number is a mistake."""

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this select greedily: dividing by them says the same and overflows."""

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for completions. A chat without a limit gets what the context leaves."""

_MAX_INT = 2**63 - 1
_MAX_UINT = 2**64 - 1
_MAX_UNKNOWN_LOGGED = 256


class RequestValidator:
    """Turns decoded fields into a ``ValidatedRequest``.

    Args:
        scheduler: Knows the served models.
        tokenizer: Knows which token ids are real.
    """

    def __init__(self, scheduler: SchedulerPort, tokenizer: Tokenizer) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._logged_unknown: set[str] = set()

    def chat(self, fields: Mapping[str, object], surface: Surface = Surface.CHAT) -> ValidatedRequest:
        """Check a chat request.

        Raises:
            EngineError: names the field; or MODEL_NOT_FOUND, or SCHEDULER_UNAVAILABLE while nothing is served.
        """
        reader = FieldReader(fields)
        self._check_known(fields, reader, CHAT_FIELDS)
        prompt = chat_prompt(
            reader.value("messages"),
            adds_generation_prompt=reader.boolean("add_generation_prompt", default=True),
            adds_special_tokens=reader.boolean("add_special_tokens", default=False),
        )
        return self._request(reader, surface, (prompt,), default_tokens=None)

    def completion(self, fields: Mapping[str, object], surface: Surface = Surface.COMPLETION) -> ValidatedRequest:
        """Check a completion request; over gRPC the limit defaults to what the context leaves.

        Raises:
            EngineError: as :meth:`chat`.
        """
        reader = FieldReader(fields)
        self._check_known(fields, reader, COMPLETION_FIELDS)
        adds_special_tokens = reader.boolean("add_special_tokens", default=True)
        prompts = parse_prompt(reader.value("prompt"), self._tokenizer, adds_special_tokens=adds_special_tokens)
        default_tokens = DEFAULT_COMPLETION_TOKENS if surface is Surface.COMPLETION else None
        return self._request(reader, surface, prompts, default_tokens=default_tokens)

    def model(self, reader: FieldReader) -> ServedModel:
        """Find the model that ``model`` names; without one it is the default.

        Raises:
            EngineError: MODEL_NOT_FOUND; SCHEDULER_UNAVAILABLE while nothing is served.
        """
        name = reader.string("model", max_length=1024)
        models = self._scheduler.models()
        if not models:
            raise EngineError(ErrorReason.SCHEDULER_UNAVAILABLE, "No model is served at the moment; try again soon.")
        if name is None:
            return models[0]
        for model in models:
            if model.name == name:
                return model
        served = ", ".join(model.name for model in models)
        text = f"The model {shown(name)} is not served; served: {served}."
        raise EngineError(ErrorReason.MODEL_NOT_FOUND, text, field="model", model=name[:128])

    def _check_known(self, fields: Mapping[str, object], reader: FieldReader, known: KnownFields) -> None:
        for name in fields:
            if name in known.neutral_values:
                reader.neutral(name, known.neutral_values[name])
            elif name not in known.served:
                self._log_unknown(name)

    def _log_unknown(self, name: str) -> None:
        if name not in self._logged_unknown and len(self._logged_unknown) < _MAX_UNKNOWN_LOGGED:
            self._logged_unknown.add(name[:128])
            logger.info("ignoring an unknown request field", extra={"fields": {"field": name[:128]}})

    def _request(
        self, reader: FieldReader, surface: Surface, prompts: tuple[Prompt, ...], *, default_tokens: int | None
    ) -> ValidatedRequest:
        for hint in ("user", "safety_identifier", "prompt_cache_key"):
            reader.string(hint, max_length=1024)
        reader.string_map("metadata", max_entries=16, max_key=64, max_value=512)
        return ValidatedRequest(
            surface=surface,
            model=self.model(reader),
            request_id=reader.identifier("request_id"),
            prompts=prompts,
            num_samples=_num_samples(reader, len(prompts)),
            sampling=self._sampling(reader),
            stop=self._stop_rule(reader),
            limit=_output_limit(reader, default_tokens),
            reply=_reply(reader),
            priority=_priority(reader.value("priority")),
            timeout_s=reader.number("timeout", low=0, high=MAX_TIMEOUT_S, is_low_allowed=False),
        )

    def _sampling(self, reader: FieldReader) -> SamplingChoice:
        temperature = reader.number("temperature", low=0, high=MAX_TEMPERATURE)
        top_p = reader.number("top_p", low=0, high=1, is_low_allowed=False)
        top_k = reader.integer("top_k", low=-1, high=_MAX_INT) or 0
        return SamplingChoice(
            temperature=1.0 if temperature is None else (0.0 if temperature < GREEDY_TEMPERATURE else temperature),
            top_p=1.0 if top_p is None else top_p,
            # -1 is the other way to say "off"; so is keeping at least the whole vocabulary
            top_k=top_k if 0 < top_k < self._tokenizer.vocab_size else 0,
            min_p=reader.number("min_p", low=0, high=1) or 0.0,
            seed=reader.integer("seed", low=-(2**63), high=_MAX_UINT),
        )

    def _stop_rule(self, reader: FieldReader) -> StopRule:
        token_ids = reader.value("stop_token_ids")
        if token_ids is None:
            token_ids = []
        if not is_int_list(token_ids):
            raise invalid("stop_token_ids", f"must be a list of token ids, not {shown(token_ids)}")
        if len(token_ids) > MAX_STOP_TOKEN_IDS:
            raise invalid("stop_token_ids", f"must have at most {MAX_STOP_TOKEN_IDS} ids, not {len(token_ids)}")
        self._tokenizer.check_token_ids(token_ids, "stop_token_ids")
        return StopRule(
            strings=_stop_strings(reader.value("stop")),
            token_ids=frozenset(token_ids),
            is_included=reader.boolean("include_stop_str_in_output", default=False),
            ignores_eos=reader.boolean("ignore_eos", default=False),
        )


def _priority(value: object) -> Priority:
    """Read a class by its name; 0 is what clients of numeric priorities send for the ordinary one."""
    if value is None or (is_int(value) and value == 0):
        return Priority.NORMAL
    names = [priority.value for priority in Priority]
    if not isinstance(value, str) or value not in names:
        raise invalid("priority", f"must be one of {', '.join(names)}, or 0, not {shown(value)}")
    return Priority(value)


def _num_samples(reader: FieldReader, num_prompts: int) -> int:
    num_samples = reader.integer("n", low=1, high=MAX_SAMPLES) or 1
    num_choices = num_samples * num_prompts
    if num_choices > MAX_CHOICES:
        raise invalid("n", f"makes {num_choices} choices with {num_prompts} prompts; at most {MAX_CHOICES} are served")
    return num_samples


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list):
        raise invalid("stop", f"must be a string or a list of strings, not {shown(value)}")
    if len(strings) > MAX_STOPS:
        raise invalid("stop", f"must have at most {MAX_STOPS} strings, not {len(strings)}")
    for index, string in enumerate(strings):
        field = "stop" if isinstance(value, str) else f"stop[{index}]"
        if not isinstance(string, str):
            raise invalid(field, f"must be a string, not {shown(string)}")
        if not 1 <= len(string) <= MAX_STOP_LENGTH:
            raise invalid(field, f"must have 1 to {MAX_STOP_LENGTH} characters, not {len(string)}")
    return tuple(dict.fromkeys(strings))


def _output_limit(reader: FieldReader, default: int | None) -> OutputLimit:
    """Read the limit; ``max_completion_tokens`` is the newer name and wins when both are given."""
    older = reader.integer("max_tokens", low=1, high=_MAX_INT)
    newer = reader.integer("max_completion_tokens", low=1, high=_MAX_INT)
    if newer is not None:
        return OutputLimit(newer, default, "max_completion_tokens")
    return OutputLimit(older, default)


def _reply(reader: FieldReader) -> Reply:
    is_stream = reader.boolean("stream", default=False)
    options = reader.nested("stream_options")
    if options is not None and not is_stream:
        raise invalid("stream_options", "is only allowed when stream is true")
    options = options or FieldReader({})
    if options.boolean("include_obfuscation", default=False):
        raise unsupported("stream_options.include_obfuscation", "is not served yet; leave it out or set it to false")
    return Reply(
        is_stream=is_stream,
        includes_usage=options.boolean("include_usage", default=False),
        has_continuous_usage=options.boolean("continuous_usage_stats", default=False),
        returns_token_ids=reader.boolean("return_token_ids", default=False),
        skips_special_tokens=reader.boolean("skip_special_tokens", default=True),
    )
