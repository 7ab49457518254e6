"""What `baton top` shows: two answers of `Admin.Status`, and what happened between them. Pure."""

from typing import Any

from baton.cluster.doctor.paths import paths, paths_data
from baton.proto import admin_pb2, worker_pb2
from baton.proto.held import kv_cache_usage


def top_data(before: admin_pb2.StatusReply, now: admin_pb2.StatusReply, interval_s: float) -> dict[str, Any]:
    """JSON-able. A rate is null where it has no meaning: nothing was done, or a worker's incarnation is new."""

    def rate(name: str) -> float | None:
        return _rate(getattr(before, name), getattr(now, name), interval_s)

    incarnations = {worker.state.worker_id: worker.state for worker in before.workers}
    workers = [_worker(worker, incarnations.get(worker.state.worker_id), interval_s) for worker in now.workers]
    return {
        "model": now.model,
        "version": now.version,
        "uptime_s": now.uptime_s,
        "interval_s": interval_s,
        "requests": {
            "running": now.num_requests_running,
            "waiting": sum(sum(worker["waiting"].values()) for worker in workers if worker["alive"]),
            "finished": now.num_requests_finished,
            "failed": now.num_requests_failed,
            "handoff_retries": now.num_handoff_retries,
            "finished_per_s": rate("num_requests_finished"),
            "failed_per_s": rate("num_requests_failed"),
        },
        "tokens_per_s": rate("num_tokens_streamed"),
        "workers": workers,
        "paths": paths_data(paths(now)),
        "refused_pairs": [
            {"prefill": pair.prefill_worker, "decode": pair.decode_worker, "reason": pair.reason}
            for pair in now.refused_pairs
        ],
    }


def _worker(worker: admin_pb2.WorkerStatus, before: worker_pb2.WorkerState | None, interval_s: float) -> dict[str, Any]:
    state, held = worker.state, worker.state.inventory
    is_same_incarnation = before is not None and before.epoch == state.epoch
    was = before.inventory if before is not None and is_same_incarnation else None

    def rate(name: str) -> float | None:
        return None if was is None else _rate(getattr(was, name), getattr(held, name), interval_s)

    return {
        "worker": state.worker_id,
        "role": state.role,
        "alive": worker.alive,
        "unfit": worker.unfit,
        "heartbeat_age_s": worker.heartbeat_age_s,
        "incarnations": worker.num_epochs,
        "running": held.num_requests_running,
        "waiting": {item.reason: item.num_requests for item in held.waiting if item.num_requests},
        "kv_use": kv_cache_usage(held),
        "kv_blocks": held.num_blocks,
        "quarantined_blocks": held.num_blocks_quarantined,
        "tokens_per_s": rate("num_emitted_tokens") if state.role == "decode" else None,
        "requests_per_s": rate("num_requests_finished"),
        "kv_bytes_per_s": rate("kv_bytes"),
        "acceptance": _acceptance(was, held),
        "num_draft_tokens": state.speculation.num_draft_tokens if state.HasField("speculation") else None,
    }


def _acceptance(was: worker_pb2.Inventory | None, held: worker_pb2.Inventory) -> float | None:
    """Share of drafts accepted: of those made in between, or, where there were none, of this incarnation's."""
    proposed, accepted = held.num_draft_tokens, held.num_accepted_tokens
    if was is not None and proposed > was.num_draft_tokens:
        proposed, accepted = proposed - was.num_draft_tokens, accepted - was.num_accepted_tokens
    return accepted / proposed if proposed else None


def _rate(before: int, now: int, interval_s: float) -> float | None:
    return (now - before) / interval_s if interval_s > 0 and now >= before else None
