"""Chat and completions over HTTP: whole answers, streams, and that the two agree."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.gateway.api_harness import (
    CHAT_PROMPT,
    END_ID,
    MARK_ID,
    MODEL,
    Api,
    chunks,
    events,
    speaker,
    streamed_text,
    token_ids,
)


async def test_chat_answers_in_the_form_of_openai():
    api = Api(speaker("Paris", num_cached_tokens=16))
    response = await api.chat(seed=7, request_id="abc")
    assert response.status_code == 200
    assert response.json() == {
        "id": "chatcmpl-abc",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": MODEL,
        "system_fingerprint": "treadle-1.2.3-01234567",
        "seed": 7,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Paris", "refusal": None},
                "finish_reason": "stop",
                "stop_reason": None,
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(CHAT_PROMPT),
            "completion_tokens": 6,
            "total_tokens": len(CHAT_PROMPT) + 6,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
    }


async def test_completion_answers_in_the_form_of_openai():
    api = Api(speaker("Paris", ends=False))
    response = await api.complete(seed=7, request_id="abc", max_tokens=3)
    assert response.status_code == 200
    assert response.json() == {
        "id": "cmpl-abc",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": MODEL,
        "system_fingerprint": "treadle-1.2.3-01234567",
        "seed": 7,
        "choices": [
            {
                "index": 0,
                "text": "Par",
                "finish_reason": "length",
                "stop_reason": None,
                "seed": 7,
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_chat_stream_has_a_role_chunk_text_chunks_and_one_finish_chunk_without_text():
    api = Api(speaker("Hi"))
    response = await api.chat(seed=7, request_id="abc", stream=True)
    head = {
        "id": "chatcmpl-abc",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": MODEL,
        "system_fingerprint": "treadle-1.2.3-01234567",
        "seed": 7,
    }

    def chunk(delta, finish_reason=None, **more):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return head | {"choices": [choice | more]}

    assert chunks(response) == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "H"}),
        chunk({"content": "i"}),
        chunk({}, "stop", stop_reason=None),
    ]


async def test_stream_numbers_its_events_by_the_position_of_their_last_token():
    api = Api(speaker("日a"))
    parsed = events((await api.chat(stream=True)).content)
    assert [event.id for event in parsed] == [None, "2", "3", "4", None]


async def test_stream_forbids_buffering_on_the_way():
    headers = (await Api(speaker("Hi")).chat(stream=True)).headers
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"


async def test_completion_stream_starts_with_text_and_ends_with_an_empty_finish_chunk():
    api = Api(speaker("Hi", ends=False))
    parsed = chunks(await api.complete(stream=True, max_tokens=2))
    assert [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in parsed] == [
        ("H", None),
        ("i", None),
        ("", "length"),
    ]


async def test_stream_reports_the_usage_of_all_choices_in_a_last_chunk_when_asked():
    api = Api(speaker("Hi", num_cached_tokens=1))
    parsed = chunks(await api.complete(prompt=["one", "three"], stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in parsed[:-1])
    assert parsed[-1]["choices"] == []
    assert parsed[-1]["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 6,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_stream_counts_up_on_every_chunk_when_asked_for_continuous_usage():
    api = Api(speaker("Hi"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    parsed = chunks(await api.chat(stream=True, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in parsed] == [0, 1, 2, 3, 3]


async def test_stream_sends_all_tokens_that_wait_in_one_chunk():
    api = Api(speaker("Hello", burst=100))
    parsed = chunks(await api.chat(stream=True))
    assert [chunk["choices"][0]["delta"].get("content") for chunk in parsed] == ["", "Hello", None]


@pytest.mark.parametrize("stop", ["\n\n\n", ["zz", "o!"], None])
async def test_stream_has_no_empty_text_chunk_while_text_is_held_back(stop):
    api = Api(speaker("日本語 oo\n\nx🧑‍🚀"))
    parsed = chunks(await api.chat(stream=True, max_tokens=40, stop=stop))
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in parsed[1:-1]]
    assert "" not in texts
    assert "�" not in "".join(texts)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, MARK_ID), min_size=1, max_size=20),
    st.integers(1, 30),
    st.integers(1, 7),
    st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=2),
    st.booleans(),
)
async def test_streamed_answer_equals_the_whole_one(ids, max_tokens, burst, stops, includes_stop):
    fields = {"max_tokens": max_tokens, "stop": stops, "include_stop_str_in_output": includes_stop}
    whole = (await Api(speaker(ids=ids, burst=1)).complete(**fields)).json()
    api = Api(speaker(ids=ids, burst=burst))
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    response = await api.complete(**fields, **options)
    finish = chunks(response)[-2]["choices"][0]
    assert streamed_text(response) == whole["choices"][0]["text"]
    assert finish["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert finish["stop_reason"] == whole["choices"][0]["stop_reason"]
    assert chunks(response)[-1]["usage"] == whole["usage"]
    streamed_ids = [i for chunk in chunks(response) for choice in chunk["choices"] for i in choice["token_ids"]]
    assert len(streamed_ids) == whole["usage"]["completion_tokens"]


async def test_answer_carries_token_ids_when_asked():
    body = (await Api(speaker("Hi")).complete(return_token_ids=True)).json()
    assert body["choices"][0]["token_ids"] == [*token_ids("Hi"), END_ID]
    assert body["choices"][0]["prompt_token_ids"] == token_ids("Once")
    body = (await Api(speaker("Hi")).chat(return_token_ids=True)).json()
    assert body["prompt_token_ids"] == token_ids(CHAT_PROMPT)


async def test_stream_carries_token_ids_once_when_asked():
    parsed = chunks(await Api(speaker("日a")).chat(return_token_ids=True, stream=True))
    assert parsed[0]["prompt_token_ids"] == token_ids(CHAT_PROMPT)
    assert [chunk["choices"][0]["token_ids"] for chunk in parsed[1:]] == [token_ids("日"), token_ids("a"), [END_ID]]
    parsed = chunks(await Api(speaker("a")).complete(return_token_ids=True, stream=True))
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in parsed] == [token_ids("Once"), None]


async def test_prompts_become_choices_with_their_index():
    api = Api(speaker("x"))
    api.scheduler.answer = lambda request: [request.prompt_token_ids[0], END_ID]
    for prompt in (["1+1", "2+2", "3+3"], [token_ids("1+1"), token_ids("2+2"), token_ids("3+3")]):
        whole = (await api.complete(prompt=prompt)).json()
        assert [(c["index"], c["text"]) for c in whole["choices"]] == [(0, "1"), (1, "2"), (2, "3")]
        assert whole["usage"]["prompt_tokens"] == 9
        stream = await api.complete(prompt=prompt, stream=True)
        assert [streamed_text(stream, index) for index in range(3)] == ["1", "2", "3"]
        assert all(event.id is None for event in events(stream.content))
    assert api.scheduler.live == {}
    assert api.scheduler.cancelled == []


async def test_prompts_draw_from_different_seeds_unless_the_client_gives_one():
    api = Api(speaker("x"))
    body = (await api.complete(prompt=["a", "a"])).json()
    seeds = [request.sampling.seed for request in api.scheduler.requests]
    assert seeds[0] != seeds[1]
    assert [choice["seed"] for choice in body["choices"]] == seeds
    assert body["seed"] == seeds[0]
    await api.complete(prompt=["a", "a"], seed=5)
    assert [request.sampling.seed for request in api.scheduler.requests[2:]] == [5, 5]


async def test_seed_is_reported_as_given_and_sampled_as_unsigned():
    api = Api(speaker("x"))
    assert (await api.complete(seed=-1)).json()["seed"] == -1
    assert api.scheduler.requests[0].sampling.seed == 2**64 - 1


async def test_stop_string_ends_the_request_at_the_scheduler_once_and_keeps_its_usage():
    api = Api(speaker("Hello world", ends=False, num_cached_tokens=2))
    for is_stream in (False, True):
        options = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
        response = await api.complete(stop=[" wo"], **options)
        body = chunks(response)[-1] if is_stream else response.json()
        assert body["usage"]["completion_tokens"] == 8
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert len(api.scheduler.cancelled) == 2
    assert api.scheduler.live == {}


async def test_stop_string_that_is_a_special_token_stops_and_stays_out_of_the_text():
    for fields in ({"stop": "<mark>"}, {"stop_token_ids": [MARK_ID]}):
        api = Api(speaker(ids=[*token_ids("ab"), MARK_ID, *token_ids("cd")]))
        choice = (await api.complete(**fields)).json()["choices"][0]
        assert choice["text"] == "ab"
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == fields.get("stop", MARK_ID)


async def test_ignore_eos_leaves_the_scheduler_no_end_token():
    api = Api(speaker("Hi"))
    body = (await api.complete(ignore_eos=True, max_tokens=5)).json()
    assert body["choices"][0]["text"] == "HiHi"
    assert body["usage"]["completion_tokens"] == 5
    assert api.scheduler.requests[0].eos_token_ids == frozenset()


async def test_special_tokens_are_shown_when_asked():
    api = Api(speaker(ids=[*token_ids("a"), MARK_ID]))
    assert (await api.complete(skip_special_tokens=False)).json()["choices"][0]["text"] == "a<mark>"


async def test_special_text_in_a_byte_fallback_answer_is_valid_json():
    """Random bytes, as a hot sampler makes them, are valid UTF-8 on the wire whatever they are."""
    ids = [0x80, 0xFF, 0x22, 0x5C, 0x0A, 0x0D, 0x00, 0xE6, 0x97]
    whole = (await Api(speaker(ids=ids)).complete()).json()["choices"][0]["text"]
    assert whole == bytes(ids).decode("utf-8", "replace")
    assert streamed_text(await Api(speaker(ids=ids)).complete(stream=True)) == whole
