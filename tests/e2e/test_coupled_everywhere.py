"""Coupled sampling: seeded requests at temperature 1 give the same tokens however they are run.

With 0, 1, 2 or 4 drafts, one at a time or 32 together, on one rank or two, in one process or handed over from prefill
to decode workers. In float64, and in float32 with invariant numerics. The reference is the one-process engine, some
requests at a time, without drafts and without chunks.
"""

import itertools
from collections import deque

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.request import AttemptKey, GenerationRequest
from baton.core.sampling import SamplingParams
from baton.engine.decode import DecodeRunner
from baton.engine.finish import FinishChecker
from baton.engine.gang import FollowDecode, FollowPrefill, LeadDecode, LeadPrefill
from baton.engine.local import LocalEngine
from baton.engine.plan_messages import Stop
from baton.engine.prefill import PrefillChunk, PrefillRunner
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.pool import KVPool
from baton.model.loader import load_model
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.gangs import GangTopology, RankProcesses
from baton.tests.e2e.prompts import token_prompts
from baton.tests.e2e.test_same_tokens import WHOLE, pairwise
from baton.tests.e2e.topology import Topology
from baton.tests.model.ranks import channel_of, on_ranks

CPU = torch.device("cpu")
ALL, FEW = (200, 10), (8, 6)  # requests, and tokens of each
REFERENCE_BATCH = 11  # none of those below
WAVE = 50  # requests handed over at once; the last of them waits for all others
NUM_BLOCKS, BLOCK_SIZE, CHUNK_LEN = 512, 16, 48
DRAFTS, BATCHES, RANKS, PLACES = (0, 1, 2, 4), (1, 32), (1, 2), ("local", "handed over")
CELLS = list(itertools.product(DRAFTS, BATCHES, RANKS, PLACES))
PAIRWISE = pairwise(CELLS)
NUMERICS = {"float64": (torch.float64, Numerics.DEFAULT), "invariant": (torch.float32, Numerics.INVARIANT)}
QUICK_INVARIANT = [(2, 32, 1, "handed over"), (4, 32, 2, "local")]


def cell_id(cell):
    k, batch, ranks, place = cell
    return f"k{k}-batch{batch}-tp{ranks}-{place.replace(' ', '_')}"


@pytest.fixture(scope="module")
def processes():
    started = RankProcesses("forkserver")
    yield started
    started.close()


def requests_with(tokenizer, k, size, tag=""):
    count, max_tokens = size
    return [
        GenerationRequest(
            key=AttemptKey(f"{tag}{seed}", 1),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed),
            deadline_s=1e12,
            num_draft_tokens=k,
        )
        for seed, prompt in enumerate(token_prompts(tokenizer, count, max_len=70))
    ]


def in_one_process(model, tokenizer, requests, k, batch, chunk_len=CHUNK_LEN):
    engine = LocalEngine(
        model,
        tokenizer,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_draft_tokens=k,
        chunk_len=chunk_len,
        max_num_sequences=batch,
    )
    return [list(result.token_ids) for result in engine.generate(requests)]


@pytest.fixture(scope="module")
def wanted(load_tiny, tokenizer):
    """Tokens of every request; as many as are asked for."""
    made = {}

    def get(numerics, size):
        if (numerics, size) not in made:
            model = load_tiny(*NUMERICS[numerics], with_mtp=False)
            requests = requests_with(tokenizer, 0, size)
            made[numerics, size] = in_one_process(model, tokenizer, requests, 0, REFERENCE_BATCH, chunk_len=WHOLE)
        return made[numerics, size]

    return get


class Driven:
    """Continuous batching by hand over any pair of runners."""

    def __init__(self, prefill, decode, tokenizer):
        self.prefill, self.decode, self.tokenizer = prefill, decode, tokenizer
        self.allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)

    def start(self, request, slot):
        """(first token, checker, table) of a request that is put into a slot, if that token does not end it."""
        table = self.allocator.reserve(request.capacity_len)
        checker = FinishChecker(request.sampling, self.tokenizer.eos_token_ids, self.tokenizer)
        for first in range(0, request.prompt_len, CHUNK_LEN):
            chunk = PrefillChunk(
                prompt_token_ids=request.prompt_token_ids,
                start=first,
                length=min(CHUNK_LEN, request.prompt_len - first),
                table=table,
                sampling=request.sampling,
                draft_cap=request.num_draft_tokens,
            )
            forward = self.prefill.forward([chunk], lambda layer: None)
            [begin] = self.prefill.draft(forward, lambda layer: None)
        _, reason = checker.accept([begin.first_token])
        if reason is None:
            k = request.num_draft_tokens
            self.decode.admit(slot, begin, request.prompt_len, request.sampling, table, k)
        else:
            self.allocator.release(table)
        return begin.first_token, None if reason else checker, table

    def generate(self, requests, batch):
        tokens = [[] for _ in requests]
        waiting, running, free = deque(enumerate(requests)), {}, list(range(batch))
        while waiting or running:
            while waiting and free:
                index, request = waiting.popleft()
                first, checker, table = self.start(request, free[-1])
                tokens[index].append(first)
                if checker is not None:
                    running[free.pop()] = index, checker, table
            slots = sorted(running)
            for slot, token_ids in zip(slots, self.decode.step(slots).token_ids, strict=True):
                index, checker, table = running[slot]
                kept, reason = checker.accept(token_ids)
                tokens[index] += kept
                if reason is not None:
                    self.decode.release(slot)
                    self.allocator.release(table)
                    del running[slot]
                    free.append(slot)
        return tokens


