"""What the launcher's tests share: signal handlers are put back, since commands and supervisors change them."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _keep_signal_handlers() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
