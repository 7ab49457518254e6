"""Decode step reports of `baton status` and `baton doctor`: acceptance by position, tokens per step, times."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from baton.cluster.outcome import format_table
from baton.core.distribution import Distribution
from baton.core.telemetry.step_report import RowCounts, StepReport
from baton.proto import admin_pb2
from baton.proto.wire import report_from_proto

NO_STEPS = "-"


def decode_data(reply: admin_pb2.StatusReply) -> list[dict[str, Any]]:
    """Build the `--json` form: one object per live decode worker, over its incarnation; null where unmeasured."""
    return [
        {"worker": worker.state.worker_id, **_data(report_from_proto(worker.state.inventory.steps))}
        for worker in reply.workers
        if worker.alive and worker.state.inventory.HasField("steps")
    ]


def _data(report: StepReport) -> dict[str, Any]:
    return {
        "num_steps": report.num_steps,
        "tokens_per_step": report.tokens_per_step,
        "sequences_per_step": report.step_sequences.mean,
        "mean_acceptance_len": report.mean_acceptance_len,
        "acceptance_per_position": list(report.acceptance_per_position),
        "host_gap_ms": _times(report.host_gap_s),
        "step_ms": _times(report.step_s),
        "by_method": {name: asdict(counts) for name, counts in report.by_method.items() if counts.num_steps},
        "rows": {name: _rows(getattr(report, name)) for name in ("computed", "kept", "cut", "late", "failed")},
    }


def _times(found: Distribution) -> dict[str, Any]:
    values = {"mean": found.mean, "p50": found.quantile(0.5), "p99": found.quantile(0.99)}
    return {"num": found.num} | {name: None if value is None else 1e3 * value for name, value in values.items()}


def _rows(rows: RowCounts) -> dict[str, int]:
    return {
        "num_rows": rows.num_rows,
        "num_tokens": rows.num_tokens,
        "num_draft_tokens": rows.num_draft_tokens,
        "num_accepted_tokens": rows.num_accepted_tokens,
    }


def format_decode(workers: Sequence[dict[str, Any]]) -> str:
    """Format the same data as a table; quantiles are those of histogram buckets."""
    if not workers:
        return "no live decode worker"
    header = (
        "decode",
        "steps",
        "tokens/step",
        "acceptance length",
        "accepted by position",
        "gap ms",
        "step ms",
        "drafts by",
    )
    rows = [
        (
            worker["worker"],
            str(worker["num_steps"]),
            _number(worker["tokens_per_step"], ".2f"),
            _number(worker["mean_acceptance_len"], ".2f"),
            " ".join(_number(share, ".2f") for share in worker["acceptance_per_position"]) or NO_STEPS,
            _quantiles(worker["host_gap_ms"]),
            _quantiles(worker["step_ms"]),
            " ".join(f"{name}:{counts['num_steps']}" for name, counts in worker["by_method"].items()) or NO_STEPS,
        )
        for worker in workers
    ]
    return format_table(header, rows)


def _quantiles(times: dict[str, Any]) -> str:
    return f"p50 {_number(times['p50'], '.2f')} p99 {_number(times['p99'], '.2f')}"


def _number(value: float | None, how: str) -> str:
    return NO_STEPS if value is None else format(value, how)
