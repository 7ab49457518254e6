"""What ranks on GPUs do in tests of graphs. Importable by the processes."""

from pathlib import Path

import torch

from baton.core.numerics import Numerics
from baton.engine.graphs.backend import CallBackend, CudaBackend
from baton.engine.graphs.graphed_step import GraphedStep
from baton.engine.graphs.key import GraphSizes
from baton.engine.tp.rank_runners import Rank0Runner, RankRunner
from baton.tests.engine import test_dealt_passes as dealt
from baton.tests.engine.driver import Driver
from baton.tests.engine.test_tp_group import generate, load, runner_of


class OneRankFails(CudaBackend):
    """Captures every second graph at one rank only."""

    def __init__(self, device, group, what):
        super().__init__(device, group)
        self._is_failing, self._what, self._number = group.rank == 1, what, 0

    def require(self, num_bytes):
        super().require(num_bytes)
        self._number += 1
        self._fail("require")

    def capture(self, pieces):
        def fail():
            self._fail("capture")

        return super().capture([*pieces, fail])[: len(pieces)]

    def _fail(self, what):
        if self._is_failing and what == self._what and self._number % 2:
            raise RuntimeError("not at this rank")


def use_graphs(channel, device, path, what):
    group, k = channel.communicator, 2
    model = load(path, group, torch.float32, Numerics.INVARIANT, device)
    runner = runner_of(model, k, group)
    backend = CudaBackend(device, group) if what is None else OneRankFails(device, group, what)
    sizes = GraphSizes(sizes=(2, 3), widths=(4, 32), num_draft_tokens=k, max_entries=1 << 20, rows=(16, 40))
    step = GraphedStep(model, runner._pool, sizes, backend, group)
    step.capture()
    runner.graphs = step
    tokens = None
    if group.rank == 0:
        lead = Rank0Runner(runner, channel)
        tokens = generate(lead, k, "coupled")
        lead.close()
    else:
        RankRunner(runner, channel).run()
    counts = step.counts
    return tokens, counts.num_captured, counts.failed, counts.num_steps_replayed, sum(counts.num_steps_eager.values())


BACKENDS = {
    "launched": lambda device, group: None,
    "called": lambda device, group: CallBackend(),
    "captured": CudaBackend,
}


def play_dealt(channel, device, path, dtype, numerics, how):
    """Tokens of steps whose sequences are dealt to ranks, at rank 0; and what became of graphs, if there are any."""
    group = channel.communicator
    runner, pool = dealt.runner_of(
        Path(path), group, dtype=dtype, numerics=numerics, device=device, block_size=16,
        backend=BACKENDS[how](device, group),
    )  # fmt: skip
    tokens = None
    if group.rank == 0:
        lead = Rank0Runner(runner, channel)
        tokens, _ = dealt.play(Driver(lead, pool), dealt.OWNERS[group.size])
        lead.close()
    else:
        RankRunner(runner, channel).run()
    counts = runner.graphs and runner.graphs.counts
    return tokens, counts and (counts.num_steps_replayed, sum(counts.num_steps_eager.values()), counts.failed)
