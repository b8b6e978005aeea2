"""What the tests of the CPU engine share."""

import pytest

from tests.kernels.cpu_references import ISAS
from treadle_kernels import cpu


@pytest.fixture(params=ISAS)
def isa(request):
    """Each instruction set of this machine in turn."""
    before = cpu.current_isa()
    cpu.select_isa(request.param)
    yield request.param
    cpu.select_isa(before)
