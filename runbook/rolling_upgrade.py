#!/usr/bin/env -S python3 -P
"""Have every worker run the code that is installed now: a canary of each role first, then one after the other."""

import argparse
import sys
from collections.abc import Sequence

from baton.core.build import build_id
from baton.core.clock import MonotonicClock
from baton.core.errors import StepFailed
from baton.runbook.common import workers
from baton.runbook.common.canary import CanaryRuns
from baton.runbook.common.command import Runbook, main
from baton.runbook.common.replace import another_incarnation
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Action, Check, Run, RunbookReport, Step, Verification, partial


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--build", default="", help="that workers should run  [this command's own]")
    workers.add_grace(parser)
    parser.add_argument("--force", action="store_true", help="even if no other worker of a role is left meanwhile")


class Upgrade:
    """The workers of a deployment, and the build that they should run."""

    def __init__(self, site: Site, options: argparse.Namespace) -> None:
        self._site, self._grace_s = site, options.grace
        self._is_forced: bool = options.force
        self._build: str = options.build or build_id()
        self._canaries = CanaryRuns(site)

    def steps(self) -> list[Step]:
        """A canary of each role, then the others; stop at the first that is not as it should be."""
        names = self._in_order()
        return [
            Check(name="some worker runs another build", look=self._builds),
            *(step for name in names for step in self._checks(name)),
            workers.expect(self._canaries),
            *(self._one(name) for name in names),
            Verification(
                name=f"every worker runs build {self._build}",
                look=self._all_run_it,
                next="install the build on the nodes of the workers that are named, and run this again",
            ),
        ]

    def _in_order(self) -> list[str]:
        found = {worker.state.worker_id: worker.state for worker in self._site.status().workers}
        left = [name for name, state in sorted(found.items()) if state.build != self._build]
        first = {found[name].role: name for name in reversed(left)}
        self._site.found |= {"build": self._build, "canary_workers": sorted(first.values())}
        return sorted(left, key=lambda name: (name not in first.values(), name))

    def _builds(self) -> str:
        builds = {worker.state.worker_id: worker.state.build for worker in self._site.status().workers}
        self._site.found["builds_before"] = builds
        return f"wanted is {self._build}; " + ", ".join(f"{name} runs {build}" for name, build in builds.items())

    def _checks(self, name: str) -> list[Step]:
        others = self._others(name, are_away=False)
        return [workers.check_alive(self._site, name), *([] if others is None else [others])]

    def _others(self, name: str, *, are_away: bool) -> Check | None:
        if self._is_forced:
            return None
        return workers.check_others(self._site, [name], are_away=are_away, or_decode=True)

    def _one(self, name: str) -> Action:
        def do() -> str:
            # Steps of their own: until its process has ended the worker is put back when one of them fails.
            others = self._others(name, are_away=True)
            steps = another_incarnation(
                self._site, name, self._canaries, self._grace_s, self._runs_it(name), others=others
            )
            report = Run(MonotonicClock(), dry=False).carry_out(steps)
            if report.error is not None:
                raise partial(f"{name}: {_why(report)}", worker_id=name, **_timed_out(report))
            return f"build {self._build}, tokens as expected"

        return Action(
            name=f"upgrade {name}",
            do=do,
            is_done=lambda: self._site.worker(name).state.build == self._build,
            next="the other workers are as they were; to go back, install the build from before and run this again",
        )

    def _runs_it(self, name: str) -> Verification:
        def look() -> str:
            build = self._site.worker(name).state.build
            if build != self._build:
                raise StepFailed(f"{name} runs {build}: its node has another installation", worker_id=name)
            return build

        return Verification(name=f"{name} runs build {self._build}", look=look)

    def _all_run_it(self) -> str:
        status = self._site.status()
        others = [f"{w.state.worker_id} runs {w.state.build}" for w in status.workers if w.state.build != self._build]
        if others:
            raise partial(", ".join(others))
        return f"{len(status.workers)} workers"


def _why(report: RunbookReport) -> str:
    taken = next(taken for taken in reversed(report.taken) if taken.state == "failed")
    return f"{taken.name}: {taken.detail}"


def _timed_out(report: RunbookReport) -> dict[str, bool]:
    return {"timed_out": True} if report.error is not None and report.error.fields.get("timed_out") else {}


def _steps(site: Site, options: argparse.Namespace) -> Sequence[Step]:
    return Upgrade(site, options).steps()


RUNBOOK = Runbook(name="rolling-upgrade", about=__doc__ or "", steps=_steps, options=_options, timeout_s=1800.0)

if __name__ == "__main__":
    sys.exit(main(RUNBOOK))
