#!/usr/bin/env -S python3 -P
"""A worker that hangs: keep what its processes are doing, end all of them, wait for the restart, compare tokens."""

import argparse
import sys
from collections.abc import Sequence

from baton.core.errors import StepFailed
from baton.proto import admin_pb2, worker_pb2
from baton.runbook.common import processes, workers
from baton.runbook.common.canary import CanaryRuns
from baton.runbook.common.command import Runbook, main, positive
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Action, Check, Step, require


def _options(parser: argparse.ArgumentParser) -> None:
    workers.add_worker(parser)
    parser.add_argument("--watch", type=positive, default=5.0, help="seconds without progress that are a hang  [5]")


def _steps(site: Site, options: argparse.Namespace) -> Sequence[Step]:
    worker_id = options.worker
    state = site.worker(worker_id).state
    canaries = CanaryRuns(site)
    return [
        _check_hangs(site, worker_id, options.watch),
        Check(
            name=f"the processes of {worker_id} can be told from others here",
            look=lambda: f"process ids {', '.join(str(item.pid) for item in processes.processes_of(state)) or 'none'}",
            next="run this on the node that `baton status --json` shows as the worker's address",
        ),
        _check_expectation(site, worker_id, canaries),
        workers.drain(site, worker_id),
        _end(site, worker_id, state),
        workers.new_incarnation(site, worker_id, state.epoch),
        workers.proven(site, canaries, worker_id),
    ]


def progress(worker: admin_pb2.WorkerStatus) -> tuple[int, ...]:
    """Counts of which at least one grows in a worker that does anything for its requests."""
    held = worker.state.inventory
    return (
        held.steps.num_steps,
        held.kv_bytes,
        held.num_requests_finished,
        held.num_requests_failed,
        held.transfer.frames,
    )


def _check_hangs(site: Site, worker_id: str, watch_s: float) -> Check:
    def look() -> str:
        before = site.worker(worker_id)
        site.pause(watch_s)
        after = site.worker(worker_id)
        require(before.state.epoch == after.state.epoch, f"{worker_id} was just started anew", worker_id=worker_id)
        if not after.alive:
            return f"silent since {after.heartbeat_age_s:.1f} s"
        num_running = min(item.state.inventory.num_requests_running for item in (before, after))
        is_idle = num_running == 0 and not after.unfit
        require(not is_idle, f"{worker_id} is heard, and has nothing to do", worker_id=worker_id)
        require(progress(before) == progress(after), f"{worker_id} makes progress", worker_id=worker_id)
        if after.unfit:
            return f"it answers no canary of the router: {after.unfit_reason}"
        return f"{num_running} requests, and no progress in {watch_s:g} s"

    return Check(
        name=f"{worker_id} hangs",
        look=look,
        next="nothing is to be done; to restart a worker that is well use `baton runbook replace-decode` or "
        "`replace-prefill`",
    )


def _check_expectation(site: Site, worker_id: str, canaries: CanaryRuns) -> Check:
    """Canaries before, where others can answer them."""

    def look() -> str:
        role = site.worker(worker_id).state.role
        if not site.others({worker_id}, role):
            return f"no other {role} worker is there: tokens can only be compared among themselves"
        try:
            return f"{len(canaries.round())} canaries answered"
        except StepFailed as error:  # the worker that hangs may still be routed to
            return f"none to compare with: {error.message}"

    return Check(name="canaries are answered by others", look=look)


def _end(site: Site, worker_id: str, state: worker_pb2.WorkerState) -> Action:
    """End the incarnation that was looked at; never one that came after it."""

    def do() -> str:
        found = processes.processes_of(state)
        site.found["stacks"] = processes.stacks(found)
        pids = processes.kill(found)
        return f"killed {', '.join(map(str, pids))}" if pids else "its processes were gone"

    return Action(
        name=f"keep the stacks of {worker_id} and end its processes",
        do=do,
        next=f"see what is left of {worker_id} with ps, and its log",
    )


RUNBOOK = Runbook(name="hung-tp-group", about=__doc__ or "", steps=_steps, options=_options)

if __name__ == "__main__":
    sys.exit(main(RUNBOOK))
