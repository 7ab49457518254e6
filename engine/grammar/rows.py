"""Applies grammars within one step: copies drafts to the host, and bitmasks back.

Only rows that have a grammar take part. `take` starts the copy of their drafts as soon as these are made. `masks` waits
for that copy alone, so on a GPU the host fills the masks while the trunk runs. Slow grammars are handled by other
threads: the step waits `PATIENCE_S` in total for all of them, and emits nothing for a sequence whose mask has not
arrived by then. If layers keep a recurrent state, or KV is pushed, the end of a prompt waits for its mask however long
it takes: to compute it again, the state would have to forget, and the push to take back. The grammar states take a
step's tokens when the next step of any of them asks for masks: by then the tokens are on the host, since they precede
that step's drafts. States that have finished or failed (their sequence has ended, or will) allow everything.

Legend: B sequences of the step, G of those with a grammar, K drafts, Q = K + 1 rows, V vocabulary, W = ceil(V / 32).
"""

import time
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch

from baton.engine.grammar.grammar import GrammarState
from baton.engine.grammar.masks import GrammarMasks
from baton.engine.grammar.walk import GrammarLookahead
from baton.engine.speculation.verify import Verified
from baton.kernels.copies import copy_to_host, host_buffer, to_device
from baton.model.parallel import Alone, Communicator

PATIENCE_S: Final = 0.002
ALONE_PATIENCE_S: Final = 0.02  # if nothing else waits for the step


class GrammarRows:
    """The grammars of one step: call `take` with its drafts, then `masks`, each once.

    Args:
        states: states of the sequences that have a grammar, by place in the batch.
        device: device of the step.
        before: tokens that earlier steps emitted and no state has taken yet; emptied by the next `masks`.
        communicator: of the ranks, which emit the same tokens.
        is_alone: the batch has no other sequences, so that the step may wait somewhat longer.
        is_patient: wait for every mask, however long it takes.
    """

    def __init__(
        self,
        states: Mapping[int, GrammarState],
        device: torch.device,
        before: "list[EmittedTokens] | None" = None,
        communicator: Communicator | None = None,
        *,
        is_alone: bool = False,
        is_patient: bool = False,
    ) -> None:
        assert states
        self._before = [] if before is None else before
        self._communicator = communicator or Alone()
        self._is_patient = is_patient
        self._is_alone = is_alone
        self._states = tuple(states.values())
        self._index_G = to_device(torch.tensor(tuple(states), dtype=torch.int64), device)
        self._drafts_GK: HostCopy | None = None

    def take(self, drafts_BK: torch.Tensor) -> None:
        """Start copying the rows' drafts to the host."""
        assert self._drafts_GK is None
        self._drafts_GK = HostCopy(drafts_BK[self._index_G])

    def masks(self) -> GrammarMasks:
        """Wait for the drafts, and determine what the grammars allow after them."""
        assert self._drafts_GK is not None
        while self._before:
            self._before.pop(0).accept()
        looks = self._looks(self._drafts_GK.get().tolist())
        masks = GrammarMasks(
            index_G=self._index_G,
            bitmask_GQW=self._to_device(np.stack([look.masks_QW for look in looks])),
            num_valid_G=self._to_device(np.asarray([look.num_valid for look in looks], dtype=np.int64)),
            num_rows_G=self._to_device(np.asarray([look.num_rows for look in looks], dtype=np.int64)),
        )
        return masks.agreed(self._communicator)

    def _looks(self, drafts_GK: list[list[int]]) -> list[GrammarLookahead]:
        rows = list(zip(self._states, drafts_GK, strict=True))
        for state, drafts in rows:
            state.begin(drafts)
        # The fast path answers at once; a sequence that leaves it here has begun its own look, and waits like the
        # others.
        looks = {at: state.found(drafts, 0.0) for at, (state, drafts) in enumerate(rows) if state.is_quick}
        is_alone = self._is_alone and not any(look.num_rows for look in looks.values())
        end_s = time.monotonic() + (ALONE_PATIENCE_S if is_alone else PATIENCE_S)
        for at, (state, drafts) in enumerate(rows):
            if at not in looks or looks[at].num_rows == 0:
                patience_s = None if self._is_patient else max(0.0, end_s - time.monotonic())
                looks[at] = state.found(drafts, patience_s)
        return [looks[at] for at in range(len(rows))]

    def emitted(self, verified: Verified) -> "EmittedTokens":
        """The tokens that the step emitted, while they are copied to the host."""
        columns = [verified.accepted_len_B[:, None], verified.token_ids_BQ]
        return EmittedTokens(self._states, torch.cat(columns, dim=1)[self._index_G])

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(values), self._index_G.device)


class EmittedTokens:
    """Tokens of one step that the grammars have not taken yet; on a GPU they are still being copied to the host.

    Args:
        states: states of the sequences.
        rows_GX: int64, per sequence, its accepted length and the step's tokens.
    """

    def __init__(self, states: Sequence[GrammarState], rows_GX: torch.Tensor) -> None:
        self._states = states
        self._copy = HostCopy(rows_GX)

    def accept(self) -> None:
        """Pass the tokens to the states; call once. A state that has finished or failed takes none."""
        for state, (accepted_len, *token_ids) in zip(self._states, self._copy.get().tolist(), strict=True):
            if state.error is None and not state.is_finished:
                state.accept(token_ids[: accepted_len + 1])


class HostCopy:
    """A tensor being copied to the host, after the work that is on the current stream now."""

    def __init__(self, source: torch.Tensor) -> None:
        self._tensor = source
        self._event: torch.cuda.Event | None = None
        if source.is_cuda:
            self._tensor = host_buffer(source.numel(), source.dtype, source.device).view(source.shape)
            copy_to_host(self._tensor, source)
            self._event = torch.cuda.Event()
            # On the source's device: the thread's current device may be another.
            self._event.record(torch.cuda.current_stream(source.device))

    def get(self) -> torch.Tensor:
        """The tensor on the host; waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor
