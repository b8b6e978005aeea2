"""The HTTP application over a fake scheduler and a tokenizer of single bytes, driven in this process.

One token is one byte of UTF-8, so a text's tokens can be written down; ``<end>`` ends a generation, ``<mark>`` is a
special token that ends nothing.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import tokenizers
from starlette.types import ASGIApp, Message
from tokenizers import AddedToken, models, pre_tokenizers

from services.common.clock import ManualClock
from services.gateway.chat_template import ChatTemplate
from services.gateway.generation import Backing
from services.gateway.http_api import build_http_api
from services.gateway.http_exchange import HttpSettings
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai_schema import RequestValidator
from services.gateway.text_generator import GenerationSettings, TextGenerator
from services.gateway.tokenizer import Tokenizer, TokenizerFacts
from services.gateway.tokenizer.pieces import PieceAlphabet, PieceCoding
from tests.fakes.fake_scheduler import FakeScheduler

END_ID, MARK_ID = 256, 257
VOCAB_SIZE = 258
MODEL = "fake"
MAX_MODEL_LEN = 64  # of the fake's default model
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
CHAT_PROMPT = "user:hi\nassistant:"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Build a tokenizer whose ids 0 to 255 are the bytes."""
    by_byte = {_character(byte): byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=by_byte, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<mark>", special=True)])
    facts = TokenizerFacts(PieceCoding(PieceAlphabet.BYTE_LEVEL), eos_token_ids=frozenset({END_ID}))
    return Tokenizer(backend, facts)


def _character(byte: int) -> str:
    """GPT-2's printable stand-in of a byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + [other for other in range(256) if other not in printable].index(byte))


TOKENIZER = byte_tokenizer()


def token_ids(text: str) -> list[int]:
    """Spell a text in tokens."""
    return list(text.encode())


def speaker(text: str = "", *, ends: bool = True, ids: Iterable[int] = (), **behaviour: Any) -> FakeScheduler:
    """Build a scheduler that answers every request with one text (or ids), followed by the end token."""
    answer = [*(ids or token_ids(text)), *([END_ID] if ends else [])]
    return FakeScheduler(answer=lambda _request: answer, **behaviour)


@dataclass
class Api:
    """The application and what stands behind it."""

    scheduler: FakeScheduler
    settings: HttpSettings = field(default_factory=HttpSettings)
    clock: ManualClock = field(default_factory=ManualClock)
    template: str | None = TEMPLATE

    def __post_init__(self) -> None:
        self.metrics = GatewayMetrics()
        backing = Backing(self.scheduler, TOKENIZER, self.metrics, self.clock)
        self.generator = TextGenerator(backing, ChatTemplate(self.template, {}), GenerationSettings())
        self.validator = RequestValidator(self.scheduler, TOKENIZER)
        self.app: ASGIApp = build_http_api(self.scheduler, TOKENIZER, self.generator, self.settings, "1.2.3")

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://gateway")

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """Send one POST; ``body`` is JSON unless it is bytes."""
        async with self.client() as client:
            if isinstance(body, bytes):
                options.setdefault("headers", {"content-type": "application/json"})
                return await client.post(path, content=body, **options)
            return await client.post(path, json=body, **options)

    async def get(self, path: str, **options: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.get(path, **options)

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", CHAT | fields)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"prompt": "Once"} | fields)

    async def metric(self, sample: str) -> float:
        """Value of one sample, by its whole name with labels."""
        text = (await self.get("/metrics")).text
        return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(sample + " "))


@dataclass(frozen=True)
class Event:
    """One event of a stream."""

    id: str | None
    data: str

    @property
    def json(self) -> Any:
        return json.loads(self.data)


def events(body: bytes | str) -> list[Event]:
    """Parse a whole stream; comments are left out."""
    text = body.decode() if isinstance(body, bytes) else body
    assert text.endswith("\n\n")
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    return [_event(block) for block in blocks]


def _event(block: str) -> Event:
    fields = dict(line.split(": ", 1) for line in block.split("\n"))
    assert set(fields) <= {"id", "data"}
    return Event(fields.get("id"), fields["data"])


def chunks(response: httpx.Response) -> list[Any]:
    """JSON of all events of a stream that ended well."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parsed = events(response.content)
    assert parsed[-1].data == "[DONE]"
    return [event.json for event in parsed[:-1]]


def streamed_text(response: httpx.Response, index: int = 0) -> str:
    """Joined text of one choice of a stream that ended well."""
    choices = [choice for chunk in chunks(response) for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


class AsgiCall:
    """One POST by hand: the client may leave, or stop reading, whenever the test says."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self._incoming: asyncio.Queue[Message] = asyncio.Queue(maxsize=2)
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        self._sent = asyncio.Condition()
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        self.messages: list[Message] = []
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.wants_to_send = asyncio.Event()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages if message["type"] == "http.response.body"]

    @property
    def is_complete(self) -> bool:
        return bool(self.messages) and not self.messages[-1].get("more_body", True)

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def until(self, num_messages: int) -> None:
        """Wait until the application has sent so many messages (the first is the head)."""
        async with self._sent:
            await self._sent.wait_for(lambda: len(self.messages) >= num_messages)

    async def send(self, message: Message) -> None:
        self.wants_to_send.set()
        await self.may_send.wait()
        async with self._sent:
            self.messages.append(message)
            self._sent.notify_all()

    async def receive(self) -> Message:
        return await self._incoming.get()


@asynccontextmanager
async def calling(api: Api, path: str, body: dict[str, Any]) -> AsyncIterator[AsgiCall]:
    """Run a call beside the test; the application must be done within 5 s after the block."""
    call = AsgiCall(path, body)

    async def run() -> None:
        await api.app(call.scope, call.receive, call.send)

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(run())
        yield call
