"""One running child: started in its own session with the lifeline, its output split into lines, ended for sure.

Owns the process and the read end of its output pipe. The pipe is ours and not asyncio's, because asyncio's ``wait``
does not return while a grandchild keeps the pipe open.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import Final

from services.launcher.output import LineSplitter
from services.launcher.topology import ServiceSpec

_READ_BYTES: Final = 64 * 1024
_LAST_OUTPUT_S: Final = 0.5


class ChildProcess:
    """A started child. Make one with :meth:`start` and await :meth:`run` to its end."""

    def __init__(self, process: asyncio.subprocess.Process, output_fd: int, on_line: Callable[[str], None]) -> None:
        self._process = process
        self._output_fd = output_fd
        self._on_line = on_line
        self.has_ended = asyncio.Event()

    @classmethod
    async def start(cls, spec: ServiceSpec, lifeline_fd: int, on_line: Callable[[str], None]) -> "ChildProcess":
        """Start the process.

        Args:
            spec: What to run.
            lifeline_fd: Read end of the launcher's pipe; inherited by the child under the same number.
            on_line: Called with each line that the child prints.

        Raises:
            OSError: the program cannot be started.
        """
        output_fd, child_fd = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                f"--lifeline-fd={lifeline_fd}",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=child_fd,
                stderr=child_fd,
                env=spec.environment,
                pass_fds=(lifeline_fd,),
                # Its own session: ^C and hang-ups of the terminal reach the launcher alone, which stops in order.
                start_new_session=True,
            )
        except BaseException:
            os.close(output_fd)
            raise
        finally:
            os.close(child_fd)
        return cls(process, output_fd, on_line)

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._process.pid

    async def run(self) -> int:
        """Forward the output until the process has ended.

        Returns:
            The exit status; negative: the signal that ended it.
        Cancellation: the process is killed and reaped before the cancellation goes on.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                forwarding = tasks.create_task(self._forward_output())
                exit_code = await self._process.wait()
                await asyncio.wait([forwarding], timeout=_LAST_OUTPUT_S)
                forwarding.cancel()
            return exit_code
        finally:
            self.kill()
            await asyncio.shield(self._process.wait())
            self.has_ended.set()

    def terminate(self) -> None:
        """Ask for a clean stop."""
        if self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """End the process and whatever it started in its group, at once."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended but was not reaped yet
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _forward_output(self) -> None:
        reader = asyncio.StreamReader(limit=_READ_BYTES)
        pipe = os.fdopen(self._output_fd, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        splitter = LineSplitter()
        try:
            while chunk := await reader.read(_READ_BYTES):
                for line in splitter.feed(chunk):
                    self._on_line(line)
        finally:
            for line in splitter.finish():
                self._on_line(line)
            transport.close()
