"""Tensor parallelism, applied to a model from outside: which part of each weight a rank reads, and who adds.

Query heads, gate and up are cut by outputs; the output projection and down by inputs, and what they make is added over
the ranks. A rank of a group larger than the number of KV heads holds one of them, as its neighbours do. Gated
delta nets are cut into ranges of key heads, with all that belongs to them. The LM head and
a pruned draft head are cut by tokens, and what is chosen from them without putting rows of logits together
(`model.vocab`). Everything else (norms, router, embeddings, the MTP head's joint projection) is whole at every rank:
embeddings are read by row, so cutting them would save memory and cost a sum over the ranks for each step. Experts are
all at every rank, each with a part of its intermediate dimension, so that a step of few tokens keeps all ranks busy; or
every rank holds different ones, whole (expert parallelism), and what is added is the same. Attention over latents may
be whole at every rank, which attends for its own sequences (`model.dealt_rows`).

How ranks reach each other is the engine's; here is the seam.
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
        rank: of this end.
        size: of the group.
        num_operations: begun so far.
        limit_s: deadline of each operation that begins from now on.
        blame: asked when an operation fails: the error of the rank at fault, None if that is not known.
        how: a sentence for operators, of how tensors cross; "" if there is nothing to choose.
    """

    how: str
    rank: int
    size: int
    num_operations: int
    limit_s: float
    blame: Callable[[], WorkerLost | None]

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, added as a balanced tree in rank order: the same bits at each rank."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, all of one shape and dtype, in rank order, [size, ...]; nothing crosses if it is empty."""
        ...

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Rank 0's `values`, at every rank, in place; the others give a tensor of that shape and dtype, contiguous."""
        ...

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order, at every rank."""
        ...

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Rank 0's bytes, at every rank."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class Alone:
    """A group of one."""

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
        """Nothing to leave."""


class ShardPlan:
    """Which part of a checkpoint's tensors one rank of a group holds.

    Args:
        config: the model's.
        communicator: the rank's.
        numerics: of the model.
        cut_vocab: cut the LM head, too; without other ranks there is nothing to cut.
        expert_parallel: ranks hold different experts, and not a part of each.
        num_redundant_experts: so many slots more than experts, and experts move between them; None: they stay.
        dp_attention: ranks attend for different sequences, with all heads, and not with a part of these for all.

    Attributes:
        inner: how parts of GEMMs are added.
        held: which experts are this rank's; None: all, or a part of each.
        vocab: which tokens are this rank's.
        deal: how rows are dealt to ranks that attend; None: each attends for all rows.

    Raises:
        ModelUnsupported: the model cannot be cut into so many equal parts.
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
        """The part of the tensor `name`; None is all of it."""
        return self._head if name == "lm_head.weight" else self._weights[name].cut(self._rank, self._size)
