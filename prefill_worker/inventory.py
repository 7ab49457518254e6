"""What a prefill worker's heartbeat says it holds; any thread, counts may be a step apart."""

from baton.engine.engine import Engine
from baton.kvtransfer.push import PushService
from baton.prefill_worker.gang import GangPush
from baton.prefill_worker.push_line import PushLine
from baton.proto import worker_pb2
from baton.proto.step_wire import waiting_to_proto
from baton.worker.prefill_pace import pace_to_proto
from baton.worker.transfer_counts import push_counts


def prefill_inventory(
    engine: Engine,
    line: PushLine,
    push: PushService | GangPush,
    *,
    full_tokens_per_s: float,
    num_requests: int,
    num_finished: int,
    num_failed: int,
) -> worker_pb2.Inventory:
    """The message.

    Args:
        engine: of the worker.
        line: requests, and which of them may ask for room.
        push: its side of the hand-off.
        full_tokens_per_s: prompt tokens computed in full steps; 0 is not known.
        num_requests: that are here.
        num_finished: that ended well.
        num_failed: that did not.
    """
    pushes, scheduler, allocator = push.inventory(), engine.scheduler, engine.scheduler.allocator
    num_waiting = line.num_waiting()
    return worker_pb2.Inventory(
        num_requests_waiting=num_waiting,
        waiting=waiting_to_proto({"turn": num_waiting}),
        num_requests_running=num_requests - num_waiting,
        num_blocks=allocator.num_blocks,
        num_blocks_free=allocator.num_free,
        num_blocks_reserved=allocator.num_reserved,
        num_landings=pushes["num_pushes"],
        num_attends=num_requests,
        num_requests_finished=num_finished,
        num_requests_failed=num_failed,
        kv_bytes=pushes["bytes_pushed"],
        num_prefix_tokens=scheduler.num_prefix_tokens,
        num_prefix_hit_tokens=scheduler.num_prefix_hit_tokens,
        num_prefix_hits=scheduler.num_prefix_hits,
        num_blocks_cached=len(allocator.index),
        transfer=push_counts(pushes, push.paths(), push.lanes()),
        num_prefill_tokens_queued=line.num_tokens_queued(),
        prefill_tokens_per_s=engine.rate.per_s,
        full_prefill_tokens_per_s=full_tokens_per_s,
        prefill_pace=pace_to_proto(engine.pace),
    )
