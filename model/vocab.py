"""Defines which tokens' logits a rank computes, and how ranks together sample from all tokens.

Rows of the LM head are cut over the ranks of a group in id order, so a row of logits [V] is spread over R ranks, W
columns each; the last columns of the last ranks may belong to no token and are -inf. No row is ever assembled: ranks
exchange a few numbers per row and rank, with at most one `all_gather` per operation. All ranks get the same bits. A
logit is the dot product of a row with a row of the head, so cutting the head changes no bit of it if GEMMs do not
depend on the number of outputs (`--batch-invariant`).

Among ties the lowest id wins, as with `torch.argmax` of the whole row: columns are in id order, within a rank `argmax`
takes the first, and among ranks the lowest. NaN counts as larger than any number, as in torch.

`WHOLE` is for a process that has all columns: nothing is exchanged, and each operation is the torch operation that it
stands for.

Legend: X any leading dimensions, V vocabulary, W columns of a rank, R ranks, K ids.
"""

import math
from collections.abc import Callable

import torch
from torch.nn import functional

from baton.kernels.gemm.inner_sum import tree_sum
from baton.kernels.tiles import OUTPUT_TILE


class Vocab:
    """The whole vocabulary. Columns are ids.

    Attributes:
        first: id of the first column.
        is_cut: whether other ranks have other columns.
    """

    first: int = 0
    is_cut: bool = False

    def width(self, vocab_size: int) -> int:
        """Number of columns of logits, for a vocabulary of `vocab_size`."""
        return vocab_size

    def table_width(self, width: int) -> int:
        """Number of columns of a table that ids are scattered into, for logits of `width`; see `columns`."""
        return width

    def columns(self, ids: torch.Tensor) -> torch.Tensor:
        """Columns of ids in a table of `table_width`; its extra last column stands for all ids of other ranks."""
        return ids

    def add_spare(self, x_XW: torch.Tensor) -> torch.Tensor:
        """A table of `table_width` from one of W; the value of the extra column is meaningless."""
        return x_XW

    def best(self, x_XW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest value [X, 1] of each row and the lowest id [X], int64, that has it."""
        ids_X = x_XW.argmax(dim=-1)
        return x_XW.gather(-1, ids_X[..., None]), ids_X

    def argmax(self, x_XW: torch.Tensor) -> torch.Tensor:
        """The lowest id, int64 [X], of each row's largest value."""
        return x_XW.argmax(dim=-1)

    def amax(self, x_XW: torch.Tensor) -> torch.Tensor:
        """The largest value of each row, [X, 1]."""
        return x_XW.amax(dim=-1, keepdim=True)

    def values_at(self, x_XW: torch.Tensor, ids_XK: torch.Tensor) -> torch.Tensor:
        """Values of each row at some ids, [X, K]."""
        return x_XW.gather(-1, ids_XK)

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of the ranks' `x`, as a balanced tree in rank order."""
        return x

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, [R, ...]."""
        return x[None]

    def gather(self, x_XW: torch.Tensor) -> torch.Tensor:
        """Whole rows [X, V], for tests and tools. No step uses this."""
        return x_XW


WHOLE = Vocab()


class CutVocab(Vocab):
    """The columns of one rank of a group.

    Args:
        vocab_size: V.
        rank: this rank.
        size: R.
        all_gather: every rank's tensor, [R, ...], of the same shape and dtype (`Communicator.all_gather`).
        multiple: W is a multiple of it.

    Attributes:
        vocab_size: V.
        rank: this rank.
        size: R.
        num_ids: columns that belong to tokens; those after them are -inf in logits.
    """

    is_cut = True

    def __init__(
        self,
        vocab_size: int,
        rank: int,
        size: int,
        all_gather: Callable[[torch.Tensor], torch.Tensor],
        multiple: int = OUTPUT_TILE,
    ) -> None:
        assert 0 <= rank < size
        self.vocab_size = vocab_size
        self.rank = rank
        self.size = size
        self._all_gather = all_gather
        self._width = math.ceil(math.ceil(vocab_size / size) / multiple) * multiple
        self.first = rank * self._width
        self.num_ids = max(0, min(self._width, vocab_size - self.first))

    def width(self, vocab_size: int) -> int:
        """W; `vocab_size` is V."""
        assert vocab_size == self.vocab_size
        return self._width

    def table_width(self, width: int) -> int:
        """W + 1."""
        return width + 1

    def columns(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Vocab.columns`; other ranks' ids are in column W."""
        columns = ids - self.first
        return torch.where((columns >= 0) & (columns < self._width), columns, self._width)

    def add_spare(self, x_XW: torch.Tensor) -> torch.Tensor:
        """See `Vocab.add_spare`."""
        return functional.pad(x_XW, (0, 1))

    def own_rows(self, head_VX: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole head, [W, ...]; rows of no token are zeros."""
        return self.pad_rows(head_VX[self.first : self.first + self.num_ids])

    def pad_rows(self, head_NX: torch.Tensor) -> torch.Tensor:
        """`num_ids` rows of a head, padded with zeros to [W, ...]."""
        assert len(head_NX) == self.num_ids
        missing = self._width - self.num_ids
        return functional.pad(head_NX, (0, 0, 0, missing)) if missing else head_NX

    def close_padding(self, logits_XW: torch.Tensor) -> torch.Tensor:
        """Set the logits of columns without a token to -inf, in place."""
        if self.num_ids < self._width:
            logits_XW[..., self.num_ids :].fill_(-torch.inf)
        return logits_XW

    def best(self, x_XW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Vocab.best`; ranks exchange (value, id) of each row in float64, which holds both exactly."""
        column_X1 = x_XW.argmax(dim=-1, keepdim=True)
        value_X1 = x_XW.gather(-1, column_X1)
        parts_RX2 = self._all_gather(torch.cat([value_X1.double(), (column_X1 + self.first).double()], dim=-1))
        rank_1X1 = parts_RX2[..., :1].argmax(dim=0, keepdim=True)
        best_X2 = parts_RX2.gather(0, rank_1X1.expand(1, *parts_RX2.shape[1:]))[0]
        return best_X2[..., :1].to(x_XW.dtype), best_X2[..., 1].to(torch.int64)

    def argmax(self, x_XW: torch.Tensor) -> torch.Tensor:
        """See `Vocab.argmax`."""
        return self.best(x_XW)[1]

    def amax(self, x_XW: torch.Tensor) -> torch.Tensor:
        """See `Vocab.amax`."""
        return self._all_gather(x_XW.amax(dim=-1, keepdim=True)).amax(dim=0)

    def values_at(self, x_XW: torch.Tensor, ids_XK: torch.Tensor) -> torch.Tensor:
        """See `Vocab.values_at`."""
        columns_XK = (ids_XK - self.first).clamp(0, self._width - 1)
        return self.of_owner(self._all_gather(x_XW.gather(-1, columns_XK)), ids_XK)

    def of_owner(self, parts_RXK: torch.Tensor, ids_XK: torch.Tensor) -> torch.Tensor:
        """From every rank's numbers about some ids, those of the rank that has the id, [X, K]."""
        return parts_RXK.gather(0, (ids_XK // self._width)[None])[0]

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """See `Vocab.add`."""
        return tree_sum(self._all_gather(x).unbind())

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """See `Vocab.parts`."""
        return self._all_gather(x)

    def gather(self, x_XW: torch.Tensor) -> torch.Tensor:
        """See `Vocab.gather`."""
        return self._all_gather(x_XW).movedim(0, -2).flatten(-2)[..., : self.vocab_size]
