#!/usr/bin/env -S python3 -P
"""Requests that workers died of: which are refused, whether the deaths are over, and taking one again."""

import argparse
import sys
from collections.abc import Sequence

from baton.cluster.commands import operate
from baton.core.errors import StepFailed
from baton.proto import admin_pb2
from baton.runbook.common.canary import CanaryRuns
from baton.runbook.common.command import Runbook, main, positive
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Action, Check, Step, Verification, partial, require


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--watch", type=positive, default=5.0, help="seconds in which no worker may die  [5]")
    parser.add_argument("--clear", metavar="FINGERPRINT", help="take this request again")


class Quarantine:
    """The requests that are refused, and the workers that they were at."""

    def __init__(self, site: Site, options: argparse.Namespace) -> None:
        self._site, self._options = site, options
        self._canaries = CanaryRuns(site)

    def steps(self) -> list[Step]:
        """Look, pardon if asked, watch."""
        clear = self._options.clear
        pardon: list[Step] = []
        if clear is not None:
            pardon = [
                Check(
                    name=f"{clear} is refused",
                    look=self._is_refused,
                    next="run this without --clear: it lists what is refused",
                ),
                Action(name=f"take {clear} again", do=self._clear),
            ]
        return [
            Check(name="the router answers", look=self._list, next="see `baton doctor`"),
            *pardon,
            Verification(
                name="the workers that died live again",
                look=self._are_back,
                next="see the logs of the workers that are missing; `baton runbook partition-triage` tells a dead "
                "process from a cut",
            ),
            Verification(
                name="no worker dies any more",
                look=self._watch,
                next="see the log of the router for requests that are blamed, and of the workers for why they died; "
                "`baton runbook collect-diagnostics` keeps both",
            ),
            Verification(
                name="other requests are answered",
                look=lambda: f"{len(self._canaries.round())} canaries",
                next="see `baton status`",
            ),
        ]

    def _refused(self) -> list[admin_pb2.Quarantined]:
        return list(self._site.status().quarantined)

    def _list(self) -> str:
        refused = self._refused()
        self._site.found["quarantined"] = [
            {"fingerprint": one.fingerprint, "workers": list(one.workers), "left_s": one.left_s} for one in refused
        ]
        listed = (f"{one.fingerprint} after {', '.join(one.workers)}, for {one.left_s:.0f} s" for one in refused)
        return "; ".join(listed) or "no request is refused"

    def _is_refused(self) -> str:
        names = {one.fingerprint for one in self._refused()}
        require(self._options.clear in names, f"{self._options.clear} is not refused")
        return "it is"

    def _clear(self) -> str:
        return f"{operate.clear_quarantine(self._site.address, self._options.clear).num_cleared} request is taken again"

    def _are_back(self) -> str:
        died = {name for one in self._site.found["quarantined"] for name in one["workers"]}

        def look() -> bool | None:
            alive = {worker.state.worker_id for worker in self._site.status().workers if worker.alive}
            return True if died <= alive else None

        self._site.wait(look, f"other incarnations of {', '.join(sorted(died))}")
        return ", ".join(sorted(died)) or "none died of a request"

    def _watch(self) -> str:
        before = self._incarnations()
        self._site.pause(self._options.watch)
        after = self._incarnations()
        died = sorted(name for name, incarnation in before.items() if after.get(name) != incarnation)
        if died:
            raise StepFailed(f"{', '.join(died)} died or fell silent", workers=died)
        silent = sorted(name for name, (alive, _) in after.items() if not alive)
        if silent:
            raise partial(f"{', '.join(silent)} silent", workers=silent)
        return f"{len(after)} workers, {self._options.watch:g} s"

    def _incarnations(self) -> dict[str, tuple[bool, int]]:
        return {
            worker.state.worker_id: (worker.alive, worker.state.epoch)
            for worker in self._site.status().workers
            if worker.alive or not worker.draining
        }


def _steps(site: Site, options: argparse.Namespace) -> Sequence[Step]:
    return Quarantine(site, options).steps()


RUNBOOK = Runbook(name="poison-request", about=__doc__ or "", steps=_steps, options=_options)

if __name__ == "__main__":
    sys.exit(main(RUNBOOK))
