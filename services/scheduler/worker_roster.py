"""Which workers there are for the shell: connected ones, those among them that drain, and those that will be succeeded.

A worker that announced its stop is expected back: its models stay on offer for a while, so that requests which come in
the gap wait for the successor instead of being refused. One that was lost without a word is not expected.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.scheduler.core.lane import WorkerInfo
from services.scheduler.ports import WorkerPort


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that some worker runs, or is about to run again; the largest figures of its workers."""

    name: str
    weight_version: str
    max_model_len: int
    max_request_tokens: int


@dataclass(slots=True)
class _Connected:
    info: WorkerInfo
    port: WorkerPort
    is_draining: bool = False
    is_told: bool = False


@dataclass(frozen=True, slots=True)
class _Expected:
    info: WorkerInfo
    until_ms: int


class WorkerRoster:
    """All workers by name.

    Args:
        successor_wait_ms: How long a worker that drained is expected back, from its end.
    """

    def __init__(self, successor_wait_ms: int) -> None:
        self._successor_wait_ms = successor_wait_ms
        self._connected: dict[str, _Connected] = {}
        self._expected: dict[str, _Expected] = {}

    @property
    def takes_requests(self) -> bool:
        """Whether a request finds a worker, now or soon."""
        return bool(self._connected or self._expected)

    def infos(self) -> dict[str, WorkerInfo]:
        """Return the connected workers."""
        return {name: worker.info for name, worker in self._connected.items()}

    def ports(self) -> list[tuple[str, WorkerPort]]:
        """Return where to send plans."""
        return [(name, worker.port) for name, worker in self._connected.items()]

    def up(self, info: WorkerInfo, port: WorkerPort) -> None:
        """Enter a worker; it succeeds a former life of its name."""
        self._expected.pop(info.name, None)
        self._connected[info.name] = _Connected(info, port)

    def note_draining(self, name: str) -> None:
        """Take note that a worker is about to stop. Idempotent."""
        worker = self._connected.get(name)
        if worker is not None:
            worker.is_draining = True

    def down(self, name: str, now_ms: int) -> bool:
        """Take a worker out; tell whether it was there. One that drained is expected back."""
        worker = self._connected.pop(name, None)
        if worker is not None and worker.is_draining:
            self._expected[name] = _Expected(worker.info, now_ms + self._successor_wait_ms)
        return worker is not None

    def take_drained(self, is_drained: Callable[[str], bool]) -> Iterator[WorkerPort]:
        """Yield, once each, the draining workers that have nothing left to do."""
        for name, worker in self._connected.items():
            if worker.is_draining and not worker.is_told and is_drained(name):
                worker.is_told = True
                yield worker.port

    def drop_late(self, now_ms: int) -> bool:
        """Expect those no longer whose time is up; tell whether there was one."""
        late = [name for name, expected in self._expected.items() if now_ms >= expected.until_ms]
        for name in late:
            del self._expected[name]
        return bool(late)

    def served_models(self) -> list[ServedModel]:
        """Return the models of all workers, connected and expected."""
        models: dict[str, ServedModel] = {}
        connected = [worker.info for worker in self._connected.values()]
        for info in (*connected, *(worker.info for worker in self._expected.values())):
            known = models.get(info.model)
            models[info.model] = ServedModel(
                name=info.model,
                weight_version=info.weight_version,
                max_model_len=max(info.max_model_len, known.max_model_len if known else 0),
                max_request_tokens=max(info.num_usable_slots, known.max_request_tokens if known else 0),
            )
        return list(models.values())
