"""The rows that the trunk of tiny-hybrid computes for one text have the same bits however the text is served.

In batch-invariant float32: a prompt of 300 tokens and 100 that follow, whole and alone, then in drawn combinations of
chunks, hand-off, cached prefixes, drafts, preemption and others in the same steps. Every row that a worker computes of
the text is compared, those of accepted drafts, and those that are computed again.
"""

import pickle
import random

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.engine.chunk_budget import ChunkBudget
from baton.engine.local import LocalEngine
from baton.model.loader import load_model
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import CORPUS
from baton.tests.e2e.topology import Topology
from baton.tests.e2e.tp_groups import TPGroupTopology
from baton.tests.e2e.trunk_rows import record_rows

PROMPT_LEN, NUM_TOKENS = 300, 100
TINY_HYBRID = TINY.with_name("tiny-hybrid")
OTHER_LEN = 120  # of other prompts at most, so that none decodes at a position of the text's answer


@pytest.fixture(scope="module")
def model():
    options = {"dtype": torch.float32, "numerics": Numerics.INVARIANT, "with_mtp": True}
    return load_model(TINY_HYBRID, device=torch.device("cpu"), **options)


class Watch:
    """The text's rows among all that a trunk computes; all that it computes until `text` is known."""

    def __init__(self):
        self.text, self.rows = (), {}  # digests of the rows by position, of the plain run
        self.begin()

    def begin(self):
        self.num_same, self.seen, self.wrong = 0, set(), []

    def look(self, run):
        if not run.is_chunk and run.first < PROMPT_LEN:
            return  # another text decodes
        for position, (token, digest) in enumerate(zip(run.token_ids, run.digests, strict=True), run.first):
            if not self.text:
                self.rows[position] = digest
                continue
            if position not in self.rows or token != self.text[position]:
                return  # another text, or a draft that is rejected
            self.num_same += 1
            self.seen.add(position)
            if digest != self.rows[position]:
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


@pytest.fixture(scope="module")
def watch(model, prompt, tokenizer):
    """What a plain run computed."""
    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "trunk", model.trunk)
        record_rows(model, watch.look)
        engine = LocalEngine(
            model, tokenizer, num_blocks=40, block_size=16, num_draft_tokens=0, chunk_len=4096, max_num_sequences=1,
            scheduling="sync",
        )  # fmt: skip
        (plain,) = engine.generate([asked(prompt, "plain", NUM_TOKENS, 0)])
    watch.text = (*prompt, *plain.token_ids)
    assert sorted(watch.rows) == list(range(PROMPT_LEN + NUM_TOKENS - 1))
    return watch


@pytest.fixture(scope="module")
def prompt(tokenizer):
    return list(tokenizer.encode(CORPUS.read_text())[400 : 400 + PROMPT_LEN])


def is_exact(watch, tokens):
    """Whether all rows of the text were computed, with the bits of the plain run, and its tokens chosen."""
    answer = range(PROMPT_LEN, PROMPT_LEN + NUM_TOKENS - 1)
    assert watch.seen >= set(answer)
    return tokens == list(watch.text[PROMPT_LEN:]) and not watch.wrong


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "seeds", [(0, 3), pytest.param(range(200), marks=pytest.mark.slow)], ids=["two", "two hundred"]
)
def test_every_row_has_the_bits_of_a_plain_run(seeds, model, tokenizer, prompt, watch, monkeypatch):
    monkeypatch.setattr(model, "trunk", model.trunk)
    record_rows(model, watch.look)
    num_exact, num_hits = 0, 0
    for seed in seeds:
        watch.begin()
        tokens, hits = serve(model, tokenizer, prompt, seed, monkeypatch)
        num_exact += is_exact(watch, tokens)
        num_hits += hits > 0
        print(f"{seed}: {watch.num_same} rows, wrong {watch.wrong[:5]}, {hits} hits")
    assert num_exact == len(seeds)
    assert num_hits > len(seeds) / 4


def serve_over_ranks(processes, prompt, seed, tp_prefill, tp_decode, directory):
    """The text in one drawn combination of two workers of several ranks; its tokens, and all rows they computed."""
    rng = random.Random(seed)
    k = rng.randrange(1, 5)
    options = {
        "dtype": torch.float32, "numerics": Numerics.INVARIANT, "rows_in": directory,
        "chunk_len": rng.choice((16, 37, 64, 150, 320)), "data_path": rng.choice(("shm", "raw", "inline")),
        "overcommit": True, "preempt_at": rng.choice(((), (0, 40), (1, 60))),
        "host_kv_bytes": rng.choice((0, 64 << 20)),
    }  # fmt: skip
    shared = rng.choice((0, 90, 250, PROMPT_LEN))  # tokens of an earlier prompt
    with TPGroupTopology(processes, TINY_HYBRID, tp_prefill, tp_decode, **options) as topology:
        if shared:
            other = prompt[:shared] + [(token + 1) % 4096 for token in prompt[:30]]
            assert topology.finish(topology.start(asked(other, "before", 1, 0))).error is None
        others = [asked(prompt[at + 1 : at + OTHER_LEN], f"other {at}", 30, k) for at in range(rng.randrange(3))]
        running = [topology.start(one) for one in (*others, asked(prompt, "text", NUM_TOKENS, k))]
        outcomes = [topology.finish(one) for one in running]
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    files = {role: sorted(directory.glob(f"{role}-*")) for role in ("prefill", "decode")}
    assert [len(files[role]) for role in files] == [tp_prefill, tp_decode]
    return outcomes[-1].token_ids, [pickle.loads(path.read_bytes()) for role in files for path in files[role]]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_seeds", [1, pytest.param(13, marks=pytest.mark.slow)], ids=["once", "thirteen times"])
@pytest.mark.parametrize("tp_decode", [1, 2])
@pytest.mark.parametrize("tp_prefill", [1, 2])
def test_every_rank_has_the_bits_of_one_process(tp_prefill, tp_decode, num_seeds, prompt, watch, processes, tmp_path):
    """Of every rank on either side of a hand-off, the rows behind the sum over its ranks."""
    for seed in range(num_seeds):
        directory = tmp_path / str(seed)
        directory.mkdir()
        tokens, ranks = serve_over_ranks(processes, prompt, seed, tp_prefill, tp_decode, directory)
        for at, runs in enumerate(ranks):
            watch.begin()
            for run in runs:
                watch.look(run)
            assert not watch.wrong, (seed, at, watch.wrong[:5])
            computed = {PROMPT_LEN - 1} if at < tp_prefill else set(range(PROMPT_LEN, PROMPT_LEN + NUM_TOKENS - 1))
            assert watch.seen >= computed, (seed, at)
        assert tokens == list(watch.text[PROMPT_LEN:]), seed
