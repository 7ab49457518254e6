import itertools

import pytest
import torch

from baton.core.requests.sampling import SamplingParams
from baton.engine.sampling.sampler import draw_noise, sampling_rows
from baton.engine.speculation.verify import DraftIds, TargetIds, accept, verify_coupled, verify_greedy
from baton.tests.engine import reference

pytestmark = pytest.mark.fast
CPU = torch.device("cpu")
VOCAB = 9


def brute_force(drafts, target, cap):
    accepted = 0
    while accepted < min(len(drafts), cap) and drafts[accepted] == target[accepted]:
        accepted += 1
    return target[: accepted + 1]


def emitted(verified):
    lens = verified.accepted_len_B.tolist()
    for row, accepted_len in enumerate(lens):
        assert verified.token_ids_BQ[row, accepted_len + 1 :].eq(0).all()
    return [verified.token_ids_BQ[row, : n + 1].tolist() for row, n in enumerate(lens)]


@pytest.mark.parametrize("num_drafts", [*range(5), 6])
def test_every_accept_pattern_and_cap(num_drafts):
    rows = list(itertools.product(itertools.product([False, True], repeat=num_drafts), range(num_drafts + 2)))
    generator = torch.Generator().manual_seed(num_drafts)
    target_BQ = torch.randint(0, VOCAB, (len(rows), num_drafts + 1), generator=generator)
    hits_BK = torch.tensor([hits for hits, _ in rows]).reshape(len(rows), num_drafts).bool()
    drafts_BK = torch.where(hits_BK, target_BQ[:, :-1], (target_BQ[:, :-1] + 1) % VOCAB)
    cap_B = torch.tensor([cap for _, cap in rows])
    verified = accept(DraftIds(drafts_BK), TargetIds(target_BQ), cap_B)
    expected = [
        brute_force(drafts, target, cap)
        for drafts, target, cap in zip(drafts_BK.tolist(), target_BQ.tolist(), cap_B.tolist(), strict=True)
    ]
    assert emitted(verified) == expected
    assert (verified.accepted_len_B <= cap_B).all()


@pytest.mark.parametrize("num_drafts", [*range(5), 6])
@pytest.mark.long
def test_greedy_and_coupled_against_reference(num_drafts):
    generator = torch.Generator().manual_seed(3)
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=5),
        SamplingParams(seed=6, top_k=3),
        SamplingParams(seed=7, temperature=0.4, top_p=0.9),
    ] * 40
    num_rows = len(params)
    logits_BQV = torch.randn(num_rows, num_drafts + 1, VOCAB, generator=generator, dtype=torch.float64) * 2
    position_B = torch.arange(num_rows) * 3 + 2
    drafts_BK = torch.randint(0, 3, (num_rows, num_drafts), generator=generator)
    cap_B = torch.full((num_rows,), num_drafts)
    rows = sampling_rows(params, CPU)
    noise = draw_noise(rows, position_B, num_drafts + 1, VOCAB, torch.float64)
    verified = verify_coupled(DraftIds(drafts_BK), logits_BQV, rows, noise, cap_B)
    expected = []
    for row in range(num_rows):
        target = [
            reference.choose(logits_BQV[row, at].tolist(), params[row], int(position_B[row]) + at)
            for at in range(num_drafts + 1)
        ]
        expected.append(brute_force(drafts_BK[row].tolist(), target, num_drafts))
    assert emitted(verified) == expected
    greedy = verify_greedy(DraftIds(drafts_BK), logits_BQV, cap_B)
    assert emitted(greedy)[::4] == expected[::4]


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_no_sequence_at_all(num_drafts):
    drafts = DraftIds(torch.empty(0, num_drafts, dtype=torch.int64))
    verified = verify_greedy(drafts, torch.empty(0, num_drafts + 1, VOCAB), torch.empty(0, dtype=torch.int64))
    assert verified.token_ids_BQ.shape == (0, num_drafts + 1)
    assert verified.accepted_len_B.shape == (0,)


def test_garbage_after_a_rejection_is_never_seen():
    logits_BQV = torch.full((1, 3, VOCAB), torch.nan)
    logits_BQV[0, 0] = torch.arange(VOCAB)
    verified = verify_greedy(DraftIds(torch.tensor([[1, 2]])), logits_BQV, torch.tensor([2]))
    assert emitted(verified) == [[VOCAB - 1]]
