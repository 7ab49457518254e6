"""The whole engine at every rank of a vocabulary that is cut: the tokens, lengths and logprobs of one process.

Ranks are threads, each with an engine of its own over the toy model; what they share is what crosses between them. All
plan alike, for no plan depends on time: the clock stands still, and each step ends before the next is planned.
"""

import itertools

import pytest
import torch

from baton.core.clock import VirtualClock
from baton.core.verification import DraftSampleMethod, VerificationConfig, VerificationMode
from baton.tests.engine.test_sampling_parameters import KINDS
from baton.tests.engine.toy import ToyModel
from baton.tests.engine.toy_engine import request_of, toy_engine
from baton.tests.model.together import part_of, together

VOCAB_SIZE = 24
PRUNED = [0, 1, 2, 3, 5, 8, 13, 21]
REJECTION = VerificationMode.REJECTION
MODES = {
    "coupled": None,
    "block": VerificationConfig(mode=REJECTION),
    "token": VerificationConfig(mode=REJECTION, block=False),
    "point": VerificationConfig(mode=REJECTION, draft_sample_method=DraftSampleMethod.GREEDY),
    "synthetic": VerificationConfig.synthetic(0.9, 0.6, 0.3),
    "force": VerificationConfig.force(2),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class CutToyModel(ToyModel):
    """One rank's: the logits of its tokens alone."""

    def __init__(self, vocab, **options):
        super().__init__(**options)
        self.vocab = vocab
        if self.d2t_C is not None:
            self.is_own_C = (self.d2t_C >= vocab.first) & (self.d2t_C < vocab.first + vocab.num_ids)
            self.draft_columns_C = self.d2t_C[self.is_own_C] - vocab.first

    def logits(self, hidden_ND):
        return part_of(super().logits(hidden_ND), self.vocab)

    def draft_logits(self, hidden_ND):
        if self.d2t_C is None:
            return self.logits(hidden_ND)
        return super().logits(hidden_ND)[:, self.d2t_C][:, self.is_own_C]


def requests_of(k, temperatures):
    """Every kind of parameter, with prompt logprobs and several answers among them; keys count up, so made once."""
    requests = []
    for at, (temperature, (kind, values)) in enumerate(itertools.product(temperatures, KINDS.items())):
        asked = {"max_tokens": 13, "ignore_eos": True, "seed": at, "temperature": temperature, "logprobs": at % 3}
        if kind == "plain":
            asked |= {"prompt_logprobs": 2, "n": 2}
        requests.append(request_of([5, 6, 7 + at % 3], k=k, **(asked | values)))
    requests.append(request_of([1, 2], k=k, max_tokens=13, ignore_eos=True, temperature=1.3, top_k=6, seed=1))
    requests.append(request_of([1, 2], k=k, max_tokens=13, ignore_eos=True, temperature=1.3, top_p=0.7, seed=1))
    return requests


def generate(model, requests, k, verification):
    engine = toy_engine(
        model,
        k=k,
        num_blocks=300,
        max_num_sequences=9,
        scheduling="sync",
        verification=verification,
        clock=VirtualClock(),
    )
    step = engine.step
    engine.step = lambda: (engine.runner.drain(), step())
    return [
        (result.token_ids, result.counts, numbers_of(result.logprobs), numbers_of(result.prompt_logprobs))
        for result in engine.generate(requests)
    ]


def numbers_of(reports):
    """(tokens and ranks, log-probabilities) of what a request reports."""
    exact = [(one.token_id, one.rank, [token for token, _ in one.top]) for one in reports or ()]
    return exact, [number for one in reports or () for number in (one.logprob, *(chance for _, chance in one.top))]


def check(size, k, mode, temperatures, d2t=None, **options):
    requests = requests_of(k, temperatures)
    wanted = generate(ToyModel(d2t=d2t, **options), requests, k, MODES[mode])

    def work(vocab):
        return generate(CutToyModel(vocab, d2t=d2t, **options), requests, k, MODES[mode])

    results, _ = together(size, VOCAB_SIZE, work)
    for result in results:
        for got, want in zip(result, wanted, strict=True):
            assert got[:2] == want[:2]
            for (exact, numbers), (wanted_exact, wanted_numbers) in zip(got[2:], want[2:], strict=True):
                assert exact == wanted_exact
                assert numbers == pytest.approx(wanted_numbers, abs=1e-12)
    return wanted


@pytest.mark.parametrize("k", [0, 2])
def test_two_ranks(k):
    check(2, k, "coupled", (0.0, 1.0))


@pytest.mark.parametrize("d2t", [None, PRUNED], ids=["whole", "pruned"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.slow), 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5, 8))]
)
def test_every_mode_and_number_of_ranks(size, mode, d2t):
    check(size, 3, mode, (0.9,), d2t)


@pytest.mark.parametrize(("mode", "d2t"), [("token", PRUNED), ("coupled", None)])
def test_five_ranks_of_which_the_last_has_fewer_tokens(mode, d2t):
    check(5, 3, mode, (0.9,), d2t)


def test_drafts_stand_as_often():
    """A head that is often right: accepted lengths of all kinds are among those that were compared."""
    wanted = check(4, 2, "coupled", (1.0,), sharpness=6.0, surprise=0.3)
    accepted = sum(counts.num_accepted_tokens for _, counts, _, _ in wanted)
    drafted = sum(counts.num_draft_tokens for _, counts, _, _ in wanted)
    assert 0.2 * drafted < accepted < 0.95 * drafted