def on_two_ranks(tokenizer, requests, k, batch, dtype, numerics):
    """In one process, each rank a thread."""

    def work(group):
        model = load_model(TINY, dtype=dtype, device=CPU, numerics=numerics, with_mtp=True, communicator=group)
        pool = KVPool(model.kv_layout(BLOCK_SIZE), NUM_BLOCKS, CPU, rank=group.rank, size=group.size)
        eos = tokenizer.eos_token_ids
        prefill = PrefillRunner(model, pool, group, eos_token_ids=eos)
        decode = DecodeRunner(model, pool, batch, k, group, eos_token_ids=eos)
        channel = channel_of(group)
        try:
            if group.rank == 0:
                lead = LeadDecode(decode, channel)
                tokens = Driven(LeadPrefill(prefill, channel), lead, tokenizer).generate(requests, batch)
                lead.close()
                return tokens
            follow, decode_ranks = FollowPrefill(prefill, channel), FollowDecode(decode, channel)
            while not isinstance(plan := channel.hear(), Stop):
                decode.drain()  # both roles share this group: one step at a time
                assert follow.take(plan, lambda layer: None) or decode_ranks.take(plan)
                decode_ranks.look()
            return None
        finally:
            channel.close()

    return on_ranks(2, work, timeout_s=120.0)[0]


def tokens_of(cell, numerics, size, *, load_tiny, tokenizer, processes):
    k, batch, ranks, place = cell
    dtype, mode = NUMERICS[numerics]
    requests = requests_with(tokenizer, k, size, tag=f"{numerics}-{cell_id(cell)}-")
    if place == "local" and ranks == 1:
        return in_one_process(load_tiny(dtype, mode), tokenizer, requests, k, batch)
    if place == "local":
        return on_two_ranks(tokenizer, requests, k, batch, dtype, mode)
    if ranks == 1:
        topology = Topology(load_tiny(dtype, mode), tokenizer, num_drafts=k, chunk_len=CHUNK_LEN, max_num_seqs=batch)
    else:
        topology = GangTopology(
            processes, TINY, ranks, ranks, dtype=dtype, numerics=mode, chunk_len=CHUNK_LEN, max_num_seqs=batch
        )
    outcomes = []
    with topology:
        for first in range(0, len(requests), WAVE):
            outcomes += topology.generate(requests[first : first + WAVE])
        topology.wait_idle()
    assert [outcome.error for outcome in outcomes] == [None] * len(requests)
    return [outcome.token_ids for outcome in outcomes]


@pytest.fixture
def check(load_tiny, tokenizer, processes, wanted):
    def check(cell, numerics, size):
        options = {"load_tiny": load_tiny, "tokenizer": tokenizer, "processes": processes}
        assert tokens_of(cell, numerics, size, **options) == wanted(numerics, size)

    return check


def test_the_requests_are_what_is_promised(tokenizer, wanted):
    requests = requests_with(tokenizer, 0, ALL)
    assert len({request.sampling.seed for request in requests}) == 200
    assert {request.sampling.temperature for request in requests} == {1.0}
    assert len({tuple(tokens) for tokens in wanted("float64", FEW)}) == FEW[0]


@pytest.mark.parametrize("cell", PAIRWISE, ids=cell_id)
def test_a_few_requests_in_float64(cell, check):
    check(cell, "float64", FEW)


@pytest.mark.parametrize("cell", QUICK_INVARIANT, ids=cell_id)
def test_a_few_requests_in_float32_with_invariant_numerics(cell, check):
    check(cell, "invariant", FEW)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("cell", CELLS, ids=cell_id)
def test_all_requests_in_every_cell(cell, numerics, check):
    check(cell, numerics, ALL)
