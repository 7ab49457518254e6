"""The law of what `engine.speculation.rejection` emits, integrated exactly over its uniforms.

`reject` is a function of the drafts and of uniforms, constant on cells. The reference says where the cells' borders
are; `reject` is asked close to both ends of every cell, must give one answer in each, and its answers, weighted by the
cells' volumes and the drafts' probabilities, are the law. A wrong border shows as two answers in one cell, a wrong rule
as a law that is not the target's.
"""

import itertools

import torch

from baton.engine.speculation import rejection
from baton.engine.speculation.verify import DraftIds, DraftProbs
from baton.model.vocab import WHOLE
from baton.tests.engine import rejection_reference as reference
from baton.tests.model.together import part_of, together

EDGE = 1e-7


def spans(chances):
    """(low, high) of the pieces of [0, 1) that a chance, or a list of them one after the other, cuts."""
    borders = [0.0, *itertools.accumulate(chances)]
    borders[-1] = 1.0
    return [(low, high) for low, high in itertools.pairwise(borders) if high - low > 4 * EDGE]


def emitted_law(
    world, num_drafts, *, is_point, block, num_usable=None, length, claim=None, dtype=torch.float64, num_ranks=1
):
    """Probability of every `length` first tokens: a step's own, and the target's after them.

    `claim(drafts, place)` is the q that `reject` is told, by default the one drafts really are drawn from. With several
    ranks each has the probabilities of its own tokens, and all must emit the same.
    """
    claim = claim or (lambda drafts, place: reference.claimed_q(world, drafts, place, is_point))
    num_usable = num_drafts if num_usable is None else num_usable
    paths = reference.draft_paths(world, num_drafts, is_point)
    rows, ids, uniforms, residual_uniforms, volumes = [], [], [], [], []
    for at, (drafts, path_chance) in enumerate(paths):
        chances, residuals = reference.thresholds(world, drafts[:num_usable], is_point, block)
        accept_cells = [spans([chance, 1.0 - chance]) for chance in chances]
        for corner in itertools.product(*accept_cells):
            accepted = reference.accepted_len([low for low, _ in corner], chances, block)
            for low, high in spans(residuals[accepted]):
                volume = path_chance * (high - low)
                for from_, to in corner:
                    volume *= to - from_
                for ends in (0, 1):
                    rows.append(at)
                    ids.append(len(volumes))
                    spare = [0.5] * (num_drafts - num_usable)
                    uniforms.append([(to - EDGE if ends else from_ + EDGE) for from_, to in corner] + spare)
                    residual_uniforms.append(high - EDGE if ends else low + EDGE)
                volumes.append(volume)
    arguments = (world, paths, rows, uniforms, residual_uniforms, num_usable, claim, is_point, block, dtype)
    if num_ranks == 1:
        verified = _reject(*arguments)
    else:
        results, _ = together(num_ranks, world.vocab_size, lambda vocab: _reject(*arguments, vocab))
        verified = results[0]
        for other in results[1:]:
            assert torch.equal(other.token_ids_BQ, verified.token_ids_BQ)
            assert torch.equal(other.accepted_len_B, verified.accepted_len_B)
    answers = {}
    lens = verified.accepted_len_B.tolist()
    for cell, tokens, accepted in zip(ids, verified.token_ids_BQ.tolist(), lens, strict=True):
        answer = tuple(tokens[: accepted + 1])
        assert answers.setdefault(cell, answer) == answer, "a border is not where the papers have it"
    law = {}
    for cell, answer in answers.items():
        law[answer] = law.get(answer, 0.0) + volumes[cell]
    full = {}
    for answer, chance in law.items():
        for rest, rest_chance in reference.target_law(world, length - len(answer), answer).items():
            full[answer + rest] = full.get(answer + rest, 0.0) + chance * rest_chance
    return full, sum(len(answer) * chance for answer, chance in law.items())


def _reject(world, paths, rows, uniforms, residual_uniforms, num_usable, claim, is_point, block, dtype, vocab=WHOLE):
    num_drafts = len(paths[0][0])
    head = world.head_tokens
    is_pruned = head != list(range(world.vocab_size))
    drafts_NK = torch.tensor([drafts for drafts, _ in paths]).reshape(len(paths), num_drafts)
    target_NQV = torch.tensor(
        [[world.p(drafts[:place]) for place in range(num_drafts + 1)] for drafts, _ in paths], dtype=dtype
    )
    target_NQV[:, num_usable + 1 :] = torch.nan
    probs = None
    if not is_point and num_drafts:
        columns = list(range(world.vocab_size)) if vocab.is_cut else head
        probs_NKC = torch.tensor(
            [[[claim(drafts, at)[token] for token in columns] for at in range(num_drafts)] for drafts, _ in paths],
            dtype=dtype,
        )
        probs_NKC[:, num_usable:] = torch.nan
        t2d = [head.index(token) if token in head else -1 for token in range(world.vocab_size)]
        is_pruned = is_pruned and not vocab.is_cut
        probs = DraftProbs(part_of(probs_NKC, vocab, 0.0)[rows], torch.tensor(t2d) if is_pruned else None)
    width, num_usable_N = vocab.width(world.vocab_size), torch.full((len(rows),), num_usable)
    return rejection.reject(
        rejection.Proposals(DraftIds(drafts_NK[rows]), probs, num_usable_N, width, vocab),
        part_of(target_NQV, vocab, 0.0)[rows],
        torch.tensor(uniforms, dtype=torch.float64).reshape(len(rows), num_drafts),
        torch.tensor(residual_uniforms, dtype=torch.float64),
        block=block,
    )


def distance(law, wanted):
    """Largest difference of any sequence's probability."""
    return max(abs(law.get(tokens, 0.0) - wanted.get(tokens, 0.0)) for tokens in {*law, *wanted})
