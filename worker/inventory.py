"""The part of heartbeats that reports what a worker of either role holds. Any thread; counts may be a step apart."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from baton.core import garbage
from baton.core.clock import clock_id
from baton.core.config import WorkerConfig
from baton.core.numerics import Numerics, Quantization
from baton.core.pace import PrefillPace
from baton.engine.engine import Engine
from baton.engine.graphs.graphed_step import GraphedStep
from baton.engine.tp.expert_balancer import ExpertBalancer
from baton.kernels import tuning
from baton.kernels.compiles import COMPILES
from baton.kernels.gemm.scaled_mm import LIBRARY
from baton.kernels.implementation import Implementation
from baton.kvcache.state_checkpoints import StateCheckpoints
from baton.kvtransfer.protocol.transfer_times import EXPOSED, TRANSFER, distribution_of
from baton.kvtransfer.sender.data_path_choice import DataPathChoice
from baton.kvtransfer.sender.table import PathCounts
from baton.model.checkpoint.fp8_tensors import GEMM_DTYPES
from baton.model.model import Model
from baton.proto import worker_pb2
from baton.proto.wire import distribution_to_proto, waiting_to_proto
from baton.worker.loading import LoadedWorker


def form_of(model: Model) -> str:
    """Return the name of what computes a model: `triton` or `reference`.

    In invariant numerics: `ordered` (Triton) or `invariant`.
    """
    is_invariant = model.numerics is Numerics.INVARIANT
    if model.implementation is Implementation.TRITON:
        return "ordered" if is_invariant else "triton"
    return "invariant" if is_invariant else "reference"


def compute_report(model: Model, quantization: Quantization, chosen: Sequence[str] = ()) -> worker_pb2.Compute:
    """Build the heartbeat's report on computing; `chosen` lists choices at start-up, with reasons. Any thread."""
    device, scheme = model.device, model.config.fp8
    is_stored = scheme is not None and scheme.may_stay_float8 and str(model.dtype).removeprefix("torch.") in GEMM_DTYPES
    return worker_pb2.Compute(
        form=form_of(model),
        why=model.why_no_triton,
        quantization="fp8, as stored" if is_stored else quantization.value,
        num_library_refused=LIBRARY.num_refused,
        library_refused=[f"{outputs}x{inputs}" for outputs, inputs in sorted(LIBRARY.refused)],
        untuned=tuning.untuned(),
        num_kernels_starting=COMPILES.num_starting,
        num_kernels_serving=COMPILES.num_serving,
        late_kernels=COMPILES.late,
        chosen=chosen,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    )


def graph_counts(step: GraphedStep | None) -> worker_pb2.GraphCounts | None:
    """Build the heartbeat's counts of CUDA graphs; None without graphs. Any thread may call this."""
    if step is None:
        return None
    counts = step.counts
    return worker_pb2.GraphCounts(
        num_captured=counts.num_captured,
        failed=dict(counts.failed),
        num_steps_replayed=counts.num_steps_replayed,
        num_steps_eager={reason.value: num for reason, num in counts.num_steps_eager.items()},
        num_sequences_padded=counts.num_sequences_padded,
        num_steps_piecewise=counts.num_steps_piecewise,
    )


def pace_to_proto(pace: PrefillPace) -> worker_pb2.PrefillPace | None:
    """Build the message; None before anything was measured. Any thread; its numbers may be of two steps."""
    if not pace.is_known:
        return None
    return worker_pb2.PrefillPace(fixed_s=pace.fixed_s, per_token_s=pace.per_token_s, draft_s=pace.draft_s)


def balance_to_proto(balancer: ExpertBalancer | None) -> worker_pb2.ExpertBalance | None:
    """Build the message; None where no expert moves. Any thread may call this."""
    if balancer is None:
        return None
    return worker_pb2.ExpertBalance(balance=balancer.balance, num_layers_moved=balancer.num_moved)


