#!/usr/bin/env -S python3 -P
"""More or fewer prefill or decode workers, while requests run: added first, drained before one ends."""

import argparse
import sys
from collections.abc import Sequence

from baton.cluster.commands import operate
from baton.core.errors import ConfigInvalid
from baton.proto import admin_pb2
from baton.runbook.common import workers
from baton.runbook.common.canary import CanaryRuns
from baton.runbook.common.command import Runbook, count, count_or_none, main
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Action, Check, Step, Verification, require

Size = tuple[int, int]  # prefill workers, decode workers


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefill",
        type=count_or_none,
        help="prefill workers, 0: decode workers compute prompts  [as many as there are]",
    )
    parser.add_argument("--decode", type=count, help="decode workers  [as many as there are]")


def _steps(site: Site, options: argparse.Namespace) -> Sequence[Step]:
    if options.prefill is None and options.decode is None:
        raise ConfigInvalid("give --prefill or --decode")
    before = _size(site.status())
    wanted = (before[0] if options.prefill is None else options.prefill, options.decode or before[1])
    canaries = CanaryRuns(site)
    site.found |= {"before": before, "wanted": wanted}

    def ask(size: Size) -> str:
        operate.scale(site.address, *size)
        return _format(size)

    return [
        _check_settled(site, before),
        workers.expect(canaries),
        Action(
            name=f"ask for {_format(wanted)}",
            do=lambda: ask(wanted),
            undo=lambda: ask(before),
            is_done=lambda: _size(site.status()) == wanted,
        ),
        Verification(
            name=f"there are {_format(wanted)}",
            look=lambda: _wait(site, wanted),
            next="the size from before was asked for again; see the log of `baton serve`, which starts and ends "
            "workers: is there room for another?",
        ),
        Verification(
            name="each of them gives the tokens expected",
            look=lambda: canaries.reach(_serving(site.status())),
            next="the size from before was asked for again; run `baton runbook collect-diagnostics`",
        ),
    ]


def _serving(status: admin_pb2.StatusReply, role: str = "") -> list[str]:
    return [
        worker.state.worker_id
        for worker in status.workers
        if worker.alive and not worker.draining and role in ("", worker.state.role)
    ]


def _size(status: admin_pb2.StatusReply) -> Size:
    return len(_serving(status, "prefill")), len(_serving(status, "decode"))


def _format(size: Size) -> str:
    return f"{size[0]} prefill and {size[1]} decode workers"


def _check_settled(site: Site, before: Size) -> Check:
    """No earlier change of size is still under way, and no worker is out of routing."""

    def look() -> str:
        status = site.status()
        if status.HasField("scale"):
            asked = status.scale.num_prefill, status.scale.num_decode
            require(asked == before, f"{_format(asked)} were asked for, and there are {_format(before)}")
        draining = [worker.state.worker_id for worker in status.workers if worker.alive and worker.draining]
        require(not draining, f"{', '.join(draining)} out of routing")
        return _format(before)

    return Check(
        name="the deployment has the size that was asked for last",
        look=look,
        next="wait, or put workers back with `baton runbook drain-node --undo`; a worker that died for good is not "
        "started again",
    )


def _wait(site: Site, wanted: Size) -> str:
    def look() -> list[str] | None:
        status = site.status()
        is_settled = not any(worker.alive and worker.draining for worker in status.workers)
        return _serving(status) if _size(status) == wanted and is_settled else None

    return ", ".join(site.wait(look, _format(wanted)))


RUNBOOK = Runbook(name="scale", about=__doc__ or "", steps=_steps, options=_options, timeout_s=600.0)

if __name__ == "__main__":
    sys.exit(main(RUNBOOK))
