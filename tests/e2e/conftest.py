"""One mesh with the default model, shared by the tests that leave it as they found it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.launcher.model_catalogue import DEFAULT_MODEL
from tests.mesh import Mesh, running_mesh


@pytest.fixture(scope="session")
def mesh(model_path: Path) -> Iterator[Mesh]:
    assert model_path.exists()
    with running_mesh(DEFAULT_MODEL, "--kv-cache-gib", "0.25", "--max-num-requests", "16") as mesh:
        yield mesh
