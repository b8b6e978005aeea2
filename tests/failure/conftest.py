"""A mesh of a tiny model for tests that kill parts of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mesh import Mesh, running_mesh
from tests.model_files import random_weights, tiny_config, write_hf_directory


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    config = tiny_config(max_model_len=4096)
    model: Path = write_hf_directory(tmp_path_factory.mktemp("tiny"), config, random_weights(config))
    with running_mesh(model, "--kv-cache-gib", "0.01", "--dtype", "float32") as mesh:
        yield mesh
