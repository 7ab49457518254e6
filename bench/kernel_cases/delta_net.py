"""Rows of `baton bench kernels` for `delta_layer`: what a gated delta net computes between its projections.

Shapes are those of Qwen3.5-35B-A3B: 16 key heads of 128, with two value heads each, or one where stated. Sequences are
at the eighth row of a tile, the average; states are read but not written, as in 15 of 16 steps.
"""

from functools import partial

import torch

from baton.bench.decode_bench.cell import kept
from baton.bench.kernel_bench.case import Call, KernelCase, Systems
from baton.kernels.delta_net.delta_net import DeltaState
from baton.kernels.delta_net.layer import DeltaKept, DeltaProjected, DeltaWeights, delta_layer
from baton.kernels.delta_net.rows import StateRows
from baton.kernels.delta_net.sizes import CONV_RING, RING, TILE, conv_len, state_len, tail_len
from baton.kernels.implementation import Implementation

_DIM, _TAPS = 128, 4
_OLD_ROWS = 7  # rows that the step's first tile already has
_FIRST = 64 * TILE + _OLD_ROWS


def _num_bytes(num_sequences: int, num_rows: int, heads: tuple[int, int], is_chunk: bool) -> int:
    """Bytes of states, once (twice for chunks, which write them), of the open tile's rows, and of the layer's rows."""
    num_heads, num_values = heads
    state = num_heads * num_values * _DIM * _DIM * 4
    tail = num_heads * (_DIM + num_values * _DIM) * 4
    row = num_heads * (2 * _DIM + 3 * num_values * _DIM) * 2
    return num_sequences * (state * (2 if is_chunk else 1) + tail * (_OLD_ROWS + num_rows) + row * num_rows)


def _layer(
    num_sequences: int, num_rows: int, heads: tuple[int, int], is_chunk: bool, device: torch.device
) -> partial[torch.Tensor]:
    num_heads, num_values = heads
    sizes = _DIM, _DIM, num_values
    num_tokens = num_sequences * num_rows
    num_values_len = num_values * _DIM
    columns = [num_heads * _DIM] * 2 + [num_heads * num_values_len] * 2 + [num_heads * num_values] * 2
    mixed_TX = torch.randn(num_tokens, sum(columns), device=device).bfloat16()
    query_TX, key_TX, value_TX, z_TX, b_TX, a_TX = mixed_TX.split(columns, dim=1)
    x = DeltaProjected(
        query_THK=query_TX.unflatten(1, (num_heads, -1)),
        key_THK=key_TX.unflatten(1, (num_heads, -1)),
        value_THX=value_TX.unflatten(1, (num_heads, -1)),
        z_THGV=z_TX.unflatten(1, (num_heads, num_values, -1)),
        b_THG=b_TX.unflatten(1, (num_heads, -1)),
        a_THG=a_TX.unflatten(1, (num_heads, -1)),
    )
    weights = DeltaWeights(
        conv_HWX=torch.randn(num_heads, _TAPS, conv_len(*sizes), device=device),
        a_log_HG=torch.randn(num_heads, num_values, device=device) - 1,
        dt_bias_HG=torch.randn(num_heads, num_values, device=device) - 2,
        norm_V=torch.randn(_DIM, device=device),
        eps=1e-6,
    )
    tail = torch.zeros(num_sequences + 1, num_heads, RING, tail_len(*sizes), device=device)
    state = torch.zeros(num_sequences + 1, num_heads, state_len(*sizes), device=device)
    state[:, :, num_values * _DIM * _DIM] = _FIRST // TILE
    conv = torch.zeros(num_sequences + 1, num_heads, CONV_RING, conv_len(*sizes), device=device, dtype=torch.bfloat16)
    rows = StateRows(
        first_row=0,
        num_rows=num_rows,
        positions_B=torch.full((num_sequences,), _FIRST, device=device),
        counts_B=torch.full((num_sequences,), num_rows, device=device),
        slots_B=torch.randperm(num_sequences, device=device),
        scratch_slot=num_sequences,
        start=_FIRST if is_chunk else None,
    )
    return partial(delta_layer, x, weights, DeltaKept(conv, DeltaState(tail, state)), [rows])


def _prepare(
    num_sequences: int, num_rows: int, heads: tuple[int, int], is_chunk: bool, device: torch.device, num_sets: int
) -> Systems:
    layers = [_layer(num_sequences, num_rows, heads, is_chunk, device) for _ in range(num_sets)]
    systems: dict[str, list[Call]] = {"ours": [kept(layer) for layer in layers]}
    if num_rows <= 256:
        systems["torch"] = [kept(partial(layer, implementation=Implementation.REFERENCE)) for layer in layers]
    return systems


def cases() -> list[KernelCase]:
    """Decode and verify steps, chunks of one prompt, and a tiny case for CPUs."""
    points = [(num_sequences, num_rows, (16, 2), False) for num_rows in (1, 4) for num_sequences in (1, 16, 64, 256)]
    points += [(num_sequences, 1, (16, 1), False) for num_sequences in (16, 64)]
    points += [(1, num_rows, (16, 2), True) for num_rows in (16, 256, 1024, 2048, 8192)] + [(16, 2048, (16, 2), True)]
    points += [(2, 1, (1, 1), False)]
    return [
        KernelCase(
            kernel="delta_layer",
            shape=f"B={num_sequences} {'chunk of ' if is_chunk else 'T='}{num_rows} H={heads[0]} G={heads[1]}",
            num_bytes=_num_bytes(num_sequences, num_rows, heads, is_chunk),
            is_read=not is_chunk,
            set_bytes=_num_bytes(num_sequences, num_rows, heads, is_chunk),
            prepare=partial(_prepare, num_sequences, num_rows, heads, is_chunk),
            only_gpu=heads[0] > 1,
        )
        for num_sequences, num_rows, heads, is_chunk in points
    ]
