#!/usr/bin/env -S python3 -P
"""Drafts are accepted too seldom: measure it by position, and make only as many drafts as are worth it, live."""

import argparse
import sys
from collections.abc import Sequence

from baton.cluster.admin import set_speculation
from baton.proto import admin_pb2, worker_pb2
from baton.runbook.common import workers
from baton.runbook.common.canary import CanaryRuns
from baton.runbook.common.command import Runbook, main, positive
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Action, Check, Step, Verification, require

MIN_ROWS = 20  # fewer drafts say nothing


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--min-acceptance", type=_share, default=0.3, help="a position below it is not drafted  [0.3]")
    parser.add_argument("--watch", type=positive, default=5.0, help="seconds to measure, with canaries  [5]")


def _share(text: str) -> float:
    value = positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is more than 1")
    return value


class Drafts:
    """How many drafts the decode workers make, and how many should be made."""

    def __init__(self, site: Site, canaries: CanaryRuns, options: argparse.Namespace) -> None:
        self._site, self._canaries, self._options = site, canaries, options
        self._modes: list[worker_pb2.Speculation] = []
        self._wanted: int | None = None

    def steps(self) -> list[Step]:
        """Measure, lower, compare."""
        return [
            Check(name="decode workers answer", look=self._look_at_modes, next="see `baton status`"),
            workers.expect(self._canaries),
            Check(
                name="acceptance can be measured",
                look=self._measure,
                next="give a longer --watch, or run this while there is traffic",
            ),
            Action(name="lower the number of drafts", do=self._lower, undo=self._restore, is_done=self._is_good),
            Verification(
                name="every decode worker makes that many",
                look=self._compare_modes,
                next="the number was put back; see `baton speculation`",
            ),
            Verification(
                name="tokens are the same",
                look=lambda: f"{len(self._canaries.round())} canaries with the tokens expected",
                next="the number was put back; run `baton runbook collect-diagnostics`: tokens must not depend on it",
            ),
        ]

    def _decoders(self) -> list[admin_pb2.WorkerStatus]:
        return [item for item in self._site.status().workers if item.alive and item.state.role == "decode"]

    def _look_at_modes(self) -> str:
        self._modes = [worker.state.speculation for worker in self._decoders()]
        require(bool(self._modes), "no decode worker is alive")
        kinds = {(mode.auto, mode.num_draft_tokens if not mode.auto else 0) for mode in self._modes}
        require(len(kinds) == 1, "decode workers make different numbers of drafts; `baton speculation K` sets one")
        return "auto" if self._modes[0].auto else f"{self._modes[0].num_draft_tokens} drafts a step"

    def _measure(self) -> str:
        if not self._modes[0].auto and self._modes[0].num_draft_tokens == 0:
            return "no drafts are made"
        before = self._sums()
        end_s = self._site.left_s - self._options.watch
        while True:
            self._canaries.round()
            if self._site.left_s <= end_s:
                break
        self._site.pause(1.0)  # counts come with heartbeats
        counts = [(now - then) for now, then in zip(self._sums(), before, strict=True)]
        proposed, accepted = counts[: len(counts) // 2], counts[len(counts) // 2 :]
        require(min(counts) >= 0, "a decode worker was started anew meanwhile")
        require(proposed[0] >= MIN_ROWS, f"only {proposed[0]} drafts were made in {self._options.watch:g} s")
        shares = [hit / num for hit, num in zip(accepted, proposed, strict=True) if num >= MIN_ROWS]
        self._site.found["acceptance_per_position"] = shares
        worth = 0
        while worth < len(shares) and shares[worth] >= self._options.min_acceptance:
            worth += 1
        self._wanted = worth if worth < len(shares) else None
        return f"accepted by position: {', '.join(f'{share:.2f}' for share in shares)}"

    def _sums(self) -> list[int]:
        """Drafts proposed at each position, then accepted at each, of all decode workers."""
        limit = max(mode.limit for mode in self._modes)
        sums = [0] * (2 * limit)
        for worker in self._decoders():
            kept = worker.state.inventory.steps.kept
            for offset, counts in ((0, kept.proposed_at), (limit, kept.accepted_at)):
                for index, count in enumerate(counts[:limit]):
                    sums[offset + index] += count
        return sums

    def _is_good(self) -> bool:
        return self._wanted is None

    def _lower(self) -> str:
        return self._set(self._wanted)

    def _restore(self) -> str:
        return self._set(None if self._modes[0].auto else self._modes[0].num_draft_tokens)

    def _set(self, number: int | None) -> str:
        reply = set_speculation(self._site.address, number)
        unheard = [worker.worker_id for worker in reply.workers if worker.error]
        text = "auto" if number is None else f"{number} drafts a step"
        return text + (f"; {', '.join(unheard)} will hear of it with a heartbeat" if unheard else "")

    def _compare_modes(self) -> str:
        wanted = self._wanted

        def look() -> bool | None:
            modes = [worker.state.speculation for worker in self._decoders()]
            good = all(not mode.auto and mode.num_draft_tokens == wanted for mode in modes)
            return True if good and modes else None

        if wanted is None:
            return "nothing was changed"
        self._site.wait(look, f"every decode worker with {wanted} drafts")
        return f"{wanted} drafts a step"


def _steps(site: Site, options: argparse.Namespace) -> Sequence[Step]:
    return Drafts(site, CanaryRuns(site), options).steps()


RUNBOOK = Runbook(name="acceptance-regression", about=__doc__ or "", steps=_steps, options=_options)

if __name__ == "__main__":
    sys.exit(main(RUNBOOK))
