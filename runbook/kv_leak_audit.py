#!/usr/bin/env -S python3 -P
"""Compare what every worker holds with the streams that are alive, for a while; what no stream needs is a leak."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.errors import StepFailed
from baton.proto import admin_pb2
from baton.runbook.common.command import Runbook, main, positive
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Check, Step, Verification, partial
from baton.runbook.common.workers import format_held, held

SAMPLE_S = 0.5
MIN_IDLE_LOOKS = 3  # one may fall between the end of a stream and what it gives back


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--watch", type=positive, default=10.0, help="seconds without a stream after which anything held leaks  [10]"
    )


@dataclass(slots=True)
class Ledger:
    """What was seen of one worker in its present incarnation.

    Attributes:
        leaked: the least that it held of each thing while it had no stream, over all looks since it had one last.
        num_idle: looks at which it had no stream.
        excess: the least that it had of attends beyond its streams, over all looks.
    """

    epoch: int
    leaked: dict[str, int] = field(default_factory=dict)
    num_idle: int = 0
    excess: int | None = None

    def look(
        self, before: admin_pb2.WorkerStatus, holds: admin_pb2.WorkerStatus, after: admin_pb2.WorkerStatus
    ) -> None:
        """Take what it holds, between two looks at its streams."""
        num_streams = max(before.num_streams, after.num_streams)
        excess = max(0, holds.state.inventory.num_requests_held - num_streams)
        self.excess = excess if self.excess is None else min(self.excess, excess)
        if num_streams:
            return
        counts = held(holds)
        if self.num_idle:
            counts = {name: min(count, counts[name]) for name, count in self.leaked.items() if name in counts}
        self.leaked, self.num_idle = counts, self.num_idle + 1


class Audit:
    """Looks at a deployment again and again."""

    def __init__(self, site: Site, watch_s: float) -> None:
        self._site = site
        self._watch_s = watch_s
        self._ledgers: dict[str, Ledger] = {}
        self._silent: set[str] = set()

    def steps(self) -> list[Step]:
        """Look, then judge."""
        return [
            Check(name="the router answers", look=self._answers, next="see `baton doctor`"),
            Verification(name="inventories are read", look=self._watch),
            Verification(
                name="nothing is held without a stream",
                look=self._judge,
                next="quarantined blocks wait for a peer that may still write: see which worker is silent, and run "
                "`baton runbook hung-tp-group` for it; anything else goes with another incarnation: `baton runbook "
                "replace-prefill` or `replace-decode`, after `collect-diagnostics`",
            ),
            Verification(
                name="every worker was seen idle",
                look=self._complete,
                next="drain a busy worker (`baton runbook drain-node`) and run this again; for a silent one, "
                "`baton runbook partition-triage`",
            ),
        ]

    def _answers(self) -> str:
        status = self._site.status()
        return f"{len(status.workers)} workers, {status.num_requests_running} requests"

    def _watch(self) -> str:
        num_looks = int(self._watch_s / SAMPLE_S) + 1
        for index in range(num_looks):
            if index:
                self._site.pause(SAMPLE_S)
            self._look()
        return f"{num_looks} times in {self._watch_s:g} s"

    def _look(self) -> None:
        before = {worker.state.worker_id: worker for worker in self._site.status().workers}
        inventory = self._site.inventory()
        after = {worker.state.worker_id: worker for worker in self._site.status().workers}
        self._silent = {name for name, worker in after.items() if not worker.alive and not worker.draining}
        for name, worker in after.items():
            holds, epoch = inventory.get(name), worker.state.epoch
            if name not in before or holds is None or not holds.alive or not worker.alive:
                continue
            if {before[name].state.epoch, holds.state.epoch} != {epoch}:
                continue
            if name not in self._ledgers or self._ledgers[name].epoch != epoch:
                self._ledgers[name] = Ledger(epoch)
            self._ledgers[name].look(before[name], holds, worker)

    def _judge(self) -> str:
        found = self._site.found["workers"] = {
            name: {
                "leaked": ledger.leaked,
                "attends_without_stream": ledger.excess or 0,
                "num_idle_looks": ledger.num_idle,
            }
            for name, ledger in sorted(self._ledgers.items())
        }
        leaks = [
            f"{name} holds {format_held(facts['leaked'])}"
            for name, facts in found.items()
            if facts["leaked"] and facts["num_idle_looks"] >= MIN_IDLE_LOOKS
        ]
        leaks += [
            f"{name} attends to {facts['attends_without_stream']} that are no streams of the router"
            for name, facts in found.items()
            if facts["attends_without_stream"] and not facts["leaked"]
        ]
        if leaks:
            raise StepFailed(f"held for {self._watch_s:g} s without a stream: {'; '.join(leaks)}", leaks=leaks)
        return f"{len(found)} workers hold nothing without a stream"

    def _complete(self) -> str:
        busy = sorted(name for name, ledger in self._ledgers.items() if ledger.num_idle < MIN_IDLE_LOOKS)
        silent = self._site.found["silent"] = sorted(self._silent)
        if busy or silent:
            what = [f"{', '.join(busy)} never idle: only its streams were counted"] if busy else []
            what += [f"{', '.join(silent)} silent"] if silent else []
            raise partial("; ".join(what), busy=busy, silent=silent)
        return ", ".join(sorted(self._ledgers))


def _steps(site: Site, options: argparse.Namespace) -> Sequence[Step]:
    return Audit(site, options.watch).steps()


RUNBOOK = Runbook(name="kv-leak-audit", about=__doc__ or "", steps=_steps, options=_options, sends_canaries=False)

if __name__ == "__main__":
    sys.exit(main(RUNBOOK))
