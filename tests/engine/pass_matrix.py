"""Passes over a pool of random KV, eager and replayed, bit for bit; shared by the tests on CPUs and on GPUs."""

import torch

from baton.engine.graphs.graphed_step import StaticPass
from baton.engine.graphs.key import GraphKey, GraphKind
from baton.engine.step.batch import DecodeRows
from baton.engine.step.passes import EagerPasses
from baton.kernels.kv.dequantize import as_bytes
from baton.kvcache.pool import KVPool

BLOCK_SIZE, WIDTH, SIZE = 16, 8, 4
LARGE = BLOCK_SIZE * WIDTH - 9
PREFIXES = (0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, LARGE)


class Side:
    """A pool, and one batch of random inputs for it; two sides of the same seed are equal."""

    def __init__(self, model, seed=0):
        self.model = model
        self.device = model.device
        self.has_graph = False
        layout = model.kv_layout(BLOCK_SIZE)
        num_slots = SIZE if layout.has_state else 0
        self.pool = KVPool(layout, SIZE * WIDTH, self.device, num_state_slots=num_slots)
        generator = torch.Generator().manual_seed(seed)
        for layer in range(self.pool.layout.num_layers):
            blocks = self.pool.blocks(layer)
            scale = 0.01 if layout.layers[layer].is_state else 1.0  # what is kept of decays may not grow
            blocks.copy_(torch.randn(blocks.shape, generator=generator) * scale)
            blocks[-1:].copy_(torch.full_like(blocks[-1:], torch.nan, dtype=torch.float32))  # nobody real may see it
        self.tables = torch.randperm(SIZE * WIDTH, generator=generator).view(SIZE, WIDTH).to(self.device)
        vocab_size, hidden_size = model.config.vocab_size, model.config.hidden_size
        self.tokens = torch.randint(vocab_size, (SIZE, 8), generator=generator).to(self.device)
        self.hidden = torch.randn(SIZE * 8, hidden_size, generator=generator).to(self.device, model.dtype)

    def rows(self, num_sequences, context_len):
        num_blocks = -(-context_len // BLOCK_SIZE)
        limit = torch.full((num_sequences,), WIDTH * BLOCK_SIZE, device=self.device)
        slots = torch.arange(SIZE, device=self.device).flip(0)[:num_sequences]
        return DecodeRows(
            block_tables_BM=self.tables[:num_sequences, :num_blocks], limit_B=limit,
            draft_cap_B=torch.zeros_like(limit), state_slots_B=slots if self.pool.layout.has_state else None,
        )  # fmt: skip

    def inputs(self, num_sequences, prefix, num_rows):
        """Tokens, first positions (every second sequence is one shorter), rows and hidden states."""
        first = torch.full((num_sequences,), prefix, device=self.device)
        first[1::2] = max(prefix - 1, 0)
        tokens, hidden = self.tokens[:num_sequences, :num_rows], self.hidden[: num_sequences * num_rows]
        return tokens, first, self.rows(num_sequences, prefix + num_rows), hidden

    def eager(self, kind, num_sequences, prefix, num_rows):
        """What launching the pass gives."""
        tokens, first, rows, hidden = self.inputs(num_sequences, prefix, num_rows)
        passes = EagerPasses(self.model, self.pool, rows, prefix + num_rows)
        if kind is GraphKind.DRAFT:
            return passes.draft(tokens[:, 0], hidden, first)
        _, trunk = passes.trunk(tokens, first)
        return trunk if kind is GraphKind.VERIFY else passes.extend(None, (tokens, hidden, first))[1]

    def graph(self, kind, num_rows, backend, size=SIZE, width=WIDTH):
        """A captured pass of this side."""
        static = StaticPass(GraphKey(kind, num_rows, size, width), self.model, self.pool)
        static.warm_up(backend, is_first=not self.has_graph)
        self.has_graph = True
        static.capture(backend)
        return static

    def replayed(self, static, num_sequences, prefix):
        """What replaying it gives."""
        num_rows = static.key.num_rows
        tokens, first, rows, hidden = self.inputs(num_sequences, prefix, num_rows)
        if static.key.kind is GraphKind.DRAFT_PREFILL:
            # The same KV of the trunk as on the other side; not a part of this pass.
            EagerPasses(self.model, self.pool, rows, prefix + num_rows).trunk(tokens, first)
        return static.replay(tokens, first, rows, None if static.key.kind is GraphKind.VERIFY else hidden)

    def kv(self):
        """All KV that belongs to somebody."""
        return [self.pool.blocks(layer)[:-1] for layer in range(self.pool.layout.num_layers)]


@torch.inference_mode()
def check_kind(model, backend, kind, num_rows, *, num_sequences=range(1, SIZE + 1), prefixes=PREFIXES):
    """Eager, at the batch's own shape, and replayed, padded, have the same bits: results, and all KV afterwards.

    Large batches come first, so that what they left behind would be seen.
    """
    eager, graphed = Side(model), Side(model)
    static = graphed.graph(kind, num_rows, backend)
    for prefix in sorted(prefixes, reverse=True):
        for count in sorted(num_sequences, reverse=True):
            wanted = eager.eager(kind, count, prefix, num_rows)
            got = graphed.replayed(static, count, prefix)
            assert got.isfinite().all()
            assert torch.equal(got, wanted), (kind, num_rows, count, prefix)
            for kv, other in zip(graphed.kv(), eager.kv(), strict=True):
                assert torch.equal(as_bytes(kv), as_bytes(other)), (kind, num_rows, count, prefix)
