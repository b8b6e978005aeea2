import pytest

from services.common.errors import EngineError, ErrorReason
from services.gateway.config import GatewayConfig


def test_gateway_without_a_tenant_is_refused() -> None:
    with pytest.raises(EngineError, match="tenant must not be empty") as error:
        GatewayConfig(listen="unix:/tmp/g", scheduler="unix:/tmp/s", model="m", tenant="")
    assert error.value.reason is ErrorReason.INVALID_CONFIG


def test_gateway_serves_all_as_the_default_tenant_unless_told_otherwise() -> None:
    assert GatewayConfig(listen="unix:/tmp/g", scheduler="unix:/tmp/s", model="m").tenant == "default"
