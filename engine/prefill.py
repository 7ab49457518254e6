"""The prefill step: the trunk over chunks of prompts, first tokens, and the MTP head over the same chunks.

The step is split in two so that first tokens are on their way before the drafts are made: `forward`, then `draft`.
What to run is the caller's decision; sequences are only known here by the chunks they give.

Legend: T tokens, F chunks that finish their prompt, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from baton.core.sampling import GrammarSpec
from baton.engine.batch import PrefillChunk, PrefillInputs, prefill_inputs
from baton.engine.grammar import GrammarCompiler, GrammarState
from baton.engine.grammar_rows import GrammarRows
from baton.engine.plan import decide
from baton.engine.sampler import SamplingRows, sample, sampling_rows
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
    """

    chunks: tuple[PrefillChunk, ...]
    inputs: PrefillInputs
    hidden_TD: torch.Tensor
    first_token_F: torch.Tensor
    first_tokens: tuple[int | None, ...]
    sampling: SamplingRows | None


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

    Prompts whose answer has a grammar need `grammars`.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        communicator: Communicator | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._communicator = communicator or Alone()
        self.grammars = grammars
        self._model = model
        self._pool = pool
        self._has_mtp = pool.layout.num_layers > model.config.num_layers

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
        sampling = sampling_rows([chunk.sampling for chunk in finished], hidden_TD.device)
        first_token_F = inputs.last_row_F  # of length 0 where no prompt ends
        if finished:
            logits_FV = self._masked(self._model.logits(hidden_TD[inputs.last_row_F]), finished)
            first_token_F = sample(logits_FV, sampling, self._last_position_F(inputs) + 1)
            first_token_F = decide(self._communicator, first_token_F)
        tokens = iter(first_token_F.tolist())
        return PrefillForward(
            chunks=tuple(chunks),
            inputs=inputs,
            hidden_TD=hidden_TD,
            first_token_F=first_token_F,
            first_tokens=tuple(next(tokens) if chunk.is_last else None for chunk in chunks),
            sampling=sampling,
        )

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
                logits_FV = self._model.logits(hidden_FD)
                draft_F = sample(logits_FV, forward.sampling, self._last_position_F(inputs) + 2)
                drafts = decide(self._communicator, draft_F).tolist()
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
        specs = {row: chunk.sampling.grammar for row, chunk in enumerate(finished)}
        states = {row: self._start(spec) for row, spec in specs.items() if spec is not None}
        if not states:
            return logits_FV
        rows = GrammarRows(states, logits_FV.device)
        rows.take(logits_FV.new_empty((len(finished), 0), dtype=torch.int64))
        return rows.masks().apply(logits_FV[:, None])[:, 0]

    def _start(self, spec: GrammarSpec) -> GrammarState:
        assert self.grammars is not None
        return self.grammars.start(spec)

    @staticmethod
    def _last_position_F(inputs: PrefillInputs) -> torch.Tensor:
        return inputs.batch.positions_T[inputs.last_row_F]
