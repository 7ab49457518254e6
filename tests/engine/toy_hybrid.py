"""A toy that keeps everything a sequence may keep: rows, a window, an open tile, and a state at whole tiles.

As in `toy`, numbers are integers below 2^53 in float64. Its layers, in order: a short convolution (`WINDOW`),
attention, a recurrence (`TAIL` and `SNAPSHOT`), attention, the MTP head's attention.

The recurrence is kept by absolute position: the state lies at the last whole tile of 16 as of the step before, and the
inputs since then lie in the ring. A step folds a tile that ends at or before its first position, reads, and writes its
rows; a row that is rejected is overwritten by the step that follows, before it is read. Chunks of prompts fold all
whole tiles. Nothing that another sequence left in a slot is ever read, though nothing is zeroed.
"""

from dataclasses import replace

import torch

from baton.kvcache.layout import KVLayout
from baton.model.inputs import MixedBatch, PrefillBatch
from baton.tests.engine.toy import PRIME, ToyModel, _attend, _rows
from baton.tests.kvtransfer.kept import state, tail, window

TILE = 16
RING = 16  # of the window: three positions, and seven of a step beside them
WINDOW, FIRST, TAIL, SNAPSHOT, SECOND, MTP = range(6)


def sequences(batch, pool):
    """(first row, positions, state slot, is_written of each row, is a chunk, where its state is copied behind it).

    Of every sequence of a batch, and of every segment of a prompt's chunk.
    """
    if isinstance(batch, MixedBatch):
        yield from sequences(batch.prompts, pool)
        num_rows = len(batch.prompts.positions_T)
        for row, *rest in sequences(batch.decode, pool):
            yield row + num_rows, *rest
        return
    slots = batch.state_slots_B.tolist()
    assert all(0 <= slot < pool.num_state_slots for slot in slots)
    assert len(set(slots)) == len(slots), "no two sequences share state"
    if isinstance(batch, PrefillBatch):
        for index, row, start, length, keep_in in batch.segments():
            positions = batch.positions_T[row : row + length].tolist()
            assert positions == list(range(start, start + length))
            yield row, positions, slots[index], [True] * length, True, keep_in
        return
    num_rows = batch.positions_BQ.shape[1]
    for index, slot in enumerate(slots):
        is_written = (batch.slots_BQ[index] != pool.scratch_slot).tolist()
        yield index * num_rows, batch.positions_BQ[index].tolist(), slot, is_written, False, None


