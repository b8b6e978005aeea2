"""Laws of open_checkpoint: which paths are models, and what is said about the others."""

import pytest

from services.common.errors import EngineError, ErrorReason
from services.worker.weights import open_checkpoint
from tests.model_files import random_weights, tiny_config, write_gguf_file


def refused_message(path) -> str:
    with pytest.raises(EngineError) as refused:
        open_checkpoint(path)
    assert refused.value.reason is ErrorReason.MODEL_LOAD_FAILED
    assert refused.value.metadata["path"] == str(path)
    return refused.value.message


def test_directory_with_one_gguf_file_is_that_file(tmp_path) -> None:
    config = tiny_config()
    path = write_gguf_file(tmp_path / "Tiny.gguf", config, random_weights(config))

    assert open_checkpoint(tmp_path).weight_version == open_checkpoint(path).weight_version


def test_directory_with_several_gguf_files_is_refused_with_their_names(tmp_path) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()

    assert "several GGUF files, name one: a.gguf, b.gguf" in refused_message(tmp_path)


def test_empty_directory_is_refused(tmp_path) -> None:
    assert "neither config.json (a Hugging Face model) nor a GGUF file" in refused_message(tmp_path)


def test_absent_path_is_refused(tmp_path) -> None:
    assert "no such file or directory" in refused_message(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "model.ckpt"])
def test_pickled_file_is_refused_unread(tmp_path, name) -> None:
    path = tmp_path / name
    path.write_bytes(b"GGUF")

    assert "convert them to safetensors" in refused_message(path)


def test_lone_safetensors_file_is_refused_with_advice(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()

    assert "give the directory that holds config.json" in refused_message(path)


def test_foreign_file_is_refused(tmp_path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("This is not a model, only a note about one.")

    assert "not a GGUF file" in refused_message(path)
