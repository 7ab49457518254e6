"""Compiles every kernel that serving launches before a worker reports ready, so that no stream waits for compilation.

There are two parts: the model's passes, and the work between them. The latter is placing sequences in slots and
sampling tokens from logits, with every cut, edit, grammar and report that requests may use, for each number of drafts,
by the same functions that steps use. `kernels.compiles` counts and reports what is compiled later all the same.

A pass computes one layer of each kind: the others would launch the same kernels. There are hundreds of passes, and some
have a chunk for every sequence: all layers of a 35B with delta nets took minutes.

Legend: B sequences, K draft tokens, Q = K + 1 rows, F prompts that end, V vocabulary, D hidden size.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from baton.core.numerics import Numerics
from baton.core.requests.sampling import SamplingParams
from baton.engine.grammar.masks import WORD_BITS, GrammarMasks
from baton.engine.grammar.rows import GrammarRows
from baton.engine.graphs.key import default_widths
from baton.engine.sampling.history import HistoryLookahead, SampledSequence
from baton.engine.sampling.kernel_sampler import next_token
from baton.engine.sampling.logprobs import LOGITS_ROWS, logprobs_of, step_logprobs
from baton.engine.sampling.sampler import SamplingRows, looks_ahead
from baton.engine.sampling.sampling_table import rows_of
from baton.engine.speculation.drafting import over_vocabulary
from baton.engine.speculation.kernel_verifier import KernelVerifier
from baton.engine.speculation.token_history import TokenHistory
from baton.engine.speculation.verify import Verifier
from baton.engine.step.batch import ChunkRows, DecodeRows, prefill_inputs
from baton.engine.step.passes import EagerPasses, Hidden, ignore_layer
from baton.engine.step.slots import DecodeState
from baton.engine.step.step import DecodeInputs, extend, sample
from baton.kernels.attention.prefill import in_every_form
from baton.kernels.fused_copy import fused_copy
from baton.kernels.gemm.linear import MAX_OWN_ROWS
from baton.kernels.implementation import Implementation
from baton.kvcache.pool import KVPool
from baton.model.model import Model

_WIDTHS_LEN = (1024, 4096)  # context lengths from which other attention kernels may be faster
_MAX_TOKENS = 16_384  # of a pass: beyond, the same kernels are used
_MAX_CHUNKS_TOKENS = 2048  # of several chunks together, which differ from one chunk only by their number
_CONTINUED_TOKENS = 128  # of a chunk that goes on with a long context


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The largest steps there may be.

    Attributes:
        num_tokens: maximum tokens of one step: of a chunk, or of all chunks together.
        num_sequences: maximum sequences of one step.
        context_len: maximum positions of a sequence.
    """

    num_tokens: int
    num_sequences: int
    context_len: int