class ToyHybrid(ToyModel):
    """See the module."""

    def kv_layout(self, block_size):
        plain = KVLayout.of_attention(
            model_hash="toy hybrid", num_layers=2 + self.with_mtp, num_kv_heads=2, head_dim=1, block_size=block_size,
            dtype="float64", has_mtp=self.with_mtp,
        )  # fmt: skip
        rows = plain.layers[0]
        layers = [
            window(2, 1, ring=RING, dtype="float64"), rows,
            tail(2, 1, dtype="float64"), state(2, 2, length=TILE, dtype="float64"), rows,
        ]  # fmt: skip
        return replace(plain, layers=(*layers, *[rows] * self.with_mtp))

    def trunk(self, token_ids_T, batch, pool, on_layer):
        rows = _rows(batch, pool)
        token_T = token_ids_T.double()
        mix_T = (token_T * 7919 + 13) % PRIME
        places = list(sequences(batch, pool))
        mix_T = self._convolve(mix_T, places, pool)
        on_layer(WINDOW)
        mix_T = _attend(rows, FIRST, mix_T, pool)
        on_layer(FIRST)
        mix_T = self._recur(mix_T, places, pool)
        on_layer(TAIL)
        on_layer(SNAPSHOT)
        mix_T = _attend(rows, SECOND, mix_T, pool)
        on_layer(SECOND)
        return torch.stack([token_T, mix_T, mix_T // 32], dim=-1)

    def mtp(self, token_ids_T, hidden_TD, batch, pool, on_layer):
        self.num_mtp_calls += 1
        token_T = token_ids_T.double()
        mix_T = (token_T * 104_729 + hidden_TD[:, 0] * 31 + hidden_TD[:, 1] * 17) % PRIME
        mix_T = _attend(_rows(batch, pool), MTP, mix_T, pool)
        on_layer(MTP)
        return torch.stack([token_T, mix_T, mix_T // 32], dim=-1)

    def _convolve(self, mix_T, places, pool):
        """x_p = 5 u_p + 3 u_(p-1) + 2 u_(p-2) + u_(p-3)."""
        kept_NHPSD, found_T = pool.blocks(WINDOW), mix_T.clone()
        for first, positions, slot, is_written, _, keep_in in places:
            rows_S = kept_NHPSD[slot, 0, 0, :, 0]
            for row, (position, written) in enumerate(zip(positions, is_written, strict=True), start=first):
                if not written:
                    continue
                u = float(mix_T[row])
                before = [float(rows_S[(position - back) % RING]) if position >= back else 0.0 for back in (1, 2, 3)]
                found_T[row] = (5 * u + 3 * before[0] + 2 * before[1] + before[2]) % PRIME
                kept_NHPSD[slot, :, 0, position % RING, 0] = torch.tensor([u, (u + 1) % PRIME], dtype=torch.float64)
                assert (
                    float(kept_NHPSD[slot, 1, 0, (position - 1) % RING, 0]) == (before[0] + 1) % PRIME or not position
                )
            if keep_in is not None:
                kept_NHPSD[keep_in] = kept_NHPSD[slot]
        return found_T

    def _recur(self, mix_T, places, pool):
        """S_p = 31 S_(p-1) + 17 u_p + 7, for two heads with factors of their own; both are added to what goes on."""
        tails_NHPSD, states_NHPSD, found_T = pool.blocks(TAIL), pool.blocks(SNAPSHOT), mix_T.clone()
        for first, positions, slot, is_written, is_chunk, keep_in in places:
            if not any(is_written):
                continue
            start = positions[0]
            folded, sums = 0, [0.0, 0.0]
            if start:
                folded = int(states_NHPSD[slot, 0, 0, 0, 0])
                sums = [float(value) for value in states_NHPSD[slot, :, 0, 0, 1]]
                assert folded in (start // TILE, start // TILE - 1), "the state is of another sequence or boundary"
            for position in range(folded * TILE, start):
                if position == start // TILE * TILE and folded < start // TILE:
                    folded = self._keep(states_NHPSD, slot, start // TILE, sums)
                sums = self._next(sums, [float(tails_NHPSD[slot, head, 0, position % 32, 0]) for head in range(2)])
            if folded < start // TILE:
                folded = self._keep(states_NHPSD, slot, start // TILE, sums)
            if not start:
                self._keep(states_NHPSD, slot, 0, sums)
            for row, (position, written) in enumerate(zip(positions, is_written, strict=True), start=first):
                if not written:
                    continue
                u = float(mix_T[row])
                tails_NHPSD[slot, :, 0, position % 32, 0] = torch.tensor([u, u * 2 % PRIME], dtype=torch.float64)
                sums = self._next(sums, [u, u * 2 % PRIME])
                found_T[row] = (u + sums[0] + 2 * sums[1]) % PRIME
                if is_chunk and (position + 1) % TILE == 0:
                    self._keep(states_NHPSD, slot, (position + 1) // TILE, sums)
            if keep_in is not None:
                tails_NHPSD[keep_in], states_NHPSD[keep_in] = tails_NHPSD[slot], states_NHPSD[slot]
        return found_T

    @staticmethod
    def _next(sums, inputs):
        return [((31 + head) * sums[head] + 17 * inputs[head] + 7) % PRIME for head in range(2)]

    @staticmethod
    def _keep(states_NHPSD, slot, folded, sums):
        for head in range(2):
            states_NHPSD[slot, head, 0, 0] = torch.tensor([folded, sums[head]], dtype=torch.float64)
        return folded
