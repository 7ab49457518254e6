"""What rank 0 tells the others to compute, and what ranks say about themselves; `plan_codec` makes bytes of them.

Numbers are fixed: a kind that goes away takes its number with it. Those from 64 on belong to the hand-off of prefill
workers (`prefill_worker.gang_messages`).
"""

from dataclasses import dataclass

import torch

from baton.core.sampling import SamplingParams
from baton.engine.batch import PrefillChunk
from baton.engine.prefill import SequenceStart
from baton.engine.slots import Growth
from baton.kvcache.allocator import BlockTable


@dataclass(frozen=True, slots=True)
class Join:
    """First word of a rank on its connection.

    Attributes:
        rank: its own.
        token: of the gang; whoever does not know it is nobody's rank.
    """

    rank: int
    token: str


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life.

    Attributes:
        num_operations: collectives that the rank has begun.
    """

    num_operations: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank is loaded and follows from now on."""


@dataclass(frozen=True, slots=True)
class Farewell:
    """Last word of a rank that ends.

    Attributes:
        error: `BatonError.to_wire` of why; empty: it was told to.
        is_victim: it could not go on without another rank; the fault is that one's.
    """

    error: str
    is_victim: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """Rank 0 ends; nothing follows."""


@dataclass(frozen=True, slots=True)
class Admit:
    """`DecodeRunner.admit`. The hidden state crosses as the bytes of its dtype; no dtype, no hidden state."""

    slot: int
    first_token: int
    draft_token: int | None
    hidden_dtype: str
    hidden: bytes
    prompt_len: int
    sampling: SamplingParams
    table: BlockTable
    draft_cap: int
    prompt_token_ids: tuple[int, ...] = ()
    output_len: int = 0
    choice: int = 0

    @classmethod
    def of(
        cls,
        slot: int,
        start: SequenceStart,
        prompt_len: int,
        sampling: SamplingParams,
        table: BlockTable,
        draft_cap: int,
        prompt_token_ids: tuple[int, ...] = (),
        output_len: int = 0,
        choice: int = 0,
    ) -> "Admit":
        """From the call's arguments."""
        hidden_D = start.hidden_D
        return cls(
            slot=slot,
            first_token=start.first_token,
            draft_token=start.draft_token,
            hidden_dtype="" if hidden_D is None else str(hidden_D.dtype).removeprefix("torch."),
            # bfloat16 has no numpy type, so the bytes are taken as bytes.
            hidden=b"" if hidden_D is None else hidden_D.cpu().contiguous().view(torch.uint8).numpy().tobytes(),
            prompt_len=prompt_len,
            sampling=sampling,
            table=table,
            draft_cap=draft_cap,
            prompt_token_ids=prompt_token_ids,
            output_len=output_len,
            choice=choice,
        )

    @property
    def start(self) -> SequenceStart:
        """The call's argument of that name."""
        hidden_D = None
        if self.hidden_dtype:
            dtype = getattr(torch, self.hidden_dtype)
            assert isinstance(dtype, torch.dtype)
            hidden_D = torch.frombuffer(bytearray(self.hidden), dtype=dtype)
        return SequenceStart(
            first_token=self.first_token, draft_token=self.draft_token, hidden_D=hidden_D, prompt_len=self.prompt_len
        )


@dataclass(frozen=True, slots=True)
class Release:
    """`DecodeRunner.release`."""

    slot: int


@dataclass(frozen=True, slots=True)
class SetDrafts:
    """`DecodeRunner.set_num_drafts`: the k of the steps told after this."""

    num_drafts: int


@dataclass(frozen=True, slots=True)
class Step:
    """`DecodeRunner.launch`.

    Attributes:
        slots: that take part.
        max_context_len: as rank 0 bounds it; all ranks compute the same shapes.
        limit_s: a rank that has not ended the step by then hangs.
    """

    slots: tuple[int, ...]
    max_context_len: int
    limit_s: float


@dataclass(frozen=True, slots=True)
class Forward:
    """`PrefillRunner.forward`.

    Attributes:
        chunks: of the step.
        limit_s: as in `Step`.
    """

    chunks: tuple[PrefillChunk, ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Draft:
    """`PrefillRunner.draft` of the last `Forward`."""

    limit_s: float


@dataclass(frozen=True, slots=True)
class Grow:
    """`DecodeRunner.grow`."""

    growths: tuple[Growth, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """`KVOffload.save`."""

    blocks: tuple[int, ...]
    first: int
    slot: int | None


@dataclass(frozen=True, slots=True)
class Load:
    """`KVOffload.load`."""

    blocks: tuple[int, ...]
    first: int
    slot: int


CONTROL_KINDS: dict[int, type] = {1: Join, 2: Beat, 3: Ready, 4: Farewell, 5: Stop}
COMPUTE_KINDS: dict[int, type] = {
    16: Admit,
    17: Release,
    18: Step,
    20: SetDrafts,
    24: Forward,
    25: Draft,
    28: Grow,
    29: Save,
    30: Load,
}
