"""`baton top`: shows a deployment's load continuously on a terminal; elsewhere once, as text or JSON."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, TextIO

from baton.cluster.admin import fetch_status
from baton.cluster.doctor.wires import paths, paths_data
from baton.cluster.outcome import ExitCode, Output
from baton.core.errors import BatonError, ConfigInvalid
from baton.proto import admin_pb2, worker_pb2
from baton.proto.wire import kv_cache_usage

if TYPE_CHECKING:
    from rich.console import RenderableType


def top_data(before: admin_pb2.StatusReply, now: admin_pb2.StatusReply, interval_s: float) -> dict[str, Any]:
    """Build JSON-able data. A rate is null if it is undefined: nothing was done, or an incarnation is new."""

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
            "refused": now.num_requests_refused,
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
        "draft_method": state.speculation.method if state.speculation.auto_method else None,
    }


def _acceptance(was: worker_pb2.Inventory | None, held: worker_pb2.Inventory) -> float | None:
    """Share of drafts that were accepted: of those made in the interval or, if there were none, in this incarnation."""
    proposed, accepted = held.num_draft_tokens, held.num_accepted_tokens
    if was is not None and proposed > was.num_draft_tokens:
        proposed, accepted = proposed - was.num_draft_tokens, accepted - was.num_accepted_tokens
    return accepted / proposed if proposed else None


def _rate(before: int, now: int, interval_s: float) -> float | None:
    return (now - before) / interval_s if interval_s > 0 and now >= before else None


NOTHING: Final = "-"
MIN_INTERVAL_S: Final = 0.1
MAX_INTERVAL_S: Final = 3600.0
COLUMNS: Final = (
    "worker",
    "role",
    "alive",
    "running",
    "waiting",
    "KV",
    "quarantined",
    "tok/s",
    "req/s",
    "KV MB/s",
    "accepted",
    "k",
)
LEFT: Final = frozenset(map(COLUMNS.index, ("worker", "role", "alive", "waiting")))
# Columns to leave out on a narrow terminal, in this order.
SPARED: Final = tuple(
    map(
        COLUMNS.index,
        ("k", "accepted", "KV MB/s", "req/s", "role", "waiting", "tok/s", "KV", "running", "quarantined"),
    )
)
DUMB: Final = ("dumb", "unknown")  # values of TERM; such a terminal cannot rewrite lines
IF_ANY: Final = frozenset(
    map(COLUMNS.index, ("waiting", "quarantined", "accepted", "k"))
)  # columns shown only if a worker has such a value


def top(address: str, output: Output, *, interval_s: float = 1.0, once: bool = False) -> ExitCode:
    """Show the load until Ctrl-C; once if stdout is not a capable terminal or is for JSON. PARTIAL as `baton status`.

    Raises:
        BatonError: no deployment answers at `address`.
        ConfigInvalid: the interval is too short or too long.
    """
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        message = f"interval: {interval_s} s is not between {MIN_INTERVAL_S} and {MAX_INTERVAL_S:.0f}"
        raise ConfigInvalid(message, keys=["interval"])
    before = fetch_status(address)
    is_dumb = os.environ.get("TERM", "").lower() in DUMB
    if once or output.as_json or not output.is_terminal or is_dumb:
        begin_s = time.monotonic()
        time.sleep(interval_s)
        now = fetch_status(address)
        data: dict[str, Any] = top_data(before, now, time.monotonic() - begin_s) | {"address": address}
        output.emit(data, text_of(data))
        return ExitCode.OK if all(worker["alive"] for worker in data["workers"]) else ExitCode.PARTIAL
    assert output.stdout is not None, "it is a terminal"
    _watch(address, before, interval_s, output.stdout)
    return ExitCode.OK


def _watch(address: str, before: admin_pb2.StatusReply, interval_s: float, stdout: TextIO) -> None:
    from rich.console import Console
    from rich.live import Live

    # An event, because a KeyboardInterrupt that is raised in a destructor or a callback is lost.
    stop = threading.Event()
    handler = signal.signal(signal.SIGINT, lambda number, frame: stop.set())
    try:
        with Live(console=Console(file=stdout), screen=True, auto_refresh=False) as live:
            for data in samples(address, before, interval_s, stop):
                live.update(view(data, live.console.width), refresh=True)
    finally:
        signal.signal(signal.SIGINT, handler)


def samples(
    address: str, before: admin_pb2.StatusReply, interval_s: float, stop: threading.Event
) -> Iterator[dict[str, Any]]:
    """Yield `top_data` of each interval until `stop`; without an answer, the last one with the reason as `problem`."""
    data = top_data(before, before, 0.0) | {"address": address}
    yield data
    begin_s = time.monotonic()
    while not stop.wait(interval_s):
        try:
            now = fetch_status(address)
        except BatonError as error:
            yield data | {"problem": error.message}
            continue
        now_s = time.monotonic()
        data = top_data(before, now, now_s - begin_s) | {"address": address}
        before, begin_s = now, now_s
        yield data


def view(data: dict[str, Any], width: int) -> "RenderableType":
    """Render for a terminal of `width` columns. If they are too few, columns are left out, but no cell is cut."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = [_cells(worker) for worker in data["workers"]]
    shown = [at for at in range(len(COLUMNS)) if at not in IF_ANY or any(row[at] not in (NOTHING, "0") for row in rows)]
    widths = [max(map(len, column)) + 1 for column in zip(COLUMNS, *rows, strict=True)]
    for spared in SPARED:
        if sum(widths[at] for at in shown) <= width:
            break
        shown = [at for at in shown if at != spared]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for at in shown:
        table.add_column(COLUMNS[at], justify="left" if at in LEFT else "right", no_wrap=True, overflow="fold")
    for worker, row in zip(data["workers"], rows, strict=True):
        is_well = worker["alive"] and not worker["quarantined_blocks"] and not worker["unfit"]
        style = "" if is_well else "yellow" if worker["alive"] else "bold red"
        table.add_row(*(row[at] for at in shown), style=style)
    lines: list[RenderableType] = [Text(_summary(data), style="bold"), table, Text(_paths(data))]
    if "problem" in data:
        lines.insert(0, Text(f"no answer: {data['problem']}", style="bold red"))
    return Group(*lines)


