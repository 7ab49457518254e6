"""Defines the plans of rank 0 as messages; every rank of a worker, including rank 0, runs exactly these.

A plan is an *operation* on slots and blocks (`Place`, `Release`, `Grow`, `Save`, `Load`) or on experts (`MoveExperts`),
or a `Step`. Ranks execute plans in the order in which rank 0 made them, so all ranks hold the same slots, block tables
and expert maps. Blocks are numbered across the pools of all ranks, if each rank has its own (`kvcache.rank_blocks`).
The numbers of the plan kinds are fixed, and the number of a deleted kind is not reused. Numbers from 64 on belong to
the KV sender (`prefill_worker.tp_group`); `plan_codec` turns messages into bytes.
"""

from dataclasses import dataclass

from baton.core.draft_method import DraftMethod
from baton.core.requests.request import AttemptKey
from baton.core.requests.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Resume:
    """The state from which a sequence resumes decoding when the KV of all its tokens but the newest is in its blocks.

    Attributes:
        draft_token: the draft for the position after its newest token; None without one.
        hidden: the hidden state that made the draft, [hidden_size] in the model's dtype, as bytes; empty without one.
    """

    draft_token: int | None = None
    hidden: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Put a sequence into a free slot.

    Attributes:
        slot: the slot.
        token_ids: all its tokens: the prompt and what was generated.
        num_output: how many of `token_ids`, at the end, were generated.
        blocks: its KV blocks, in token order.
        sampling: the request's parameters.
        draft_cap: maximum number of drafts in a step.
        method: draft method in every step that has drafts; None: that of the step.
        choice: which of the request's `n` answers it is.
        resume: if given, it decodes from the next step on; None: chunks compute its tokens first.
        knows_next: chunks compute all tokens but the newest, which was sampled earlier; it decodes from there.
        state_slot: its state slot; None if the layout has no state.
    """

    slot: int
    token_ids: tuple[int, ...]
    num_output: int
    blocks: tuple[int, ...]
    sampling: SamplingParams
    draft_cap: int
    method: DraftMethod | None = None
    choice: int = 0
    resume: Resume | None = None
    knows_next: bool = False
    state_slot: int | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Free `slot`: its sequence takes part in no later step."""

    slot: int


@dataclass(frozen=True, slots=True)
class Growth:
    """More blocks for a sequence that has a slot.

    Attributes:
        slot: its slot.
        first: number of blocks that it has.
        blocks: the blocks to append.
    """

    slot: int
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grow:
    """Append blocks to sequences."""

    growths: tuple[Growth, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Copy KV blocks, and the state slot that belongs to them, to host memory.

    Attributes:
        blocks: blocks of the pool.
        first: host block that the first one is copied to; the others follow.
        slot: slot whose draft is kept with them; None if the sequence has none.
        state_slot: state slot of the pool; None if the layout has no state.
        state_image: place in host memory that the state slot is copied to; None if the layout has no state.
    """

    blocks: tuple[int, ...]
    first: int
    slot: int | None
    state_slot: int | None = None
    state_image: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Copy back from host memory what `Save` copied, and restore the draft that was kept with it to `slot`."""

    blocks: tuple[int, ...]
    first: int
    slot: int
    state_slot: int | None = None
    state_image: int | None = None


@dataclass(frozen=True, slots=True)
class MoveExperts:
    """One round of the exchange between ranks that moves a layer's experts to other slots.

    Steps may run between rounds. The last round puts the new map and the moved weights into effect together.

    Attributes:
        layer: index among the layers with experts.
        experts: the expert of each slot of all ranks, once the last round is over.
        round: 0, 1 and so on, for each layer and map.
    """

    layer: int
    experts: tuple[int, ...]
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """`length` tokens of the sequence in `slot`, from position `start` on, computed in one step.

    A chunk that ends with the last token to compute samples the next one, unless that is already known.

    Attributes:
        slot: slot of the sequence.
        start: first position; everything before it is in the pool.
        length: >= 1.
        report_from: log-probabilities are reported for prompt tokens from this position on; None: not requested.
        push: the attempt whose KV is pushed to a decode worker, layer by layer; None: the sequence stays here.
        begin_with: state slot of the checkpoint that is copied to the sequence's own before the step; None: no copy.
        keep_in: checkpoints that it leaves, ascending: a position, and the state slot that receives the state after all
            tokens before that position.
    """

    slot: int
    start: int
    length: int
    report_from: int | None = None
    push: AttemptKey | None = None
    begin_with: int | None = None
    keep_in: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One pass over the rows of sequences: prefill chunks, and decode rows of num_drafts + 1 positions each.

    Attributes:
        chunks: at most one per sequence.
        slots: slots of the sequences that decode.
        num_drafts: drafts that each of them verifies, at most its cap.
        method: draft method; None: the only one that the runner has, or no drafts if it has two.
        max_context_len: upper bound of position + 1 over the decode rows, so that all ranks compute the same shapes.
        limit_s: time after which a rank that has not ended the step counts as hung; 0 with one rank.
    """

    chunks: tuple[Chunk, ...] = ()
    slots: tuple[int, ...] = ()
    num_drafts: int = 0
    method: DraftMethod | None = None
    max_context_len: int = 0
    limit_s: float = 0.0

    @property
    def num_rows(self) -> int:
        """Number of tokens that the step computes."""
        return sum(chunk.length for chunk in self.chunks) + len(self.slots) * (self.num_drafts + 1)


Operation = Place | Release | Grow | Save | Load | MoveExperts

PLAN_KINDS: dict[int, type] = {17: Release, 28: Grow, 29: Save, 30: Load, 31: Place, 32: Step, 33: MoveExperts}
