"""Tensor parallelism, applied to a model from outside: which part of each weight a rank reads, and where ranks add up.

- Query heads, gate and up projections are cut by outputs; output and down projections by inputs, and their results are
  summed over the ranks. With more ranks than KV heads, several consecutive ranks hold the same KV head.
- Gated delta nets are cut into ranges of key heads, with all that belongs to them.
- The LM head and a pruned draft head are cut by tokens; sampling never assembles whole rows of logits (`model.vocab`).
- Everything else (norms, router, embeddings, the MTP head's joint projection) is whole on every rank: embeddings are
  read by row, so cutting them would save memory but cost a sum over the ranks in each step.
- Experts are all on every rank, each with a part of its intermediate dimension, so that a step of few tokens keeps all
  ranks busy; or every rank holds different ones, whole (expert parallelism), and results are summed the same way.
- Attention over latents may be whole on every rank, which then attends for its own sequences (`model.dealt_rows`).

The engine implements the communication; this module defines its interface.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from baton.core.errors import WorkerLost
from baton.core.numerics import Numerics
from baton.kernels.gemm.inner_sum import InnerSum
from baton.kernels.moe.held_experts import HeldExperts
from baton.model.checkpoint.weights import Cut
from baton.model.config import ModelConfig
from baton.model.dealt_rows import RowDeal
from baton.model.tensor_spec import tensor_spec
from baton.model.tp_fit import require_cut
from baton.model.vocab import WHOLE, CutVocab, Vocab


class Communicator(Protocol):
    """One rank's end of a group of ranks. Every rank makes the same calls in the same order, one at a time.

    Attributes:
        rank: this rank.
        size: size of the group.
        num_operations: number of operations begun so far.
        limit_s: deadline of each operation that begins from now on.
        blame: called when an operation fails: the error of the rank at fault, None if unknown.
        how: a sentence for operators about how tensors are exchanged; "" if there is no choice.
    """

    how: str
    rank: int
    size: int
    num_operations: int
    limit_s: float
    blame: Callable[[], WorkerLost | None]

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of every rank's `x`, added as a balanced tree in rank order: the same bits on each rank."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, all of one shape and dtype, in rank order, [size, ...]; an empty `x` is not sent."""
        ...

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Copy rank 0's `values` to every rank, in place; others pass a contiguous tensor of that shape and dtype."""
        ...

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order, on every rank."""
        ...

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class Alone:
    """A communicator for a group of one rank."""

    how = ""
    rank = 0
    size = 1

    def __init__(self) -> None:
        self.num_operations = 0
        self.limit_s = 0.0
        self.blame: Callable[[], WorkerLost | None] = lambda: None

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        """`x`."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, [1, ...]."""
        return x[None]

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """`values`."""
        return values

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """`data` alone."""
        return [data]

    def broadcast_bytes(self, data: bytes) -> bytes:
        """`data`."""
        return data

    def close(self) -> None:
        """Do nothing: there is no group to leave."""


class ShardPlan:
    """Which part of a checkpoint's tensors one rank of a group holds.

    Args:
        config: the model's config.
        communicator: the rank's communicator.
        numerics: the model's numerics.
        cut_vocab: cut the LM head, too; has no effect with a single rank.
        expert_parallel: ranks hold different experts instead of a part of each.
        num_redundant_experts: number of slots beyond one per expert, between which experts move; None: they stay.
        dp_attention: ranks attend for different sequences, with all heads, instead of with a part of the heads for all.

    Attributes:
        inner: how partial GEMM results are summed.
        held: which experts this rank holds; None: all, or a part of each.
        vocab: which tokens are this rank's.
        deal: how rows are distributed over ranks that attend; None: each attends for all rows.

    Raises:
        ModelUnsupported: the model cannot be cut into that many equal parts.
    """

    def __init__(
        self,
        config: ModelConfig,
        communicator: Communicator,
        numerics: Numerics,
        *,
        cut_vocab: bool = True,
        expert_parallel: bool = False,
        num_redundant_experts: int | None = None,
        dp_attention: bool = False,
    ) -> None:
        self._rank, self._size = communicator.rank, communicator.size
        self.inner = InnerSum(self._size, communicator.all_sum)
        size = self._size
        held: dict[str, Any] = {
            "expert_parallel": expert_parallel,
            "num_redundant_experts": num_redundant_experts,
            "dp_attention": dp_attention,
        }
        require_cut(config, size, numerics, **held)
        self.deal: RowDeal | None = None
        if dp_attention and size > 1:
            self.deal = RowDeal(rank=self._rank, size=size, all_gather=communicator.all_gather)
        self._weights = tensor_spec(config, with_mtp=True, **held).weights
        self.held: HeldExperts | None = None
        if expert_parallel and size > 1:
            self.held = HeldExperts.of_rank(config.num_experts, self._rank, size, num_redundant_experts)
        self._head: Cut | None = None
        self.vocab: Vocab = WHOLE
        if cut_vocab and size > 1:
            cut = CutVocab(config.vocab_size, self._rank, size, communicator.all_gather)
            self._head = Cut(0, min(cut.first, config.vocab_size), cut.num_ids)
            self.vocab = cut

    def cut(self, name: str) -> Cut | None:
        """The part of the tensor `name`; None for all of it."""
        return self._head if name == "lm_head.weight" else self._weights[name].cut(self._rank, self._size)