def text_of(data: dict[str, Any]) -> str:
    """Render as text for a pipe."""
    from baton.cluster.outcome import format_table

    rows = [_cells(worker) for worker in data["workers"]]
    return "\n".join(part for part in (_summary(data), format_table(COLUMNS, rows), _paths(data)) if part)


def _summary(data: dict[str, Any]) -> str:
    requests = data["requests"]
    return (
        f"{data['model']} at {data['address']}, up {data['uptime_s']:.0f} s: {_number(data['tokens_per_s'])} tokens/s, "
        f"{requests['running']} requests running, {requests['waiting']} waiting at workers, "
        f"{_number(requests['finished_per_s'])} finished/s, {requests['failed']} failed, "
        f"{requests['handoff_retries']} hand-offs tried again"
    )


def _cells(worker: dict[str, Any]) -> list[str]:
    rate = worker["kv_bytes_per_s"]
    drafts = worker["num_draft_tokens"]
    return [
        worker["worker"],
        worker["role"],
        _alive(worker),
        str(worker["running"]),
        " ".join(f"{reason}:{num}" for reason, num in worker["waiting"].items()) or NOTHING,
        f"{worker['kv_use']:.0%}",
        str(worker["quarantined_blocks"]),
        _number(worker["tokens_per_s"]),
        _number(worker["requests_per_s"]),
        _number(None if rate is None else rate / 1e6),
        NOTHING if worker["acceptance"] is None else f"{worker['acceptance']:.0%}",
        NOTHING if drafts is None else f"{drafts} {worker['draft_method']}" if worker["draft_method"] else str(drafts),
    ]


def _alive(worker: dict[str, Any]) -> str:
    if not worker["alive"]:
        return f"NO, {worker['heartbeat_age_s']:.0f} s"
    return "unfit" if worker["unfit"] else "yes"


def _paths(data: dict[str, Any]) -> str:
    lines = []
    for path in data["paths"]:
        if path["has_met"]:
            rate = "" if path["gbps"] is None else f", {path['gbps']:.3g} GB/s"
            lines.append(f"{path['prefill']} to {path['decode']}: {path['data_path'] or 'NO DATA PATH'}{rate}")
    lines += [
        f"{pair['prefill']} and {pair['decode']} are not paired: {pair['reason']}" for pair in data["refused_pairs"]
    ]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}"
