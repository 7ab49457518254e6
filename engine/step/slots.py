"""Holds the device state of each running sequence, in tensors indexed by *slot*.

A step reads the rows of the slots it runs and writes back what changed. The host reads nothing here; it keeps what it
must know (lengths, parameters) itself. The caller assigns the slots.

Legend: N slots, B sequences of a step, D hidden size, M entries of the widest block table, C numbers of a slot.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.engine.sampling.sampling_table import SamplingTable
from baton.engine.speculation.token_history import TokenHistory
from baton.engine.step.batch import DecodeRows
from baton.engine.step.plan import Growth
from baton.kernels.copies import host_buffer, to_device
from baton.kernels.fused_copy import RunningCopies, fused_copy
from baton.model.vocab import WHOLE, Vocab

_MAX_RUNNING = 64  # launches whose sources are kept alive; one more waits for the oldest
_COPY_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeState:
    """The part of a slot that a step changes.

    Attributes:
        last_token_B: int64, the newest token, t_{L-1}; its trunk KV is not yet in the pool.
        length_B: int64, L, tokens of the sequence so far.
        draft_token_B: int64, the first draft, for position L.
        hidden_BD: MTP output that made that draft (entry L-2), the input of the chain's next entry.
    """

    last_token_B: torch.Tensor
    length_B: torch.Tensor
    draft_token_B: torch.Tensor
    hidden_BD: torch.Tensor


class SlotTable:
    """The tensors of every slot; `sampling` owns those used for sampling, `history` those used to look up drafts."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_blocks: int,
        hidden_size: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        vocab: Vocab = WHOLE,
        history: TokenHistory | None = None,
    ) -> None:
        self.history = history
        self.sampling = SamplingTable(
            num_slots=num_slots, vocab_size=vocab_size, device=device, eos_token_ids=eos_token_ids, vocab=vocab
        )
        self._device = device
        # One tensor, so that a step reads it with one operation. What a step changes comes first, in the order of
        # writing.
        self._numbers_NC = torch.zeros(num_slots, 6, dtype=torch.int64, device=device)
        self._sampled_N2 = self._numbers_NC[:, :2]
        self._running: deque[RunningCopies] = deque()
        columns_CN = self._numbers_NC.unbind(dim=1)
        _, _, self._draft_token_N, self._limit_N, _, _ = columns_CN
        self._hidden_ND = torch.zeros(num_slots, hidden_size, dtype=dtype, device=device)
        self._tables_NM = torch.zeros(num_slots, max_blocks, dtype=torch.int64, device=device)

    def place(
        self,
        slot: int,
        *,
        blocks: Sequence[int],
        limit: int,
        null_block: int,
        draft_cap: int,
        state_slot: int = 0,
        last_token: int = 0,
        length: int = 0,
        draft_token: int = 0,
        hidden_D: torch.Tensor | None = None,
        token_ids: Sequence[int] = (),
    ) -> None:
        """Set everything about a sequence, in one kernel launch on a GPU.

        What the host knows is packed into one pinned buffer, which the kernel reads.

        Args:
            slot: a free slot.
            blocks: its KV blocks.
            limit: positions that fit in its blocks.
            null_block: fills unused entries of its block table.
            draft_cap: drafts that it may accept in a step.
            state_slot: its state slot; not read if the layout has no state.
            last_token: its newest token, if it decodes next.
            length: number of its tokens, if it decodes next.
            draft_token: its draft, if it decodes next.
            hidden_D: the hidden state that made the draft, on any device, if it decodes next.
            token_ids: its tokens; not read without a history.
        """
        width = self._tables_NM.shape[1]
        numbers = (last_token, length, draft_token, limit, draft_cap, state_slot)
        hidden_row_D = self._hidden_ND[slot]
        kept = () if self.history is None else token_ids
        num_ints = len(numbers) + width
        ends = [8 * num_ints, 8 * num_ints + hidden_row_D.nbytes]
        packed = host_buffer(ends[1] + 4 * len(kept), torch.uint8, self._device)
        packed_ints = packed[: ends[0]].view(torch.int64)
        # By NumPy: a table may have thousands of entries, and a list of them takes milliseconds.
        ints = packed_ints.numpy()
        ints[: len(numbers)] = numbers
        ints[len(numbers) :] = null_block
        ints[len(numbers) :][: len(blocks)] = blocks[:width]
        if hidden_D is None or hidden_D.device.type == "cpu":
            source_D = packed[ends[0] : ends[1]].view(hidden_row_D.dtype)
            source_D.copy_(source_D.new_zeros(()) if hidden_D is None else hidden_D)
        else:
            source_D = hidden_D.to(self._hidden_ND).contiguous()
        pairs = [
            (self._numbers_NC[slot], packed_ints[: len(numbers)]),
            (self._tables_NM[slot], packed_ints[len(numbers) :]),
            (hidden_row_D, source_D),
        ]
        if self.history is not None:
            tokens = packed[ends[1] :].view(torch.int32)
            tokens.copy_(torch.tensor(kept, dtype=torch.int32))
            pairs.append((self.history.places(slot, len(kept)), tokens))
        self._copy(pairs)

    def _copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy all pairs in one launch; keeps the sources alive until the device has read them."""
        while self._running and self._running[0].is_done:
            self._running.popleft()
        if len(self._running) >= _MAX_RUNNING:
            self._running.popleft().wait(_COPY_LIMIT_S)
        running = fused_copy(pairs, self._device)
        if not running.is_done:
            self._running.append(running)

    def grow(self, growths: Sequence[Growth], limits: Sequence[int]) -> None:
        """Append to block tables and raise the sequences' limits; blocks beyond the table's width are left out."""
        width = self._tables_NM.shape[1]
        places: list[int] = []
        blocks: list[int] = []
        for growth in growths:
            added = growth.blocks[: max(0, width - growth.first)]
            first = growth.slot * width + growth.first
            places += range(first, first + len(added))
            blocks += added
        slots = [growth.slot for growth in growths]
        sizes = [len(places), len(blocks), len(slots), len(slots)]
        numbers = to_device(torch.tensor([*places, *blocks, *slots, *limits]), self._device)
        place_E, block_E, slot_G, limit_G = numbers.split(sizes)
        self._tables_NM.view(-1).index_copy_(0, place_E, block_E)
        self._limit_N.index_copy_(0, slot_G, limit_G)

    def draft_of(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Device copies of a sequence's first draft (int64 scalar) and of the hidden state [D] that made it."""
        return self._draft_token_N[slot].clone(), self._hidden_ND[slot].clone()

    def put_draft(self, slot: int, draft: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Set what `draft_of` returned."""
        self._draft_token_N[slot], self._hidden_ND[slot] = draft

    def gather(self, slots_B: torch.Tensor, num_blocks: int) -> tuple[DecodeState, DecodeRows]:
        """Copies of the slots' rows; this step needs only `num_blocks` entries of each block table."""
        numbers_BC = self._numbers_NC.index_select(0, slots_B)
        last_token_B, length_B, draft_token_B, limit_B, draft_cap_B, state_slot_B = numbers_BC.unbind(dim=1)
        state = DecodeState(
            last_token_B=last_token_B,
            length_B=length_B,
            draft_token_B=draft_token_B,
            hidden_BD=self._hidden_ND.index_select(0, slots_B),
        )
        block_tables_BM = self._tables_NM[:, :num_blocks].index_select(0, slots_B)
        return state, DecodeRows(
            block_tables_BM=block_tables_BM, limit_B=limit_B, draft_cap_B=draft_cap_B, state_slots_B=state_slot_B
        )

    def write_sample(self, slots_B: torch.Tensor, last_token_B: torch.Tensor, length_B: torch.Tensor) -> None:
        """Write what sampling changed."""
        self._sampled_N2.index_copy_(0, slots_B, torch.stack([last_token_B, length_B], dim=1))

    def write_draft(self, slots_B: torch.Tensor, draft_token_B: torch.Tensor | None, hidden_BD: torch.Tensor) -> None:
        """Write the next draft and the hidden state that made it; without a draft, the hidden state alone."""
        if draft_token_B is not None:
            self._draft_token_N.index_copy_(0, slots_B, draft_token_B)
        self._hidden_ND.index_copy_(0, slots_B, hidden_BD)
