"""Grammars within one step: drafts to the host, bitmasks back, and the bitmask on the logits.

Only rows that have a grammar take part. `take` starts their drafts' copy as soon as these are made; `masks` waits for
that copy alone, so on a GPU the host fills the masks while the trunk runs. Nothing here moves a state: the runner
accepts what was emitted once it is on the host.

`masks` needs every state to have accepted all tokens of earlier steps. A runner that has step n in flight when it
launches n + 1 must read step n's tokens of these rows, and accept them, between `take` and `masks`: they are ahead of
the drafts on the same stream, so this waits for nothing that `masks` would not wait for. It accepts each token once,
and may ask for masks of a state that has finished or failed (its sequence ended in between): they allow everything.

Legend: B sequences of the step, G of those with a grammar, K drafts, Q = K + 1 rows, V vocabulary, W = ceil(V / 32).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from baton.engine.grammar import GrammarState

WORD_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarMasks:
    """What the grammars allow in one step.

    Attributes:
        index_G: int64, place of each sequence in the batch.
        bitmask_GQW: int32, bit t % 32 of word t // 32 for token t.
        num_valid_G: int64, drafts that the grammar allows; later rows of the bitmask allow everything.
    """

    index_G: torch.Tensor
    bitmask_GQW: torch.Tensor
    num_valid_G: torch.Tensor

    def apply(self, logits_BQV: torch.Tensor) -> torch.Tensor:
        """The logits with what is forbidden at -inf; other sequences' rows are the same bits, the argument too."""
        masked_GQV = apply_bitmask(logits_BQV[self.index_G], self.bitmask_GQW)
        return logits_BQV.index_copy(0, self.index_G, masked_GQV)

    def cap(self, draft_cap_B: torch.Tensor) -> torch.Tensor:
        """The draft caps, lowered so that no draft that a grammar forbids can be accepted."""
        capped_G = torch.minimum(draft_cap_B[self.index_G], self.num_valid_G)
        return draft_cap_B.index_copy(0, self.index_G, capped_G)


class GrammarRows:
    """The grammars of one step: `take` its drafts, then ask for its `masks`, each once.

    Args:
        states: of the sequences that have one, by place in the batch; at the step's first new token.
    """

    def __init__(self, states: Mapping[int, GrammarState], device: torch.device) -> None:
        assert states
        self._states = tuple(states.values())
        self._index_G = torch.tensor(tuple(states), dtype=torch.int64).to(device)
        self._drafts_GK: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def take(self, drafts_BK: torch.Tensor) -> None:
        """Start to copy the rows' drafts to the host."""
        assert self._drafts_GK is None
        drafts_GK = drafts_BK[self._index_G]
        if drafts_GK.is_cuda:
            on_host = torch.empty(drafts_GK.shape, dtype=drafts_GK.dtype, pin_memory=True)
            on_host.copy_(drafts_GK, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
            drafts_GK = on_host
        self._drafts_GK = drafts_GK

    def masks(self) -> GrammarMasks:
        """Wait for the drafts, and find what the grammars allow after them."""
        assert self._drafts_GK is not None
        if self._copied is not None:
            self._copied.synchronize()
        looks = [state.look(drafts) for state, drafts in zip(self._states, self._drafts_GK.tolist(), strict=True)]
        return GrammarMasks(
            index_G=self._index_G,
            bitmask_GQW=self._to_device(np.stack([look.masks_QW for look in looks])),
            num_valid_G=self._to_device(np.asarray([look.num_valid for look in looks], dtype=np.int64)),
        )

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        on_host = torch.from_numpy(values)
        device = self._index_G.device
        return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host


def apply_bitmask(logits_RQV: torch.Tensor, bitmask_RQW: torch.Tensor) -> torch.Tensor:
    """Logits with every token whose bit is 0 at -inf; the reference of any kernel that does this.

    Args:
        logits_RQV: any float type.
        bitmask_RQW: int32, at least ceil(V / 32) words a row, lowest bit first.
    """
    bit_32 = torch.arange(WORD_BITS, dtype=torch.int32, device=bitmask_RQW.device)
    allowed_RQV = ((bitmask_RQW[..., None] >> bit_32) & 1).flatten(-2)[..., : logits_RQV.shape[-1]]
    return logits_RQV.masked_fill(allowed_RQV == 0, -torch.inf)
