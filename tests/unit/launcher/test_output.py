"""Merged output: whole lines in one form, and no waiting for a reader."""

import errno
import json
import os
import socket
import threading
from functools import partial

from services.launcher.output import LineSplitter, LineWriter, MergedOutput, announce_ready, write_all


class Collector(LineWriter):
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, text: str) -> int:
        self.texts.append(text)
        return len(text)


def written(name: str, line: str, *, log_format: str = "text", has_colour: bool = False) -> str:
    collector = Collector()
    MergedOutput(collector, log_format, has_colour=has_colour).write_line(name, line)  # type: ignore[arg-type]
    return "".join(collector.texts)


def test_log_line_of_a_service_passes_through() -> None:
    line = "12:00:00.000 info    worker-0  starting epoch=1"
    assert written("worker-0", line) == line + "\n"


def test_raw_line_gets_the_name_of_its_service() -> None:
    assert written("worker-0", "Segmentation fault").split(maxsplit=3)[1:] == [
        "output",
        "worker-0",
        "Segmentation fault\n",
    ]


def test_empty_line_is_left_out() -> None:
    assert written("worker-0", "  ") == ""


def test_name_is_coloured_on_a_terminal() -> None:
    line = "12:00:00.000 info    gateway   starting"
    assert written("gateway", line, has_colour=True) == "12:00:00.000 info    \x1b[36mgateway\x1b[0m   starting\n"


def test_log_file_gets_the_same_line_without_colour() -> None:
    terminal, log_file = Collector(), Collector()
    line = "12:00:00.000 info    gateway   starting"
    MergedOutput(terminal, "text", has_colour=True, log_file=log_file).write_line("gateway", line)
    assert log_file.texts == [line + "\n"]
    assert terminal.texts != log_file.texts


def test_json_line_passes_through_and_a_raw_line_becomes_json() -> None:
    assert written("gateway", '{"a": 1}', log_format="json", has_colour=True) == '{"a": 1}\n'
    document = json.loads(written("gateway", "Killed", log_format="json"))
    assert (document["service"], document["level"], document["message"]) == ("gateway", "output", "Killed")


def test_splitter_joins_chunks_into_lines_across_utf8_borders() -> None:
    splitter = LineSplitter()
    data = "eins\nzwölf\r\nrest".encode()
    lines = [line for index in range(len(data)) for line in splitter.feed(data[index : index + 1])]
    assert lines == ["eins", "zwölf"]
    assert splitter.finish() == ["rest"]
    assert splitter.finish() == []


def test_splitter_breaks_a_line_without_end() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"x" * 70_000) == ["x" * 70_000]
    assert splitter.finish() == []


def test_writer_writes_in_order_and_ends_when_closed() -> None:
    read_fd, write_fd = os.pipe()
    writer = LineWriter(partial(write_all, write_fd))
    for number in range(100):
        writer.write(f"{number}\n")
    writer.close()
    os.close(write_fd)
    with os.fdopen(read_fd) as reader:
        assert reader.read().split() == [str(number) for number in range(100)]


def test_writer_drops_and_counts_lines_that_nobody_reads() -> None:
    read_fd, write_fd = os.pipe()
    writer = LineWriter(partial(write_all, write_fd))
    for _ in range(30_000):  # far more than pipe and queue hold; a blocking writer would hang here
        writer.write("x" * 99 + "\n")
    received: list[str] = []
    with os.fdopen(read_fd) as reader:
        thread = threading.Thread(target=lambda: received.extend(reader))
        thread.start()
        writer.close(timeout_s=10)
        os.close(write_fd)
        thread.join(10)
    num_dropped = sum(int(line.split()[1]) for line in received if "dropped" in line)
    assert num_dropped > 0
    assert sum(line.startswith("x") for line in received) + num_dropped == 30_000


def test_writer_ends_quietly_when_the_disk_is_full() -> None:
    def refuse(_data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = LineWriter(refuse)
    writer.write("lost\n")
    writer.close()
    writer.write("lost too\n")


def test_writer_survives_a_reader_that_went_away() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    writer = LineWriter(partial(write_all, write_fd))
    writer.write("nobody hears this\n")
    writer.close()
    os.close(write_fd)


def test_ready_line_is_one_write_newline_included() -> None:
    # A datagram socket keeps the borders of writes, as a pipe does not.
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with reader, writer:
        announce_ready(writer.fileno(), "http://127.0.0.1:8000")
        assert reader.recv(100) == b"ready: http://127.0.0.1:8000\n"
