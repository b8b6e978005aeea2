"""``prompt`` and ``messages`` of the OpenAI API, checked and turned into prompts.

Guarantees: shapes only; what a role or a content part means is the chat template's business. Special texts in a role
cannot reach the template, since only the known roles pass.
"""

from collections.abc import Mapping

from services.gateway.tokenizer import Tokenizer
from services.gateway.validated_request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from services.gateway.validation import invalid, is_int_list, shown, unsupported

MAX_PROMPTS = 256
"""Prompts in one request: each is a generation of its own, and a bound keeps one client from filling the queue."""

MAX_MESSAGES = 10_000
"""Messages in one chat; far beyond any context, and the template's time is proportional to it."""

ROLES = ("system", "developer", "user", "assistant")
"""Roles served; the others belong to tool calls."""

_TOOL_ROLES = ("tool", "function")


def parse_prompt(value: object, tokenizer: Tokenizer, *, adds_special_tokens: bool) -> tuple[Prompt, ...]:
    """Turn ``prompt`` into prompts: a string, a list of strings, token ids, or a list of lists of token ids.

    Raises:
        EngineError: INVALID_REQUEST naming ``prompt`` or one of its items.
    """
    if isinstance(value, str):
        return (_text_prompt(value, "prompt", adds_special_tokens=adds_special_tokens),)
    if value is None:
        raise invalid("prompt", "is required")
    if not isinstance(value, list):
        raise invalid("prompt", f"must be a string, token ids, or a list of them, not {shown(value)}")
    if not value:
        raise invalid("prompt", "must not be empty")
    if is_int_list(value):
        return (_token_prompt(value, "prompt", tokenizer),)
    if len(value) > MAX_PROMPTS:
        raise invalid("prompt", f"must have at most {MAX_PROMPTS} prompts, not {len(value)}")
    if all(isinstance(item, str) for item in value):
        return tuple(
            _text_prompt(item, f"prompt[{i}]", adds_special_tokens=adds_special_tokens) for i, item in enumerate(value)
        )
    is_list_of_lists = isinstance(value[0], list)
    for index, item in enumerate(value):
        if is_list_of_lists and not is_int_list(item):
            raise invalid(f"prompt[{index}]", f"must be a list of token ids like the first, not {shown(item)}")
        if not is_list_of_lists and type(item) is not type(value[0]):
            raise invalid(f"prompt[{index}]", f"must be of one kind with prompt[0], not {shown(item)}")
    if not is_list_of_lists:
        raise invalid("prompt[0]", f"must be a string or token ids, not {shown(value[0])}")
    return tuple(_token_prompt(item, f"prompt[{i}]", tokenizer) for i, item in enumerate(value))


def parse_messages(value: object) -> tuple[Mapping[str, object], ...]:
    """Check ``messages``.

    Raises:
        EngineError: INVALID_REQUEST or UNSUPPORTED_PARAMETER naming ``messages`` or the part of it that is wrong.
    """
    if value is None:
        raise invalid("messages", "is required")
    if not isinstance(value, list):
        raise invalid("messages", f"must be a list of messages, not {shown(value)}")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise invalid("messages", f"must have 1 to {MAX_MESSAGES} messages, not {len(value)}")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(value))


def chat_prompt(value: object, *, adds_generation_prompt: bool, adds_special_tokens: bool) -> ChatPrompt:
    """Turn ``messages`` into a prompt.

    Raises:
        EngineError: as :func:`parse_messages`.
    """
    return ChatPrompt(parse_messages(value), adds_generation_prompt, adds_special_tokens)


def _text_prompt(text: str, field: str, *, adds_special_tokens: bool) -> TextPrompt:
    return TextPrompt(text, adds_special_tokens, field)


def _token_prompt(token_ids: list[int], field: str, tokenizer: Tokenizer) -> TokenPrompt:
    if not token_ids:
        raise invalid(field, "must have at least one token")
    tokenizer.check_token_ids(token_ids, field)
    return TokenPrompt(tuple(token_ids), field)


def _message(message: object, path: str) -> Mapping[str, object]:
    if not isinstance(message, dict):
        raise invalid(path, f"must be an object with role and content, not {shown(message)}")
    role = message.get("role")
    if role in _TOOL_ROLES:
        raise unsupported(f"{path}.role", f"{role!r} belongs to tool calls, which are not served yet")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{path}.role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
    for key in ("tool_calls", "function_call", "audio"):
        value = message.get(key)
        if value is not None and value != []:
            raise unsupported(f"{path}.{key}", "is not served yet")
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise invalid(f"{path}.name", f"must be a string, not {shown(name)}")
    _check_content(message.get("content"), role, f"{path}.content")
    return {key: item for key, item in message.items() if key in ("role", "content", "name")}


def _check_content(content: object, role: str, path: str) -> None:
    """Accept text or a list of text parts; an assistant's turn may be without."""
    if isinstance(content, str) or (content is None and role == "assistant"):
        return
    if content is None:
        raise invalid(path, "is required")
    if not isinstance(content, list):
        raise invalid(path, f"must be a string or a list of parts, not {shown(content)}")
    if not content:
        raise invalid(path, "must have at least one part")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str):
            raise invalid(f"{path}[{index}]", f"must be an object with a type, not {shown(part)}")
        if kind != "text":
            raise unsupported(path, f"has a part of type {shown(kind)}; only text parts are served")
        if not isinstance(part.get("text"), str):
            raise invalid(f"{path}[{index}].text", f"must be a string, not {shown(part.get('text'))}")
