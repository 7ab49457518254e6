"""The KV of a prompt that begins in cached blocks is, bit by bit, what a fresh worker computes.

The toy models compute with exact integers, and their MTP head's KV depends on the token after each position: an entry
that was computed for another prompt's next token would differ.
"""

import pytest
import torch

from baton.core.block_hash import block_hashes
from baton.core.request import AttemptKey, GenerationRequest
from baton.core.sampling import SamplingParams
from baton.engine.prefill import PrefillChunk, PrefillRunner
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.pool import KVPool
from baton.prefill_worker.scheduler import PrefillScheduler, PrefillSequence, PrefillState
from baton.tests.engine.toy import PerfectToyModel, ToyModel

pytestmark = pytest.mark.fast
BLOCK_SIZE = 4


class Bench:
    """A prefill loop without a hand-off: sequences stay until they are removed."""

    def __init__(self, model, num_blocks=40, chunk_len=5):
        self.model = model
        self.pool = KVPool(model.kv_layout(BLOCK_SIZE), num_blocks, model.device)
        self.runner = PrefillRunner(model, self.pool)
        self.allocator = BlockAllocator(num_blocks, BLOCK_SIZE)
        self.scheduler = PrefillScheduler(self.allocator, chunk_len, 8)
        self.starts = {}

    def add(self, prompt, tenant="", name=None):
        request = GenerationRequest(
            key=AttemptKey(name or f"r{len(self.starts)}-{len(self.scheduler.sequences())}", 1),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=4, temperature=0.0),
            deadline_s=1e9,
            tenant=tenant,
        )
        names = block_hashes(prompt, model="toy", tenant=tenant, block_size=BLOCK_SIZE, with_mtp=self.runner.has_mtp)
        sequence = PrefillSequence(request, "d0", block_names=names)
        self.scheduler.add(sequence)
        return sequence

    def run(self):
        while True:
            while (taken := self.scheduler.next_to_reserve(0.0)) is not None:
                taken.state = PrefillState.READY
            plan = self.scheduler.plan()
            if not plan:
                return
            chunks = [
                PrefillChunk(
                    prompt_token_ids=part.sequence.request.prompt_token_ids,
                    start=part.start,
                    length=part.length,
                    table=part.sequence.table,
                    sampling=part.sequence.request.sampling,
                    draft_cap=0,
                )
                for part in plan
            ]
            forward = self.runner.forward(chunks, lambda layer: None)
            starts = self.runner.draft(forward, lambda layer: None)
            for part, start in zip(plan, starts, strict=True):
                part.sequence.num_computed += part.length
                self.scheduler.name_blocks(part)
                if start is not None:
                    part.sequence.state = PrefillState.COMMITTING
                    self.starts[part.sequence.key] = start

    def prefill(self, prompt, tenant=""):
        sequence = self.add(prompt, tenant)
        self.run()
        return sequence

    def rows(self, sequence):
        """The KV of a prompt, whatever blocks it lies in."""
        slots = torch.tensor([sequence.table.slot(at) for at in range(sequence.request.prompt_len)])
        layers = []
        for layer in range(self.pool.layout.num_layers):
            blocks_NHPSD = self.pool.blocks(layer)
            layers.append(blocks_NHPSD[slots // BLOCK_SIZE, :, :, slots % BLOCK_SIZE])
        return torch.stack(layers)

    def check(self, sequence):
        fresh = Bench(type(self.model)(with_mtp=self.model.with_mtp), chunk_len=1000)
        want = fresh.prefill(sequence.request.prompt_token_ids)
        assert torch.equal(self.rows(sequence), fresh.rows(want))
        got, start = self.starts[sequence.key], fresh.starts[want.key]
        assert (got.first_token, got.draft_token) == (start.first_token, start.draft_token)
        if start.hidden_D is not None:
            assert torch.equal(got.hidden_D, start.hidden_D)


BASE = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


@pytest.mark.parametrize("with_mtp", [False, True])
@pytest.mark.parametrize("kind", [ToyModel, PerfectToyModel])
@pytest.mark.parametrize("shared_len", [1, 4, 7, 8, 9, 16, 17, 20])
@pytest.mark.parametrize("more", [(), (11,), (11, 12, 13, 14, 15)])
def test_what_is_shared_is_what_would_have_been_computed(kind, with_mtp, shared_len, more):
    bench = Bench(kind(with_mtp=with_mtp))
    first = bench.prefill(BASE)
    second = bench.prefill([*BASE[:shared_len], *more])
    for sequence in (first, second):
        bench.check(sequence)
    num_known = min(second.request.prompt_len - 1, shared_len - with_mtp)
    assert second.num_cached == num_known // BLOCK_SIZE * BLOCK_SIZE


def test_the_block_before_a_fork_is_not_shared_because_its_last_draft_entry_differs():
    bench = Bench(PerfectToyModel())
    bench.prefill(BASE)
    same = bench.prefill([*BASE[:9], 20])
    fork = bench.prefill([*BASE[:8], 20])
    assert (same.num_cached, fork.num_cached) == (8, 4)
    for sequence in (same, fork):
        bench.check(sequence)


def test_requests_that_run_together_share_as_soon_as_a_block_is_whole():
    bench = Bench(ToyModel(), chunk_len=8)
    sequences = [bench.add(BASE, name=f"r{at}") for at in range(4)]
    bench.run()
    assert [sequence.num_cached for sequence in sequences[2:]] == [16, 16]
    for sequence in sequences:
        bench.check(sequence)


def test_tenants_share_nothing():
    bench = Bench(ToyModel())
    first, other, again = bench.prefill(BASE, "a"), bench.prefill(BASE, "b"), bench.prefill(BASE, "a")
    assert (other.num_cached, again.num_cached) == (0, 16)
    assert not set(first.table.blocks) & set(other.table.blocks)
    assert bench.allocator.index.match(first.block_names) == first.table.blocks[:4]


def test_what_was_given_up_is_computed_again():
    bench = Bench(ToyModel(), num_blocks=8)
    bench.scheduler.remove(bench.prefill(BASE))
    bench.scheduler.remove(bench.prefill([20, *BASE]))
    last = bench.prefill(BASE)
    assert 0 < bench.allocator.index.num_evicted
    bench.check(last)
    bench.scheduler.remove(last)
    assert bench.allocator.num_free == 8
