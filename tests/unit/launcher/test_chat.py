"""The terminal chat against a real HTTP server that plays the mesh."""

import http.server
import io
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from services.launcher.chat import ChatError, ChatSettings, Conversation, chat, read_deltas

DONE = b"data: [DONE]\n"


def event(**delta: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n"


class FakeGateway(http.server.BaseHTTPRequestHandler):
    """Answers every chat with the words of ``answer`` and keeps what it was asked."""

    protocol_version = "HTTP/1.1"
    asked: list[dict[str, object]]
    refusal: str | None

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.refusal is not None:
            self._send(400, json.dumps({"error": {"message": self.refusal}}).encode())
            return
        self._send(
            200, event(role="assistant") + b"\n" + event(content="Hel") + b": ping\n" + event(content="lo") + DONE
        )

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def gateway(refusal: str | None = None) -> Iterator[tuple[ChatSettings, list[dict[str, object]]]]:
    asked: list[dict[str, object]] = []
    handler = type("Handler", (FakeGateway,), {"asked": asked, "refusal": refusal})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield ChatSettings("127.0.0.1", server.server_address[1], "Be brief.", 64, 0.0), asked
        finally:
            server.shutdown()
            thread.join()


SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "assistant", "content": "Hello"}


def test_conversation_sends_what_was_said_before() -> None:
    with gateway() as (settings, asked):
        conversation = Conversation(settings)
        assert "".join(conversation.ask("one")) == "Hello"
        assert "".join(conversation.ask("two")) == "Hello"
    one, two = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}
    assert [request["messages"] for request in asked] == [[SYSTEM, one], [SYSTEM, one, HELLO, two]]
    assert asked[0] | {"messages": []} == {
        "model": "tiny",
        "messages": [],
        "max_tokens": 64,
        "temperature": 0.0,
        "stream": True,
    }


def test_conversation_keeps_the_part_of_an_answer_that_was_interrupted() -> None:
    with gateway() as (settings, _), closing((conversation := Conversation(settings)).ask("one")) as pieces:
        assert next(pieces) == "Hel"
    assert conversation.messages[-1] == {"role": "assistant", "content": "Hel"}


def test_conversation_forgets_a_question_that_was_refused() -> None:
    with gateway(refusal="prompt is too long") as (settings, _):
        conversation = Conversation(settings)
        with pytest.raises(ChatError, match="prompt is too long"):
            list(conversation.ask("one"))
    assert conversation.messages == [SYSTEM]


def test_conversation_says_how_to_start_a_mesh_when_none_answers() -> None:
    with gateway() as (settings, _):
        pass
    with pytest.raises(ChatError, match="treadle serve"):
        list(Conversation(settings).ask("one"))


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([event(content="a")], "cut off"),
        ([event(content="a"), b'data: {"error": {"message": "worker lost"}}\n'], "worker lost"),
    ],
    ids=["ends without [DONE]", "carries an error"],
)
def test_stream_that_did_not_finish_is_an_error(lines: list[bytes], text: str) -> None:
    with pytest.raises(ChatError, match=text):
        list(read_deltas(lines))


def test_chat_prints_answers_and_reset_forgets() -> None:
    sink = io.StringIO()
    with gateway() as (settings, asked):
        assert chat(settings, io.StringIO("one\n\n/reset\n/what\ntwo\n/exit\nnot asked\n"), sink) == 0
    assert sink.getvalue().splitlines().count("Hello") == 2
    assert [request["messages"][-1]["content"] for request in asked] == ["one", "two"]  # type: ignore[index]
    assert asked[1]["messages"] == [SYSTEM, {"role": "user", "content": "two"}]


def test_chat_ends_at_the_end_of_input_and_fails_when_nobody_answered() -> None:
    with gateway() as (settings, _):
        pass
    assert chat(settings, io.StringIO("one\n"), io.StringIO()) == 1
