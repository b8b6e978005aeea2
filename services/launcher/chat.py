"""`treadle chat`: a conversation in the terminal with a running mesh, over its public HTTP interface.

Owns the conversation. Commands: ``/reset`` forgets it, ``/exit`` or end of file leaves; an interrupt during an answer
ends the answer (which the mesh then stops computing) and keeps what was said.
"""

import http.client
import json
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final, TextIO, TypedDict

from services.launcher.topology import join_host_port

_CONNECT_TIMEOUT_S: Final = 5.0
_SILENCE_TIMEOUT_S: Final = 120.0
_EXIT_WORDS: Final = frozenset({"/exit", "/quit"})
_HELP: Final = "/reset forgets the conversation, /exit leaves"


class Message(TypedDict):
    """One message in the form of the OpenAI API."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Where to talk, and how.

    Attributes:
        host: Where the mesh listens.
        http_port: HTTP port of the mesh.
        system: System message, if any.
        max_tokens: Longest answer, in tokens.
        temperature: 0 is greedy.
    """

    host: str
    http_port: int
    system: str | None
    max_tokens: int
    temperature: float


class ChatError(Exception):
    """The mesh did not answer; the text is for the user."""


@dataclass
class Conversation:
    """What was said so far.

    Args:
        settings: Where to talk, and how.
    """

    settings: ChatSettings
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        system = self.settings.system
        self.messages = [] if system is None else [Message(role="system", content=system)]

    def ask(self, text: str) -> Generator[str]:
        """Say ``text`` and yield the answer piece by piece.

        However the iteration ends, the conversation keeps what was answered; when nothing was, it forgets the question,
        so that it may be asked again. Close the iterator when leaving it early.

        Raises:
            ChatError: no mesh answers, or it refuses.
        """
        self.messages.append(Message(role="user", content=text))
        answer = ""
        try:
            with closing(self._stream()) as pieces:
                for piece in pieces:
                    answer += piece
                    yield piece
        finally:
            if answer:
                self.messages.append(Message(role="assistant", content=answer))
            else:
                self.messages.pop()

    def _stream(self) -> Generator[str]:
        settings = self.settings
        connection = http.client.HTTPConnection(settings.host, settings.http_port, timeout=_CONNECT_TIMEOUT_S)
        with closing(connection):
            try:
                connection.connect()
                connection.sock.settimeout(_SILENCE_TIMEOUT_S)
                body = {
                    "model": _first_model(connection),
                    "messages": self.messages,
                    "max_tokens": settings.max_tokens,
                    "temperature": settings.temperature,
                    "stream": True,
                }
                headers = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
                yield from read_deltas(_successful(connection.getresponse()))
            except (OSError, http.client.HTTPException) as error:
                place = join_host_port(settings.host, settings.http_port)
                raise ChatError(
                    f"no mesh answers at http://{place} ({error}). Start one with `treadle serve`, "
                    "or name its port with --http-port."
                ) from error


def read_deltas(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the text of each event of a streamed chat completion.

    Args:
        lines: Lines of a ``text/event-stream``.

    Raises:
        ChatError: the stream carries an error, or ends without ``[DONE]``.
    """
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ChatError(event["error"]["message"])
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                yield text
    raise ChatError("the answer was cut off: the mesh ended the stream")


def chat(settings: ChatSettings, source: TextIO = sys.stdin, sink: TextIO = sys.stdout) -> int:
    """Talk until the user leaves; return the exit status, 1 when the mesh could not be reached at the end."""
    conversation = Conversation(settings)
    is_terminal = source.isatty()
    if is_terminal:
        print(_HELP, file=sink)
    exit_code = 0
    while (text := _read(source, sink, is_terminal)) not in _EXIT_WORDS:
        if text == "/reset":
            conversation.reset()
        elif text.startswith("/"):
            print(_HELP, file=sink)
        elif text:
            exit_code = _answer(conversation, text, sink)
    return exit_code


def _read(source: TextIO, sink: TextIO, is_terminal: bool) -> str:
    """Return the next line, or ``/exit`` at the end of input."""
    try:
        if is_terminal and source is sys.stdin:
            import readline  # noqa: F401 - gives input() a history and editing

            return input("\n> ").strip()
        line = source.readline()
        return line.strip() if line else "/exit"
    except (EOFError, KeyboardInterrupt):
        print(file=sink)
        return "/exit"


def _answer(conversation: Conversation, text: str, sink: TextIO) -> int:
    try:
        with closing(conversation.ask(text)) as pieces:
            for piece in pieces:
                print(piece, end="", file=sink, flush=True)
        print(file=sink)
    except KeyboardInterrupt:
        print(" [stopped]", file=sink)
    except ChatError as error:
        print(f"treadle: {error}", file=sys.stderr)
        return 1
    return 0


def _first_model(connection: http.client.HTTPConnection) -> str:
    """Return the name of the model that the mesh serves."""
    connection.request("GET", "/v1/models")
    models = json.loads(_successful(connection.getresponse()).read())
    return str(models["data"][0]["id"])


def _successful(response: http.client.HTTPResponse) -> http.client.HTTPResponse:
    if response.status != http.HTTPStatus.OK:
        raise ChatError(_error_text(response.read(), response.status))
    return response


def _error_text(body: bytes, status: int) -> str:
    """Return the message of an error response, or the status when it has none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the mesh answered with HTTP status {status}"
