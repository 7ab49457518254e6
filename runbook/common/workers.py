"""Steps that several runbooks share: drain, wait until idle, restart, undrain, and the checks around them."""

import argparse
from collections.abc import Iterable

from baton.cluster.commands import operate
from baton.cluster.ray.restarts import MAX_STARTS
from baton.core.errors import StepFailed
from baton.proto import admin_pb2
from baton.proto.wire import held as held_by
from baton.runbook.common.canary import CanaryRuns
from baton.runbook.common.command import positive
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Action, Check, Verification, partial, require

SETTLE_S = 10.0  # from a stream's end at the router until everything is released: far more than is ever needed


def held(worker: admin_pb2.WorkerStatus) -> dict[str, int]:
    """Resources of requests that a worker holds; empty if it holds none."""
    return {name: count for name, count in held_by(worker.state.inventory).items() if count}


def format_held(counts: dict[str, int]) -> str:
    """Format held resources as text."""
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()) or "nothing"


def add_worker(parser: argparse.ArgumentParser) -> None:
    """Add the flag of runbooks about one worker."""
    parser.add_argument("--worker", required=True, help="its name, as `baton status` shows it")


def check_alive(site: Site, worker_id: str) -> Check:
    """Check that the router receives the worker's heartbeats."""

    def look() -> str:
        worker = site.worker(worker_id)
        require(worker.alive, f"{worker_id} is silent since {worker.heartbeat_age_s:.1f} s", worker_id=worker_id)
        return f"heard {worker.heartbeat_age_s:.1f} s ago, incarnation {worker.state.epoch:016x}"

    return Check(
        name=f"{worker_id} is alive",
        look=look,
        next=f"run `baton runbook hung-tp-group --worker {worker_id}` on its node; it ends a process that hangs",
    )


def check_others(site: Site, worker_ids: Iterable[str], *, are_away: bool = False, or_decode: bool = False) -> Check:
    """Check that every role still has a worker without these.

    Args:
        site: site of the workers.
        worker_ids: ids of the workers to leave out.
        or_decode: whether all prefill workers may be away for a while if decode workers compute the prompts.
        are_away: whether they are out of routing by now; another runbook may have removed the others since the first
            check.
    """
    away = set(worker_ids)
    still = "still " if are_away else ""

    def look() -> str:
        left = []
        for role in sorted({site.worker(worker_id).state.role for worker_id in away}):
            others = site.others(away, role)
            computing = site.computing(away) if or_decode and role == "prefill" and not others else []
            if computing:
                left.append(f"{role}: none; {', '.join(computing)} compute the prompts")
                continue
            require(bool(others), f"no other {role} worker takes requests", role=role)
            left.append(f"{role}: {', '.join(others)}")
        return "; ".join(left)

    return Check(
        name=f"others can {still}serve without {', '.join(sorted(away))}",
        look=look,
        next="wait until the other workers of the role take requests again, and run this again"
        if are_away
        else f"undrain another worker of the role, or give --force: {_meanwhile(site, away)}",
    )


def _meanwhile(site: Site, away: set[str]) -> str:
    """Say what happens to requests without these workers, the last of their roles."""
    if {site.worker(worker_id).state.role for worker_id in away} == {"prefill"}:
        return "decode workers compute the prompts meanwhile (refused only with `--local-prefill never`)"
    return "requests are refused meanwhile"


def add_grace(parser: argparse.ArgumentParser) -> None:
    """Add the flag of runbooks that take workers out of routing."""
    parser.add_argument(
        "--grace", type=positive, help="seconds until streams move to other workers  [the router's own, 10]"
    )


def drain(site: Site, worker_id: str, grace_s: float | None = None) -> Action:
    """Take the worker's current incarnation out of routing."""
    return Action(
        name=f"take {worker_id} out of routing",
        do=lambda: site.drain(worker_id, grace_s=grace_s),
        undo=lambda: site.drain(worker_id, undo=True),
        is_done=lambda: site.worker(worker_id).draining,
    )


def undrain(site: Site, worker_id: str) -> Action:
    """Put the worker back into routing."""
    return Action(
        name=f"route to {worker_id} again",
        do=lambda: site.drain(worker_id, undo=True),
        undo=lambda: site.drain(worker_id),
        is_done=lambda: not site.worker(worker_id).draining,
    )


def idle(site: Site, worker_id: str) -> Verification:
    """Verify that the worker's streams are over, and that it holds nothing."""

    def look() -> str:
        def is_over() -> bool | None:
            return True if not site.worker(worker_id).num_streams else None

        def is_empty() -> bool | None:
            worker = site.inventory().get(worker_id)
            return True if worker is not None and worker.alive and not held(worker) else None

        site.wait(is_over, f"{worker_id}: the end of its streams")
        site.wait(is_empty, f"{worker_id} gives back what it holds", within_s=SETTLE_S)
        return "no stream, no block held"

    return Verification(
        name=f"{worker_id} is idle",
        look=look,
        next="give more --timeout, or let it go on: it was put back into routing; "
        "`baton runbook kv-leak-audit` shows what is held without a stream",
    )


def new_incarnation(site: Site, worker_id: str, old_epoch: int) -> Verification:
    """Verify that the worker runs again, under another epoch."""

    def look() -> str:
        def is_there() -> int | None:
            worker = site.worker(worker_id)
            return worker.state.epoch if worker.alive and worker.state.epoch != old_epoch else None

        epoch = site.wait(is_there, f"{worker_id}: another incarnation")
        site.found["epochs"] = {"before": f"{old_epoch:016x}", "after": f"{epoch:016x}"}
        return f"incarnation {epoch:016x}"

    return Verification(
        name=f"{worker_id} has another incarnation",
        look=look,
        next=f"see the log of {worker_id} and `baton status`; who dies {MAX_STARTS} times in ten minutes stays away",
    )


def expect(canaries: CanaryRuns) -> Check:
    """Check that the deployment answers canaries, and keep the answers for comparison."""

    def look() -> str:
        num = len(canaries.round())
        return f"{num} canaries answered"

    return Check(name="canaries are answered", look=look, next="see `baton status` and `baton doctor --address`")


def served_by(canaries: CanaryRuns, worker_ids: Iterable[str], *, next: str) -> Verification:
    """Verify that these workers serve canaries, with the expected tokens."""
    wanted = sorted(set(worker_ids))
    return Verification(
        name=f"{', '.join(wanted)} gives the tokens expected", look=lambda: canaries.reach(wanted), next=next
    )


def proven(site: Site, canaries: CanaryRuns, worker_id: str) -> Verification:
    """Verify that a new incarnation gives the expected tokens; if not, take it out of routing."""

    def look() -> str:
        try:
            return canaries.reach([worker_id])
        except StepFailed as error:
            raise partial(f"{error.message}; {site.drain(worker_id)}", **error.fields) from error

    return Verification(
        name=f"{worker_id} gives the tokens expected",
        look=look,
        next=f"{worker_id} is out of routing; run `baton runbook collect-diagnostics`, then replace it once more",
    )


def end_incarnation(site: Site, worker_id: str, epoch: int) -> Action:
    """End the worker's process."""

    def do() -> str:
        reply = operate.restart(site.address, worker_id, epoch)
        return f"incarnation {epoch:016x} ends" if reply.ending else f"incarnation {epoch:016x} was over"

    return Action(
        name=f"end the process of {worker_id}",
        do=do,
        next=f"run `baton runbook hung-tp-group --worker {worker_id}` on its node, which ends a process that hangs",
    )
