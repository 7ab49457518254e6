"""The prefill step: the trunk over chunks of prompts, first tokens, and the MTP head over the same chunks.

The step is split in two so that first tokens are on their way before the drafts are made: `forward`, then `draft`.
What to run is the caller's decision; sequences are only known here by the chunks they give.

Legend: T tokens, F chunks that finish their prompt, D hidden size, V vocabulary (of it the tokens of this rank,
`model.vocab`), N rows whose logprobs are asked.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from baton.core.logprobs import TokenLogprobs
from baton.engine.batch import PrefillChunk, PrefillInputs, prefill_inputs
from baton.engine.decision import Decisions
from baton.engine.drafting import over_vocabulary
from baton.engine.grammar import GrammarCompiler, GrammarState
from baton.engine.grammar_rows import GrammarRows
from baton.engine.history import Lookahead, SampledSequence
from baton.engine.kernel_choice import next_token
from baton.engine.kernel_warm_up import Reach, warm_up_prefill
from baton.engine.logprobs import LOGITS_ROWS, logprobs_of, step_logprobs, unpack, unpack_step
from baton.engine.sampler import SamplingRows, looks_ahead
from baton.engine.sampling_table import rows_of
from baton.kernels.copies import to_device
from baton.kvcache.pool import KVPool
from baton.model.model import Model
from baton.model.parallel import Alone, Communicator

__all__ = ["PrefillChunk", "PrefillForward", "PrefillRunner", "SequenceStart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillForward:
    """A trunk pass whose MTP pass is still to come.

    Attributes:
        chunks: what was computed.
        inputs: its tensors.
        hidden_TD: trunk hidden of every token, after the final norm.
        first_token_F: int64, first tokens on the device.
        first_tokens: the same on the host, one entry a chunk; None where the prompt goes on.
        sampling: parameters of the F finished prompts.
        first_logprobs: of the first tokens, one entry a chunk; None where nothing is reported.
        prompt_logprobs: of the prompt tokens that follow the chunk's tokens, one entry a chunk; None likewise.
    """

    chunks: tuple[PrefillChunk, ...]
    inputs: PrefillInputs
    hidden_TD: torch.Tensor
    first_token_F: torch.Tensor
    first_tokens: tuple[int | None, ...]
    sampling: SamplingRows | None
    first_logprobs: tuple[TokenLogprobs | None, ...]
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStart:
    """What decode needs beside the KV; it crosses from the prefill worker to the decode worker.

    Attributes:
        first_token: t_P, P the prompt's length.
        draft_token: the draft for position P + 1; None without an MTP head.
        hidden_D: the MTP output that made it; None without an MTP head.
        prompt_len: P.
    """

    first_token: int
    draft_token: int | None
    hidden_D: torch.Tensor | None
    prompt_len: int


class PrefillRunner:
    """Runs prefill steps of one model over one pool; as one rank of a group if there is a `communicator`.

    `eos_token_ids` are what `min_tokens` holds back beside a request's own stop tokens. Prompts whose answer has a
    grammar need `grammars`.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        communicator: Communicator | None = None,
        *,
        eos_token_ids: Sequence[int] = (),
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._communicator = communicator or Alone()
        self._decisions = Decisions(self._communicator, pool.device)
        self.grammars = grammars
        self._model = model
        self._pool = pool
        self._has_mtp = pool.layout.num_layers > model.config.num_layers

    def warm_up(self, reach: Reach) -> None:
        """Compile whatever steps within this reach launch; all ranks at the same time, before the first step."""
        warm_up_prefill(self._model, self._pool, reach)

    @property
    def has_mtp(self) -> bool:
        """Whether the pool's last layer is an MTP head's."""
        return self._has_mtp

    @torch.inference_mode()
    def forward(self, chunks: Sequence[PrefillChunk], on_layer: Callable[[int], None]) -> PrefillForward:
        """Compute the chunks' trunk KV, and the first token of every prompt that is complete with its chunk."""
        inputs = prefill_inputs(chunks, self._pool)
        hidden_TD = self._model.trunk(inputs.token_ids_T, inputs.batch, self._pool, on_layer)
        finished = [chunk for chunk in chunks if chunk.is_last]
        sequences = [_sequence(chunk) for chunk in finished]
        vocab_size, vocab = self._model.config.vocab_size, self._model.vocab
        sampling = rows_of(sequences, vocab_size, hidden_TD.device, self._eos_token_ids, vocab)
        first_token_F = inputs.last_row_F  # of length 0 where no prompt ends
        logprobs: Iterator[tuple[TokenLogprobs, ...] | None] = iter([None] * len(finished))
        if any(chunk.next_token is None for chunk in finished):
            logits_FV = self._model.logits(hidden_TD[inputs.last_row_F])
            position_F = self._last_position_F(inputs) + 1
            first_token_F = next_token(self._model, self._masked(logits_FV, finished), sampling, position_F)
            first_token_F = self._decisions.agree(first_token_F, _upon(inputs))
            if sampling is not None and sampling.logprobs is not None:
                packed_L1X = step_logprobs(
                    logits_FV[:, None], first_token_F[:, None], sampling.logprobs, vocab, self._model.choosing
                )
                num_tops = [chunk.sampling.logprobs for chunk in finished]
                logprobs = iter(unpack_step(packed_L1X, 1, num_tops, [1] * len(finished)))
        if any(chunk.next_token is not None for chunk in finished):
            # What was chosen stays chosen, also where this pass rounds another way.
            known = [-1 if chunk.next_token is None else chunk.next_token for chunk in finished]
            known_F = to_device(torch.tensor(known, dtype=torch.int64), hidden_TD.device)
            first_token_F = torch.where(known_F < 0, first_token_F, known_F)
        tokens = iter(self._decisions.check(first_token_F.tolist()))
        return PrefillForward(
            chunks=tuple(chunks),
            inputs=inputs,
            hidden_TD=hidden_TD,
            first_token_F=first_token_F,
            first_tokens=tuple(next(tokens) if chunk.is_last else None for chunk in chunks),
            sampling=sampling,
            first_logprobs=tuple((next(logprobs) or (None,))[0] if chunk.is_last else None for chunk in chunks),
            prompt_logprobs=self._prompt_logprobs(chunks, inputs, hidden_TD),
        )

    def _prompt_logprobs(
        self, chunks: Sequence[PrefillChunk], inputs: PrefillInputs, hidden_TD: torch.Tensor
    ) -> tuple[tuple[TokenLogprobs, ...] | None, ...]:
        reports: list[tuple[TokenLogprobs, ...] | None] = []
        row = 0
        for chunk in chunks:
            num_top, end = chunk.sampling.prompt_logprobs, row + chunk.length - chunk.is_last
            if num_top is None:
                reports.append(None)
            else:
                report: list[TokenLogprobs] = []
                for first in range(row, end, LOGITS_ROWS):
                    rows = slice(first, min(first + LOGITS_ROWS, end))
                    logits_NV = self._model.logits(hidden_TD[rows])
                    packed_NX = logprobs_of(
                        logits_NV, inputs.next_token_ids_T[rows], num_top, self._model.vocab, self._model.choosing
                    )
                    report += [unpack(packed, num_top) for packed in packed_NX.tolist()]
                reports.append(tuple(report))
            row += chunk.length
        return tuple(reports)

    @torch.inference_mode()
    def draft(self, forward: PrefillForward, on_layer: Callable[[int], None]) -> tuple[SequenceStart | None, ...]:
        """Compute the chunks' MTP KV, and the first draft of every finished prompt; one entry a chunk."""
        drafts: list[int] = []
        hidden_FD = forward.hidden_TD[:0]
        if self._has_mtp:
            inputs = forward.inputs
            token_ids_T = inputs.next_token_ids_T.index_copy(0, inputs.last_row_F, forward.first_token_F)
            hidden_TD = self._model.mtp(token_ids_T, forward.hidden_TD, inputs.batch, self._pool, on_layer)
            hidden_FD = hidden_TD[inputs.last_row_F]
            if hidden_FD.shape[0]:
                logits_FV = over_vocabulary(self._model.draft_logits(hidden_FD), self._model)
                ahead = Lookahead.after(forward.first_token_F[:, None]) if looks_ahead(forward.sampling) else None
                position_F = self._last_position_F(inputs) + 2
                draft_F = next_token(self._model, logits_FV, forward.sampling, position_F, ahead)
                drafts = self._decisions.check(self._decisions.agree(draft_F, _upon(inputs)).tolist())
        starts: list[SequenceStart | None] = []
        num_finished = 0
        for chunk, first_token in zip(forward.chunks, forward.first_tokens, strict=True):
            if first_token is None:
                starts.append(None)
                continue
            start = SequenceStart(
                first_token=first_token,
                draft_token=drafts[num_finished] if self._has_mtp else None,
                hidden_D=hidden_FD[num_finished] if self._has_mtp else None,
                prompt_len=len(chunk.prompt_token_ids),
            )
            starts.append(start)
            num_finished += 1
        return tuple(starts)

    def _masked(self, logits_FV: torch.Tensor, finished: Sequence[PrefillChunk]) -> torch.Tensor:
        """The logits of first tokens, without those that a grammar forbids."""
        chosen = {row: chunk for row, chunk in enumerate(finished) if chunk.next_token is None}
        states = {row: self._start(chunk) for row, chunk in chosen.items() if chunk.sampling.grammar is not None}
        if not states:
            return logits_FV
        rows = GrammarRows(states, logits_FV.device, communicator=self._communicator, is_patient=True)
        rows.take(logits_FV.new_empty((len(finished), 0), dtype=torch.int64))
        return rows.masks().apply(logits_FV[:, None], self._model.vocab)[:, 0]

    def _start(self, chunk: PrefillChunk) -> GrammarState:
        assert self.grammars is not None
        assert chunk.sampling.grammar is not None
        return self.grammars.start(chunk.sampling.grammar, _sequence(chunk).output_token_ids)

    @staticmethod
    def _last_position_F(inputs: PrefillInputs) -> torch.Tensor:
        return inputs.batch.positions_T[inputs.last_row_F]


def _sequence(chunk: PrefillChunk) -> SampledSequence:
    num_prompt = len(chunk.prompt_token_ids) - chunk.output_len
    return SampledSequence(
        params=chunk.sampling,
        choice=chunk.choice,
        prompt_token_ids=chunk.prompt_token_ids[:num_prompt],
        output_token_ids=chunk.prompt_token_ids[num_prompt:],
    )


def _upon(inputs: PrefillInputs) -> list[torch.Tensor]:
    """What every rank must have been told alike."""
    batch = inputs.batch
    return [inputs.token_ids_T, batch.positions_T, batch.slots_T, batch.block_tables_BM]
