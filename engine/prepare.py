"""What attention needs to verify, made ahead: on a thread of its own, while the drafts are still being made.

The rows of a verification, where they stand and where they write, follow from the lengths before the step, which are
known before its first draft. The MTP pass over what was accepted (the draft prefill) runs over the same rows, so one
prepared value serves both. It is frozen and carries its generation and its maker; `open` gives the batch out once, to
the step it was made for, and refuses every other.
"""

from dataclasses import dataclass

import torch

from baton.engine.async_runner import AsyncRunner, Ticket
from baton.engine.batch import DecodeRows, decode_batch
from baton.kernels.implementation import Implementation
from baton.kvcache.pool import KVPool
from baton.model.inputs import DecodeBatch


class NotPrepared(Exception):
    """A prepared value that is not of this step: stale, used before, or another preparer's."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The rows of one step's verification.

    Attributes:
        maker: identity of the preparer.
        generation: which of its values this is.
        batch: what attention needs.
    """

    maker: object
    generation: int
    batch: DecodeBatch


class StepPreparer:
    """Makes `Prepared` values for one runner, one step after the other.

    Args:
        pool: that the rows are of.
        implementation: which form places the rows.
    """

    def __init__(self, pool: KVPool, implementation: Implementation = Implementation.AUTO) -> None:
        self._pool = pool
        self._implementation = implementation
        is_cuda = pool.device.type == "cuda"
        self._stream = torch.cuda.Stream(pool.device) if is_cuda else None
        self._runner = AsyncRunner("prepare", self._stream)
        self._maker = object()
        self._generation = 0
        self._num_opened = 0

    def launch(
        self, first_position_B: torch.Tensor, num_rows: int, rows: DecodeRows, max_context_len: int
    ) -> Ticket[Prepared]:
        """Begin to prepare a step, as `decode_batch` would; what was prepared before is stale from now on."""
        self._generation += 1
        maker, generation, pool, stream = self._maker, self._generation, self._pool, self._stream

        def prepare() -> Prepared:
            if stream is not None:
                for tensor in (first_position_B, rows.block_tables_BM, rows.limit_B):
                    tensor.record_stream(stream)  # they are of the caller's stream
            places = first_position_B, num_rows, rows, max_context_len, pool, self._implementation
            return Prepared(maker, generation, decode_batch(*places))

        return self._runner.launch(prepare)

    def open(self, prepared: Prepared) -> DecodeBatch:
        """The batch, for the step it was prepared for.

        Raises:
            NotPrepared: it was prepared for another step, by another preparer, or was opened before.
        """
        if prepared.maker is not self._maker:
            raise NotPrepared("prepared by another preparer, for another pool")
        if prepared.generation != self._generation:
            raise NotPrepared(f"prepared for step {prepared.generation}, this is step {self._generation}")
        if self._num_opened == prepared.generation:
            raise NotPrepared(f"step {prepared.generation} has begun before")
        self._num_opened = prepared.generation
        if self._stream is not None:
            for tensor in (prepared.batch.positions_BQ, prepared.batch.slots_BQ):
                tensor.record_stream(torch.cuda.current_stream(self._pool.device))
        return prepared.batch

    def close(self) -> None:
        """End the thread."""
        self._runner.close()
