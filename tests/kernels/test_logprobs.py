"""Log-probabilities without sorting: the kernels and their reference against the engine's."""

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.engine.sampling.logprobs import logprobs_of
from baton.kernels.implementation import Implementation
from baton.kernels.sampling import logprobs_triton
from baton.kernels.sampling.logprobs import logprobs_topk
from baton.tests.kernels.harness import strided

TRITON, REFERENCE = Implementation.TRITON, Implementation.REFERENCE
pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    for name, value in (("CHUNK", 64), ("GROUP", 4), ("REREAD", 16), ("LISTED", 32)):
        monkeypatch.setattr(logprobs_triton, name, value)


@pytest.mark.long
@pytest.mark.parametrize(("vocab_size", "num_top"), [(200, 5), (64, 0), (3, 20), (1, 1), (130, 20)])
def test_a_report_is_the_engines(vocab_size, num_top):
    generator = torch.Generator().manual_seed(vocab_size)
    logits_NV = (torch.randn(4, vocab_size, generator=generator) * 3).bfloat16()
    logits_NV[1] = logits_NV[1].round()  # equals
    logits_NV[2, : vocab_size // 2] = -torch.inf
    token_N = torch.randint(0, vocab_size, (4,), generator=generator)
    token_N[2] = 0  # may be one of no probability
    wanted_NX = logprobs_of(logits_NV.float(), token_N, num_top)
    for implementation in (TRITON, REFERENCE):
        found_NX = logprobs_topk(logits_NV, token_N, num_top, implementation=implementation)
        assert found_NX.shape == wanted_NX.shape
        num_ids = (wanted_NX.shape[1] - 1) // 2
        assert torch.equal(found_NX[:, num_ids:], wanted_NX[:, num_ids:])
        assert torch.allclose(found_NX[:, :num_ids], wanted_NX[:, :num_ids], atol=2e-6, rtol=1e-6)


def test_rows_may_be_strided_and_of_float32():
    logits_NV = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    token_N = torch.tensor([3, 99, 0], dtype=torch.int32)
    wanted_NX = logprobs_topk(logits_NV, token_N, 3, implementation=REFERENCE)
    found_NX = logprobs_topk(strided(logits_NV), token_N, 3, implementation=TRITON)
    assert torch.allclose(found_NX, wanted_NX, atol=2e-6)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # of numpy, that interprets; a GPU says nothing
@pytest.mark.parametrize("num_top", [0, 2, 20])
def test_what_is_no_number_is_reported_as_tokens_and_numbers(num_top):
    """A row that a model failed at ends no step: whoever reads its report makes whole numbers of ids and ranks."""
    nan, inf = torch.nan, torch.inf
    rows = [torch.full((100,), nan), torch.full((100,), -inf), torch.zeros(100), torch.arange(100.0), torch.zeros(100)]
    rows[2][3:], rows[3][::2], rows[4][5] = nan, nan, inf
    logits_NV, token_N = torch.stack(rows), torch.tensor([7, 7, 1, 98, 5])
    for implementation in (TRITON, REFERENCE):
        found_NX = logprobs_topk(logits_NV, token_N, num_top, implementation=implementation)
        assert found_NX.isfinite().all()
        ids_NX, rank_N = found_NX[:, num_top + 1 : -1], found_NX[:, -1]
        assert ids_NX[:, 0].tolist() == token_N.tolist()
        assert ((ids_NX >= 0) & (ids_NX < 100)).all()
        assert all(len(set(row[1:])) == num_top for row in ids_NX.tolist())
        assert ((rank_N >= 1) & (rank_N <= 100)).all()


def test_arguments_that_do_not_fit_are_named():
    logits_NV, token_N = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)
    for name, given in (
        ("logits_NV", (logits_NV.double(), token_N, 1)),
        ("token_ids_N", (logits_NV, token_N[:1], 1)),
        ("num_top", (logits_NV, token_N, 33)),
    ):
        with pytest.raises(KernelArgumentInvalid, match=name):
            logprobs_topk(*given, implementation=TRITON)
