"""What the heartbeat of a worker of either role says it holds; any thread, counts may be a step apart."""

from collections.abc import Mapping, Sequence

from baton.core.clock_id import clock_id
from baton.core.config import WorkerConfig
from baton.engine.engine import Engine
from baton.proto import worker_pb2
from baton.proto.step_wire import waiting_to_proto
from baton.worker.compute_form import compute_report
from baton.worker.loading import LoadedWorker
from baton.worker.prefill_pace import pace_to_proto


def engine_inventory(
    engine: Engine,
    *,
    num_requests: int,
    num_running: int,
    waiting: Mapping[str, int],
    num_finished: int,
    num_failed: int,
) -> worker_pb2.Inventory:
    """The part of the message that both roles fill in alike.

    Args:
        engine: of the worker.
        num_requests: that are here, in any state.
        num_running: of them, those that are computed.
        waiting: of them, those that are not, by what they wait for; in the order of a request's life.
        num_finished: requests that ended well.
        num_failed: that did not.
    """
    scheduler, allocator = engine.scheduler, engine.scheduler.allocator
    return worker_pb2.Inventory(
        num_requests_waiting=sum(waiting.values()),
        waiting=waiting_to_proto(waiting),
        num_requests_running=num_running,
        num_requests_held=num_requests,
        num_requests_finished=num_finished,
        num_requests_failed=num_failed,
        num_blocks=allocator.num_blocks,
        num_blocks_free=allocator.num_free,
        num_blocks_reserved=allocator.num_reserved,
        num_blocks_quarantined=allocator.num_quarantined,
        num_blocks_cached=len(allocator.index),
        num_prefix_tokens=scheduler.num_prefix_tokens,
        num_prefix_hit_tokens=scheduler.num_prefix_hit_tokens,
        num_prefix_hits=scheduler.num_prefix_hits,
        prefill_pace=pace_to_proto(engine.pace),
    )


def worker_state(
    role: str,
    config: WorkerConfig,
    loaded: LoadedWorker,
    inventory: worker_pb2.Inventory,
    *,
    epoch: int,
    address: str,
    build: str,
    naming: worker_pb2.PrefixNaming | None,
    rank_pids: Sequence[int],
) -> worker_pb2.WorkerState:
    """The heartbeat of a worker of either role, but for what one role alone says.

    Args:
        role: "prefill" or "decode".
        config: with what the worker has chosen itself.
        loaded: its model and KV pool.
        inventory: see `engine_inventory`; how the model is computed is added.
        epoch: of this incarnation.
        address: of its gRPC server.
        build: of its program (`core.build`).
        naming: of its cached prefixes; None without a cache.
        rank_pids: process ids, in rank order.
    """
    layout = loaded.layout
    inventory.compute.CopyFrom(compute_report(loaded.model, config.quantization, loaded.sizes.why))
    return worker_pb2.WorkerState(
        worker_id=config.worker_id,
        role=role,
        epoch=epoch,
        address=address,
        model=config.model_name,
        layout_hash=layout.hash,
        max_model_len=config.max_model_len,
        num_draft_tokens=config.num_draft_tokens,
        block_size=config.block_size,
        numerics=config.numerics.value,
        dtype=config.dtype,
        kv_dtype=layout.dtype,
        inventory=inventory,
        rank_pids=rank_pids,
        prefix_naming=naming,
        max_num_seqs=config.max_num_seqs,
        build=build,
        clock_id=clock_id(),
    )
