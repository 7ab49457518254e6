"""The gated delta net by absolute position: a state per head, stored at whole tiles, and the rows of the open tile.

S_p = e^g S_(p-1) + k u^T with u = beta (v - (e^g S_(p-1))^T k), and o = S_p^T q.

**Tiles.** Tiles begin at multiples of 16 of the *position*, wherever a step begins, and have a fixed shape: absent rows
are zeros. So a row is computed from the same numbers in the same order in a chunk of any length, alone, or beside
drafts: in float32 and float64 on a CPU it has the same bits in each case.

**State.** The state is stored at multiples of 16 only; k, u and g of later rows lie in a ring, position p in row p mod
ring. A step first folds in the tile that ended at or before its first position, unless an earlier step did, then reads
the state and writes its rows. What rejected rows wrote is overwritten before it is read: nothing is undone, counted or
copied. A chunk, whose rows all stay, folds every whole tile. The first number behind a state says how many tiles are
folded into it. At position 0 nothing of a slot is read.

Source: Yang et al. 2024 (Gated DeltaNet), transformers `torch_recurrent_gated_delta_rule`; the chunk form is that
paper's, in tiles of 16.
Legend: B sequences, L rows of each, H key heads, G value heads of one, K and V sizes of their heads, C rows of a tile,
N slots, R ring, Y and Z elements of a row of the ring and of a state.
"""

from dataclasses import dataclass

import torch

from baton.kernels import tiles
from baton.kernels.arguments import require
from baton.kernels.delta_net.rows import StateRows
from baton.kernels.delta_net.sizes import TILE

_L2_EPS = 1e-6
_SOFTPLUS_LINEAR = 20.0  # above this, softplus(x) = x


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRows:
    """Inputs of the recurrence for some rows, in the wide dtype: q and k normalised, q scaled, g at most 0."""

    query_BLHK: torch.Tensor
    key_BLHK: torch.Tensor
    value_BLHGV: torch.Tensor
    decay_BLHG: torch.Tensor  # g
    beta_BLHG: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeltaState:
    """A layer's rings and states, as views of the pool in the wide dtype."""

    tail_NHRY: torch.Tensor
    state_NHZ: torch.Tensor


def delta_rows(
    mixed_BLHX: torch.Tensor,
    ba_BLHG: tuple[torch.Tensor, torch.Tensor],
    a_log_HG: torch.Tensor,
    dt_bias_HG: torch.Tensor,
    key_dim: int,
) -> DeltaRows:
    """Compute the inputs of the recurrence from a layer's projections; all in the wide dtype except `ba_BLHG`.

    Args:
        mixed_BLHX: output of the convolution: for each key head, its query, key and value heads side by side.
        ba_BLHG: projections that control how much is written, and how much is forgotten.
        a_log_HG: logarithm of the rate of forgetting.
        dt_bias_HG: bias of the second projection.
        key_dim: K.
    """
    b_BLHG, a_BLHG = (x.to(mixed_BLHX.dtype) for x in ba_BLHG)
    query_BLHK, key_BLHK, value_BLHX = mixed_BLHX.split([key_dim, key_dim, mixed_BLHX.shape[3] - 2 * key_dim], dim=3)
    a_BLHG = a_BLHG + dt_bias_HG
    # softplus with torch's threshold, from operations that round alike in vector body and scalar tail
    soft_BLHG = torch.where(
        a_BLHG > _SOFTPLUS_LINEAR, a_BLHG, torch.log1p(torch.exp(a_BLHG.clamp(max=_SOFTPLUS_LINEAR)))
    )
    return DeltaRows(
        query_BLHK=_l2_normed(query_BLHK) * key_dim**-0.5,
        key_BLHK=_l2_normed(key_BLHK),
        value_BLHGV=value_BLHX.unflatten(3, (a_log_HG.shape[1], -1)),
        decay_BLHG=-torch.exp(a_log_HG) * soft_BLHG,
        beta_BLHG=1 / (1 + torch.exp(-b_BLHG)),
    )


