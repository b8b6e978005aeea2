"""Chat templates: the environment that their authors expect, and a 400 for everything a client can get wrong."""

import json
from datetime import UTC, datetime

import pytest

from services.common.clock import ManualClock
from services.common.errors import EngineError, ErrorReason
from services.gateway import chat_template as module
from services.gateway.chat_template import ChatTemplate

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTENTS = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"


def render(source: str, *messages: dict, **options: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def user(content: object) -> dict:
    return {"role": "user", "content": content}


def refused(template: ChatTemplate, *messages: dict, **options: object) -> EngineError:
    with pytest.raises(EngineError) as caught:
        template.render(messages, **options)
    assert caught.value.http_status == 400
    return caught.value


def test_chatml_is_rendered_with_and_without_generation_prompt():
    assert render(CHATML, user("hi")) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, user("hi"), add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_content_is_data_and_neither_escaped_nor_evaluated():
    assert render(CONTENTS, user("<b> & {{ 7 * 7 }} {% raw %}")) == "[<b> & {{ 7 * 7 }} {% raw %}]"


def test_special_tokens_and_variables_are_visible():
    assert render("{{ bos_token }}{{ mood }}{{ eos_token }}", user("x"), variables={"mood": "calm"}) == "<s>calm</s>"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_client_variables_cannot_take_the_templates_own_names(name):
    error = refused(ChatTemplate(CONTENTS, {}), user("x"), variables={name: "y"})
    assert error.metadata["field"] == f"chat_template_kwargs.{name}"


def test_blocks_are_trimmed_as_transformers_does():
    assert render("  {% if true %}\nA\n  {% endif %}\nB", user("x")) == "A\nB"


def test_loop_controls_work():
    assert (
        render("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}", *[user("")] * 3)
        == "x"
    )


def test_generation_blocks_are_just_their_body():
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!", user("x")) == "x!"


def test_tojson_keeps_characters_as_they_are():
    source = "{{ messages[0].extra | tojson }}|{{ messages[0].extra | tojson(indent=1) }}"
    extra = {"a": "<é日&'>"}
    expected = json.dumps(extra, ensure_ascii=False)
    assert (
        render(source, user("") | {"extra": extra}) == f"{expected}|{json.dumps(extra, ensure_ascii=False, indent=1)}"
    )


def test_strftime_now_reads_the_clock_in_utc():
    moment = datetime(2031, 5, 4, 23, 59, tzinfo=UTC)
    clock = ManualClock(unix_ms=int(moment.timestamp() * 1000))
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, clock=clock)
    assert template.render([user("x")]) == "04 May 2031"


def test_text_parts_are_joined_by_a_line_feed():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(CONTENTS, user(parts)) == "[a\nb]"


@pytest.mark.parametrize("message", [{"role": "assistant"}, {"role": "assistant", "content": None}])
def test_missing_content_of_the_assistant_is_empty(message):
    assert render(CHATML, message, add_generation_prompt=False) == "<|im_start|>assistant\n<|im_end|>\n"


def test_developer_becomes_system_for_templates_that_do_not_know_it():
    message = {"role": "developer", "content": "x"}
    assert render("{{ messages[0].role }}", message) == "system"
    assert render("{% if messages[0].role == 'developer' %}known{% endif %}", message) == "known"


def test_arguments_of_tool_calls_are_given_as_objects():
    source = "{% for c in messages[0].tool_calls %}{{ c.function.name }}:{{ c.function.arguments.n + 1 }}{% endfor %}"
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}]
    assert render(source, {"role": "assistant", "content": None, "tool_calls": calls}) == "f:2"


def test_messages_of_the_caller_are_left_unchanged():
    message = {"role": "developer", "content": [{"type": "text", "text": "a"}]}
    before = json.dumps(message)
    render(CONTENTS, message)
    assert json.dumps(message) == before


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": 3, "content": "x"}, "messages[0].role"),
        ({"role": "", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        (user(None), "messages[0].content"),
        (user(5), "messages[0].content"),
        (user({"type": "text"}), "messages[0].content"),
        (user(["x"]), "messages[0].content"),
        (user([{"text": "x"}]), "messages[0].content"),
        (user([{"type": "text"}]), "messages[0].content"),
        (user([{"type": "text", "text": None}]), "messages[0].content"),
        ({"role": "assistant", "tool_calls": 5}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [5]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_malformed_message_is_refused_and_the_field_named(message, field):
    error = refused(ChatTemplate(CONTENTS, {}), message)
    assert error.reason is ErrorReason.INVALID_REQUEST
    assert error.metadata["field"] == field


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_part_that_is_not_text_is_unsupported_and_the_message_named(kind):
    error = refused(ChatTemplate(CONTENTS, {}), user("a"), user([{"type": "text", "text": "b"}, {"type": kind}]))
    assert error.reason is ErrorReason.UNSUPPORTED_PARAMETER
    assert error.metadata["field"] == "messages[1].content"


def test_complaint_of_the_template_reaches_the_client():
    template = ChatTemplate("{{ raise_exception('Roles must alternate') }}", {})
    error = refused(template, user("a"))
    assert error.message == "The model's chat template refuses these messages: Roles must alternate"
    assert error.metadata == {"field": "messages"}


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].absent.name }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ range(10000000) | list }}",
        "{{ 'x' | int(base=99) + absent() }}",
        "{{ strftime_now(5) }}",
        "{{ messages | tojson }}{{ self | tojson }}",
    ],
)
def test_failure_inside_the_template_is_a_400_without_pythons_words(source):
    error = refused(ChatTemplate(source, {}), user("a"))
    assert error.metadata == {"field": "messages"}
    assert error.message == "These messages do not fit the model's chat template; check their roles and contents."


def test_output_beyond_the_limit_is_refused_while_it_is_rendered(monkeypatch):
    monkeypatch.setattr(module, "_MAX_PROMPT_CHARACTERS", 1000)
    template = ChatTemplate("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", {})
    assert "exceed 1000 characters" in refused(template, user("a" * 100)).message


def test_model_without_a_template_refuses_chat_and_says_what_to_use():
    template = ChatTemplate(None, {})
    assert not template.is_available
    error = refused(template, user("a"))
    assert error.metadata == {"field": "messages"}
    assert "no chat template; use /v1/completions" in error.message


def test_invalid_source_is_refused_at_load():
    with pytest.raises(EngineError, match=r"chat template is not valid: .* \(line 2\)") as caught:
        ChatTemplate("a\n{% if %}", {})
    assert caught.value.reason is ErrorReason.MODEL_LOAD_FAILED
