#!/usr/bin/env -S python3 -P
"""Take workers out of routing, without a request lost, so that their node can be worked on."""

import argparse
import sys
from collections.abc import Sequence

from baton.core.errors import ConfigInvalid, InvalidRequest
from baton.runbook.common import workers
from baton.runbook.common.canary import CanaryRuns
from baton.runbook.common.command import Runbook, main
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Step, Verification


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worker", action="append", default=[], help="its name; several times")
    parser.add_argument("--node", help="all workers with this host in their address")
    workers.add_grace(parser)
    parser.add_argument("--undo", action="store_true", help="put them back into routing instead")
    parser.add_argument("--force", action="store_true", help="even if no other worker of a role is left")


def _steps(site: Site, options: argparse.Namespace) -> Sequence[Step]:
    names = _names(site, options)
    canaries = CanaryRuns(site)
    if options.undo:
        return [
            *(workers.check_alive(site, name) for name in names),
            *(workers.undrain(site, name) for name in names),
            workers.served_by(canaries, names, next="the workers are out of routing again; see `baton doctor`"),
        ]
    away: list[Step] = []
    if not options.force:
        away = [workers.check_others(site, names), workers.expect(canaries)]
    return [
        *(workers.check_alive(site, name) for name in names),
        *away,
        *(workers.drain(site, name, options.grace) for name in names),
        *(workers.idle(site, name) for name in names),
        *([] if options.force else [_others_serve(canaries, names)]),
    ]


def _names(site: Site, options: argparse.Namespace) -> list[str]:
    names: list[str] = list(options.worker)
    for name in names:
        site.worker(name)
    if options.node is not None:
        states = [worker.state for worker in site.status().workers]
        found = [state.worker_id for state in states if state.address.rpartition(":")[0] == options.node]
        if not found:
            raise InvalidRequest(f"no worker has an address at {options.node!r}", field="node", node=options.node)
        names += found
    if not names:
        raise ConfigInvalid("give --worker or --node")
    site.found["workers"] = names = list(dict.fromkeys(names))
    return names


def _others_serve(canaries: CanaryRuns, names: Sequence[str]) -> Verification:
    def look() -> str:
        canaries.seen.clear()
        num = len(canaries.round())
        return f"{num} canaries with the tokens expected, served by {', '.join(sorted(canaries.seen))}"

    return Verification(
        name=f"others serve without {', '.join(names)}", look=look, next="all are routed to again; see `baton doctor`"
    )


RUNBOOK = Runbook(name="drain-node", about=__doc__ or "", steps=_steps, options=_options)

if __name__ == "__main__":
    sys.exit(main(RUNBOOK))
