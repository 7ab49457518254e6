"""The waterfall of a finished request, from its last chunk's stats: parts in order, their sum, and the whole."""

from typing import Any

from baton.core.telemetry.waterfall import gap
from baton.proto import inference_pb2

FIRST = ("router_ms", "queue_ms", "grant_wait_ms", "prefill_ms", "publish_ms")
SECOND = ("retry_ms", "draft_ms", "transfer_ms", "verification_ms", "admission_ms", "step_ms", "publish_ms")


def waterfall_data(stats: inference_pb2.RequestStats) -> dict[str, Any]:
    """JSON-able: `first` and, if there was one, `second`; each with `parts`, `sum_ms`, `total_ms` and `gap`."""
    parts = {name: getattr(stats, name) for name in FIRST}
    data: dict[str, Any] = {"shared_clock": stats.shared_clock, "first": _closed(parts, stats.ttft_ms)}
    if stats.HasField("second"):
        before = {name: value for name, value in parts.items() if name != "publish_ms"}
        later = {name: getattr(stats.second, name) for name in SECOND}
        data["second"] = _closed(before | later, stats.second.total_ms)
    return data


def _closed(parts: dict[str, float], total_ms: float) -> dict[str, Any]:
    sum_ms = sum(parts.values())
    return {"parts": parts, "sum_ms": sum_ms, "total_ms": total_ms, "gap": gap(sum_ms, total_ms)}
