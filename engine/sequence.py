"""Represents one sequence: one answer to a request while an engine works on it, and the resources it holds there."""

from dataclasses import dataclass, field
from enum import Enum, auto

from baton.core.draft_method import DraftMethod
from baton.core.requests.request import AttemptKey, FinishReason, GenerationRequest, SpeculationCounts
from baton.engine.finish import FinishChecker
from baton.engine.grammar.grammar import HeldGrammar
from baton.engine.step.plan import Resume
from baton.kvcache.allocator import BlockTable
from baton.kvcache.host_ranges import HostRange

MAX_PREEMPTIONS = 3  # of one sequence, before it is protected


class Phase(Enum):
    """The phase of a sequence. Only the scheduler and the engine change it."""

    EXPECTED = auto()  # its KV will come from a prefill worker, which has not asked for blocks yet; holds nothing
    WAITING = auto()  # waits for blocks, or for a slot; holds nothing on the device
    RESERVING = auto()  # holds blocks; the decode worker was asked for blocks
    RECEIVING = auto()  # holds blocks, into which a prefill worker writes its KV
    READY = auto()  # holds blocks; waits for a slot
    RUNNING = auto()  # holds blocks and a slot
    SENDING = auto()  # its prompt is computed; holds blocks until the decode worker has acknowledged its KV
    ABORTING = auto()  # was given up; holds blocks until no push reads them
    ENDED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One answer to a request. Times are readings of the engine's clock, in seconds.

    A preempted sequence is a waiting sequence with more tokens: its output is computed as part of its prompt.

    Attributes:
        request: the request, for this answer alone, with its own `choice`.
        checker: tells when the answer ends; has seen all of `token_ids`.
        draft_cap: maximum number of drafts in a step.
        grammar: keeps the request's compiled grammar alive; None without one.
        method: draft method in all its steps; None: that of each step.
        phase: see `Phase`.
        order: arrival order in the queue for blocks; lower goes first.
        is_received: its prompt's KV comes from a prefill worker.
        is_pushed: its KV goes to a decode worker, which decodes it.
        owner: rank whose pool has its blocks, or had those that are saved; 0 with a single pool.
        table: its block table.
        slot: its slot.
        token_ids: tokens generated here so far.
        num_cached: positions whose KV was found in the prefix cache.
        num_computed: positions whose KV is in its blocks, or will be when the steps in flight are over; once it
            decodes, the number when it began to.
        is_decoding: it takes part in steps as a decode row.
        is_leaving: it is to be preempted as soon as no step in flight runs it.
        resume: what it decodes from, if its KV came from a prefill worker; None once it runs.
        saved: its KV in host memory.
        saved_state: its state slot in host memory; None if the layout has no state.
        num_lost: positions that a preemption dropped and that are to be recomputed.
        num_preemptions: number of times that it was preempted.
        num_scripted: number of preemptions that a test requested.
        num_counted: prompt tokens up to which the engine has counted them as computed.
        num_reported: prompt tokens whose log-probabilities were reported.
        block_hashes: hashes of its prompt's full blocks; empty if it shares nothing.
        is_unsound: its KV may hold NaN or infinities, so no more of its blocks are registered for sharing.
        checkpoint: name of the checkpoint that its first chunk begins with; None if there is none, or once that chunk
            is planned.
        checkpoint_blocks: block counts after which it leaves checkpoints, in order; maps to whether it is a branch,
            where it diverges from other prompts.
        chunks: of a traced request, per chunk: when it was launched and read, its first position and its length.
        counts: drafts proposed and accepted, tokens emitted.
        finish_reason: why the answer ended.
        submitted_s: when it arrived.
        computing_s: when its first chunk was launched; 0 before.
        first_token_s: when its first token was known; 0 before.
        decoding_s: when it began to decode; 0 before.
        last_token_s: when its newest token was known; 0 before.
    """

    request: GenerationRequest
    checker: FinishChecker
    draft_cap: int
    submitted_s: float
    grammar: HeldGrammar | None = None
    method: DraftMethod | None = None
    phase: Phase = Phase.WAITING
    order: int = -1
    is_received: bool = False
    is_pushed: bool = False
    owner: int = 0
    table: BlockTable | None = None
    slot: int | None = None
    token_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_computed: int = 0
    is_decoding: bool = False
    is_leaving: bool = False
    resume: Resume | None = None
    saved: HostRange | None = None
    saved_state: HostRange | None = None
    num_lost: int = 0
    num_preemptions: int = 0
    num_scripted: int = 0
    num_counted: int = 0
    num_reported: int = 0
    block_hashes: tuple[bytes, ...] = ()
    is_unsound: bool = False
    checkpoint: bytes | None = None
    checkpoint_blocks: dict[int, bool] = field(default_factory=dict)
    chunks: list[tuple[float, float, int, int]] = field(default_factory=list)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    finish_reason: FinishReason | None = None
    computing_s: float = 0.0
    first_token_s: float = 0.0
    decoding_s: float = 0.0
    last_token_s: float = 0.0

    @property
    def key(self) -> AttemptKey:
        """Identity of the attempt."""
        return self.request.key

    @property
    def num_tokens(self) -> int:
        """Number of tokens in prompt and output so far."""
        return self.request.prompt_len + len(self.token_ids)

    @property
    def all_token_ids(self) -> tuple[int, ...]:
        """Tokens of the prompt and the output so far."""
        prompt = self.request.prompt_token_ids
        return (*prompt, *self.token_ids) if self.token_ids else prompt

    @property
    def num_output(self) -> int:
        """Number of tokens of the answer so far, including those of earlier attempts."""
        return self.request.num_forced + len(self.token_ids)

    @property
    def capacity_len(self) -> int:
        """Maximum number of positions that its KV may ever occupy here."""
        if self.is_pushed:
            return self.request.prompt_len
        return self.request.prompt_len - self.request.num_forced + self.request.sampling.max_tokens + self.draft_cap

    @property
    def step_len(self) -> int:
        """Number of positions that it occupies after one more decode step, however many drafts that accepts."""
        num_tokens = self.request.prompt_len + max(1, len(self.token_ids))
        return min(num_tokens + self.draft_cap, self.capacity_len)

    @property
    def num_left(self) -> int:
        """Number of tokens that chunks still have to compute: all but the newest, once one was sampled here."""
        return 0 if self.is_decoding else self.num_tokens - bool(self.token_ids) - self.num_computed

    @property
    def num_kv(self) -> int:
        """Number of positions whose KV is in its blocks, once all steps are read."""
        return self.num_tokens - 1 if self.is_whole else self.num_computed

    @property
    def is_whole(self) -> bool:
        """Whether the KV of all tokens but the newest is present, so that it is worth saving."""
        return self.is_decoding or self.resume is not None

    @property
    def is_protected(self) -> bool:
        """Whether it was preempted so often that it restarts only with every block that it may need."""
        return self.num_preemptions >= MAX_PREEMPTIONS
