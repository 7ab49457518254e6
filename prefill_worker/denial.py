"""What a decode worker's no to an incoming transfer means for the request."""

from baton.core.errors import BatonError, HandoffTooLong, Overloaded, PromptTooLong, TransferFailed
from baton.kvtransfer.receiver.driver import STAGING_KEY
from baton.kvtransfer.sender.service import Denied
from baton.proto import kv_pb2


def error_of(event: Denied) -> BatonError:
    """The error that the request ends with."""
    if event.reason == kv_pb2.Deny.BUSY:
        return Overloaded(f"the decode worker has no room: {event.detail}")
    if event.reason == kv_pb2.Deny.TOO_LONG and event.detail.startswith(STAGING_KEY):
        return HandoffTooLong(f"the decode worker cannot take the hand-off: {event.detail}")
    if event.reason == kv_pb2.Deny.TOO_LONG:
        return PromptTooLong(f"the decode worker's pool is too small: {event.detail}")
    error = TransferFailed(f"the decode worker refused the incoming transfer: {event.detail}")
    if event.reason == kv_pb2.Deny.LAYOUT:
        error.fields["pair_refused"] = event.detail  # the router pairs these two no more
    return error
