"""Decisions where nothing waits for the host: as on a GPU, with the kernels in Triton's interpreter."""

import pytest
import torch

import baton.tests.kernels.interpreter  # noqa: F401  (repairs it)
from baton.core.errors import WorkerLost
from baton.engine.tp.decision import Decisions
from baton.kernels.sampling.decision_reference import DIVERGED, message_number, pack_reference
from baton.model.parallel import Alone

pytestmark = pytest.mark.fast


class Told(Alone):
    """Rank 1 of two, whom rank 0 tells what it has decided, in place."""

    rank = 1
    size = 2

    def __init__(self, decided_N):
        super().__init__()
        self._decided_N = decided_N

    def broadcast(self, values):
        return values.copy_(self._decided_N)


def agree(values, state, others, others_state, number=1):
    decisions = Decisions(Told(pack_reference(others, others_state, number)))
    return decisions, decisions._agree_on_gpu(values, state, message_number(1))


def test_ranks_that_decide_alike_get_their_values():
    values, state = torch.tensor([[3, 4], [5, 6]]), [torch.tensor([1, 2]), torch.tensor([[8], [9]])]
    decisions, decided = agree(values, state, values.clone(), state)
    assert torch.equal(decided, values)
    assert decisions.check(decided.flatten().tolist()) == [3, 4, 5, 6]


@pytest.mark.parametrize("what", ["values", "state", "number"])
def test_a_rank_that_diverged_finds_no_value(what):
    values, state = torch.tensor([[3, 4], [5, 6]]), [torch.tensor([1, 2]), torch.tensor([[8], [9]])]
    others = values + (what == "values")
    others_state = [state[0].flip(0), state[1]] if what == "state" else state
    decisions, decided = agree(values, state, others, others_state, 2 if what == "number" else 1)
    assert decided.tolist() == [[DIVERGED] * 2] * 2
    with pytest.raises(WorkerLost, match="rank 1 of 2 diverged"):
        decisions.check(decided.flatten().tolist())


def test_a_cpu_needs_no_kernels(monkeypatch):
    monkeypatch.setattr(Decisions, "_agree_on_gpu", None)
    values = torch.tensor([3, 4])
    told = Told(pack_reference(values, [values], 1))
    assert Decisions(told, torch.device("cpu")).agree(values, [values]) is values
