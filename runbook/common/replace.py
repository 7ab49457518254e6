"""Another incarnation for a worker that is alive, without a request lost: what replacing means for either role."""

import argparse
from collections.abc import Sequence

from baton.runbook.common import workers
from baton.runbook.common.canary import CanaryRuns
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Check, Step, Verification


def add_options(parser: argparse.ArgumentParser) -> None:
    """--worker, --grace and --force."""
    workers.add_worker(parser)
    workers.add_grace(parser)
    parser.add_argument("--force", action="store_true", help="even if no other worker of the role is left meanwhile")


def replace_steps(site: Site, options: argparse.Namespace, role: str) -> Sequence[Step]:
    """Drain it, end its incarnation, wait for the next one, and compare tokens before anyone relies on it.

    Raises:
        InvalidRequest: the worker is unknown, or of the other role.
    """
    worker_id = options.worker
    site.worker(worker_id, role)
    canaries = CanaryRuns(site)
    others = None if options.force else workers.check_others(site, [worker_id], are_away=True)
    return [
        workers.check_alive(site, worker_id),
        *([] if options.force else [workers.check_others(site, [worker_id])]),
        workers.expect(canaries),
        *another_incarnation(site, worker_id, canaries, options.grace, others=others),
    ]


def another_incarnation(
    site: Site,
    worker_id: str,
    canaries: CanaryRuns,
    grace_s: float | None,
    *verifications: Verification,
    others: Check | None = None,
) -> Sequence[Step]:
    """Drained, idle, ended, alive again, as it should be.

    Args:
        site: where it is.
        worker_id: a live worker.
        canaries: whose answers are known.
        grace_s: until its streams move; None for the router's own.
        *verifications: of the new incarnation, before its tokens are compared.
        others: what must hold of other workers when this one is out of routing; None if nothing must.
    """
    epoch = site.worker(worker_id).state.epoch
    return [
        workers.drain(site, worker_id, grace_s),
        # Of two runbooks that take out the last two workers at once, each sees the other's drain by now.
        *([] if others is None else [others]),
        workers.idle(site, worker_id),
        workers.end_incarnation(site, worker_id, epoch),
        workers.new_incarnation(site, worker_id, epoch),
        *verifications,
        workers.proven(site, canaries, worker_id),
    ]
