"""`baton speculation`: shows or changes how many drafts a deployment's decode workers make, while they serve."""

import re
from typing import Any

from baton.cluster.admin import as_data, fetch_status, set_speculation
from baton.cluster.outcome import ExitCode, Output, format_table
from baton.core.errors import ConfigInvalid


def speculation(address: str, mode: str | None, output: Output) -> ExitCode:
    """Print it, after setting it to a number or `auto` if `mode` is given. PARTIAL if a worker was not reached.

    Raises:
        ConfigInvalid: `mode` is neither.
        BatonError: no deployment answers at `address`, or it refuses.
    """
    if mode is None:
        status = as_data(fetch_status(address))
        states = [worker["state"] for worker in status["workers"] if worker["alive"]]
        workers = [
            {"worker_id": state["worker_id"], "speculation": state["speculation"], "error": ""}
            for state in states
            if state["role"] == "decode"
        ]
    else:
        workers = as_data(set_speculation(address, _parse(mode)))["workers"]
    output.emit({"address": address, "workers": workers}, format_speculation(workers))
    return ExitCode.PARTIAL if any(worker["error"] for worker in workers) else ExitCode.OK


def format_speculation(workers: list[dict[str, Any]]) -> str:
    """Format it as a table."""
    rows = []
    for worker in workers:
        now = worker["speculation"]
        mode = "auto" if now["auto"] else "fixed"
        method = now["method"] + (", as measured" if now["auto_method"] else "")
        drafts, limit = str(now["num_draft_tokens"]), str(now["limit"])
        rows.append((worker["worker_id"], mode, drafts, method, limit, worker["error"]))
    return format_table(("worker", "mode", "drafts", "by", "limit", "error"), rows)


def _parse(mode: str) -> int | None:
    if mode == "auto":
        return None
    if re.fullmatch("[0-9]{1,9}", mode):
        return int(mode)
    raise ConfigInvalid(f"{mode!r} is neither a number of draft tokens nor auto", keys=["mode"])
