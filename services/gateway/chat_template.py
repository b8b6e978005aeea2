"""Renders a conversation into the prompt text that the model was trained on, by the model's own Jinja template.

Templates come from model files only, never from a request, and run in Jinja's immutable sandbox. The environment is
the one that transformers documents for chat templates, which is what their authors write for. Guarantees: whatever a
client sends, the outcome is text of bounded length or an ``EngineError`` with HTTP status 400 that names the field; the
text of Python's own exceptions does not reach the client.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from services.common.clock import Clock, SystemClock
from services.common.errors import EngineError, ErrorReason

_MAX_PROMPT_CHARACTERS: Final = 64 << 20
"""Longest text rendered: twice the largest request body, so that only a template that multiplies its input meets it."""

_PART_SEPARATOR: Final = "\n"
"""What stands between the text parts of one message; vLLM and llama.cpp do the same."""

_TEMPLATE_VARIABLES: Final = frozenset({"messages", "tools", "add_generation_prompt"})

# What evaluating an expression on unexpected data may raise; anything else is a bug of this module.
_EVALUATION_ERRORS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class _TemplateComplaintError(Exception):
    """The template called ``raise_exception``: its text is meant for the client."""


class ChatTemplate:
    """A model's chat template, compiled once.

    Args:
        source: Jinja source; None for a model without one, whose every rendering is refused.
        special_token_texts: Variables such as ``bos_token`` and ``eos_token``.
        clock: What ``strftime_now`` reads, in UTC, so that every gateway renders the same.

    Raises:
        EngineError: MODEL_LOAD_FAILED, when the source is not valid.
    """

    def __init__(
        self, source: str | None, special_token_texts: Mapping[str, str], *, clock: Clock | None = None
    ) -> None:
        self._special_token_texts = dict(special_token_texts)
        self._knows_developer_role = source is not None and "developer" in source
        self._template = None if source is None else _compile(source, clock or SystemClock())

    @property
    def is_available(self) -> bool:
        """Whether the model has a template."""
        return self._template is not None

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Render a conversation.

        Text parts of one message are joined by a line feed. A missing content becomes "" for the assistant. The role
        ``developer`` is given as ``system`` to templates that do not know it. Arguments of tool calls are given as
        objects, as templates expect, not as the JSON text of the wire.

        Args:
            messages: Objects with ``role`` and ``content`` as in OpenAI's API; other keys are passed through.
            add_generation_prompt: Whether to end with the start of the assistant's turn.
            tools: Tool definitions for templates that take them.
            variables: Further template variables (``chat_template_kwargs``).

        Raises:
            EngineError: INVALID_REQUEST naming the field, when the model has no template, a message is malformed, or
                the template refuses the conversation; UNSUPPORTED_PARAMETER, when a content part is not text.
        """
        if self._template is None:
            raise _invalid("messages", "This model has no chat template; use /v1/completions with a prompt instead.")
        variables = variables or {}
        for name in variables:
            if name in _TEMPLATE_VARIABLES:
                raise _invalid(f"chat_template_kwargs.{name}", f"{name} cannot be set as a template variable.")
        context: dict[str, object] = {
            **self._special_token_texts,
            **variables,
            "messages": [self._message(message, f"messages[{index}]") for index, message in enumerate(messages)],
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _join_bounded(self._template.generate(context))
        except _TemplateComplaintError as complaint:
            raise _invalid("messages", f"The model's chat template refuses these messages: {complaint}") from None
        except _EVALUATION_ERRORS as error:
            raise _invalid(
                "messages", "These messages do not fit the model's chat template; check their roles and contents."
            ) from error

    def _message(self, message: Mapping[str, object], field: str) -> dict[str, object]:
        """Bring one message into the form that templates expect."""
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise _invalid(f"{field}.role", f"{field}.role must be a non-empty string.")
        shaped = dict(message)
        if role == "developer" and not self._knows_developer_role:
            shaped["role"] = "system"
        shaped["content"] = _text_content(message.get("content"), f"{field}.content", is_optional=role == "assistant")
        if message.get("tool_calls") is not None:
            shaped["tool_calls"] = _tool_calls(message["tool_calls"], f"{field}.tool_calls")
        return shaped


def _compile(source: str, clock: Clock) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _complain
    environment.globals["strftime_now"] = _strftime_now(clock)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise EngineError(
            ErrorReason.MODEL_LOAD_FAILED,
            f"The model's chat template is not valid: {error.message} (line {error.lineno}).",
            line=str(error.lineno),
        ) from error


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}``: marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 -- the base class declares an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # templates pass these under the names of json.dumps
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialise without the HTML escaping of Jinja's own filter, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _complain(message: object) -> NoReturn:
    raise _TemplateComplaintError(str(message))


def _strftime_now(clock: Clock) -> Callable[[str], str]:
    def strftime_now(format_text: str) -> str:
        return datetime.fromtimestamp(clock.unix_ms() / 1000, tz=UTC).strftime(format_text)

    return strftime_now


def _text_content(content: object, field: str, *, is_optional: bool) -> str:
    """Give a message's content as text.

    Raises:
        EngineError: INVALID_REQUEST for a malformed content, UNSUPPORTED_PARAMETER for a part that is not text.
    """
    if isinstance(content, str):
        return content
    if content is None and is_optional:
        return ""
    if not isinstance(content, list | tuple):
        raise _invalid(field, f"{field} must be a string or a list of content parts.")
    return _PART_SEPARATOR.join(_part_text(part, f"{field}[{index}]", field) for index, part in enumerate(content))


def _part_text(part: object, name: str, field: str) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise _invalid(field, f"{name} must be an object with a type.")
    if part["type"] != "text":
        raise EngineError(
            ErrorReason.UNSUPPORTED_PARAMETER,
            f"{name} is of type {part['type']!r}; this model takes text parts only.",
            field=field,
            type=part["type"],
        )
    if not isinstance(part.get("text"), str):
        raise _invalid(field, f"{name}.text must be a string.")
    return str(part["text"])


def _tool_calls(calls: object, field: str) -> list[Any]:
    """Copy tool calls, with the arguments parsed."""
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise _invalid(field, f"{field} must be a list of objects.")
    return [_tool_call(call, f"{field}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Mapping[str, object], field: str) -> dict[str, object]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise _invalid(f"{field}.function", f"{field}.function must be an object.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            name = f"{field}.function.arguments"
            raise _invalid(name, f"{name} must hold valid JSON.") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _join_bounded(pieces: Iterator[str]) -> str:
    """Join rendered pieces.

    Raises:
        EngineError: INVALID_REQUEST, when the text grows past the limit.
    """
    parts: list[str] = []
    num_characters = 0
    for piece in pieces:
        num_characters += len(piece)
        if num_characters > _MAX_PROMPT_CHARACTERS:
            raise _invalid("messages", f"The rendered messages exceed {_MAX_PROMPT_CHARACTERS} characters.")
        parts.append(piece)
    return "".join(parts)


def _invalid(field: str, message: str) -> EngineError:
    return EngineError(ErrorReason.INVALID_REQUEST, message, field=field)
