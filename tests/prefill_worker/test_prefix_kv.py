"""The KV of a prompt that begins in cached blocks is, bit by bit, what a fresh worker computes.

The toy models compute with exact integers, and their MTP head's KV depends on the token after each position: an entry
that was computed for another prompt's next token would differ.
"""

import pytest
import torch

from baton.engine.sequence import Phase
from baton.tests.engine.toy import PerfectToyModel, ToyModel
from baton.tests.prefill_worker.pushes import BLOCK_SIZE, Prefill

pytestmark = pytest.mark.fast


class Bench(Prefill):
    """A prefill worker whose hand-offs are granted at once; what they committed stays until it is acknowledged."""

    def prefill(self, prompt, tenant=""):
        key = self.submit(prompt, tenant=tenant)
        self.run()
        return self.sequence(key)

    def remove(self, sequence):
        self.pushes.ack(sequence.key)
        self.run()
        assert self.sinks[sequence.key].ended

    def rows(self, sequence):
        """The KV of a prompt, whatever blocks it lies in."""
        slots = torch.tensor([sequence.table.slot(at) for at in range(sequence.request.prompt_len)])
        layers = []
        for layer in range(self.pool.layout.num_layers):
            blocks_NHPSD = self.pool.blocks(layer)
            layers.append(blocks_NHPSD[slots // BLOCK_SIZE, :, :, slots % BLOCK_SIZE])
        return torch.stack(layers).view(torch.int64)  # bits: what a toy never writes is NaN

    def check(self, sequence):
        fresh = Bench(type(self.model)(with_mtp=self.model.with_mtp), chunk_len=1000)
        want = fresh.prefill(sequence.request.prompt_token_ids)
        assert torch.equal(self.rows(sequence), fresh.rows(want))
        (got,), (start,) = self.pushes.known[sequence.key].states, fresh.pushes.known[want.key].states
        assert (got.first_token, got.draft_tokens, got.hidden) == (start.first_token, start.draft_tokens, start.hidden)
        assert bool(got.hidden) is bool(got.draft_tokens) is self.model.with_mtp
        assert self.pushed(sequence) == fresh.pushed(want)

    def pushed(self, sequence):
        """(layer, position) of all that was pushed, each once."""
        push = self.pushes.known[sequence.key]
        num_layers = self.pool.layout.num_layers
        found = [(layer, at) for layer in range(num_layers) for at in range(push.cached)]
        found += [(layer, at) for layer, start, length in push.pushed for at in range(start, start + length)]
        assert len(set(found)) == len(found)
        assert push.cached == sequence.num_cached
        return sorted(found)


BASE = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


@pytest.mark.long
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
    keys = [bench.submit(BASE, name=f"r{at}") for at in range(4)]
    bench.run()
    sequences = [bench.sequence(key) for key in keys]
    assert [sequence.phase for sequence in sequences] == [Phase.SENDING] * 4
    assert [sequence.num_cached for sequence in sequences[2:]] == [16, 16]
    for sequence in sequences:
        bench.check(sequence)


def test_tenants_share_nothing():
    bench = Bench(ToyModel())
    first, other, again = (bench.prefill(BASE, tenant) for tenant in "aba")
    assert (other.num_cached, again.num_cached) == (0, 16)
    assert not set(first.table.blocks) & set(other.table.blocks)
    assert bench.scheduler.allocator.index.match(first.block_hashes) == first.table.blocks[:4]


def test_what_was_given_up_is_computed_again():
    bench = Bench(ToyModel(), num_blocks=8)
    bench.remove(bench.prefill(BASE))
    bench.remove(bench.prefill([20, *BASE]))
    last = bench.prefill(BASE)
    allocator = bench.scheduler.allocator
    assert 0 < allocator.index.num_evicted
    bench.check(last)
    bench.remove(last)
    assert allocator.num_free == 8
    bench.scheduler.check_empty()