def delta_net(x: DeltaRows, kept: DeltaState, rows: StateRows, *, invariant: bool = False) -> torch.Tensor:
    """Compute outputs o, [B, L, H, G, V] in the wide dtype. Never waits for the device.

    Args:
        x: inputs of the rows.
        kept: rings and states, read and written.
        rows: positions and slots of the rows.
        invariant: on CUDA, whether to use matmuls of one fixed shape; on a CPU this is always so.

    Raises:
        KernelArgumentInvalid: there are more decode rows than a tile has, so that two tiles could end before the next
            step.
    """
    num_rows, is_chunk = rows.num_rows, rows.start is not None
    require(is_chunk or num_rows <= TILE, "rows", f"are {num_rows} of a sequence that decodes")
    if rows.start is not None:
        num_tiles = -(-(rows.start % TILE + num_rows) // TILE)
    else:
        num_tiles = 1 if num_rows == 1 else 2
    layer = _Layer(x, kept, rows, invariant)
    state_BHGKV = layer.begun()
    begin_B = rows.positions_B // TILE * TILE
    folded_B = rows.positions_B // TILE
    if not is_chunk:  # it is not known yet which decode rows will be accepted
        layer.keep(state_BHGKV, folded_B)
    found = []
    for index in range(num_tiles):
        tile = layer.tile(begin_B, is_first=index == 0)
        out_BHGCV, u_BHGCV = layer.solve(tile, state_BHGKV)
        found.append(out_BHGCV)
        is_last = index == num_tiles - 1
        if is_last or not is_chunk:  # a chunk folds its whole tiles, so their rows are not read later
            layer.put(tile, u_BHGCV)
        if is_last and not is_chunk:
            break
        begin_B = begin_B + TILE
        is_whole_B = begin_B <= rows.positions_B + rows.counts_B
        folded_BHGKV = layer.fold(state_BHGKV, tile.key_BHCK, u_BHGCV, tile.decay_BHGC)
        state_BHGKV = torch.where(is_whole_B.view(-1, 1, 1, 1, 1), folded_BHGKV, state_BHGKV)
        folded_B = folded_B + is_whole_B
    if is_chunk:
        layer.keep(state_BHGKV, folded_B)
    at_BL = (rows.positions_B % TILE)[:, None] + torch.arange(num_rows, device=begin_B.device)
    at_B1 = torch.arange(len(at_BL), device=at_BL.device)[:, None]
    return torch.cat(found, dim=3).movedim(3, 1)[at_B1, at_BL]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """16 positions of each sequence; absent rows are zero. Old rows are those of earlier steps."""

    positions_BC: torch.Tensor
    is_old_BC: torch.Tensor
    is_new_BC: torch.Tensor
    query_BHCK: torch.Tensor
    key_BHCK: torch.Tensor
    value_BHGCV: torch.Tensor
    decay_BHGC: torch.Tensor
    beta_BHGC: torch.Tensor
    old_u_BHGCV: torch.Tensor


class _Layer:
    """The operations of a step on one layer."""

    def __init__(self, x: DeltaRows, kept: DeltaState, rows: StateRows, invariant: bool) -> None:
        self._x, self._kept, self._rows = x, kept, rows
        self._is_fixed = invariant and not tiles.has_cpu_rules(x.key_BLHK.device)
        self._at_C = torch.arange(TILE, device=x.key_BLHK.device)
        self._shape = (*x.value_BLHGV.shape[2:4], x.key_BLHK.shape[3], x.value_BLHGV.shape[4])
        self._num_elements = self._shape[1] * self._shape[2] * self._shape[3]

    def begun(self) -> torch.Tensor:
        """States at the last multiple of 16 at or before the first row, [B, H, G, K, V]."""
        rows, stored_BHZ = self._rows, self._kept.state_NHZ[self._rows.slots_B]
        state_BHGKV = stored_BHZ[..., : self._num_elements].unflatten(2, self._shape[1:])
        wanted_B = rows.positions_B // TILE
        folded_BHGKV = self.fold(state_BHGKV, *self._read((wanted_B[:, None] - 1) * TILE + self._at_C))
        is_behind_B = stored_BHZ[:, 0, self._num_elements] < wanted_B
        state_BHGKV = torch.where(is_behind_B.view(-1, 1, 1, 1, 1), folded_BHGKV, state_BHGKV)
        return torch.where((rows.positions_B == 0).view(-1, 1, 1, 1, 1), 0, state_BHGKV)

    def keep(self, state_BHGKV: torch.Tensor, folded_B: torch.Tensor) -> None:
        """Store states, and how many tiles are folded into each."""
        rows, state_NHZ = self._rows, self._kept.state_NHZ
        row_BHZ = state_NHZ.new_zeros(len(folded_B), *state_NHZ.shape[1:])
        row_BHZ[..., : self._num_elements] = state_BHGKV.flatten(2)
        row_BHZ[..., self._num_elements] = folded_B[:, None].to(row_BHZ.dtype)
        state_NHZ[rows.real_slots(rows.counts_B[:, None] > 0)[:, 0]] = row_BHZ

    def tile(self, begin_B: torch.Tensor, *, is_first: bool) -> _Tile:
        """Assemble the positions from `begin_B` on; only the first tile has old rows."""
        rows, x = self._rows, self._x
        position_BC = begin_B[:, None] + self._at_C
        row_BC = position_BC - rows.positions_B[:, None]
        is_new_BC, is_old_BC = (row_BC >= 0) & (row_BC < rows.counts_B[:, None]), row_BC < 0
        at_B1 = torch.arange(len(row_BC), device=row_BC.device)[:, None]
        taken_BC = row_BC.clamp(0, rows.num_rows - 1)

        def new(x_BL: torch.Tensor) -> torch.Tensor:
            return torch.where(is_new_BC[(...,) + (None,) * (x_BL.dim() - 2)], x_BL[at_B1, taken_BC], 0)

        key_BHCK = new(x.key_BLHK).movedim(1, 2)
        decay_BHGC = new(x.decay_BLHG).movedim(1, 3)
        value_BHGCV = new(x.value_BLHGV).movedim(1, 3)
        old_u_BHGCV = value_BHGCV
        if is_first:
            old_key_BHCK, old_u_BHGCV, old_decay_BHGC = self._read(position_BC)
            key_BHCK = torch.where(is_old_BC[:, None, :, None], old_key_BHCK, key_BHCK)
            decay_BHGC = torch.where(is_old_BC[:, None, None], old_decay_BHGC, decay_BHGC)
        return _Tile(
            positions_BC=position_BC,
            is_old_BC=is_old_BC,
            is_new_BC=is_new_BC,
            query_BHCK=new(x.query_BLHK).movedim(1, 2),
            key_BHCK=key_BHCK,
            value_BHGCV=value_BHGCV,
            decay_BHGC=decay_BHGC,
            beta_BHGC=new(x.beta_BLHG).movedim(1, 3),
            old_u_BHGCV=old_u_BHGCV,
        )

    def solve(self, tile: _Tile, state_BHGKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute outputs and u of a tile's rows, [B, H, G, C, V] each."""
        is_below_CC = self._at_C[:, None] > self._at_C
        sum_BHGC = _running_sum(tile.decay_BHGC)
        apart_BHGCC = torch.exp((sum_BHGC[..., :, None] - sum_BHGC[..., None, :]).clamp(max=0))
        since_BHGC1 = torch.exp(sum_BHGC)[..., None]
        key_BHCK, beta_BHGC1 = tile.key_BHCK, tile.beta_BHGC[..., None]
        met_BHGCC = self._matmul(key_BHCK, key_BHCK.mT)[:, :, None] * apart_BHGCC * beta_BHGC1
        is_old_BHGC1 = tile.is_old_BC[:, None, None, :, None]
        met_BHGCC = torch.where(is_below_CC & ~is_old_BHGC1, met_BHGCC, 0)
        left_BHGCV = beta_BHGC1 * (tile.value_BHGCV - since_BHGC1 * self._of_state(key_BHCK, state_BHGKV))
        u_BHGCV = torch.where(is_old_BHGC1, tile.old_u_BHGCV, left_BHGCV)
        for row in range(TILE - 1):  # subtract each row from those that follow, always in the same order
            one, below = slice(row, row + 1), slice(row + 1, TILE)
            u_BHGCV[..., below, :] -= met_BHGCC[..., below, one] * u_BHGCV[..., one, :]
        seen_BHGCC = self._matmul(tile.query_BHCK, key_BHCK.mT)[:, :, None] * apart_BHGCC
        seen_BHGCC = torch.where(is_below_CC.mT, 0, seen_BHGCC)
        before_BHGCV = since_BHGC1 * self._of_state(tile.query_BHCK, state_BHGKV)
        return before_BHGCV + self._matmul(seen_BHGCC, u_BHGCV), u_BHGCV

    def fold(
        self, state_BHGKV: torch.Tensor, key_BHCK: torch.Tensor, u_BHGCV: torch.Tensor, decay_BHGC: torch.Tensor
    ) -> torch.Tensor:
        """Compute the states at the end of a whole tile."""
        sum_BHGC = _running_sum(decay_BHGC)
        last_BHG1 = sum_BHGC[..., -1:]
        weight_BHGC1 = torch.exp((last_BHG1 - sum_BHGC).clamp(max=0))[..., None]
        added_BHGKV = self._matmul((key_BHCK[:, :, None] * weight_BHGC1).mT, u_BHGCV)
        return torch.exp(last_BHG1)[..., None] * state_BHGKV + added_BHGKV

    def put(self, tile: _Tile, u_BHGCV: torch.Tensor) -> None:
        """Write k, u and g of the step's own rows to the ring."""
        tail_NHRY = self._kept.tail_NHRY
        parts = [tile.key_BHCK.movedim(2, 1), u_BHGCV.movedim(3, 1).flatten(3), tile.decay_BHGC.movedim(3, 1)]
        row_BCHY = torch.cat(parts, dim=3)
        row_BCHY = torch.nn.functional.pad(row_BCHY, (0, tail_NHRY.shape[3] - row_BCHY.shape[3]))
        slot_BC = self._rows.real_slots(tile.is_new_BC)
        tail_NHRY[slot_BC, :, tile.positions_BC % tail_NHRY.shape[2]] = row_BCHY

    def _read(self, position_BC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Read k, u and g of these positions from the ring; positions that were not written give arbitrary values."""
        _, values, key_dim, value_dim = self._shape
        tail_NHRY = self._kept.tail_NHRY
        row_BCHY = tail_NHRY[self._rows.slots_B[:, None], :, position_BC % tail_NHRY.shape[2]]
        lengths = [key_dim, values * value_dim, values]
        key_BCHK, u_BCHX, decay_BCHG = row_BCHY[..., : sum(lengths)].split(lengths, dim=3)
        u_BCHGV = u_BCHX.unflatten(3, (values, value_dim))
        return key_BCHK.movedim(1, 2), u_BCHGV.movedim(1, 3), decay_BCHG.movedim(1, 3)

    def _of_state(self, x_BHCK: torch.Tensor, state_BHGKV: torch.Tensor) -> torch.Tensor:
        """Multiply each key head's rows by the state of each of its value heads, [B, H, G, C, V]."""
        return self._matmul(x_BHCK[:, :, None].expand(-1, -1, self._shape[1], -1, -1), state_BHGKV)

    def _matmul(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Batched matmul, [..., M, N]; all have one shape, so each depends on its own operands alone."""
        left_XMK, right_XKN = left.flatten(0, -3).contiguous(), right.flatten(0, -3).contiguous()
        if self._is_fixed:
            found_XMN = tiles.matmul_groups_fixed(left_XMK, right_XKN, left.shape[-2])
        else:
            found_XMN = torch.bmm(left_XMK, right_XKN)
        return found_XMN.view(*left.shape[:-1], right.shape[-1])


def _l2_normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(tiles.ordered_sum(x.square()) + _L2_EPS)


def _running_sum(decay_BHGC: torch.Tensor) -> torch.Tensor:
    """Cumulative sums over rows, added one after the other."""
    sums = [decay_BHGC[..., :1]]
    for row in range(1, TILE):
        sums.append(sums[-1] + decay_BHGC[..., row : row + 1])
    return torch.cat(sums, dim=-1)
