"""Drives a model by hand: a pool whose unwritten slots are NaN, block tables in scrambled order, and batches."""

import torch

from baton.kvcache.pool import KVPool
from baton.model.inputs import DecodeBatch, PrefillBatch


class Paged:
    """Several sequences in one pool. Sequence s owns blocks s, s + B, s + 2 B ... in descending order, and slot s."""

    def __init__(self, model, *, num_sequences=1, capacity_len=160, block_size=16, group=None):
        self.model = model
        self.block_size = block_size
        per_sequence = -(-capacity_len // block_size)
        num_blocks = num_sequences * per_sequence
        rank, size = (group.rank, group.size) if group else (0, 1)
        layout = model.kv_layout(block_size)
        num_slots = num_sequences if layout.has_state else 0
        self.pool = KVPool(layout, num_blocks, model.device, rank=rank, size=size, num_state_slots=num_slots)
        for layer in range(self.pool.layout.num_layers):
            self.pool.blocks(layer).fill_(float("nan"))
        blocks = torch.arange(num_blocks, device=model.device).view(per_sequence, num_sequences).flip(0).T
        # One column more than needed, as a wider neighbour would cause: it points at the scratch block.
        self.table = torch.nn.functional.pad(blocks, (0, 1), value=num_blocks)
        self.layers = []

    def _slots(self, sequence, position):
        return self.table[sequence, position // self.block_size] * self.block_size + position % self.block_size

    def places(self, sequence, length):
        """Flat pool slots of a sequence's first positions."""
        return self._slots(sequence, torch.arange(length, device=self.model.device))

    def prefill_batch(self, parts):
        """`parts`: (sequence, start, end) each."""
        device = self.model.device
        positions = [torch.arange(start, end, device=device) for _, start, end in parts]
        return PrefillBatch(
            positions_T=torch.cat(positions),
            slots_T=torch.cat([self._slots(part[0], p) for part, p in zip(parts, positions, strict=True)]),
            block_tables_BM=self.table[[part[0] for part in parts]],
            query_lens=tuple(end - start for _, start, end in parts),
            context_lens=tuple(end for _, _, end in parts),
            state_slots_B=self._state_slots([part[0] for part in parts]),
        )

    def decode_batch(self, sequences, starts, num_rows, *, num_real=None, bound=None):
        """Rows from each start on; rows past `num_real` are garbage, and so is a sequence given as None."""
        device = self.model.device
        num_real = num_rows if num_real is None else num_real
        sequence_B = torch.tensor([0 if s is None else s for s in sequences], device=device)
        padding_B1 = torch.tensor([s is None for s in sequences], device=device)[:, None]
        offset_Q = torch.arange(num_rows, device=device)
        position_BQ = torch.tensor(starts, device=device)[:, None] + offset_Q.clamp(max=num_real - 1)
        position_BQ = position_BQ.masked_fill(padding_B1, 0)
        slot_BQ = self._slots(sequence_B[:, None], position_BQ)
        slot_BQ = slot_BQ.masked_fill(padding_B1 | (offset_Q >= num_real), self.pool.scratch_slot)
        tables = self.table[sequence_B].masked_fill(padding_B1, self.pool.num_blocks)
        longest = int(position_BQ.max()) + 1
        return DecodeBatch(
            positions_BQ=position_BQ,
            slots_BQ=slot_BQ,
            block_tables_BM=tables,
            max_context_len=longest if bound is None else bound,
            state_slots_B=self._state_slots([0 if s is None else s for s in sequences]),
        )

    def _state_slots(self, sequences):
        return torch.tensor(sequences, device=self.model.device) if self.pool.layout.has_state else None

    @torch.inference_mode()
    def trunk(self, token_ids, batch):
        token_ids_T = torch.as_tensor(token_ids, device=self.model.device).flatten()
        return self.model.trunk(token_ids_T, batch, self.pool, self.layers.append)

    @torch.inference_mode()
    def mtp(self, token_ids, hidden, batch):
        token_ids_T = torch.as_tensor(token_ids, device=self.model.device).flatten()
        return self.model.mtp(token_ids_T, hidden, batch, self.pool, self.layers.append)

    @torch.inference_mode()
    def logits(self, hidden):
        """Of all tokens, wherever their logits are."""
        return self.model.vocab.gather(self.model.logits(hidden))

    def prefill(self, token_ids, *, chunk_len=None, sequence=0):
        """Trunk hidden of a whole prompt, chunk by chunk."""
        length = len(token_ids)
        step = chunk_len or length
        parts = [(sequence, start, min(start + step, length)) for start in range(0, length, step)]
        return torch.cat([self.trunk(token_ids[s:e], self.prefill_batch([(q, s, e)])) for q, s, e in parts])


def noting_layers(model, monkeypatch):
    """A list to which each pass adds the layers that it computes."""
    found = []
    for index, layer in enumerate(model._decoder.layers):
        before = layer.pieces

        def pieces(*inputs, index=index, before=before):
            found.append(index)
            return before(*inputs)

        monkeypatch.setattr(layer, "pieces", pieces)
    return found


def prompt(length, vocab_size=96, seed=0):
    return torch.randint(2, vocab_size, (length,), generator=torch.Generator().manual_seed(seed))
