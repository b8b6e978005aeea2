"""The one translation between :class:`EngineError` and gRPC statuses.

Guarantees: every status that leaves the mesh carries exactly one ``google.rpc.ErrorInfo`` of domain ``treadle``; the
way there and back is the identity on reason, message and metadata.
"""

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.common.errors import EngineError, ErrorReason

DOMAIN = "treadle"
RETRY_DELAY_METADATA = "retry_after_s"

_REASON_BY_CODE = {
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorReason.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED: ErrorReason.CLIENT_CANCELLED,
    grpc.StatusCode.INVALID_ARGUMENT: ErrorReason.INVALID_REQUEST,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorReason.PAYLOAD_TOO_LARGE,
}


def to_status(error: EngineError) -> status_pb2.Status:
    """Return the status that carries ``error``."""
    status = status_pb2.Status(code=code_pb2.Code.Value(error.kind.value), message=error.message)
    info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=error.metadata)
    status.details.add().Pack(info)
    if error.is_retryable:
        delay_s = float(error.metadata.get(RETRY_DELAY_METADATA, "1"))
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(delay_s * 1000))
        status.details.add().Pack(retry)
    return status


def from_status(status: status_pb2.Status, fallback: ErrorReason) -> EngineError:
    """Return the error that ``status`` carries, or one of reason ``fallback`` when it carries none of ours."""
    for detail in status.details:
        info = _error_info(detail)
        if info is not None and info.domain == DOMAIN and info.reason in ErrorReason.__members__:
            return EngineError(ErrorReason[info.reason], status.message, **dict(info.metadata))
    return EngineError(fallback, status.message or "no details given")


def from_rpc_error(error: grpc.RpcError, unavailable: ErrorReason) -> EngineError:
    """Return the error behind a failed call.

    Args:
        error: What grpc.aio raised.
        unavailable: Reason for a peer that is away or answers something unknown, such as WORKER_UNAVAILABLE.
    """
    code = error.code()
    fallback = _REASON_BY_CODE.get(code, unavailable)
    status = rpc_status.from_call(error)
    if status is None:
        return EngineError(fallback, error.details() or code.name, code=code.name)
    return from_status(status, fallback)


def _error_info(detail: AnyMessage) -> error_details_pb2.ErrorInfo | None:
    info = error_details_pb2.ErrorInfo()
    return info if detail.Unpack(info) else None
