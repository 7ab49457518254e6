"""`baton quarantine`: lists or clears requests that are refused because workers died of them."""

import grpc

from baton.cluster.admin import TIMEOUT_S, as_data, error_from_rpc, fetch_status, open_channel
from baton.cluster.outcome import ExitCode, Output, format_table
from baton.proto import admin_pb2, admin_pb2_grpc

ALL = "all"


def quarantine(address: str, clear: str | None, output: Output) -> ExitCode:
    """Print them, after clearing one or all. FAILED if there was none of that name to clear.

    Raises:
        BatonError: no deployment answers at `address`.
    """
    num_cleared = 0
    if clear is not None:
        with open_channel(address) as channel:
            request = admin_pb2.ClearQuarantineRequest(fingerprint="" if clear == ALL else clear)
            try:
                stub = admin_pb2_grpc.AdminStub(channel)
                num_cleared = stub.ClearQuarantine(request, timeout=TIMEOUT_S).num_cleared
            except grpc.RpcError as error:
                raise error_from_rpc(error, address) from error
    refused = as_data(fetch_status(address))["quarantined"]
    rows = [(one["fingerprint"], ", ".join(one["workers"]), f"{one['left_s']:.0f} s") for one in refused]
    text = format_table(("request", "died of it", "refused for"), rows) if rows else "no request is refused"
    data = {"address": address, "num_cleared": num_cleared, "quarantined": refused}
    if clear in (None, ALL) or num_cleared:
        output.emit(data, text)
        return ExitCode.OK
    message = f"no refused request is named {clear!r}"
    output.emit(data | {"message": message, "exit_code": ExitCode.FAILED}, text)
    output.note(f"baton: {message}", "ERROR")
    return ExitCode.FAILED
