"""Checks at startup that batch-invariant numerics hold on this machine, before anything is promised.

Each operation is computed for the same rows alone, at the end of a batch and in batches of several sizes, and on a CPU
with one thread and with all of them. Every row must agree bit for bit. The check covers shapes that a model uses, not
every possible shape; it does not load a model.

Legend: T rows, N outputs, K inputs, B sequences, A query heads, H KV heads, D head size.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from baton.core.errors import NumericsUnsupported
from baton.core.numerics import Numerics, Quantization
from baton.kernels.delta_net.delta_net import DeltaState
from baton.kernels.delta_net.layer import DeltaKept, DeltaProjected, DeltaWeights
from baton.kernels.delta_net.rows import StateRows
from baton.kernels.delta_net.sizes import CONV_RING, RING, conv_len, state_len, tail_len
from baton.kernels.gemm.fp8_weight import quantize_weight
from baton.kernels.gemm.quantize_fp8 import GROUP_LEN
from baton.kernels.implementation import Implementation
from baton.kernels.kv.write import kv_write
from baton.kernels.ops import Ops
from baton.kernels.tiles import OUTPUT_TILE, wide_dtype

_NUM_ROWS = 512
_BATCHES = ((0, 1), (3, 17), (0, 48), (7, 135), (60, 300), (0, _NUM_ROWS))  # first row, rows
_MAX_ROWS_OF_OUTPUTS = 48
_MAX_OUTPUTS = 4096  # wider weights are checked on this many outputs, since all outputs are computed alike
_ATTENTION = (8, 4, 32)  # A, H, D
_LENGTHS = {
    Implementation.REFERENCE: 144,
    Implementation.TRITON: 720,
}  # of a sequence; the kernels split at 512 positions


def check_invariance(
    linear_shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_ranks: int = 1,
    attention: tuple[int, int, int] = _ATTENTION,
    implementation: Implementation = Implementation.REFERENCE,
    quantization: Quantization = Quantization.NONE,
    delta_net: tuple[int, int, int] | None = None,
) -> None:
    """Compare rows across batch shapes, positions and thread counts, for GEMMs of these (outputs, inputs).

    With several ranks, which split the outputs of most GEMMs, each rank's outputs are compared with those of the whole
    GEMM. `attention` gives the number of query heads, the number of KV heads and their size. `implementation` says
    whether Triton or the reference computes the model, and `quantization` how its weights are quantized. `delta_net`
    gives the key head size, the value head size and the number of value heads per key head of the model's gated delta
    nets; None if it has none.

    Raises:
        NumericsUnsupported: rows differ, or TF32 is enabled; the operation and shape are named.
    """
    if device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        message = "invariant numerics need TF32 switched off (torch.backends.cuda.matmul.allow_tf32)"
        raise NumericsUnsupported(message, operation="linear", shape=[])
    ops = Ops(Numerics.INVARIANT, implementation=implementation)
    with torch.inference_mode():
        for num_outputs, num_inputs in linear_shapes:
            shape = (min(num_outputs, _MAX_OUTPUTS), num_inputs)
            weight_NK = _values(shape, dtype, device) / num_inputs**0.5
            _check_rows("linear", shape, partial(ops.linear, weight=weight_NK), shape[1], dtype, device)
            if num_ranks > 1:
                _check_outputs(ops, weight_NK, num_ranks)
            if quantization is Quantization.FP8 and num_inputs % GROUP_LEN == 0:
                weight = quantize_weight(weight_NK)
                _check_rows("linear_fp8", shape, partial(ops.linear, weight=weight), shape[1], dtype, device)
            inner = partial(ops.linear_inner, weight=weight_NK)
            _check_rows("linear_inner", shape, inner, shape[1], dtype, device)
        for size in sorted({num_inputs for _, num_inputs in linear_shapes}):
            weight_D = _values((size,), dtype, device)
            _check_rows("rms_norm", (size,), partial(ops.rms_norm, weight_D=weight_D, eps=1e-6), size, dtype, device)
            if size % 2 == 0:
                _check_rows("silu_mul", (size,), ops.silu_mul, size, dtype, device)
        _check_attention(ops, attention, dtype, device)
        if delta_net is not None:
            _check_delta_net(ops, delta_net, dtype, device)


def _values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Deterministic values in -1 ... 1, the same on every machine."""
    num_values = 1
    for length in shape:
        num_values *= length
    index = torch.arange(num_values, dtype=torch.int64)
    mixed = (index * 2_654_435_761 + 12_345) % 4_294_967_291
    return (mixed.to(torch.float64) / 2_147_483_645.5 - 1).view(shape).to(device=device, dtype=dtype)


