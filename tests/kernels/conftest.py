"""What the tests of the CPU engine share."""

import pytest

from tests.kernels.cpu_references import ISAS
from treadle_kernels import cpu


@pytest.fixture(params=ISAS)
def isa(request):
    """Each instruction set of this machine in turn."""
    yield from selected(request.param)


@pytest.fixture(params=[name for name in ISAS if name != "plain"])
def fused_isa(request):
    """Each that has fused products; plain C++ may be compiled without them, and rounds twice then."""
    yield from selected(request.param)


def selected(name):
    before = cpu.current_isa()
    cpu.select_isa(name)
    yield name
    cpu.select_isa(before)
