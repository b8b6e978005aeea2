"""What every test has: verification on, one compute thread, and a detector of leaked asyncio tasks."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from services.common.verify import set_verification
from services.launcher.model_catalogue import CATALOGUE
from services.launcher.model_store import ModelStore, default_store_root

# Several tests run models; two processes of two threads each on two cores only take time from each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# A busy machine is no bug, so examples have no deadline. Continuous integration tries the same examples every time; new
# ones are found where somebody is there to look at them.
settings.register_profile("treadle", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "treadle")


def default_model_path() -> Path:
    """Return the default model's file; scripts/test fetches it before the tests run."""
    override = os.environ.get("TREADLE_TEST_MODEL")
    if override:
        return Path(override)
    return ModelStore(default_store_root(os.environ)).path_of(CATALOGUE[0])


@pytest.fixture(scope="session")
def model_path() -> Path:
    path = default_model_path()
    assert path.exists(), f"{path} is missing; `treadle model pull` or ./scripts/test fetches it"
    return path


@pytest.fixture(autouse=True)
def _verification() -> Iterator[None]:
    set_verification(enabled=True)
    yield
    set_verification(enabled=False)


@pytest.fixture
async def no_leaked_tasks() -> AsyncIterator[None]:
    """Fail when the test leaves a task running; what is ending already may take a moment."""
    before = asyncio.all_tasks()
    yield
    for _ in range(200):
        leaked = asyncio.all_tasks() - before - {asyncio.current_task()}
        if not leaked:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"leaked tasks: {[task.get_name() for task in leaked]}")
