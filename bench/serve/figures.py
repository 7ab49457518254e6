"""Figures of one round, and rows over rounds: pure functions of the clients' records.

Latencies count from when a request was due, which in a closed loop is when its client sent it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

from baton.bench.result import spread
from baton.bench.serve.drive import Record
from baton.bench.serve.workload import Slo

SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
LAG_LIMIT_MS: Final = 10.0  # p99 of how late clients sent, or noticed a timer; beyond it they are part of the figures
CPU_LIMIT: Final = 0.9  # share of one core that the busiest client process used
_TOTALS: Final = ("num_requests", "num_ok", "num_cancelled", "num_failed", "steady_num_failed")
_MAX_EXAMPLES: Final = 3


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, linearly between neighbours as numpy's default.

    Args:
        ordered: at least one value, ascending.
        share: 0 ... 1.
    """
    assert ordered and 0 <= share <= 1
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles_ms(name: str, seconds: Iterable[float]) -> dict[str, float]:
    """`NAME_p50_ms` and so on; nothing without values."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {f"{name}_{label}_ms": 1e3 * percentile(ordered, share) for label, share in SHARES.items()}


def ttft_s(record: Record) -> float:
    """Time from due to the first token, in seconds."""
    return record.chunk_times_s[0] - record.due_s


def itl_s(record: Record) -> list[float]:
    """Inter-token latencies: times between two chunks, in seconds."""
    return [later - earlier for earlier, later in pairwise(record.chunk_times_s)]


def tpot_s(record: Record) -> float | None:
    """Time per output token after the first, in seconds; None for answers of one token."""
    if record.num_tokens < 2:
        return None
    return (record.chunk_times_s[-1] - record.chunk_times_s[0]) / (record.num_tokens - 1)


def holds(record: Record, slo: Slo) -> bool:
    """Return whether a request was answered within all SLOs."""
    if not record.is_ok:
        return False
    values_s = (ttft_s(record), max(itl_s(record), default=0.0), tpot_s(record) or 0.0, record.end_s - record.due_s)
    limits_ms = (slo.ttft_ms, slo.itl_ms, slo.tpot_ms, slo.e2e_ms)
    return all(limit is None or 1e3 * value <= limit for value, limit in zip(values_s, limits_ms, strict=True))


def figures(records: Sequence[Record], slo: Slo, begin_s: float) -> dict[str, Any]:
    """One round of one system at one point.

    Args:
        records: records of all client processes.
        slo: SLOs that define goodput; without limits, every answered request counts.
        begin_s: when arrivals began.

    Returns:
        Numbers of requests, rates per second, latencies in ms, failures by kind.
    """
    asked = [record for record in records if not record.steady]
    ok = [record for record in asked if record.is_ok]
    failed = [record for record in asked if record.error]
    stayed = [record for record in asked if not record.cancelled]
    end_s = max((record.end_s for record in asked), default=begin_s)
    seconds = max(end_s - begin_s, 1e-9)
    good = sum(holds(record, slo) for record in asked)
    tokens_out = sum(record.num_tokens for record in asked if not record.error)
    prompts = [record for record in asked if not record.error]
    tokens_in = sum(record.prompt_tokens or record.prompt_len for record in prompts)
    found: dict[str, Any] = {
        "num_requests": len(asked),
        "num_ok": len(ok),
        "num_cancelled": sum(record.cancelled for record in asked),
        "num_failed": len(failed),
        "failures": dict(Counter(record.error for record in failed)),
        "examples": examples(records),
        "seconds": seconds,
        "requests_per_s": len(ok) / seconds,
        "input_tokens_per_s": tokens_in / seconds,
        "output_tokens_per_s": tokens_out / seconds,
        "goodput_per_s": good / seconds,
        "goodput_share": good / len(stayed) if stayed else None,
        "chunks_per_token": _ratio(sum(len(record.chunk_times_s) for record in ok), sum(r.num_tokens for r in ok)),
        "cached_share": _ratio(
            sum(record.cached_tokens or 0 for record in prompts if record.cached_tokens is not None),
            sum(record.prompt_len for record in prompts if record.cached_tokens is not None),
        ),
        **percentiles_ms("ttft", [ttft_s(record) for record in prompts if record.chunk_times_s]),
        **percentiles_ms("tpot", [value for record in ok if (value := tpot_s(record)) is not None]),
        **percentiles_ms("itl", [value for record in prompts for value in itl_s(record)]),
        **percentiles_ms("e2e", [record.end_s - record.due_s for record in ok]),
    }
    lags = percentiles_ms("send_lag", [record.sent_s - record.due_s for record in asked if record.is_open])
    found |= {name: value for name, value in lags.items() if name in ("send_lag_p99_ms", "send_lag_max_ms")}
    return found | _steady(records, begin_s, end_s)


def _steady(records: Sequence[Record], begin_s: float, end_s: float) -> dict[str, Any]:
    """Steady streams while requests arrived or were answered: ITLs that ended in that time, and tokens."""
    streams = [record for record in records if record.steady]
    if not streams:
        return {}
    gaps = [b - a for record in streams for a, b in pairwise(record.chunk_times_s) if begin_s <= b <= end_s]
    chunks = sum(begin_s <= at <= end_s for record in streams for at in record.chunk_times_s)
    return {
        "steady_num_failed": sum(bool(record.error) for record in streams),
        "steady_chunks_per_s": chunks / max(end_s - begin_s, 1e-9),
        **percentiles_ms("steady_itl", gaps),
    }


def examples(records: Sequence[Record]) -> dict[str, str]:
    """The first message of each kind of failure."""
    found: dict[str, str] = {}
    for record in records:
        if record.error and len(found) < _MAX_EXAMPLES:
            found.setdefault(record.error, record.detail)
    return found


def is_client_limited(send_lag_p99_ms: float, loop_lag_p99_ms: float, cpu: float) -> bool:
    """Return whether the clients were too slow for the figures to be the server's.

    Args:
        send_lag_p99_ms: how late requests of an open loop were sent; 0 in a closed one.
        loop_lag_p99_ms: how late the event loops noticed a timer.
        cpu: share of one core that the busiest client process used.
    """
    return max(send_lag_p99_ms, loop_lag_p99_ms) > LAG_LIMIT_MS or cpu > CPU_LIMIT


def row_of(rounds: Sequence[dict[str, Any]], **names: Any) -> dict[str, Any]:
    """Make one row: counts summed, all other numbers as the median over rounds with `_min` and `_max`."""
    row: dict[str, Any] = {**names, "rounds": len(rounds)}
    for key in dict.fromkeys(key for each in rounds for key in each):
        values = [each[key] for each in rounds if key in each]
        if key in _TOTALS:
            row[key] = sum(values)
        elif key == "failures":
            row[key] = dict(sum((Counter(value) for value in values), Counter[str]()))
        elif key == "examples":
            row[key] = {kind: text for value in reversed(values) for kind, text in value.items()}
        elif key == "client_limited":
            row[key] = any(values)
        else:
            row |= spread(key, values)
    return row


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None
