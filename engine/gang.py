"""Runners of a tensor-parallel gang: rank 0's tell the plan and compute, the others' compute what they hear.

To a worker's loop, `LeadPrefill` and `LeadDecode` are the runners they wrap; the loop exists at rank 0 alone. The other
ranks hold the same slots and block tables, because they were told the same, and their own KV heads. Refuses to know
what a worker does beside computing.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from baton.core.sampling import GrammarSpec, SamplingParams
from baton.engine.decode import DecodeOutput, DecodeRunner
from baton.engine.plan import Plan, PlanChannel
from baton.engine.prefill import PrefillChunk, PrefillForward, PrefillRunner, SequenceStart
from baton.kvcache.allocator import BlockTable

STOP = "stop"


class LeadPrefill:
    """Rank 0's `PrefillRunner`."""

    def __init__(self, runner: PrefillRunner, channel: PlanChannel) -> None:
        self.has_mtp = runner.has_mtp
        self.grammars = runner.grammars
        self._runner = runner
        self._channel = channel

    def forward(self, chunks: Sequence[PrefillChunk], on_layer: Callable[[int], None]) -> PrefillForward:
        """As `PrefillRunner.forward`, at every rank."""
        prompts = [np.asarray(chunk.prompt_token_ids, dtype=np.int32).tobytes() for chunk in chunks]
        fields = [_chunk_fields(chunk) for chunk in chunks]
        self._channel.tell("forward", b"".join(prompts), chunks=fields)
        with self._channel.computing():
            return self._runner.forward(chunks, on_layer)

    def draft(self, forward: PrefillForward, on_layer: Callable[[int], None]) -> tuple[SequenceStart | None, ...]:
        """As `PrefillRunner.draft`, at every rank."""
        self._channel.tell("draft")
        with self._channel.computing():
            return self._runner.draft(forward, on_layer)


class FollowPrefill:
    """Another rank's."""

    def __init__(self, runner: PrefillRunner) -> None:
        self._runner = runner
        self._forward: PrefillForward | None = None

    def take(self, plan: Plan, on_layer: Callable[[int], None]) -> bool:
        """Do what the plan says; False if it is about something else."""
        match plan.kind:
            case "forward":
                self._forward = self._runner.forward(_chunks(plan), on_layer)
            case "draft":
                assert self._forward is not None
                self._runner.draft(self._forward, on_layer)
                self._forward = None
            case _:
                return False
        return True


class LeadDecode:
    """Rank 0's `DecodeRunner`."""

    def __init__(self, runner: DecodeRunner, channel: PlanChannel) -> None:
        self._runner = runner
        self._channel = channel
        self.max_num_sequences = runner.max_num_sequences
        self.hidden_size = runner.hidden_size
        self.num_draft_tokens = runner.num_draft_tokens
        self.grammars = runner.grammars

    def admit(
        self,
        slot: int,
        start: SequenceStart,
        prompt_len: int,
        sampling: SamplingParams,
        table: BlockTable,
        draft_cap: int,
    ) -> None:
        """As `DecodeRunner.admit`, at every rank."""
        hidden_D = start.hidden_D
        data = b"" if hidden_D is None else hidden_D.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        self._channel.tell(
            "admit",
            data,
            slot=slot,
            first_token=start.first_token,
            draft_token=start.draft_token,
            hidden_dtype="" if hidden_D is None else str(hidden_D.dtype).removeprefix("torch."),
            prompt_len=prompt_len,
            sampling=dataclasses.asdict(sampling),
            table=table_fields(table),
            draft_cap=draft_cap,
        )
        self._runner.admit(slot, start, prompt_len, sampling, table, draft_cap)

    def release(self, slot: int) -> None:
        """As `DecodeRunner.release`, at every rank."""
        self._channel.tell("release", slot=slot)
        self._runner.release(slot)

    def step(self, slots: Sequence[int]) -> DecodeOutput:
        """As `DecodeRunner.step`, at every rank."""
        self._channel.tell("step", slots=list(slots))
        return self._runner.step(slots)

    def close(self) -> None:
        """Let the other ranks go; the last call."""
        self._channel.tell(STOP)


class FollowDecode:
    """Another rank's."""

    def __init__(self, runner: DecodeRunner) -> None:
        self._runner = runner

    def run(self, channel: PlanChannel) -> None:
        """Do what rank 0 says until it says stop.

        Raises:
            WorkerLost: rank 0 is gone, or this rank diverged.
        """
        while (plan := channel.hear()).kind != STOP:
            is_known = self.take(plan)
            assert is_known, f"a decode rank does not know {plan.kind!r}"

    def take(self, plan: Plan) -> bool:
        """Do what the plan says; False if it is about something else."""
        fields = plan.fields
        match plan.kind:
            case "admit":
                start = SequenceStart(
                    first_token=fields["first_token"],
                    draft_token=fields["draft_token"],
                    hidden_D=_hidden(fields["hidden_dtype"], plan.data),
                    prompt_len=fields["prompt_len"],
                )
                self._runner.admit(
                    fields["slot"],
                    start,
                    fields["prompt_len"],
                    _sampling(fields["sampling"]),
                    table_of(fields["table"]),
                    fields["draft_cap"],
                )
            case "release":
                self._runner.release(fields["slot"])
            case "step":
                self._runner.step(fields["slots"])
            case _:
                return False
        return True


def table_fields(table: BlockTable) -> dict[str, Any]:
    """A block table as JSON values."""
    return {"blocks": list(table.blocks), "block_size": table.block_size}


def table_of(fields: Mapping[str, Any]) -> BlockTable:
    """A block table from JSON values."""
    return BlockTable(tuple(fields["blocks"]), fields["block_size"])


def _chunk_fields(chunk: PrefillChunk) -> dict[str, Any]:
    return {
        "prompt_len": len(chunk.prompt_token_ids),
        "start": chunk.start,
        "length": chunk.length,
        "table": table_fields(chunk.table),
        "sampling": dataclasses.asdict(chunk.sampling),
        "draft_cap": chunk.draft_cap,
    }


def _chunks(plan: Plan) -> list[PrefillChunk]:
    token_ids = np.frombuffer(plan.data, dtype=np.int32).tolist()
    chunks, start = [], 0
    for fields in plan.fields["chunks"]:
        end = start + fields["prompt_len"]
        chunk = PrefillChunk(
            prompt_token_ids=tuple(token_ids[start:end]),
            start=fields["start"],
            length=fields["length"],
            table=table_of(fields["table"]),
            sampling=_sampling(fields["sampling"]),
            draft_cap=fields["draft_cap"],
        )
        chunks.append(chunk)
        start = end
    return chunks


def _sampling(fields: Mapping[str, Any]) -> SamplingParams:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    if values["grammar"] is not None:
        values["grammar"] = GrammarSpec(**values["grammar"])
    return SamplingParams(**values)


def _hidden(dtype: str, data: bytes) -> torch.Tensor | None:
    if not dtype:
        return None
    kind = getattr(torch, dtype)
    assert isinstance(kind, torch.dtype)
    return torch.frombuffer(bytearray(data), dtype=kind)
