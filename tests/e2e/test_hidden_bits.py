"""The rows that the trunk of tiny-hybrid computes for one text have the same bits however the text is served.

In batch-invariant float32: a prompt of 300 tokens and 100 that follow, whole and alone, then in drawn combinations of
chunks, hand-off, cached prefixes, drafts, preemption and others in the same steps. Every row that a worker computes of
the text is compared, those of accepted drafts, and those that are computed again.
"""

import random

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.engine.chunk_budget import ChunkBudget
from baton.engine.local import LocalEngine
from baton.model.inputs import MixedBatch, PrefillBatch
from baton.model.loader import load_model
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import CORPUS
from baton.tests.e2e.topology import Topology

PROMPT_LEN, NUM_TOKENS = 300, 100
OTHER_LEN = 120  # of other prompts at most, so that none decodes at a position of the text's answer


@pytest.fixture(scope="module")
def model():
    path = TINY.with_name("tiny-hybrid")
    return load_model(path, dtype=torch.float32, device=torch.device("cpu"), numerics=Numerics.INVARIANT, with_mtp=True)


def runs(batch):
    """(first row, positions, is a chunk) of every sequence of a batch."""
    if isinstance(batch, MixedBatch):
        yield from runs(batch.prompts)
        for row, *rest in runs(batch.decode):
            yield row + len(batch.prompts.positions_T), *rest
    elif isinstance(batch, PrefillBatch):
        row = 0
        for length in batch.query_lens:
            yield row, batch.positions_T[row : row + length].tolist(), True
            row += length
    else:
        num_rows = batch.positions_BQ.shape[1]
        for index, positions in enumerate(batch.positions_BQ.tolist()):
            yield index * num_rows, positions, False


class Watch:
    """Rows of the text in all that a model's trunk computes; all that it computes until `text` is known."""

    def __init__(self, model, monkeypatch):
        self.text, self.rows = (), {}  # the rows by position, of the plain run
        self.num_same, self.seen, self.wrong = 0, set(), []
        trunk = model.trunk

        def watched(token_ids, batch, *rest):
            hidden_TD = trunk(token_ids, batch, *rest)
            tokens = token_ids.flatten().tolist()
            for first, positions, is_chunk in runs(batch):
                if is_chunk or positions[0] >= PROMPT_LEN:
                    self._look(tokens[first : first + len(positions)], positions, hidden_TD[first:])
            return hidden_TD

        monkeypatch.setattr(model, "trunk", watched)

    def _look(self, tokens, positions, hidden_TD):
        for token, position, hidden_D in zip(tokens, positions, hidden_TD, strict=False):
            if not self.text:
                self.rows[position] = hidden_D.clone()
                continue
            if position not in self.rows or token != self.text[position]:
                return  # another text, or a draft that is rejected
            self.num_same += 1
            self.seen.add(position)
            if not torch.equal(hidden_D, self.rows[position]):
                self.wrong.append(position)


def asked(prompt, name, max_tokens, k):
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(
        key=AttemptKey(name, 1), prompt_token_ids=tuple(prompt), sampling=sampling, deadline_s=1e12, num_draft_tokens=k
    )


def serve(model, tokenizer, prompt, seed, monkeypatch):
    """The text in one drawn combination; its tokens, and what was found in the cache."""
    rng = random.Random(seed)
    lens = [rng.choice((16, 37, 64, 150, 300)) for _ in range(rng.choice((1, 3)))]
    monkeypatch.setattr(ChunkBudget, "length", lambda *_: rng.choice(lens))
    k = rng.randrange(5)
    options = {
        "num_prefill": rng.randrange(2), "num_drafts": k, "chunk_len": 320, "overcommit": True,
        "scheduling": rng.choice(("sync", "async")), "preempt_at": rng.choice(((), (0,), (9,), (0, 40), (1, 60))),
        "host_kv_bytes": rng.choice((0, 64 << 20)),
    }  # fmt: skip
    before = rng.choice((0, 90, 170, 250, PROMPT_LEN))  # tokens that an earlier prompt shares

    def unlike(first, length):
        return [(token + rng.randrange(1, 4000)) % 4096 for token in prompt[first : first + length]]

    with Topology(model, tokenizer, **options) as topology:
        start = topology.start if topology.prefill else topology.start_local
        for at in range(2 if before else 0):  # the second leaves a checkpoint where they part
            other = prompt[:before] + unlike(before, 30)
            assert topology.finish(start(asked(other, f"before {at}", 1, 0))).error is None
        others = [asked(unlike(0, rng.randrange(1, OTHER_LEN)), f"other {at}", 30, k) for at in range(rng.randrange(4))]
        running = [start(one) for one in (*others, asked(prompt, "text", NUM_TOKENS, k))]
        outcomes = [topology.finish(one) for one in running]
        topology.wait_idle()
        (computing, *_) = topology.prefill or topology.decode
        num_hits = computing.worker.engine.scheduler.num_prefix_hits
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    return outcomes[-1].token_ids, num_hits


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "seeds", [(0, 3), pytest.param(range(200), marks=pytest.mark.slow)], ids=["two", "two hundred"]
)
def test_every_row_has_the_bits_of_a_plain_run(seeds, model, tokenizer, monkeypatch):
    prompt = list(tokenizer.encode(CORPUS.read_text())[400 : 400 + PROMPT_LEN])
    watch = Watch(model, monkeypatch)
    engine = LocalEngine(
        model, tokenizer, num_blocks=40, block_size=16, num_draft_tokens=0, chunk_len=4096, max_num_sequences=1,
        scheduling="sync",
    )  # fmt: skip
    (plain,) = engine.generate([asked(prompt, "plain", NUM_TOKENS, 0)])
    watch.text = (*prompt, *plain.token_ids)
    assert sorted(watch.rows) == list(range(PROMPT_LEN + NUM_TOKENS - 1))
    num_exact, num_hits = 0, 0
    for seed in seeds:
        watch.num_same, watch.wrong, watch.seen = 0, [], set()
        tokens, hits = serve(model, tokenizer, prompt, seed, monkeypatch)
        assert watch.seen >= set(range(PROMPT_LEN, PROMPT_LEN + NUM_TOKENS - 1))
        num_exact += tokens == list(plain.token_ids) and not watch.wrong
        num_hits += hits > 0
        print(f"{seed}: {watch.num_same} rows, wrong {watch.wrong[:5]}, {hits} hits")
    assert num_exact == len(seeds)
    assert num_hits > len(seeds) / 4