def _check_rows(
    operation: str,
    shape: tuple[int, ...],
    compute: Callable[[torch.Tensor], torch.Tensor],
    num_inputs: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    x_TK = _values((_NUM_ROWS, num_inputs), dtype, device)
    wanted_TN = compute(x_TK)
    for num_threads in _thread_counts(device):
        with _threads(num_threads):
            for first, num_rows in _BATCHES:
                rows = slice(first, first + num_rows)
                if not torch.equal(compute(x_TK[rows]), wanted_TN[rows]):
                    raise _refusal(operation, shape, dtype, device, f"{num_rows} rows from {first} on")


def _check_outputs(ops: Ops, weight_NK: torch.Tensor, num_ranks: int) -> None:
    """Check that a rank's share of the outputs of a GEMM equals the same outputs of the whole GEMM."""
    num_outputs, num_inputs = weight_NK.shape
    dtype, device = weight_NK.dtype, weight_NK.device
    x_TK = _values((_MAX_ROWS_OF_OUTPUTS, num_inputs), dtype, device)
    wanted_TN = ops.linear(x_TK, weight_NK)
    width = math.ceil(num_outputs / num_ranks / OUTPUT_TILE) * OUTPUT_TILE
    for first in range(0, num_outputs, width):
        part_TN = ops.linear(x_TK, weight_NK[first : first + width])
        if not torch.equal(part_TN, wanted_TN[:, first : first + width]):
            where = f"outputs from {first} on, cut over {num_ranks} ranks"
            raise _refusal("linear", (num_outputs, num_inputs), dtype, device, where)


def _check_attention(ops: Ops, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Check one sequence: whole, in two chunks, and its last rows as decode rows beside another sequence."""
    num_heads, num_kv_heads, head_dim = shape
    length, block_size, split = _LENGTHS[ops.implementation], 16, 101
    num_blocks = length // block_size
    pool = torch.zeros(2, 2 * num_blocks + 3, num_kv_heads, block_size, head_dim, dtype=dtype, device=device)
    key_NHSD, value_NHSD = pool
    table_BM = torch.arange(2 * num_blocks, device=device).view(num_blocks, 2).flip(0).T.contiguous()
    position_T = torch.arange(length, device=device)
    key_2THD = _values((2, 2 * length, num_kv_heads, head_dim), dtype, device)
    for sequence in range(2):
        slots_T = table_BM[sequence][position_T // block_size] * block_size + position_T % block_size
        rows = slice(sequence * length, (sequence + 1) * length)
        kv_write(key_2THD[0, rows], key_2THD[1, rows], slots_T, key_NHSD, value_NHSD)
    query_TAD = _values((length, num_heads, head_dim), dtype, device) * 4

    def prefill(start: int, end: int) -> torch.Tensor:
        return ops.attention_prefill(query_TAD[start:end], key_NHSD, value_NHSD, table_BM[:1], [end - start], [end])

    wanted_TAD = prefill(0, length)
    query_2QAD = query_TAD[-3:].expand(2, -1, -1, -1)
    positions_2Q = position_T[-3:].expand(2, -1)
    for num_threads in _thread_counts(device):
        with _threads(num_threads):
            chunked_TAD = torch.cat([prefill(0, split), prefill(split, length)])
            if not torch.equal(chunked_TAD, wanted_TAD):
                raise _refusal("attention_prefill", shape, dtype, device, f"chunks of {split} and {length - split}")
            decoded_2QAD = ops.attention_decode(
                query_2QAD, key_NHSD, value_NHSD, table_BM, positions_2Q, num_blocks * block_size
            )
            if not torch.equal(decoded_2QAD[0], wanted_TAD[-3:]):
                raise _refusal("attention_decode", shape, dtype, device, "3 rows of 2 sequences")


def _check_delta_net(ops: Ops, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Check one key head: a prompt whole, in two chunks, and its last rows as decode rows beside another sequence."""
    key_dim, value_dim, num_values = sizes
    length, split, num_decoded, num_taps, wide = 37, 21, 3, 4, wide_dtype(dtype)
    shapes = (
        (1, key_dim),
        (1, key_dim),
        (1, num_values * value_dim),
        (1, num_values, value_dim),
        *[(1, num_values)] * 2,
    )
    parts = [_values((length, *shape), dtype, device) for shape in shapes]
    weights = DeltaWeights(
        conv_HWX=_values((1, num_taps, conv_len(*sizes)), wide, device),
        a_log_HG=_values((1, num_values), wide, device),
        dt_bias_HG=_values((1, num_values), wide, device),
        norm_V=_values((value_dim,), wide, device),
        eps=1e-6,
    )
    conv_NHRX = torch.zeros(3, 1, CONV_RING, conv_len(*sizes), dtype=dtype, device=device)
    tail_NHRY = torch.zeros(3, 1, RING, tail_len(*sizes), dtype=wide, device=device)
    state_NHZ = torch.zeros(3, 1, state_len(*sizes), dtype=wide, device=device)
    kept = DeltaKept(conv_NHRX, DeltaState(tail_NHRY, state_NHZ))

    def compute(start: int, end: int, slots: Sequence[int], *, is_chunk: bool) -> torch.Tensor:
        num_sequences = len(slots)
        rows = StateRows(
            first_row=0,
            num_rows=end - start,
            positions_B=torch.full((num_sequences,), start, device=device),
            counts_B=torch.full((num_sequences,), end - start, device=device),
            slots_B=torch.tensor(slots, device=device),
            scratch_slot=2,
            start=start if is_chunk else None,
        )
        query, key, value, z, b, a = (torch.cat([part[start:end]] * num_sequences) for part in parts)
        x = DeltaProjected(query_THK=query, key_THK=key, value_THX=value, z_THGV=z, b_THG=b, a_THG=a)
        return ops.delta_layer(x, weights, kept, [rows])

    wanted_TX = compute(0, length, [0], is_chunk=True)
    for num_threads in _thread_counts(device):
        with _threads(num_threads):
            stop = length - num_decoded
            for slot in (0, 1):
                found_TX = torch.cat([compute(*ends, [slot], is_chunk=True) for ends in ((0, split), (split, stop))])
                if not torch.equal(found_TX, wanted_TX[:stop]):
                    raise _refusal("delta_layer", sizes, dtype, device, f"chunks of {split} and {stop - split}")
            decoded_TX = compute(stop, length, [0, 1], is_chunk=False)
            if not torch.equal(decoded_TX, torch.cat([wanted_TX[stop:]] * 2)):
                raise _refusal("delta_layer", sizes, dtype, device, f"{num_decoded} rows of 2 sequences")


def _refusal(
    operation: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, where: str
) -> NumericsUnsupported:
    message = (
        f"invariant numerics do not hold on this machine: {operation} of shape {list(shape)} in {dtype} on {device} "
        f"gives other bits for {where}; serve without --batch-invariant"
    )
    return NumericsUnsupported(message, operation=operation, shape=list(shape), dtype=str(dtype), device=str(device))


def _thread_counts(device: torch.device) -> tuple[int, ...]:
    """Thread counts to test: 1 and this process's own, because prefill and decode workers may use different numbers."""
    return tuple({1, torch.get_num_threads()}) if device.type == "cpu" else (torch.get_num_threads(),)


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if num_threads == before:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
