"""Replaces a live worker by a new incarnation without losing a request, for either role."""

import argparse
from collections.abc import Sequence

from baton.runbook.common import workers
from baton.runbook.common.canary import CanaryRuns
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Check, Step, Verification


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --worker, --grace and --force."""
    workers.add_worker(parser)
    workers.add_grace(parser)
    parser.add_argument("--force", action="store_true", help="even if no other worker of the role is left meanwhile")


def replace_steps(site: Site, options: argparse.Namespace, role: str) -> Sequence[Step]:
    """Drain the worker, end its incarnation, wait for the next one, and compare tokens before it is relied on.

    Raises:
        InvalidRequest: the worker is unknown, or has the other role.
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
    """Make the steps: drain, wait until idle, end, wait for the next incarnation, verify.

    Args:
        site: site of the worker.
        worker_id: id of a live worker.
        canaries: canaries with known answers.
        grace_s: time until its streams move; None: the router's own.
        *verifications: checks of the new incarnation, before its tokens are compared.
        others: check of other workers once this one is out of routing; None: no check.
    """
    epoch = site.worker(worker_id).state.epoch
    return [
        workers.drain(site, worker_id, grace_s),
        # If two runbooks take out the last two workers at once, each sees the other's drain by now.
        *([] if others is None else [others]),
        workers.idle(site, worker_id),
        workers.end_incarnation(site, worker_id, epoch),
        workers.new_incarnation(site, worker_id, epoch),
        *verifications,
        workers.proven(site, canaries, worker_id),
    ]
