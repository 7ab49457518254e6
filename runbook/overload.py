#!/usr/bin/env -S python3 -P
"""Too many requests: let the router hold fewer at once, so that those it takes are served; later, more again."""

import argparse
import math
import sys
import time
from collections.abc import Sequence

from baton.cluster.commands import operate
from baton.core.errors import StepFailed
from baton.runbook.common.canary import PROMPTS, ask
from baton.runbook.common.command import Runbook, count_or_none, main
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Action, Check, Step, Verification, require

BUSY_SHARE = 0.8
REFUSAL_S = 1.0  # a refusal is said at once; this much is for a busy machine


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit", type=_limit, required=True, help="requests that the router holds from now on; none: no limit"
    )
    parser.add_argument("--force", action="store_true", help="lower it even if nothing waits")


def _limit(text: str) -> int:
    """A number of requests, or 0 for none."""
    return 0 if text == "none" else count_or_none(text)


def _steps(site: Site, options: argparse.Namespace) -> Sequence[Step]:
    limit, previous = options.limit, site.status().max_queue_len

    def set_to(value: int) -> str:
        reply = operate.set_admission(site.address, value)
        if not value and reply.max_queue_len:
            message = f"the router was started with a limit of {reply.max_queue_len}, and has that when it has no other"
            raise StepFailed(message, limit=reply.max_queue_len)
        now, before = reply.max_queue_len or "no limit", reply.previous or "no limit"
        return f"{now}, before {before}; {reply.num_in_flight} are in flight"

    few = Verification(
        name=f"no more than {limit} are in flight",
        look=lambda: _wait_in_flight(site, limit),
        next="the limit was put back: those in flight last longer than --timeout",
    )
    return [
        _check_load(site, limit or math.inf, force=options.force),
        Action(
            name=f"let the router hold {limit or 'any number of'} requests",
            do=lambda: set_to(limit),
            undo=lambda: set_to(previous),
            is_done=lambda: site.status().max_queue_len == limit,
            next="the limit was put back; give --limit a number",
        ),
        *([few] if limit else []),
        Verification(
            name="a request is answered, or refused at once",
            look=lambda: _probe(site),
            next="the limit was put back; see `baton status` for workers that are missing",
        ),
    ]


def _check_load(site: Site, limit: float, *, force: bool) -> Check:
    def look() -> str:
        status = site.status()
        num_waiting = sum(worker.state.inventory.num_requests_waiting for worker in status.workers if worker.alive)
        site.found["before"] = {
            "limit": status.max_queue_len,  # as --limit takes it: 0 for none
            "in_flight": status.num_requests_running,
            "waiting": num_waiting,
        }
        most = status.max_queue_len or math.inf
        what = (
            f"{status.num_requests_running} of {status.max_queue_len or 'any'} in flight, {num_waiting} wait at workers"
        )
        is_busy = num_waiting > 0 or status.num_requests_running >= BUSY_SHARE * most
        require(is_busy or force or limit >= most, f"this is no overload: {what}")
        return what

    return Check(
        name="there is too much to do, or the limit is not lowered", look=look, next="give --force to lower it"
    )


def _wait_in_flight(site: Site, limit: int) -> str:
    def look() -> int | None:
        num = site.status().num_requests_running
        return num if num <= limit else None

    return f"{site.wait(look, f'no more than {limit} in flight')} in flight"


def _probe(site: Site) -> str:
    start_s = time.monotonic()
    try:
        ask(site, PROMPTS[0])
    except StepFailed as error:
        seconds = time.monotonic() - start_s
        if error.fields.get("cause") == "Overloaded" and seconds < REFUSAL_S:
            return f"refused in {1e3 * seconds:.0f} ms"
        raise
    return f"answered in {time.monotonic() - start_s:.2f} s"


RUNBOOK = Runbook(name="overload", about=__doc__ or "", steps=_steps, options=_options)

if __name__ == "__main__":
    sys.exit(main(RUNBOOK))
