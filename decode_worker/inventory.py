"""The inventory in a decode worker's heartbeat. Any thread may build it; counts may be a step apart."""

from collections.abc import Set

from baton.core.requests.request import AttemptKey
from baton.engine.engine import Engine
from baton.engine.sequence import Phase, Sequence
from baton.engine.step.runner import Runner
from baton.engine.tp.rank_runners import Rank0Runner
from baton.proto import worker_pb2
from baton.proto.wire import report_to_proto
from baton.worker.inventory import engine_inventory, graph_counts, receiver_counts

_REASONS: tuple[str, ...] = ("prefill", "blocks", "transfer", "slot", "preempted")


def decode_inventory(
    engine: Engine,
    runner: Runner | Rank0Runner,
    incoming_transfers: dict[str, int],
    *,
    asking: Set[AttemptKey],
    num_finished: int,
    num_failed: int,
    max_handoff_len: int,
) -> worker_pb2.Inventory:
    """Build the inventory message of a decode worker.

    Args:
        engine: the worker's engine.
        runner: runner of its steps.
        incoming_transfers: counters of the KV receiver.
        asking: attempts for which prefill workers ask for room.
        num_finished: number of requests that succeeded.
        num_failed: number of requests that failed.
        max_handoff_len: maximum positions of one hand-off over sockets; 0: no limit.
    """
    scheduler, preempted = engine.scheduler, engine.preemptions
    sequences = scheduler.sequences()
    waiting = dict.fromkeys(_REASONS, 0)
    for sequence in sequences:
        reason = _waits_for(sequence, asking)
        if reason:
            waiting[reason] += 1
    held = engine_inventory(
        engine,
        num_requests=len(sequences),
        num_running=scheduler.count(Phase.RUNNING),
        waiting=waiting,
        num_finished=num_finished,
        num_failed=num_failed,
    )
    steps = engine.tally.report(runner.meter, runner.meter.computed())
    own = worker_pb2.Inventory(
        num_kv_receives=incoming_transfers["num_kv_receives"],
        num_slots_in_use=scheduler.num_slots_used,
        frames_late_dropped=incoming_transfers["frames_late_dropped"],
        frames_corrupt=incoming_transfers["frames_corrupt"],
        num_draft_tokens=steps.kept.num_draft_tokens,
        num_accepted_tokens=steps.kept.num_accepted_tokens,
        num_emitted_tokens=steps.kept.num_tokens,
        kv_bytes=incoming_transfers["bytes_landed"],
        num_preemptions=preempted.num_preemptions,
        num_recomputed_tokens=preempted.num_recomputed_tokens,
        num_offloaded_blocks=preempted.num_offloaded_blocks,
        num_restored_blocks=preempted.num_restored_blocks,
        num_host_full=preempted.num_host_full,
        num_host_blocks_used=engine.num_host_blocks_used,
        transfer=receiver_counts(incoming_transfers, held.num_blocks_quarantined),
        steps=report_to_proto(steps),
        graphs=graph_counts(runner.graphs),
        max_handoff_len=max_handoff_len,
        num_prefill_tokens_queued=sum(map(_num_queued, sequences)),
        num_local_prefills=engine.num_prompts,
        num_local_prefill_tokens=engine.num_prompt_tokens,
        local_chunk_len=engine.budget.last_len,
    )
    held.MergeFrom(own)
    return held


def _waits_for(sequence: Sequence, asking: Set[AttemptKey]) -> str:
    match sequence.phase:
        case Phase.EXPECTED:
            return "blocks" if sequence.key in asking else "prefill"
        case Phase.WAITING:
            return "preempted" if sequence.num_preemptions else "blocks"
        case Phase.RECEIVING:
            return "transfer"
        case Phase.READY:
            return "slot"
        case _:
            return ""


def _num_queued(sequence: Sequence) -> int:
    """Return the prompt tokens to be computed here."""
    return 0 if sequence.is_received or sequence.token_ids else sequence.num_left
