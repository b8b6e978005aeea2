"""A log of bounded size: whole writes, newest part first, nothing else lost than the oldest."""

import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from services.launcher.rotating_file import RotatingFile


@contextmanager
def rotating(path: Path, max_bytes: int = 10, num_old_files: int = 2) -> Iterator[RotatingFile]:
    with closing(RotatingFile(path, max_bytes, num_old_files)) as file:
        yield file


def parts(path: Path) -> dict[str, str]:
    return {part.name: part.read_text() for part in path.parent.iterdir()}


def test_file_is_continued_and_private(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for text in (b"one\n", b"two\n"):
        with rotating(path) as file:
            file.write(text)
    assert parts(path) == {"log": "one\ntwo\n"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_write_that_would_outgrow_the_bound_begins_a_new_part(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with rotating(path) as file:
        for number in range(7):
            file.write(f"{number}...\n".encode())
    assert parts(path) == {"log": "6...\n", "log.1": "4...\n5...\n", "log.2": "2...\n3...\n"}


def test_bound_counts_what_was_there_before(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("12345678\n")
    with rotating(path) as file:
        file.write(b"new\n")
    assert parts(path) == {"log": "new\n", "log.1": "12345678\n"}


def test_write_larger_than_the_bound_is_a_part_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with rotating(path, num_old_files=0) as file:
        file.write(b"x" * 100)
        file.write(b"last")
    assert parts(path) == {"log": "last"}


def test_log_is_refused_when_it_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        RotatingFile(tmp_path)
