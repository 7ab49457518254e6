#!/usr/bin/env -S python3 -P
"""Which workers reach which: try every pair, take those out of routing that none reaches, say what is left to do."""

import argparse
import socket
import sys
from collections.abc import Sequence

from baton.cluster.doctor.wires import paths
from baton.core.errors import StepFailed
from baton.proto import admin_pb2
from baton.runbook.common.canary import CanaryRuns
from baton.runbook.common.command import Runbook, count, main
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Action, Check, Step, Verification, partial, require

CONNECT_S = 1.0
ROUNDS_PER_PAIR = 2

Edge = tuple[str, str]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=count, default=ROUNDS_PER_PAIR, help="canary rounds for each pair  [2]")


class Triage:
    """The edges between prefill and decode workers."""

    def __init__(self, site: Site, options: argparse.Namespace) -> None:
        self._site = site
        self._num_rounds = options.rounds
        self._canaries = CanaryRuns(site)
        self._edges: dict[Edge, str] = {}
        self._cut_off: list[str] = []
        self._drained: list[str] = []

    def steps(self) -> list[Step]:
        """Look, try, isolate, try again, say what remains."""
        return [
            Check(name="every role has a worker that is heard", look=self._roles, next="see `baton status`"),
            Check(name="every pair is tried", look=self._try_pairs),
            Action(
                name="take workers out of routing that no pair works with",
                do=self._isolate,
                undo=self._undo,
                is_done=lambda: not self._cut_off,
            ),
            Verification(
                name="canaries are answered, with the same tokens",
                look=self._answered,
                next="all are routed to as before; give the pairs that do not work to the network's operators",
            ),
            Verification(
                name="every pair works",
                look=self._all_work,
                next="what is named is out of routing or not paired; for a silent worker whose port answers run "
                "`baton runbook hung-tp-group` on its node; mend the network for the others, then `baton runbook "
                "drain-node --undo`",
            ),
        ]

    def _live(self, status: admin_pb2.StatusReply) -> dict[str, str]:
        return {
            worker.state.worker_id: worker.state.role
            for worker in status.workers
            if worker.alive and not worker.draining
        }

    def _roles(self) -> str:
        roles = list(self._live(self._site.status()).values())
        for role in ("prefill", "decode"):
            require(role in roles, f"no {role} worker is heard and takes requests", role=role)
        return f"{roles.count('prefill')} prefill, {roles.count('decode')} decode"

    def _try_pairs(self) -> str:
        roles = list(self._live(self._site.status()).values())
        num_pairs = roles.count("prefill") * roles.count("decode")
        failed: list[str] = []
        for _ in range(num_pairs * self._num_rounds):
            try:
                self._canaries.round()
            except StepFailed as error:
                failed.append(error.message)
        self._look()
        bad = [f"{' to '.join(edge)}: {why}" for edge, why in sorted(self._edges.items()) if why]
        self._site.found["failed_canaries"] = failed
        return f"{len(self._edges) - len(bad)} of {len(self._edges)} pairs work" + "".join(f"; {text}" for text in bad)

    def _look(self) -> None:
        """The matrix, and who has no edge that works."""
        status = self._site.status()
        live = self._live(status)
        refused = {(pair.prefill_worker, pair.decode_worker): pair.reason for pair in status.refused_pairs}
        self._edges = {
            (path.prefill, path.decode): refused.get((path.prefill, path.decode))
            or (path.why if path.is_broken else "")
            for path in paths(status)
            if path.prefill in live and path.decode in live
        }
        works = {name for edge, why in self._edges.items() if not why for name in edge}
        self._cut_off = sorted(live.keys() - works) if works else []
        silent = {
            worker.state.worker_id: _port_state(worker.state.address)
            for worker in status.workers
            if not worker.alive and not worker.draining
        }
        self._site.found |= {
            "edges": [{"prefill": edge[0], "decode": edge[1], "why": why} for edge, why in sorted(self._edges.items())],
            "cut_off": self._cut_off,
            "silent": silent,
        }

    def _isolate(self) -> str:
        self._drained = list(self._cut_off)
        return "; ".join(self._site.drain(name) for name in self._drained)

    def _undo(self) -> str:
        return "; ".join(self._site.drain(name, undo=True) for name in self._drained)

    def _answered(self) -> str:
        answers = self._canaries.round()
        return f"{len(answers)} canaries, served by {', '.join(sorted({name for a in answers for name in a.workers}))}"

    def _all_work(self) -> str:
        self._look()
        silent = self._site.found["silent"]
        left = [f"{name} is silent, and {state}" for name, state in silent.items()]
        left += [f"{name} is out of routing" for name in self._drained]
        left += [f"{' to '.join(edge)}: {why}" for edge, why in sorted(self._edges.items()) if why]
        if left:
            raise partial("; ".join(left), left=left)
        return f"{len(self._edges)} pairs, and no worker is silent"


def _port_state(address: str) -> str:
    """What a connection from here says of a worker that the router does not hear."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
            return "its port answers here: it hangs, or the router cannot be reached from it"
    except ConnectionRefusedError:
        return "its port is closed: the process is gone"
    except OSError as error:
        return f"its port does not answer here ({error}): its node or the network is down"


def _steps(site: Site, options: argparse.Namespace) -> Sequence[Step]:
    return Triage(site, options).steps()


RUNBOOK = Runbook(name="partition-triage", about=__doc__ or "", steps=_steps, options=_options)

if __name__ == "__main__":
    sys.exit(main(RUNBOOK))
