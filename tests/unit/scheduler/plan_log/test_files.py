"""Plan logs on disk: what is written is read, and every kind of damage is named."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from services.common.errors import EngineError, ErrorReason
from services.scheduler.plan_log.files import frame_record, list_log_files, read_plan_log
from services.scheduler.plan_log.writer import PlanLogWriter
from treadle.scheduler.v1 import plan_log_pb2 as pb2
from treadle.worker.v1 import worker_service_pb2

MIB = 1 << 20


@contextmanager
def writing(
    directory: Path, epoch: int = 7, max_bytes: int = 9 * MIB, max_file_bytes: int = MIB
) -> Iterator[PlanLogWriter]:
    header = pb2.FileStarted(scheduler_epoch=epoch, run_ahead_depth=2)
    with closing(PlanLogWriter(directory, header, max_bytes, max_file_bytes)) as writer:
        yield writer
        writer.flush()


def cancelled(request_id: str) -> pb2.PlanLogRecord:
    return pb2.PlanLogRecord(unix_time_us=5, request_cancelled=pb2.RequestCancelled(request_id=request_id))


def write_requests(directory: Path, count: int, **settings: int) -> None:
    with writing(directory, **settings) as writer:
        for number in range(count):
            writer.append(cancelled(f"request-{number}"))


def request_ids(directory: Path) -> list[str]:
    records = read_plan_log(directory)
    return [record.request_cancelled.request_id for record in records if record.HasField("request_cancelled")]


def only_file(directory: Path) -> Path:
    (file,) = list_log_files(directory)
    return file.path


def breakage(directory: Path) -> EngineError:
    with pytest.raises(EngineError) as raised:
        list(read_plan_log(directory))
    assert raised.value.reason is ErrorReason.PLAN_LOG_BROKEN
    return raised.value


def record_bytes(path: Path) -> list[bytes]:
    """The framed records of a file."""
    framed = [frame_record(record.SerializeToString()) for record in read_plan_log(path.parent)]
    assert b"".join(framed) == path.read_bytes()
    return framed


def test_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_requests(tmp_path / "log", 3)
    records = list(read_plan_log(tmp_path / "log"))
    assert [record.WhichOneof("record") for record in records] == ["file_started"] + ["request_cancelled"] * 3
    assert [record.sequence for record in records] == [0, 1, 2, 3]
    assert records[0].file_started.scheduler_epoch == 7
    assert {record.unix_time_us for record in records} == {5}
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o700
    assert only_file(tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_length_prefix_is_a_varint() -> None:
    assert frame_record(b"x" * 127)[:2] == b"\x7fx"
    assert frame_record(b"x" * 300)[:3] == b"\xac\x02x"


def test_lives_are_read_one_after_the_other(tmp_path: Path) -> None:
    write_requests(tmp_path, 1, epoch=20)
    write_requests(tmp_path, 2, epoch=3)
    assert request_ids(tmp_path) == ["request-0", "request-1", "request-0"]


def test_full_file_is_followed_by_one_that_tells_the_workers_again(tmp_path: Path) -> None:
    capabilities = worker_service_pb2.Capabilities(name="worker-0", num_blocks=9)
    started = pb2.WorkerStarted(stream=1, capabilities=capabilities)
    with writing(tmp_path, max_file_bytes=20) as writer:
        writer.append(pb2.PlanLogRecord(worker_started=started))
        for number in range(3):
            writer.append(cancelled("x" * 100 + str(number)))
    assert len(list_log_files(tmp_path)) == 4
    headers = [record.file_started for record in read_plan_log(tmp_path) if record.HasField("file_started")]
    assert [list(header.workers) for header in headers] == [[], [started], [started], [started]]
    assert [request_id[-1] for request_id in request_ids(tmp_path)] == ["0", "1", "2"]


def test_oldest_files_go_when_the_bound_is_reached(tmp_path: Path) -> None:
    write_requests(tmp_path, 1, epoch=1)
    write_requests(tmp_path, 200, epoch=2, max_bytes=2000, max_file_bytes=500)
    files = list_log_files(tmp_path)
    assert {file.scheduler_epoch for file in files} == {2}
    assert sum(file.path.stat().st_size for file in files) <= 2000 + 100
    assert request_ids(tmp_path)[-1] == "request-199"
    assert 0 < len(request_ids(tmp_path)) < 100


def test_changed_record_is_named(tmp_path: Path) -> None:
    write_requests(tmp_path, 5)
    path = only_file(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"request-2", b"request-9"))
    error = breakage(tmp_path)
    assert "after record 3" in error.message
    assert f"({path.name}, byte " in error.message


@pytest.mark.parametrize(("victim", "what"), [(2, "where 2 must follow"), (0, "must begin with the start of a file")])
def test_missing_record_is_noticed(tmp_path: Path, victim: int, what: str) -> None:
    write_requests(tmp_path, 4)
    path = only_file(tmp_path)
    records = record_bytes(path)
    path.write_bytes(b"".join(records[:victim] + records[victim + 1 :]))
    assert what in breakage(tmp_path).message


def test_exchanged_records_are_noticed(tmp_path: Path) -> None:
    write_requests(tmp_path, 4)
    path = only_file(tmp_path)
    first, second, third, *rest = record_bytes(path)
    path.write_bytes(b"".join([first, third, second, *rest]))
    assert "it is number 2, where 1 must follow" in breakage(tmp_path).message


def test_record_of_another_log_is_noticed(tmp_path: Path) -> None:
    for name, epoch in (("a", 1), ("b", 2)):
        write_requests(tmp_path / name, 4, epoch=epoch)
    path = only_file(tmp_path / "a")
    mine, others = record_bytes(path), record_bytes(only_file(tmp_path / "b"))
    path.write_bytes(b"".join([*mine[:3], others[3], *mine[4:]]))
    assert "does not belong after record 2" in breakage(tmp_path / "a").message


def test_missing_file_is_noticed(tmp_path: Path) -> None:
    write_requests(tmp_path, 20, max_file_bytes=100)
    list_log_files(tmp_path)[2].path.unlink()
    assert "number 2 of its life, is missing" in breakage(tmp_path).message


def test_missing_file_at_the_front_is_no_damage(tmp_path: Path) -> None:
    write_requests(tmp_path, 20, max_file_bytes=100)
    list_log_files(tmp_path)[0].path.unlink()
    assert request_ids(tmp_path)[-1] == "request-19"


@pytest.mark.parametrize("num_bytes_left", range(1, 40))
def test_record_that_was_being_written_at_a_kill_is_left_out(tmp_path: Path, num_bytes_left: int) -> None:
    write_requests(tmp_path, 3)
    path = only_file(tmp_path)
    *kept, last = record_bytes(path)
    path.write_bytes(b"".join(kept) + last[: min(num_bytes_left, len(last) - 1)])
    assert request_ids(tmp_path) == ["request-0", "request-1"]


def test_cut_record_inside_a_log_is_damage(tmp_path: Path) -> None:
    write_requests(tmp_path, 20, max_file_bytes=100)
    path = list_log_files(tmp_path)[1].path
    path.write_bytes(path.read_bytes()[:-1])
    assert "it is cut short" in breakage(tmp_path).message


def test_every_changed_byte_is_noticed_or_the_last_records(tmp_path: Path) -> None:
    write_requests(tmp_path, 3)
    path = only_file(tmp_path)
    intact = path.read_bytes()
    length_of_last = len(record_bytes(path)[-1])
    for position in range(len(intact) - length_of_last):
        path.write_bytes(intact[:position] + bytes([intact[position] ^ 0x01]) + intact[position + 1 :])
        try:
            ids = request_ids(tmp_path)
        except EngineError:
            continue
        # A length that grew beyond the file looks like a kill; it can only hide records, not change one.
        assert ids == ["request-0", "request-1", "request-2"][: len(ids)]
        assert len(ids) < 3


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_directory_without_a_log_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.log").write_text("x")
    with pytest.raises(EngineError) as raised:
        list(read_plan_log(tmp_path / name))
    assert raised.value.reason is ErrorReason.REPLAY_REFUSED
