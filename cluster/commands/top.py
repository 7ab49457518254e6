"""`baton top`: a deployment's load as it changes, on a terminal; once, as text or JSON, elsewhere."""

import signal
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, TextIO

from baton.cluster.admin import fetch_status
from baton.cluster.commands.top_data import top_data
from baton.cluster.outcome import ExitCode, Output
from baton.core.errors import BatonError, ConfigInvalid
from baton.proto import admin_pb2

if TYPE_CHECKING:
    from rich.console import RenderableType

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
    "tokens/s",
    "requests/s",
    "KV MB/s",
    "accepted",
    "k",
)


def top(address: str, output: Output, *, interval_s: float = 1.0, once: bool = False) -> ExitCode:
    """Show it until Ctrl-C; once where stdout is no terminal, or is for JSON. PARTIAL as `baton status`.

    Raises:
        BatonError: no deployment answers at `address`.
        ConfigInvalid: the interval is too short or too long.
    """
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        message = f"interval: {interval_s} s is not between {MIN_INTERVAL_S} and {MAX_INTERVAL_S:.0f}"
        raise ConfigInvalid(message, keys=["interval"])
    before = fetch_status(address)
    if once or output.as_json or not output.is_terminal:
        begin_s = time.monotonic()
        time.sleep(interval_s)
        now = fetch_status(address)
        data: dict[str, Any] = top_data(before, now, time.monotonic() - begin_s) | {"address": address}
        output.emit(data, text_of(data))
        return ExitCode.OK if all(worker["alive"] for worker in data["workers"]) else ExitCode.PARTIAL
    _watch(address, before, interval_s, output.stdout)
    return ExitCode.OK


def _watch(address: str, before: admin_pb2.StatusReply, interval_s: float, stdout: TextIO) -> None:
    from rich.console import Console
    from rich.live import Live

    # An event, not KeyboardInterrupt: one that is raised in a destructor or a callback is lost, and with it the Ctrl-C.
    stop = threading.Event()
    handler = signal.signal(signal.SIGINT, lambda number, frame: stop.set())
    try:
        with Live(console=Console(file=stdout), screen=True, auto_refresh=False) as live:
            for data in samples(address, before, interval_s, stop):
                live.update(view(data), refresh=True)
    finally:
        signal.signal(signal.SIGINT, handler)


def samples(
    address: str, before: admin_pb2.StatusReply, interval_s: float, stop: threading.Event
) -> Iterator[dict[str, Any]]:
    """What `top_data` says of each interval until `stop`; without an answer, the last with the reason as `problem`."""
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


def view(data: dict[str, Any]) -> "RenderableType":
    """For a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for at, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if at in (0, 1, 2, 4) else "right")
    for worker in data["workers"]:
        is_well = worker["alive"] and not worker["quarantined_blocks"] and not worker["unfit"]
        table.add_row(*_cells(worker), style="" if is_well else "yellow" if worker["alive"] else "bold red")
    lines: list[RenderableType] = [Text(_summary(data), style="bold"), table, Text(_paths(data))]
    if "problem" in data:
        lines.insert(0, Text(f"no answer: {data['problem']}", style="bold red"))
    return Group(*lines)


def text_of(data: dict[str, Any]) -> str:
    """For a pipe."""
    from baton.cluster.table import format_table

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
        NOTHING if drafts is None else str(drafts),
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
            lines.append(f"{path['prefill']} to {path['decode']}: {path['lane'] or 'NO LANE'}{rate}")
    lines += [
        f"{pair['prefill']} and {pair['decode']} are not paired: {pair['reason']}" for pair in data["refused_pairs"]
    ]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}"
