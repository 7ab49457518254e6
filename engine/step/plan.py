"""What rank 0 plans, as messages: every rank of a worker, rank 0 included, runs exactly these.

A plan is an *operation* on slots and blocks (`Place`, `Release`, `Grow`, `Save`, `Load`) or on experts (`MoveExperts`),
or a `Step`. Ranks carry them out in the order in which rank 0 made them, so that all ranks hold the same slots, block
tables and maps of experts. Blocks are numbered over the pools of all ranks, where each has its own
(`kvcache.rank_blocks`). The numbers of the kinds are fixed: a kind that is deleted takes its number with it. Numbers
from 64 on belong to the KV sender (`prefill_worker.tp_group_messages`); `plan_codec` turns messages into bytes.
"""

from dataclasses import dataclass

from baton.core.draft_method import DraftMethod
from baton.core.requests.request import AttemptKey
from baton.core.requests.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a sequence goes on decoding whose KV, but for its newest token's, is in its blocks.

    Attributes:
        draft_token: the draft for the position after its newest token; None without one.
        hidden: the hidden state that made the draft, [hidden_size] in the model's dtype, as bytes; empty without one.
    """

    draft_token: int | None = None
    hidden: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A sequence takes a free slot.

    Attributes:
        slot: which.
        token_ids: all its tokens: the prompt and what was generated.
        num_output: the last so many of `token_ids` were generated.
        blocks: its KV blocks, in token order.
        sampling: the request's parameters.
        draft_cap: drafts that it may use in a step.
        method: what makes its drafts in every step that has any; None: what makes the step's.
        choice: which of the request's `n` answers it is.
        resume: it decodes from the next step on; None: chunks compute its tokens first.
        knows_next: chunks compute all tokens but the newest, which was sampled before; it decodes from there.
        state_slot: its own; None if the layout has no state.
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
    """The sequence in `slot` takes part in no later step."""

    slot: int


@dataclass(frozen=True, slots=True)
class Growth:
    """More blocks of a sequence that has a slot.

    Attributes:
        slot: its own.
        first: blocks that it has.
        blocks: those that follow them.
    """

    slot: int
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grow:
    """Sequences get more blocks."""

    growths: tuple[Growth, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Copy KV blocks, and the state slot that belongs to them, to host memory.

    Attributes:
        blocks: of the pool.
        first: host block that the first is copied to; the others follow.
        slot: whose draft is kept with them; None: it has none.
        state_slot: of the pool; None if the layout has no state.
        state_image: where in host memory the state slot is copied to; likewise.
    """

    blocks: tuple[int, ...]
    first: int
    slot: int | None
    state_slot: int | None = None
    state_image: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Copy what `Save` copied back from host memory, and the draft that was kept with it to `slot`."""

    blocks: tuple[int, ...]
    first: int
    slot: int
    state_slot: int | None = None
    state_image: int | None = None


@dataclass(frozen=True, slots=True)
class MoveExperts:
    """One round of what ranks exchange so that a layer's experts lie in other slots; steps may lie between rounds.

    The last one puts the map and the weights that crossed in force together.

    Attributes:
        layer: its place among the layers with experts.
        experts: the expert of each slot of all ranks, once all is over.
        round: 0, 1 and so on; each of the same layer and map.
    """

    layer: int
    experts: tuple[int, ...]
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """`length` tokens of the sequence in `slot`, from position `start` on, computed in one step.

    A chunk that ends with the last token to compute samples the next one, unless that is known.

    Attributes:
        slot: of the sequence.
        start: everything before it is in the pool.
        length: >= 1.
        report_from: log-probabilities of the prompt are reported for tokens from this position on; None: not asked for.
        push: the attempt whose KV is pushed to a decode worker, layer by layer; None: the sequence stays here.
        begin_with: state slot of the checkpoint that is copied to the sequence's own ahead of the step; None: none.
        keep_in: checkpoints that it leaves, ascending: a position, and the state slot that gets the state behind all
            tokens before it.
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
    """One pass over rows of sequences: chunks of prompts, and decode rows of num_drafts + 1 positions each.

    Attributes:
        chunks: at most one a sequence.
        slots: of the sequences that decode.
        num_drafts: drafts that each of them verifies, at most its cap.
        method: what makes them; None: the one that the runner has, or nothing where it has two.
        max_context_len: bound of position + 1 over the decode rows; all ranks compute the same shapes.
        limit_s: a rank that has not ended the step by then hangs; 0 with one rank.
    """

    chunks: tuple[Chunk, ...] = ()
    slots: tuple[int, ...] = ()
    num_drafts: int = 0
    method: DraftMethod | None = None
    max_context_len: int = 0
    limit_s: float = 0.0

    @property
    def num_rows(self) -> int:
        """Tokens that the step computes."""
        return sum(chunk.length for chunk in self.chunks) + len(self.slots) * (self.num_drafts + 1)


Operation = Place | Release | Grow | Save | Load | MoveExperts

PLAN_KINDS: dict[int, type] = {17: Release, 28: Grow, 29: Save, 30: Load, 31: Place, 32: Step, 33: MoveExperts}
