"""Grammars within one step: drafts to the host, and bitmasks back.

Only rows that have a grammar take part. `take` starts their drafts' copy as soon as these are made; `masks` waits for
that copy alone, so on a GPU the host fills the masks while the trunk runs. A grammar that takes long is worked on by
other threads: the step waits `PATIENCE_S` for all of those together, and emits nothing of a sequence whose mask is not
there by then. Where layers keep a recurrent state, or KV is pushed, the end of a prompt waits for its mask however long
it takes: to be computed once more, the state would have to forget, and the push to take back. A step's tokens are told
to the states when the next step of any of them asks for masks: then they are on the host, as they are ahead of that
step's drafts. States that have finished or failed (their sequence has ended, or will) allow everything.

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
ALONE_PATIENCE_S: Final = 0.02  # where nothing else waits for the step


class GrammarRows:
    """The grammars of one step: `take` its drafts, then ask for its `masks`, each once.

    Args:
        states: of the sequences that have one, by place in the batch.
        device: of the step.
        before: what earlier steps emitted and no state has taken yet; emptied by the first `masks` that is asked.
        communicator: of the ranks, which emit the same tokens.
        is_alone: the batch has no other sequences, so that a step may wait somewhat longer.
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
        """Start to copy the rows' drafts to the host."""
        assert self._drafts_GK is None
        self._drafts_GK = HostCopy(drafts_BK[self._index_G])

    def masks(self) -> GrammarMasks:
        """Wait for the drafts, and find what the grammars allow after them."""
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
        # The fast path finds at once; who leaves it in doing so has begun, and waits with the others.
        looks = {at: state.found(drafts, 0.0) for at, (state, drafts) in enumerate(rows) if state.is_quick}
        is_alone = self._is_alone and not any(look.num_rows for look in looks.values())
        end_s = time.monotonic() + (ALONE_PATIENCE_S if is_alone else PATIENCE_S)
        for at, (state, drafts) in enumerate(rows):
            if at not in looks or looks[at].num_rows == 0:
                patience_s = None if self._is_patient else max(0.0, end_s - time.monotonic())
                looks[at] = state.found(drafts, patience_s)
        return [looks[at] for at in range(len(rows))]

    def emitted(self, verified: Verified) -> "EmittedTokens":
        """What the step emitted, on its way to the host."""
        columns = [verified.accepted_len_B[:, None], verified.token_ids_BQ]
        return EmittedTokens(self._states, torch.cat(columns, dim=1)[self._index_G])

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(values), self._index_G.device)


class EmittedTokens:
    """Tokens of one step that its sequences' grammars have not heard of: on a GPU they are not on the host yet.

    Args:
        states: of the sequences.
        rows_GX: int64, of each its accepted length and the step's tokens.
    """

    def __init__(self, states: Sequence[GrammarState], rows_GX: torch.Tensor) -> None:
        self._states = states
        self._copy = HostCopy(rows_GX)

    def accept(self) -> None:
        """Tell them; the only call. A state that has finished, or failed, takes nothing more."""
        for state, (accepted_len, *token_ids) in zip(self._states, self._copy.get().tolist(), strict=True):
            if state.error is None and not state.is_finished:
                state.accept(token_ids[: accepted_len + 1])


class HostCopy:
    """A tensor on its way to the host, behind what is on the current stream now."""

    def __init__(self, source: torch.Tensor) -> None:
        self._tensor = source
        self._event: torch.cuda.Event | None = None
        if source.is_cuda:
            self._tensor = host_buffer(source.numel(), source.dtype, source.device).view(source.shape)
            copy_to_host(self._tensor, source)
            self._event = torch.cuda.Event()
            # Of the source's device: another one may be the thread's current.
            self._event.record(torch.cuda.current_stream(source.device))

    def get(self) -> torch.Tensor:
        """It, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor
