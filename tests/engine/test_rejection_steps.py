"""Many sequences through several steps with the real counters: what one step leaves over must not bias the next.

Each sequence has its own seed, so a million of them are a million independent generations; the law of their first
tokens is compared with the target's by chi-square.
"""

import itertools

import pytest
import torch

from baton.engine.sampling.sampler import SamplingRows
from baton.engine.speculation import drafting, rejection
from baton.engine.speculation.drafting import DraftSource
from baton.engine.speculation.verify import DraftIds, DraftLaw, DraftProbs, VerifyInputs
from baton.kernels.sampling.noise import Purpose, uniform
from baton.model.vocab import WHOLE
from baton.tests.engine import rejection_reference as reference

VOCAB = 3
LENGTH = 3
FIRST = 4  # position of the first token


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def table(law, length):
    """The law after every prefix of a length, [VOCAB] * length + [VOCAB]."""
    values = torch.full((*[VOCAB] * length, VOCAB), 0.0, dtype=torch.float64)
    for prefix in itertools.product(range(VOCAB), repeat=length):
        values[prefix] = torch.tensor(law(prefix), dtype=torch.float64)
    return values


class Generation:
    """Sequences over one world, all of the same prompt, which is empty."""

    def __init__(self, num_sequences, num_drafts, *, block, is_point=False, seed=0, changes=False):
        self.world = reference.World(VOCAB, "steps2", zeros=0.0)
        depth = LENGTH + num_drafts + 1
        self.p = [table(self.world.p, length) for length in range(depth)]
        self.q = [table(self.world.q, length) for length in range(depth)]
        self.num_drafts = num_drafts
        self.changes = changes  # fewer drafts in some steps, depending on what was emitted before
        self.verifier = rejection.RejectionVerifier(is_probabilistic=not is_point, block=block)
        self.tokens = torch.zeros(num_sequences, depth + num_drafts, dtype=torch.int64)
        self.length = torch.zeros(num_sequences, dtype=torch.int64)
        self.seeds = torch.arange(num_sequences) * 7919 + seed

    def run(self):
        while True:
            for length in range(LENGTH):
                rows = (self.length == length).nonzero()[:, 0]
                if not self.changes:
                    self.step(rows, length, self.num_drafts)
                    continue
                last = self.tokens[rows, length - 1] if length else rows % VOCAB
                for num_drafts in range(self.num_drafts + 1):
                    self.step(rows[last % (self.num_drafts + 1) == num_drafts], length, num_drafts)
            if (self.length >= LENGTH).all():
                return self.tokens[:, :LENGTH]

    def step(self, rows, length, num_drafts):
        """All `rows` have `length` tokens."""
        num_rows = len(rows)
        if not num_rows:
            return
        position = torch.full((num_rows,), FIRST + length)
        sampling = SamplingRows(
            index_S=torch.arange(num_rows),
            temperature_S=torch.ones(num_rows, dtype=torch.float64),
            top_k_S=torch.zeros(num_rows, dtype=torch.int64),
            top_p_S=torch.ones(num_rows, dtype=torch.float64),
            seed_S=self.seeds[rows],
            choice_S=torch.zeros(num_rows, dtype=torch.int64),
            truncated_U=None,
        )
        source = DraftSource.of_step(self.verifier.draft_law, sampling, position, num_drafts, _Model())
        prefix = self.tokens[rows]
        p_rows, q_rows = [], []
        for place in range(num_drafts + 1):
            at = tuple(prefix[:, column] for column in range(length + place))
            p_rows.append(self.p[length + place][at].expand(num_rows, VOCAB))
            if place < num_drafts:
                drafted = source.draft(_Model(), self.q[length + place][at].expand(num_rows, VOCAB).log(), place)
                prefix[:, length + place] = drafted.token_B
                q_rows.append(drafted.probs_SC)
        probs = None
        if self.verifier.draft_law is DraftLaw.SAMPLED and num_drafts:
            probs = DraftProbs(torch.stack(q_rows, dim=1), None)
        verified = self.verifier.verify(
            VerifyInputs(
                drafts=DraftIds(prefix[:, length : length + num_drafts]),
                draft_probs=probs,
                target_logits_BQV=torch.stack(p_rows, dim=1).log(),
                sampling=sampling,
                position_B=position,
                draft_cap_B=torch.full((num_rows,), num_drafts),
            )
        )
        self.tokens[rows, length : length + num_drafts + 1] = verified.token_ids_BQ
        self.length[rows] = length + verified.accepted_len_B + 1

    def chi_square(self):
        wanted = reference.target_law(self.world, LENGTH)
        weights = torch.tensor([VOCAB**place for place in reversed(range(LENGTH))])
        seen = torch.bincount((self.run() * weights).sum(dim=1), minlength=VOCAB**LENGTH)
        expected = torch.tensor([wanted[tokens] for tokens in itertools.product(range(VOCAB), repeat=LENGTH)])
        expected = expected.double() * len(self.tokens)
        return float(((seen - expected) ** 2 / expected).sum())


class _Model:
    """Hidden states are the draft's logits."""

    d2t_C = draft_columns_C = None
    vocab = WHOLE
    sampling_implementation = None
    dtype = torch.float64

    def draft_logits(self, hidden):
        return hidden

    def draft_to_target(self, ids):
        return ids.columns


QUANTILE = 54.05  # 99.9 % of chi-square with 26 degrees of freedom; the seeds are fixed, so the test cannot flicker
NUM_SEQUENCES = 60_000


