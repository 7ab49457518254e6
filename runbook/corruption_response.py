#!/usr/bin/env -S python3 -P
"""KV arrived that was not what was sent: find the worker it has to do with, take it out of routing, test the others."""

import argparse
import sys
from collections.abc import Sequence

from baton.core.errors import StepFailed
from baton.proto import worker_pb2
from baton.runbook.common import workers
from baton.runbook.common.canary import CanaryRuns
from baton.runbook.common.command import Runbook, count, main
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Action, Check, Step, Verification, require

Counts = dict[str, worker_pb2.TransferCounts]

MIN_FRAMES = 10  # a worker with fewer has not been tried


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tolerate", type=int, default=0, help="corrupt frames that are let pass  [0]")
    parser.add_argument("--rounds", type=count, default=4, help="canary rounds before and after  [4]")


class Response:
    """Whose frames are corrupt, and what is done about it."""

    def __init__(self, site: Site, options: argparse.Namespace) -> None:
        self._site, self._options = site, options
        self._canaries = CanaryRuns(site)
        self._suspects: list[str] = []
        self._new: list[str] = []  # of them, those taken out of routing here

    def steps(self) -> list[Step]:
        """Find, isolate, test."""
        return [
            Check(
                name="canaries are answered", look=self._provoke, next="see `baton status` and `baton doctor --address`"
            ),
            Check(
                name="corrupt frames point at a worker that others can do without",
                look=self._find,
                next="start another worker of the role first, or replace the suspects one by one with `baton runbook "
                "replace-decode` and `replace-prefill`; what was corrupt was pushed again, and no token came from it",
            ),
            Action(
                name="take the suspects out of routing",
                do=self._isolate,
                undo=self._undo,
                is_done=lambda: not self._new,
            ),
            Verification(name="the suspects are idle", look=self._idle, next="they were put back; give more --timeout"),
            Verification(
                name="others get no corrupt frame, and give the tokens expected",
                look=self._test,
                next="the suspects were put back: it is another worker, or what all share; run `baton runbook "
                "collect-diagnostics`",
            ),
        ]

    def _provoke(self) -> str:
        num = sum(len(self._canaries.round()) for _ in range(self._options.rounds))
        self._site.pause(1.0)  # counts come with heartbeats
        return f"{num} with the same tokens"

    def _find(self) -> str:
        live = [worker for worker in self._site.status().workers if worker.alive]
        decode = {w.state.worker_id: w.state.inventory.transfer for w in live if w.state.role == "decode"}
        prefill = {w.state.worker_id: w.state.inventory.transfer for w in live if w.state.role == "prefill"}
        corrupt = {name: counts.corrupt for name, counts in decode.items() if counts.corrupt > self._options.tolerate}
        self._site.found |= {
            "corrupt_frames": {name: counts.corrupt for name, counts in decode.items()},
            "resent_frames": {name: counts.resent for name, counts in prefill.items()},
        }
        self._suspects = _suspects(corrupt, decode, prefill)
        self._site.found["suspects"] = self._suspects
        if not corrupt:
            return "no corrupt frame in the present incarnations of the decode workers"
        facts = ", ".join(f"{name} {count}" for name, count in corrupt.items())
        require(bool(self._suspects), f"corrupt frames at every worker, with nothing to tell whose they are: {facts}")
        drained = {worker.state.worker_id for worker in live if worker.draining}
        self._new = [name for name in self._suspects if name not in drained]
        if self._new:
            workers.check_others(self._site, self._new).look()
        return f"corrupt frames: {facts}; suspected: {', '.join(self._suspects)}"

    def _isolate(self) -> str:
        return "; ".join(self._site.drain(name) for name in self._new)

    def _undo(self) -> str:
        return "; ".join(self._site.drain(name, undo=True) for name in self._new)

    def _idle(self) -> str:
        for name in self._suspects:
            workers.idle(self._site, name).look()
        return ", ".join(self._suspects) or "there are none"

    def _test(self) -> str:
        before = self._counts()
        num = sum(len(self._canaries.round()) for _ in range(self._options.rounds))
        self._site.pause(1.0)
        grown = [name for (name, epoch), count in self._counts().items() if count > before.get((name, epoch), 0)]
        if grown:
            raise StepFailed(f"corrupt frames again, at {', '.join(grown)}", workers=grown)
        if self._suspects:
            self._site.found["next"] = (
                f"look at the memory and the network of {', '.join(self._suspects)}, then replace and undrain"
            )
        return f"{num} canaries"

    def _counts(self) -> dict[tuple[str, int], int]:
        return {
            (worker.state.worker_id, worker.state.epoch): worker.state.inventory.transfer.corrupt
            for worker in self._site.status().workers
            if worker.alive and worker.state.role == "decode"
        }


def _suspects(corrupt: dict[str, int], decode: Counts, prefill: Counts) -> list[str]:
    """Workers of one side, where the counts tell which side it is.

    The decode workers with corrupt frames if others have none, else the prefill workers that had to push again if
    others had not.
    """
    clean = [name for name, counts in decode.items() if name not in corrupt and counts.frames >= MIN_FRAMES]
    if not corrupt or clean:
        return sorted(corrupt)
    resent = [name for name, counts in prefill.items() if counts.resent]
    if any(not counts.resent and counts.frames >= MIN_FRAMES for counts in prefill.values()):
        return sorted(resent)
    return []


def _steps(site: Site, options: argparse.Namespace) -> Sequence[Step]:
    return Response(site, options).steps()


RUNBOOK = Runbook(name="corruption-response", about=__doc__ or "", steps=_steps, options=_options)

if __name__ == "__main__":
    sys.exit(main(RUNBOOK))
