"""When a refused call may be sent again, as gRPC's clients expect it: google.rpc.RetryInfo in the status' details."""

import math
from typing import Final

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from baton.core.errors import BatonError

DETAILS_KEY: Final = "grpc-status-details-bin"
NANOS: Final = 10**9


def retry_details(error: BatonError, code: int, message: str) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata for an error that knows when to try again; none for others.

    Args:
        error: its field `retry_after_s`, if it is a number of seconds, says when.
        code: of gRPC, the number.
        message: of the status; the two must say the same.
    """
    after_s = error.fields.get("retry_after_s")
    if not isinstance(after_s, int | float) or not math.isfinite(after_s) or after_s < 0:
        return ()
    info = error_details_pb2.RetryInfo()
    info.retry_delay.seconds, info.retry_delay.nanos = divmod(round(after_s * NANOS), NANOS)
    status = status_pb2.Status(code=code, message=message)
    status.details.add().Pack(info)
    return ((DETAILS_KEY, status.SerializeToString()),)


def retry_after_s(details: bytes) -> float | None:
    """Seconds in the details of a status; None if they say nothing of it, or are none."""
    try:
        status = status_pb2.Status.FromString(details)
    except DecodeError:
        return None
    info = error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(info):
            return info.retry_delay.seconds + info.retry_delay.nanos / NANOS
    return None
