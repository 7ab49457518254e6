"""`baton status`: the router's view of its workers, as a table or as JSON."""

from typing import Any

from baton.cluster.admin import as_data, fetch_status
from baton.cluster.doctor.decode_report import decode_data, format_decode
from baton.cluster.outcome import ExitCode, Output, format_table
from baton.core.start_phase import StartPhase


def status(address: str, output: Output) -> ExitCode:
    """Print the status. PARTIAL if a worker that the router knows is not alive, and was not drained before.

    Raises:
        BatonError: no deployment answers at `address`.
    """
    reply = fetch_status(address)
    data: dict[str, Any] = as_data(reply) | {"address": address, "decode": decode_data(reply)}
    output.emit(data, format_status(data))
    return ExitCode.OK if all(worker["alive"] or worker["draining"] for worker in data["workers"]) else ExitCode.PARTIAL


def format_status(data: dict[str, Any]) -> str:
    """Format the status as text."""
    header = (
        "worker",
        "role",
        "alive",
        "ranks",
        "epoch",
        "incarnations",
        "heartbeat",
        "running",
        "waiting",
        "blocks",
        "quarantined",
    )
    rows = []
    for worker in data["workers"]:
        state, held = worker["state"], worker["state"]["inventory"]
        rows.append(
            (
                state["worker_id"],
                state["role"],
                alive_cell(worker),
                ranks_cell(state["rank_pids"]),
                state["epoch"],
                str(worker["num_epochs"]),
                f"{worker['heartbeat_age_s']:.1f} s",
                str(held["num_requests_running"]),
                str(held["num_requests_waiting"]),
                f"{held['num_blocks'] - held['num_blocks_free']}/{held['num_blocks']}",
                str(held["num_blocks_quarantined"]),
            )
        )
    summary = (
        f"{data['model']} at {data['address']}, up {data['uptime_s']:.0f} s: "
        f"{data['num_requests_running']} requests running, {data['num_requests_finished']} finished, "
        f"{data['num_requests_failed']} failed or turned away, {data['num_requests_refused']} invalid or cancelled, "
        f"{data['num_tokens_streamed']} tokens, "
        f"{data['num_handoff_retries']} hand-offs tried again, {data['num_migrations']} streams moved"
    )
    if data["num_retries_refused"]:
        summary += f", {data['num_retries_refused']} more than the retry budget allows"
    lines = [summary, format_table(header, rows), *([format_decode(data["decode"])] if data["decode"] else [])]
    for worker in data["starting"]:
        phase = StartPhase(worker["phase"], worker["num_done"], worker["num_total"])
        lines.append(f"{worker['worker_id']} starts: {phase}")
    for worker in data["workers"]:
        if worker["unfit"]:
            reason = worker["unfit_reason"]
            lines.append(f"{worker['state']['worker_id']} answers no canary, and is avoided while others do: {reason}")
    for pair in data["refused_pairs"]:
        lines.append(f"{pair['prefill_worker']} and {pair['decode_worker']} are not paired: {pair['reason']}")
    has_prefill = any(worker["state"]["role"] == "prefill" for worker in data["workers"])
    lines += local_lines(data.get("local_prefill"), has_prefill=has_prefill)
    for one in data["quarantined"]:
        workers = ", ".join(one["workers"])
        lines.append(f"request {one['fingerprint']} is refused for {one['left_s']:.0f} s: {workers} died of it")
    return "\n".join(lines)


def alive_cell(worker: dict[str, Any]) -> str:
    """Table cell that says whether a worker serves."""
    if not worker["alive"]:
        return "NO"
    if worker["draining"]:
        return f"draining, {worker['num_streams']} streams"
    return "unfit" if worker["unfit"] else "yes"


def ranks_cell(pids: list[int]) -> str:
    """Number of a worker's ranks and, for a TP group, their process ids in rank order."""
    return f"{len(pids)} ({', '.join(map(str, pids))})" if len(pids) > 1 else "1"


def local_lines(local: dict[str, Any] | None, *, has_prefill: bool) -> list[str]:
    """Say where prompts were computed and why, once a decode worker computed any, and whether that is the only way.

    Args:
        local: as in `Status`; None if that lacks it.
        has_prefill: whether the deployment has, or had, a prefill worker.
    """
    choices = {} if local is None else local["num_choices"]
    lines = []
    if any(name.startswith("local") for name in choices):
        counts = ", ".join(f"{name} {count}" for name, count in sorted(choices.items()))
        lines.append(f"prompts by the way they went: {counts}")
    if local is not None and local["only_way"] and has_prefill:  # otherwise it is intended: --prefill 0
        lines.append("no prefill worker takes requests: decode workers compute prompts")
    return lines