def push_counts(
    counts: Mapping[str, int], paths: Iterable[PathCounts], data_paths: Mapping[str, DataPathChoice]
) -> worker_pb2.TransferCounts:
    """Build a prefill worker's counts from `PushService.inventory`, `paths` and `data_paths`."""
    found = worker_pb2.TransferCounts(
        transfers=counts["num_acked"],
        bytes=counts["bytes_pushed"],
        seconds=counts["transfer_us"] / 1e6,
        exposed_seconds=counts["exposed_us"] / 1e6,
        transfer_times=distribution_to_proto(distribution_of(counts, TRANSFER)),
        exposed_times=distribution_to_proto(distribution_of(counts, EXPOSED)),
        frames=counts["frames_pushed"],
        resent=counts["frames_resent"],
        fallbacks=counts["data_path_fallbacks"],
        credit_stall_seconds=counts["credit_stall_us"] / 1e6,
    )
    for path in paths:
        choice = data_paths.get(path.address)
        if choice is None:
            continue  # no HELLO was answered yet
        found.paths.add(
            kv_address=path.address,
            epoch=choice.epoch,
            data_path=choice.data_path,
            why=choice.why,
            bytes=path.bytes_pushed,
            transfers=path.num_acked,
            gbps=path.bytes_per_s / 1e9,
            round_trip_ms=path.round_trip_s * 1e3,
        )
    return found


def receiver_counts(counts: Mapping[str, int], num_quarantined: int) -> worker_pb2.TransferCounts:
    """Build a decode worker's counts from `ReceiverService.inventory` and the number of quarantined blocks."""
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


def engine_inventory(
    engine: Engine,
    *,
    num_requests: int,
    num_running: int,
    waiting: Mapping[str, int],
    num_finished: int,
    num_failed: int,
) -> worker_pb2.Inventory:
    """Build the part of the inventory message that both roles share.

    Args:
        engine: the worker's engine.
        num_requests: number of present requests, in any state.
        num_running: number of those that are computed.
        waiting: numbers of those that are not, by what they wait for; in the order of a request's stages.
        num_finished: number of requests that succeeded.
        num_failed: number of requests that failed.
    """
    scheduler, allocators = engine.scheduler, engine.scheduler.allocators
    checkpoints = scheduler.allocator.index.checkpoints or StateCheckpoints()
    return worker_pb2.Inventory(
        num_requests_waiting=sum(waiting.values()),
        waiting=waiting_to_proto(waiting),
        num_requests_running=num_running,
        num_requests_held=num_requests,
        num_requests_finished=num_finished,
        num_requests_failed=num_failed,
        num_blocks=sum(allocator.num_blocks for allocator in allocators),
        num_blocks_free=sum(allocator.num_free for allocator in allocators),
        num_blocks_reserved=sum(allocator.num_reserved for allocator in allocators),
        num_blocks_quarantined=sum(allocator.num_quarantined for allocator in allocators),
        num_blocks_cached=sum(len(allocator.index) for allocator in allocators),
        num_state_checkpoints=len(checkpoints),
        num_state_checkpoint_slots=checkpoints.num_slots,
        num_state_checkpoints_evicted=checkpoints.num_evicted,
        num_not_finite=engine.num_not_finite,
        num_prefix_tokens=scheduler.num_prefix_tokens,
        num_prefix_hit_tokens=scheduler.num_prefix_hit_tokens,
        num_prefix_hits=scheduler.num_prefix_hits,
        prefill_pace=pace_to_proto(engine.pace),
        full_prefill_tokens_per_s=engine.full_tokens_per_s(),
        experts=balance_to_proto(engine.runner.balancer),
        gc_seconds=garbage.collected_s(),
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
    """Build the heartbeat of a worker of either role, without what only one role reports.

    Args:
        role: "prefill" or "decode".
        config: configuration, including what the worker has chosen itself.
        loaded: its model and KV pool.
        inventory: see `engine_inventory`; a report on how the model is computed is added.
        epoch: this incarnation.
        address: address of its gRPC server.
        build: build of its program (`core.build`).
        naming: naming of its cached prefixes; None without a cache.
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
