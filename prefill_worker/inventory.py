"""What a prefill worker's heartbeat says it holds; any thread, counts may be a step apart."""

from baton.engine.engine import Engine
from baton.kvtransfer.sender.service import PushService
from baton.prefill_worker.push_line import PushLine
from baton.prefill_worker.tp_group import TPGroupPush
from baton.proto import worker_pb2
from baton.worker.inventory import engine_inventory
from baton.worker.transfer_counts import push_counts


def prefill_inventory(
    engine: Engine,
    line: PushLine,
    push: PushService | TPGroupPush,
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
    pushes, num_waiting = push.inventory(), line.num_waiting()
    held = engine_inventory(
        engine,
        num_requests=num_requests,
        num_running=num_requests - num_waiting,
        waiting={"turn": num_waiting},
        num_finished=num_finished,
        num_failed=num_failed,
    )
    held.num_kv_receives = pushes["num_pushes"]
    held.kv_bytes = pushes["bytes_pushed"]
    held.transfer.CopyFrom(push_counts(pushes, push.paths(), push.lanes()))
    held.num_prefill_tokens_queued = line.num_tokens_queued()
    held.prefill_tokens_per_s = engine.rate.per_s
    held.full_prefill_tokens_per_s = full_tokens_per_s
    return held