@pytest.mark.parametrize(("is_point", "block"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("num_drafts", [1, 2])
def test_several_steps_keep_the_law(num_drafts, is_point, block):
    assert Generation(NUM_SEQUENCES, num_drafts, is_point=is_point, block=block).chi_square() < QUANTILE


@pytest.mark.parametrize(("is_point", "block"), [(True, False), (False, True)])
def test_steps_with_changing_numbers_of_drafts_keep_the_law(is_point, block):
    assert Generation(NUM_SEQUENCES, 2, is_point=is_point, block=block, changes=True).chi_square() < QUANTILE


def by_own_position(seed, choice, position, purpose, num_draws):
    """Each number keyed by the position of the draft it is for: the obvious way, and wrong for blocks."""
    places = [uniform(seed, choice, position + place, purpose, 1) for place in range(num_draws)]
    return torch.cat(places, dim=1) if places else uniform(seed, choice, position, purpose, 0)


def one_purpose(seed, choice, position, purpose, num_draws):
    return uniform(seed, choice, position, Purpose.ACCEPT, num_draws)


def one_for_all_drafts(seed, choice, position, purpose, num_draws):
    return uniform(seed, choice, position, purpose, 1).expand(-1, num_draws)


def off_by_one(seed, choice, position, purpose, num_draws):
    """The residual takes the number before it, which decided the last draft."""
    if purpose is Purpose.RESIDUAL:
        return uniform(seed, choice, position, Purpose.ACCEPT, 8)[:, 1:2]
    return uniform(seed, choice, position, purpose, num_draws)


@pytest.mark.parametrize(
    ("wrong", "block"),
    [(by_own_position, True), (one_purpose, False), (one_for_all_drafts, False), (off_by_one, False)],
)
def test_numbers_that_are_used_twice_are_caught(wrong, block, monkeypatch):
    monkeypatch.setattr(rejection, "uniform", wrong)
    monkeypatch.setattr(drafting, "uniform", wrong)
    statistic = Generation(NUM_SEQUENCES, 2, block=block).chi_square()
    print(f"{wrong.__name__}: chi-square {statistic:.0f}")
    assert statistic > 2 * QUANTILE


def test_the_likeliest_drafts_told_as_drawn_are_caught(monkeypatch):
    def likeliest(weights_SV, uniform_S):
        return weights_SV.argmax(dim=-1)

    monkeypatch.setattr(drafting, "pick", likeliest)
    assert Generation(NUM_SEQUENCES, 1, block=False).chi_square() > 10 * QUANTILE


# --- a wide vocabulary ------------------------------------------------------------------------------------------------

WIDE = 4096


def wide_chi_square(num_draws, *, is_point, block, num_rows=400):
    """(statistic, degrees of freedom) of the first token of one step with two drafts."""
    generator = torch.Generator().manual_seed(5)
    p_QV = (torch.randn(3, WIDE, generator=generator, dtype=torch.float64) * 1.5).softmax(-1)
    q_KV = (p_QV[:2].log() + torch.randn(2, WIDE, generator=generator, dtype=torch.float64)).softmax(-1)
    counts = torch.zeros(WIDE, dtype=torch.int64)
    zeros_S = torch.zeros(num_rows, dtype=torch.int64)
    for first in range(0, num_draws, num_rows):
        seeds_S = torch.arange(first, first + num_rows)
        if is_point:
            ids_SK, probs = q_KV.argmax(-1).expand(num_rows, -1), None
        else:
            u_SK = uniform(seeds_S, zeros_S, zeros_S, Purpose.DRAFT, 2)
            cumulative_KV = q_KV.cumsum(-1)
            ids_SK = torch.stack(
                [torch.searchsorted(cumulative_KV[at], u_SK[:, at].contiguous(), right=True) for at in (0, 1)], 1
            )
            probs = DraftProbs(q_KV.expand(num_rows, -1, -1), None)
        verified = rejection.reject(
            rejection.Proposals(DraftIds(ids_SK.clamp(max=WIDE - 1)), probs, zeros_S + 2, WIDE),
            p_QV.expand(num_rows, -1, -1),
            uniform(seeds_S, zeros_S, zeros_S, Purpose.ACCEPT, 2),
            uniform(seeds_S, zeros_S, zeros_S, Purpose.RESIDUAL, 1)[:, 0],
            block=block,
        )
        counts += torch.bincount(verified.token_ids_BQ[:, 0], minlength=WIDE)
    order_V = p_QV[0].argsort(descending=True)
    expected_V, seen_V = p_QV[0][order_V] * num_draws, counts[order_V].double()
    is_large_V = expected_V >= 5
    expected = torch.cat([expected_V[is_large_V], expected_V[~is_large_V].sum()[None]])
    seen = torch.cat([seen_V[is_large_V], seen_V[~is_large_V].sum()[None]])
    keep = expected > 0
    return float(((seen - expected) ** 2 / expected)[keep].sum()), int(keep.sum()) - 1


def quantile(freedom):
    """About the 99.9 % quantile of chi-square (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.0902 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize(("is_point", "block"), [(True, False), (False, False), (False, True)])
def test_chi_square_of_a_wide_vocabulary(is_point, block):
    statistic, freedom = wide_chi_square(20_000, is_point=is_point, block=block)
    assert statistic < quantile(freedom)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("is_point", "block"), [(True, False), (False, False), (False, True)])
def test_chi_square_of_a_million_draws(is_point, block):
    statistic, freedom = wide_chi_square(1_000_000, is_point=is_point, block=block)
    print(f"chi-square {statistic:.0f} at {freedom} degrees of freedom")
    assert statistic < quantile(freedom)


def test_a_wide_bias_is_caught(monkeypatch):
    def no_residual(p_SV, q_SV, reach_S):
        return p_SV

    monkeypatch.setattr(rejection, "residual_weights", no_residual)
    statistic, freedom = wide_chi_square(20_000, is_point=False, block=False)
    assert statistic > 2 * quantile(freedom)