def classes(most: int) -> tuple[int, ...]:
    """Representative sizes from 1 to `most`."""
    found, power = {most}, 1
    while power < most:
        found |= {power, min(power * 3 // 2, most)}
        power *= 2
    return tuple(sorted(found))


def prefill_shapes(reach: Reach, block_size: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """(tokens of each chunk, table entries): one chunk, several, one beside one-token chunks, long ones together."""
    last = -(-reach.context_len // block_size)
    given: set[tuple[int, ...]] = set()  # with all table entries
    for length in classes(min(reach.num_tokens, reach.context_len, _MAX_TOKENS)):
        least = -(-length // block_size)
        widths = {least, last, *(-(-bound // block_size) for bound in _WIDTHS_LEN)}
        most = max(1, min(reach.num_tokens, _MAX_CHUNKS_TOKENS) // length)
        equal = {(length,), (length,) * min(reach.num_sequences, most)}
        for width in sorted(width for width in widths if least <= width <= last):
            for lens in sorted(equal):
                yield lens, width
        others = min(reach.num_sequences - 1, reach.num_tokens - length)
        mixed = (length,) + (1,) * others
        if mixed not in equal:
            yield mixed, last
        given |= {*equal, mixed}
    # Where contexts are shorter than a step, no chunk alone has as many tokens as several have.
    for total in classes(min(reach.num_tokens, reach.num_sequences * reach.context_len, _MAX_TOKENS)):
        num_whole, rest = divmod(total, reach.context_len)
        together = (reach.context_len,) * num_whole + (rest,) * (rest > 0)
        if total > reach.context_len and together not in given:
            yield together, last


def decode_shapes(reach: Reach, block_size: int) -> Iterator[tuple[int, int]]:
    """(number of sequences, table entries) of decode steps."""
    for width in default_widths(-(-reach.context_len // block_size)):
        for count in classes(reach.num_sequences):
            yield count, width


@torch.inference_mode()
def warm_up_prefill_passes(model: Model, pool: KVPool, reach: Reach) -> None:
    """Run trunk and MTP head over chunks."""
    block_size = pool.layout.block_size
    shapes = [(0, lens, width) for lens, width in prefill_shapes(reach, block_size)]
    # These begin a sequence: where chunks are short, no context of theirs is long.
    end = min(reach.context_len, _WIDTHS_LEN[-1])
    num_rows = min(reach.num_tokens, end, _CONTINUED_TOKENS)
    shapes.append((end - num_rows, (num_rows,), -(-end // block_size)))
    with model.one_of_each_layer():
        for start, lens, width in shapes:
            # More tokens are not divided otherwise, and parts of positions would take much memory.
            with in_every_form() if sum(lens) <= _MAX_CHUNKS_TOKENS else nullcontext():
                _prefill_pass(model, pool, start, lens, width)


def _prefill_pass(model: Model, pool: KVPool, start: int, lens: tuple[int, ...], width: int) -> None:
    """Run trunk and MTP head over chunks of those lengths that begin at `start`, with so many table entries."""
    inputs = prefill_inputs([_chunk(start, length, pool) for length in lens], pool)
    tables_BW = inputs.batch.block_tables_BM.new_full((len(lens), width), pool.num_blocks)
    batch = replace(inputs.batch, block_tables_BM=tables_BW)
    hidden_TD = model.trunk(inputs.token_ids_T, batch, pool, ignore_layer)
    if pool.layout.has_mtp:
        model.mtp(inputs.next_token_ids_T, hidden_TD, batch, pool, ignore_layer)


@torch.inference_mode()
def warm_up_decode_passes(model: Model, pool: KVPool, reach: Reach, num_draft_tokens: int) -> None:
    """Run the passes of a decode step with each number of drafts."""
    with model.one_of_each_layer():
        for count, width in decode_shapes(reach, pool.layout.block_size):
            for num_drafts in range(num_draft_tokens, -1, -1):
                _decode_pass(model, pool, reach, (count, width), num_drafts, has_drafts=num_draft_tokens > 0)


def _decode_pass(
    model: Model, pool: KVPool, reach: Reach, shape: tuple[int, int], num_drafts: int, *, has_drafts: bool
) -> None:
    """Run the passes of one decode step; `shape` is its number of sequences and of table entries."""
    count, width = shape
    first_B = torch.zeros(count, dtype=torch.int64, device=pool.device)
    tables_BW = first_B.new_full((count, width), pool.num_blocks)
    slots_B = torch.full_like(first_B, pool.num_state_slots) if pool.layout.has_state else None
    rows = DecodeRows(block_tables_BM=tables_BW, limit_B=first_B + 1, draft_cap_B=first_B, state_slots_B=slots_B)
    passes = EagerPasses(model, pool, rows, min(width * pool.layout.block_size, reach.context_len))
    ids_BQ = first_B.new_zeros(count, num_drafts + 1)
    _, hidden_TD = passes.trunk(ids_BQ, first_B)
    if has_drafts and pool.layout.has_mtp:
        assert hidden_TD is not None
        _, entries_TD = passes.extend(None, (ids_BQ, hidden_TD, first_B))
        assert entries_TD is not None
        passes.draft(first_B, entries_TD[:: num_drafts + 1], first_B)


def _chunk(start: int, length: int, pool: KVPool) -> ChunkRows:
    end = start + length
    num_blocks = -(-end // pool.layout.block_size)
    ids = np.zeros(end, dtype=np.int64)
    state_slot = pool.num_state_slots if pool.layout.has_state else None
    return ChunkRows(
        token_ids=ids,
        start=start,
        length=length,
        blocks=(pool.num_blocks,) * num_blocks,
        state_slot=state_slot,
        keep_in=() if state_slot is None else ((end, state_slot),),
    )


__all__ = ["Reach", "warm_up_decode", "warm_up_heads", "warm_up_prefill", "warm_up_prompts", "warm_up_steps"]

_CUTS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
)
_BIAS: dict[str, Any] = {"logit_bias": ((0, 1.0),)}
_PENALTY: dict[str, Any] = {"presence_penalty": 1.0}
_ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    *_CUTS,
    {"temperature": 1.0, **_BIAS},
    *({"temperature": 0.0, **edits} for edits in (_BIAS, _PENALTY, _BIAS | _PENALTY)),
    *({"temperature": 0.0, "logprobs": num_top} for num_top in (0, 1)),
)
_GREEDY: dict[str, Any] = {"temperature": 0.0}
_COPY_LIMIT_S = 60.0
_MAX_HEAD_ROWS = 512  # beyond, the same GEMM kernels are used, and logits take much memory


def warm_up_prefill(model: Model, pool: KVPool, reach: Reach) -> None:
    """Warm up for prompts, in steps of any size; all ranks at the same time."""
    _place(pool.device)
    if is_compiled(model):
        warm_up_prefill_passes(model, pool, reach)
        warm_up_heads(model, max(reach.num_sequences, LOGITS_ROWS))
    if is_needed(model):
        warm_up_prompts(model)


def warm_up_decode(
    model: Model,
    pool: KVPool,
    reach: Reach,
    verifiers: Sequence[tuple[Verifier, TokenHistory | None]],
    num_draft_tokens: int,
) -> None:
    """Warm up for decode steps of any size, with up to `num_draft_tokens` drafts; all ranks at the same time.

    `verifiers` has, for each draft method, its verifier and, if drafts are looked up, the history.
    """
    if is_compiled(model):
        warm_up_decode_passes(model, pool, reach, num_draft_tokens)
        warm_up_heads(model, reach.num_sequences * (num_draft_tokens + 1))
    if is_needed(model):
        for verifier, history in verifiers:
            warm_up_steps(model, verifier, num_draft_tokens, history)


def _place(device: torch.device) -> None:
    """Launch the kernel that places a sequence in a slot: used on every GPU, even if torch computes the model."""
    number = torch.zeros(1, dtype=torch.int64, device=device)
    running = fused_copy([(number, torch.zeros_like(number))], device)
    running.wait(_COPY_LIMIT_S)


def is_compiled(model: Model) -> bool:
    """Whether compiled kernels compute the passes."""
    return model.device.type == "cuda" and model.implementation is Implementation.TRITON


def is_needed(model: Model) -> bool:
    """Whether sampling uses kernels that must be compiled."""
    return model.sampling_implementation is Implementation.TRITON and model.device.type == "cuda"


@torch.inference_mode()
def warm_up_heads(model: Model, num_rows: int) -> None:
    """Compute logits of up to `num_rows` rows, where kernels compute them; many rows only in invariant numerics."""
    most = _MAX_HEAD_ROWS if model.numerics is Numerics.INVARIANT else MAX_OWN_ROWS
    for count in classes(min(num_rows, most)):
        model.logits(_hidden(model, count))
        if model.with_mtp:
            model.draft_logits(_hidden(model, count))


@torch.inference_mode()
def warm_up_prompts(model: Model) -> None:
    """Warm up for the first token of a prompt, its first draft, and its log-probabilities."""
    assert model.sampling_implementation is not None
    for params in _params():
        sampling, hidden_FD = _rows(params, model), _hidden(model, len(params))
        position_F = torch.arange(len(params), device=model.device)
        logits_FV = model.logits(hidden_FD)
        token_F = next_token(model, logits_FV, sampling, position_F)
        if sampling is not None and sampling.logprobs is not None:
            step_logprobs(
                logits_FV[:, None], token_F[:, None], sampling.logprobs, model.vocab, model.sampling_implementation
            )
            logprobs_of(logits_FV, token_F, sampling.logprobs.num_top, model.vocab, model.sampling_implementation)
        if model.with_mtp:
            ahead = HistoryLookahead.after(token_F[:, None]) if looks_ahead(sampling) else None
            draft_logits_FV = over_vocabulary(model.draft_logits(hidden_FD), model)
            next_token(model, draft_logits_FV, sampling, position_F, ahead)


@torch.inference_mode()
def warm_up_steps(model: Model, verifier: Verifier, num_draft_tokens: int, history: TokenHistory | None = None) -> None:
    """Warm up for steps with up to `num_draft_tokens` drafts, and for prompts, which decode workers compute, too."""
    warm_up_prompts(model)
    is_greedy = isinstance(verifier, KernelVerifier) and verifier.is_greedy
    for params in _params():
        sampling = _rows(params, model)
        if is_greedy and sampling is not None:
            continue
        for num_drafts in range(num_draft_tokens + 1):
            _step(model, verifier, sampling, len(params), num_drafts, drafts=num_draft_tokens > 0, history=history)
    for num_drafts in range(num_draft_tokens + 1):
        grammar = _AnyToken(model, num_drafts)
        _step(model, verifier, None, 2, num_drafts, drafts=num_draft_tokens > 0, grammar=grammar, history=history)


def _params() -> Iterator[tuple[SamplingParams, ...]]:
    """Parameters of batches of two: a greedy sequence beside one with each feature."""
    for asked in _ASKED:
        yield SamplingParams(**_GREEDY), SamplingParams(**asked)


def _rows(params: tuple[SamplingParams, ...], model: Model) -> SamplingRows | None:
    sequences = [SampledSequence(params=item, prompt_token_ids=(0,), output_token_ids=(0,)) for item in params]
    return rows_of(sequences, model.config.vocab_size, model.device)


def _hidden(model: Model, num_rows: int) -> torch.Tensor:
    return torch.zeros(num_rows, model.config.hidden_size, dtype=model.dtype, device=model.device)


def _step(
    model: Model,
    verifier: Verifier,
    sampling: SamplingRows | None,
    num_sequences: int,
    num_drafts: int,
    *,
    drafts: bool,
    grammar: GrammarRows | None = None,
    history: TokenHistory | None = None,
) -> None:
    zeros_B = torch.zeros(num_sequences, dtype=torch.int64, device=model.device)
    state = DecodeState(
        last_token_B=zeros_B, draft_token_B=zeros_B, hidden_BD=_hidden(model, num_sequences), length_B=zeros_B + 1
    )
    rows = DecodeRows(block_tables_BM=zeros_B[:, None], limit_B=zeros_B + 1, draft_cap_B=zeros_B + num_drafts)
    decode = DecodeInputs(
        state=state,
        rows=rows,
        num_drafts=num_drafts,
        keeps_mtp=drafts and history is None,
        sampling=sampling,
        grammar=grammar,
        history=None if history is None else (history, zeros_B),
    )
    passes = _NoPasses(model)
    sampled, _ = sample(passes, decode, None, model, verifier)
    extend(passes, decode, sampled, None, None, model)


class _NoPasses:
    """Passes that compute nothing; see `passes.Passes`."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def draft(self, token_B: torch.Tensor, hidden_BD: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
        return _hidden(self._model, len(token_B))

    def trunk(self, ids_BQ: torch.Tensor | None, first_B: torch.Tensor | None) -> Hidden:
        assert ids_BQ is not None
        rows = ids_BQ.numel(), self._model.trunk_width
        return None, torch.zeros(rows, dtype=self._model.dtype, device=self._model.device)

    def extend(
        self,
        prompt: tuple[torch.Tensor, torch.Tensor] | None,
        decode: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    ) -> Hidden:
        assert decode is not None
        return None, _hidden(self._model, decode[0].numel())


class _AnyToken(GrammarRows):
    """A grammar of the first sequence that allows every token."""

    def __init__(self, model: Model, num_drafts: int) -> None:
        self._index_G = torch.zeros(1, dtype=torch.int64, device=model.device)
        num_words = -(-model.config.vocab_size // WORD_BITS)
        shape = 1, num_drafts + 1, num_words
        self._bitmask_GQW = torch.full(shape, -1, dtype=torch.int32, device=model.device)

    def take(self, drafts_BK: torch.Tensor) -> None:
        """Do nothing: no grammar reads the drafts."""

    def masks(self) -> GrammarMasks:
        """Masks with every bit set."""
        index_G, bitmask_GQW = self._index_G, self._bitmask_GQW
        num_rows_G = index_G + bitmask_GQW.shape[1]
        return GrammarMasks(index_G=index_G, bitmask_GQW=bitmask_GQW, num_valid_G=num_rows_G - 1, num_rows_G=num_rows_G)
