import pytest

from services.common.config import load_config
from services.common.errors import EngineError, ErrorReason
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import PolicySettings, SchedulerLimits

REQUIRED = ("--listen=unix:a", "--kv-cache=unix:b", "--workers=worker-0=unix:c")


def config(*flags: str) -> SchedulerConfig:
    return load_config(SchedulerConfig, "scheduler", (*REQUIRED, *flags), {})


def test_defaults_of_the_service_are_those_of_the_core_but_for_the_bound_of_the_queue() -> None:
    assert config().limits() == SchedulerLimits(max_waiting_tokens=4_000_000)
    assert config().policy_settings() == PolicySettings("composed", 30_000, ())


def test_policy_and_weights_are_read_from_flags() -> None:
    settings = config("--policy=fair", "--ageing-s=0.5", "--tenant-weights=a=2,b=c=0.5").policy_settings()
    assert settings == PolicySettings("fair", 500, (("a", 2.0), ("b=c", 0.5)))


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        ("--policy=random", "policy"),
        ("--ageing-s=0", "ageing_s"),
        ("--tenant-weights=a", "tenant_weights"),
        ("--tenant-weights=a=-1", "tenant_weights"),
        ("--tenant-weights=a=nan", "tenant_weights"),
        ("--batch-wait-ms=-1", "batch_wait_ms"),
        ("--target-itl-ms=-1", "target_itl_ms"),
        ("--long-prefill-token-threshold=-1", "long_prefill_token_threshold"),
    ],
)
def test_setting_that_makes_no_sense_is_refused(flag: str, field: str) -> None:
    with pytest.raises(EngineError) as error:
        config(flag)
    assert error.value.reason is ErrorReason.INVALID_CONFIG
    assert error.value.metadata["field"] == field
