"""Choice of an implementation."""

import pytest
import torch

from treadle_kernels import dispatch
from treadle_kernels.dispatch import Backend, choose, parse_overrides

CPU, META = torch.device("cpu"), torch.device("meta")
BOTH = {Backend.REFERENCE: "reference", Backend.CPU: "cpu"}


def test_choose_takes_the_devices_own_implementation():
    assert choose("op", CPU, BOTH) == "cpu"


def test_choose_falls_back_to_the_reference():
    assert choose("op", META, BOTH) == "reference"
    assert choose("op", CPU, {Backend.REFERENCE: "reference"}) == "reference"


def test_overrides_name_one_operation_or_all():
    assert parse_overrides("") == {}
    assert parse_overrides("reference") == {"*": Backend.REFERENCE}
    assert parse_overrides("rms_norm=cpu, kv_write=reference") == {
        "rms_norm": Backend.CPU,
        "kv_write": Backend.REFERENCE,
    }


def test_overrides_refuse_an_unknown_backend():
    with pytest.raises(ValueError, match="'fast' in 'rms_norm=fast' is none of reference, cpu, triton"):
        parse_overrides("rms_norm=fast")


def test_choose_obeys_the_override(monkeypatch):
    monkeypatch.setattr(dispatch, "_OVERRIDES", {"op": Backend.REFERENCE, "*": Backend.TRITON})
    assert choose("op", CPU, BOTH) == "reference"
    with pytest.raises(ValueError, match="other has no triton implementation"):
        choose("other", CPU, BOTH)
