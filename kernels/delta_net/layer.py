"""What a gated delta net computes between its projections: convolution, recurrence, gated norm.

The reference is the three modules beside this one, plus torch operations. The Triton implementation is one launch for
each, or four launches that process a chunk by blocks. All of them read and write the pool in the same format, so a
sequence may switch between them.

Legend: T rows of a pass, B sequences, L rows of each, H key heads, G value heads of one, K and V sizes of their heads,
X channels of a key head, W positions that an output of the convolution sees, N slots, R ring, Y and Z elements of a row
of the ring and of a state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from baton.kernels.arguments import require, require_rows, require_tensor
from baton.kernels.delta_net import causal_conv_triton, delta_chunk_triton, delta_net_triton
from baton.kernels.delta_net.causal_conv import causal_conv
from baton.kernels.delta_net.delta_net import DeltaState, delta_net, delta_rows
from baton.kernels.delta_net.rows import StateRows
from baton.kernels.delta_net.sizes import MAX_TAPS, TILE, unfit_delta_sizes
from baton.kernels.delta_net.state_copy import copy_state
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.memo import Memo, open_signature, signature
from baton.kernels.tiles import ordered_sum, wide_dtype

MAX_DECODE_ROWS = TILE // 2  # in Triton; see `delta_net_triton`
MAX_GATED_ROWS = 64  # of a pass whose convolution computes b and a: each row reads their weights again
_FORMS: Memo[bool] = Memo()


@dataclass(frozen=True, slots=True)
class StateGates:
    """Projections of the state's gates that are left to the convolution: their weights and the rows they read."""

    x_TD: torch.Tensor
    b_HGD: torch.Tensor
    a_HGD: torch.Tensor

    def project(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute b and a, [T, H, G], in torch: summed in the wide dtype, rounded once."""
        x_TD = self.x_TD.to(wide_dtype(self.x_TD.dtype))
        b_THG, a_THG = (
            torch.einsum("td,hgd->thg", x_TD, weight_HGD.to(x_TD.dtype)).to(self.x_TD.dtype)
            for weight_HGD in (self.b_HGD, self.a_HGD)
        )
        return b_THG, a_THG


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaProjected:
    """Outputs of a layer's projections for a pass's rows, as views of the GEMM outputs, in the model's dtype.

    The state's gates may be left to the convolution where `leaves_gates`: `gates` then takes the place of b and a.
    """

    query_THK: torch.Tensor
    key_THK: torch.Tensor
    value_THX: torch.Tensor  # X = G V here
    z_THGV: torch.Tensor  # gates the outputs
    b_THG: torch.Tensor | None = None  # controls how much is written
    a_THG: torch.Tensor | None = None  # controls how much is forgotten
    gates: StateGates | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaWeights:
    """A layer's weights, in the wide dtype, contiguous."""

    conv_HWX: torch.Tensor
    a_log_HG: torch.Tensor
    dt_bias_HG: torch.Tensor
    norm_V: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class DeltaKept:
    """A layer's part of the pool: the convolution's ring in the model's dtype, and the recurrence's state, wide."""

    conv_NHRX: torch.Tensor
    state: DeltaState

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """All tensors, [N, H, ...] each."""
        return self.conv_NHRX, self.state.tail_NHRY, self.state.state_NHZ


def leaves_gates(rows: Sequence[StateRows]) -> bool:
    """Whether b and a of a pass may be left to the convolution, whose programs multiply a row each: if rows are few."""
    return all(some.start is None and some.num_rows == 1 and len(some.positions_B) <= MAX_GATED_ROWS for some in rows)


def delta_layer(
    x: DeltaProjected,
    weights: DeltaWeights,
    kept: DeltaKept,
    rows: Sequence[StateRows],
    *,
    invariant: bool = False,
    implementation: Implementation = Implementation.AUTO,
) -> torch.Tensor:
    """Compute the layer's outputs, [T, H G V] in the dtype of `x`, rounded once. Never waits for the device.

    Args:
        x: projections for the rows of the pass. The launch before must be a projection: what `x.gates`, `rows` and
            `kept` hold is read before that has ended.
        weights: weights of the layer.
        kept: rings and states, read and written.
        rows: positions and slots; together all rows of the pass, in order.
        invariant: for the reference on CUDA, use matmuls of one fixed shape; for Triton, process a chunk row by row, so
            that bits do not depend on where a prompt is cut. Otherwise Triton processes chunks by blocks, whose matmul
            operands are half precision where the model's dtype is narrower than float32.
        implementation: implementation to use. Triton computes in float32, and returns 0 for rows that are not real.

    Raises:
        KernelArgumentInvalid: an argument does not fit.
    """
    parts = _parts(x)
    num_tokens = len(x.query_THK)
    num_missing = num_tokens - sum(len(some.positions_B) * some.num_rows for some in rows)
    key = (
        *(open_signature(part) for part in parts), all(len(part) == num_tokens for part in parts), num_missing,
        None if x.gates is None else (signature(x.gates.b_HGD), signature(x.gates.a_HGD), leaves_gates(rows)),
        *(signature(weight) for weight in (weights.conv_HWX, weights.a_log_HG, weights.dt_bias_HG, weights.norm_V)),
        *(signature(kept_part) for kept_part in (kept.conv_NHRX, kept.state.tail_NHRY, kept.state.state_NHZ)),
        frozenset(_form(some) for some in rows),
        max((some.num_rows for some in rows if some.start is None), default=0), implementation,
    )  # fmt: skip
    in_triton = _FORMS.find(key)
    if in_triton is None:
        in_triton = uses_triton(x.query_THK.device, implementation)
        if in_triton:
            _check(x, weights, kept, rows, num_missing)
        _FORMS.keep(key, in_triton)
    if not in_triton:
        return _reference(x, weights, kept, rows, invariant)
    _, num_heads, key_dim = x.query_THK.shape
    num_values, value_dim = x.z_THGV.shape[2:]
    out_TX = torch.empty(num_tokens, num_heads * num_values * value_dim, dtype=x.z_THGV.dtype, device=x.z_THGV.device)
    float32: dict[str, Any] = {"dtype": torch.float32, "device": out_TX.device}
    of_weights = weights.conv_HWX, weights.a_log_HG, weights.dt_bias_HG
    for some in rows:
        cut = slice(some.first_row, some.stop_row)
        inputs = x.query_THK[cut], x.key_THK[cut], x.value_THX[cut], *_gates(x, cut)
        gated = x.z_THGV[cut], weights.norm_V, weights.eps
        if some.start is not None and not invariant:
            delta_chunk_triton.launch(inputs, of_weights, kept.conv_NHRX, kept.state, some, gated, out_TX[cut])
        else:
            heads = len(gated[0]), num_heads
            made_THX = torch.empty(*heads, 2 * key_dim + num_values * value_dim, **float32)
            factors_THGF = torch.empty(*heads, num_values, causal_conv_triton.FACTORS, **float32)
            out_THGV = torch.empty(*heads, num_values, value_dim, **float32)
            step = made_THX, factors_THGF
            x_TD = None if x.gates is None else x.gates.x_TD[cut]
            begun_BH = causal_conv_triton.launch(
                inputs, of_weights, kept.conv_NHRX, kept.state, some, step, value_dim, x_TD
            )
            delta_net_triton.launch(step, begun_BH, kept.state, some, out_THGV, key_dim)
            if some.start is not None:
                num_taps = weights.conv_HWX.shape[1]
                causal_conv_triton.launch_keep(inputs, kept.conv_NHRX, kept.state.tail_NHRY, some, step, num_taps)
            delta_net_triton.launch_norm(out_THGV, *gated, out_TX[cut])
        if some.keep_in is not None:
            copy_state(kept.parts, some, in_triton=True)
    return out_TX


def _reference(
    x: DeltaProjected, weights: DeltaWeights, kept: DeltaKept, rows: Sequence[StateRows], invariant: bool
) -> torch.Tensor:
    b_THG, a_THG = _gates(x, slice(None)) if x.gates is None else x.gates.project()
    mixed_THX = torch.cat([x.query_THK, x.key_THK, x.value_THX], dim=2)
    found = []
    for some in rows:
        cut, shape = slice(some.first_row, some.stop_row), (len(some.positions_B), some.num_rows)
        conv_BLHX = causal_conv(mixed_THX[cut].unflatten(0, shape), weights.conv_HWX, kept.conv_NHRX, some)
        gates = b_THG[cut].unflatten(0, shape), a_THG[cut].unflatten(0, shape)
        made = delta_rows(conv_BLHX, gates, weights.a_log_HG, weights.dt_bias_HG, x.query_THK.shape[2])
        found.append(delta_net(made, kept.state, some, invariant=invariant).flatten(0, 1))
        if some.keep_in is not None:
            copy_state(kept.parts, some, in_triton=False)
    out_THGV = torch.cat(found)
    mean_square = ordered_sum(out_THGV.square()) / out_THGV.shape[-1]
    out_THGV = out_THGV * torch.rsqrt(mean_square + weights.eps) * weights.norm_V
    z_THGV = x.z_THGV.to(wide_dtype(x.z_THGV.dtype))
    out_THGV = out_THGV * (z_THGV / (1 + torch.exp(-z_THGV)))
    return out_THGV.flatten(1).to(x.z_THGV.dtype)


def _gates(x: DeltaProjected, cut: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return b and a of some rows, or the weights of both."""
    if x.gates is not None:
        return x.gates.b_HGD, x.gates.a_HGD
    assert x.b_THG is not None and x.a_THG is not None
    return x.b_THG[cut], x.a_THG[cut]


def _parts(x: DeltaProjected) -> tuple[torch.Tensor, ...]:
    """What has a row for each of the pass."""
    gates = _gates(x, slice(None)) if x.gates is None else (x.gates.x_TD,)
    return x.query_THK, x.key_THK, x.value_THX, x.z_THGV, *gates


def _form(rows: StateRows) -> tuple[object, ...]:
    """What checks read of the rows' tensors, except their number."""
    shape = (len(rows.positions_B),)
    return tuple(
        (some.dtype, some.device, some.shape == shape) for some in (rows.positions_B, rows.counts_B, rows.slots_B)
    )


def _check(
    x: DeltaProjected, weights: DeltaWeights, kept: DeltaKept, rows: Sequence[StateRows], num_missing: int
) -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    num_tokens, num_heads, key_dim = x.query_THK.shape
    num_values, value_dim = x.z_THGV.shape[2:]
    values_len = num_values * value_dim
    num_channels = 2 * key_dim + values_len
    unfit = unfit_delta_sizes(key_dim, value_dim)
    require(not unfit, "query_THK", f"no kernel is made for {unfit}")
    shapes = {
        "query_THK": [num_tokens, num_heads, key_dim],
        "key_THK": [num_tokens, num_heads, key_dim],
        "value_THX": [num_tokens, num_heads, values_len],
        "z_THGV": [num_tokens, num_heads, num_values, value_dim],
    }
    device, gates = x.query_THK.device, _parts(x)[4:]
    if x.gates is None:
        shapes |= {name: [num_tokens, num_heads, num_values] for name in ("b_THG", "a_THG")}
    else:
        is_few = leaves_gates(rows)
        require(is_few, "gates", f"are of rows that are not one of each of {MAX_GATED_ROWS} sequences at most")
        row_len = x.gates.x_TD.shape[1]
        shapes["x_TD"] = [num_tokens, row_len]
        shapes |= {name: [num_heads, num_values, row_len] for name in ("b_HGD", "a_HGD")}
        gates += x.gates.b_HGD, x.gates.a_HGD
    for (name, shape), tensor in zip(shapes.items(), (*_parts(x)[:4], *gates), strict=True):
        require_tensor(name, tensor, shape, dtypes, device)
        require(tensor.dtype == x.query_THK.dtype, name, f"is {tensor.dtype}, not {x.query_THK.dtype}")
        require_rows(name, tensor)
    num_taps = weights.conv_HWX.shape[1]
    require(2 <= num_taps <= MAX_TAPS, "conv_HWX", f"sees {num_taps} positions, not 2 to {MAX_TAPS}")
    for name, tensor, shape in (
        ("conv_HWX", weights.conv_HWX, [num_heads, num_taps, num_channels]),
        ("a_log_HG", weights.a_log_HG, [num_heads, num_values]),
        ("dt_bias_HG", weights.dt_bias_HG, [num_heads, num_values]),
        ("norm_V", weights.norm_V, [value_dim]),
    ):
        require_tensor(name, tensor, shape, [torch.float32], device)
        require(tensor.is_contiguous(), name, "is not contiguous")
    num_slots = len(kept.conv_NHRX)
    ring = kept.conv_NHRX.shape[2]
    require_tensor("conv_NHRX", kept.conv_NHRX, [num_slots, num_heads, ring, num_channels], [x.query_THK.dtype], device)
    tail, state = kept.state.tail_NHRY, kept.state.state_NHZ
    require_tensor("tail_NHRY", tail, [num_slots, num_heads, 2 * TILE, None], [torch.float32], device)
    require_tensor("state_NHZ", state, [num_slots, num_heads, None], [torch.float32], device)
    for name, tensor in (("conv_NHRX", kept.conv_NHRX), ("tail_NHRY", tail)):
        is_dense = tensor.stride(3) == 1 and tensor.stride(2) == tensor.shape[3]
        require(is_dense, name, "rows of a ring do not lie one after the other")
    require_rows("state_NHZ", state)
    in_fours = all(stride % 4 == 0 for stride in state.stride()[:2])
    require(in_fours, "state_NHZ", "has strides that are no multiples of 4")
    require(tail.shape[3] >= key_dim + values_len + num_values, "tail_NHRY", f"has rows of {tail.shape[3]}")
    require(state.shape[2] > values_len * key_dim, "state_NHZ", f"has {state.shape[2]} elements")
    require(num_missing == 0, "rows", f"are {num_tokens - num_missing} of {num_tokens}")
    for some in rows:
        is_chunk = some.start is not None
        fits = is_chunk or (some.num_rows <= MAX_DECODE_ROWS and some.num_rows + num_taps - 1 <= ring)
        require(fits, "rows", f"are {some.num_rows} of a sequence that decodes, not {MAX_DECODE_ROWS} at most")
        for name in ("positions_B", "counts_B", "slots_B"):
            require_tensor(name, getattr(some, name), [len(some.positions_B)], [torch.int64], device)
