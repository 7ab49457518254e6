"""What a worker's heartbeat says of the hand-off, from the counts of its service."""

from collections.abc import Iterable, Mapping

from baton.kvtransfer.protocol.transfer_times import EXPOSED, TRANSFER, distribution_of
from baton.kvtransfer.sender.lane_choice import LaneChoice
from baton.kvtransfer.sender.table import PathCounts
from baton.proto import worker_pb2
from baton.proto.step_wire import distribution_to_proto


def push_counts(
    counts: Mapping[str, int], paths: Iterable[PathCounts], lanes: Mapping[str, LaneChoice]
) -> worker_pb2.TransferCounts:
    """Of a prefill worker: `PushService.inventory`, `paths` and `lanes`."""
    found = worker_pb2.TransferCounts(
        transfers=counts["num_acked"],
        bytes=counts["bytes_pushed"],
        seconds=counts["transfer_us"] / 1e6,
        exposed_seconds=counts["exposed_us"] / 1e6,
        transfer_times=distribution_to_proto(distribution_of(counts, TRANSFER)),
        exposed_times=distribution_to_proto(distribution_of(counts, EXPOSED)),
        frames=counts["frames_pushed"],
        resent=counts["frames_resent"],
        fallbacks=counts["lane_fallbacks"],
        credit_stall_seconds=counts["credit_stall_us"] / 1e6,
    )
    for path in paths:
        choice = lanes.get(path.address)
        if choice is None:
            continue  # no HELLO was answered yet
        found.paths.add(
            kv_address=path.address,
            epoch=choice.epoch,
            lane=choice.lane,
            why=choice.why,
            bytes=path.bytes_pushed,
            transfers=path.num_acked,
            gbps=path.bytes_per_s / 1e9,
            round_trip_ms=path.round_trip_s * 1e3,
        )
    return found


def receiver_counts(counts: Mapping[str, int], num_quarantined: int) -> worker_pb2.TransferCounts:
    """Of a decode worker: `ReceiverService.inventory`, and the blocks its allocator holds back."""
    return worker_pb2.TransferCounts(
        transfers=counts["transfers_complete"],
        bytes=counts["bytes_landed"],
        seconds=counts["transfer_us"] / 1e6,
        exposed_seconds=counts["exposed_us"] / 1e6,
        transfer_times=distribution_to_proto(distribution_of(counts, TRANSFER)),
        exposed_times=distribution_to_proto(distribution_of(counts, EXPOSED)),
        frames=counts["frames_landed"],
        late_dropped=counts["frames_late_dropped"],
        corrupt=counts["frames_corrupt"],
        refused=counts["hellos_unproved"] + counts["transport_connections_refused"],
        quarantined_blocks=num_quarantined,
    )
