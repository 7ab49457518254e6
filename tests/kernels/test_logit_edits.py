"""Edited rows: the kernel and its reference against the engine's bitmask, bias and penalties."""

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.engine.grammar.masks import apply_bitmask
from baton.engine.sampling.history import HistoryLookahead
from baton.engine.sampling.logit_edits import LogitBias, Penalties
from baton.kernels.implementation import Implementation
from baton.kernels.sampling import logit_edits_triton
from baton.kernels.sampling.logit_edits import Edits, edit_rows

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(logit_edits_triton, "CHUNK", 64)


def batch(num_drafts, vocab_size):
    generator = torch.Generator().manual_seed(num_drafts)
    logits_BQV = (torch.randn(4, num_drafts + 1, vocab_size, generator=generator) * 3).bfloat16()
    words = -(-vocab_size // 32)
    shape = (2, num_drafts + 1, words)
    return logits_BQV, Edits(
        sequence_P=torch.tensor([2, 0]),
        drafts_BK=torch.randint(0, 3, (4, num_drafts), generator=generator),
        bitmask_PQW=torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).int(),
        bias_ids_PW=torch.tensor([[1, 70, 0], [vocab_size - 1, 0, 0]]),
        bias_values_PW=torch.tensor([[2.5, -100, 0], [1, 0, 0]], dtype=torch.float64),
        penalties_P3=torch.tensor([[1.3, 0.5, 0.25], [0.8, -1, 0]], dtype=torch.float64),
        counts_NX=torch.randint(0, 3, (5, vocab_size), generator=generator).int(),
        in_prompt_NX=torch.rand(5, vocab_size, generator=generator) < 0.3,
        slot_P=torch.tensor([4, 1]),
    )


@pytest.mark.parametrize(("num_drafts", "vocab_size"), [(0, 100), (3, 150), (1, 71)])
def test_edited_rows_are_the_engines(num_drafts, vocab_size):
    logits_BQV, edits = batch(num_drafts, vocab_size)
    x_PQV = apply_bitmask(logits_BQV[edits.sequence_P].float(), edits.bitmask_PQW)
    ahead = HistoryLookahead.of_drafts(edits.drafts_BK).pick(edits.sequence_P)
    x_PQV = LogitBias(ids_PW=edits.bias_ids_PW, values_PW=edits.bias_values_PW).apply(x_PQV, ahead)
    penalties = Penalties(
        values_P3=edits.penalties_P3,
        counts_NX=edits.counts_NX,
        in_prompt_NX=edits.in_prompt_NX,
        slots_P=edits.slot_P,
    )
    wanted_EV = penalties.apply(x_PQV, ahead).flatten(0, 1)
    num_rows = num_drafts + 1
    wanted_R = torch.full((4, num_rows), -1)
    wanted_R[2], wanted_R[0] = torch.arange(num_rows), num_rows + torch.arange(num_rows)
    for implementation in (Implementation.TRITON, Implementation.REFERENCE):
        found = edit_rows(logits_BQV, edits, implementation=implementation)
        assert torch.allclose(found.logits_EV, wanted_EV, atol=1e-5, rtol=1e-6)
        assert found.place_R.tolist() == wanted_R.flatten().tolist()


def test_arguments_that_do_not_fit_are_named():
    logits_BQV, edits = batch(1, 71)
    fields = {name: getattr(edits, name) for name in Edits.__dataclass_fields__}
    for name, wrong in (
        ("bitmask_PQW", edits.bitmask_PQW[..., :1].contiguous()),
        ("sequence_P", edits.sequence_P[0]),
        ("bias_values_PW", None),
        ("bias_values_PW", edits.bias_values_PW[:, :2].contiguous()),
        ("bias_values_PW", torch.zeros(2, 4, dtype=torch.float64)),
        ("bias_ids_PW", None),
        ("counts_NX", edits.counts_NX[:, :9].contiguous()),
        ("slot_P", None),
        ("in_prompt_NX", edits.in_prompt_NX.int()),
    ):
        with pytest.raises(KernelArgumentInvalid, match=name):
            edit_rows(logits_BQV, Edits(**{**fields, name: wrong}), implementation=Implementation.TRITON)
