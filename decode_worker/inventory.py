"""What a decode worker's heartbeat says it holds, from its parts; any thread, counts may be a step apart."""

from baton.decode_worker.graph_counts import graph_counts
from baton.decode_worker.recompute import Recompute
from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequence import DecodeState
from baton.engine.decode import DecodeRunner
from baton.engine.gang import LeadDecode
from baton.engine.preemption import PreemptionCounts
from baton.engine.step_tally import StepTally
from baton.kvcache.allocator import BlockAllocator
from baton.proto import worker_pb2
from baton.proto.step_wire import report_to_proto, waiting_to_proto
from baton.worker.prefill_pace import pace_to_proto
from baton.worker.transfer_counts import landing_counts


def decode_inventory(
    scheduler: DecodeScheduler,
    allocator: BlockAllocator,
    runner: DecodeRunner | LeadDecode,
    tally: StepTally,
    landings: dict[str, int],
    preempted: PreemptionCounts,
    recompute: Recompute | None,
    *,
    num_host_blocks_used: int,
    num_finished: int,
    num_failed: int,
    max_handoff_len: int,
) -> worker_pb2.Inventory:
    """The message.

    Args:
        scheduler: of the worker, like the next three.
        allocator: of its blocks.
        runner: of its steps.
        tally: of what became of them.
        landings: what the landing counts.
        preempted: what giving way has cost.
        recompute: what computes prompts here, if anything does.
        num_host_blocks_used: of host memory.
        num_finished: requests that ended well.
        num_failed: that did not.
        max_handoff_len: positions that one hand-off by sockets can carry; 0: any.
    """
    waiting, steps = scheduler.num_waiting(), tally.report(runner.meter, runner.meter.computed())
    held = worker_pb2.Inventory(
        num_requests_waiting=sum(waiting.values()),
        waiting=waiting_to_proto(waiting),
        num_requests_running=scheduler.count(DecodeState.RUNNING, DecodeState.COMPUTING),
        num_blocks=allocator.num_blocks,
        num_blocks_free=allocator.num_free,
        num_blocks_reserved=allocator.num_reserved,
        num_blocks_quarantined=allocator.num_quarantined,
        num_landings=landings["num_landings"],
        num_slots_in_use=scheduler.num_slots_in_use,
        num_attends=len(scheduler.sequences()),
        frames_late_dropped=landings["frames_late_dropped"],
        frames_corrupt=landings["frames_corrupt"],
        num_draft_tokens=steps.kept.num_draft_tokens,
        num_accepted_tokens=steps.kept.num_accepted_tokens,
        num_emitted_tokens=steps.kept.num_tokens,
        num_requests_finished=num_finished,
        num_requests_failed=num_failed,
        kv_bytes=landings["bytes_landed"],
        num_preemptions=preempted.num_preemptions,
        num_recomputed_tokens=preempted.num_recomputed_tokens,
        num_offloaded_blocks=preempted.num_offloaded_blocks,
        num_restored_blocks=preempted.num_restored_blocks,
        num_host_full=preempted.num_host_full,
        num_host_blocks_used=num_host_blocks_used,
        transfer=landing_counts(landings, allocator.num_quarantined),
        steps=report_to_proto(steps),
        graphs=graph_counts(runner.graphs),
        max_handoff_len=max_handoff_len,
    )
    if recompute is not None:
        pace = pace_to_proto(recompute.pace)
        if pace is not None:
            held.prefill_pace.CopyFrom(pace)
        held.num_prefill_tokens_queued = sum(sequence.num_queued for sequence in scheduler.sequences())
        held.num_local_prefills = recompute.num_prompts
        held.num_local_prefill_tokens = recompute.num_prompt_tokens
        held.local_chunk_len = recompute.chunk_len
    return held
