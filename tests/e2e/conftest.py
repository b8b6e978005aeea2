"""One mesh with the default model, shared by the tests that leave it as they found it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mesh import Mesh, running_mesh


@pytest.fixture(scope="session")
def mesh(model_path: Path) -> Iterator[Mesh]:
    with running_mesh(model_path, "--kv-cache-gib", "0.25", "--max-num-requests", "16") as mesh:
        yield mesh
