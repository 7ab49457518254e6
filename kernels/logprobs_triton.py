"""The launches of `kernels.logprobs`: chunks of rows, then rows.

A logit and its token make one whole number that puts the likelier first and among equals the lower id, so that each of
the K likeliest is one maximum. Nothing is added up in an order that depends on the batch.

Shapes: N tokens of a chunk, M chunks of a row, rounded up to a power of two, K likeliest.
"""

import torch
import triton
import triton.language as tl

from baton.kernels.row_triton import of_order_key, order_key
from baton.kernels.variant import Variant

CHUNK = 8192
CHUNK_WARPS = 16
ROW_WARPS = 4

_NOTHING = tl.constexpr(-(1 << 63))


def launch(logits_NV, token_ids_N, num_top, packed_NX) -> None:
    """Both launches."""
    num_rows, vocab_size = logits_NV.shape
    num_chunks, device = triton.cdiv(vocab_size, CHUNK), logits_NV.device
    sums = torch.empty(num_rows, num_chunks, 2, dtype=torch.float32, device=device)
    larger = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    keys = torch.empty(num_rows, num_chunks, max(num_top, 1), dtype=torch.int64, device=device)
    _chunk_kernel[(num_rows, num_chunks)](
        logits_NV, logits_NV.stride(0), token_ids_N, sums, larger, keys, vocab_size, num_top, num_chunks, N=CHUNK,
        num_warps=CHUNK_WARPS,
    )  # fmt: skip
    _row_kernel[(num_rows,)](
        logits_NV, logits_NV.stride(0), token_ids_N, sums, larger, keys, packed_NX, num_top, num_chunks,
        M=triton.next_power_of_2(num_chunks), X=triton.next_power_of_2(num_chunks * max(num_top, 1)),
        num_warps=ROW_WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_top", "num_chunks"])
def _chunk_kernel(logits, row_stride, token_ids, sums, larger, keys, V, num_top, num_chunks, N: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    base = row.to(tl.int64) * row_stride
    token_N = chunk * N + tl.arange(0, N)
    x_N = tl.load(logits + base + token_N, mask=token_N < V, other=float("-inf")).to(tl.float32)
    chosen = tl.load(logits + base + tl.load(token_ids + row)).to(tl.float32)
    best = tl.max(x_N)
    at = row * num_chunks + chunk
    tl.store(sums + 2 * at, best)
    tl.store(sums + 2 * at + 1, tl.sum(tl.exp(x_N - tl.maximum(best, -3.0e38))))
    tl.store(larger + at, tl.sum((x_N > chosen).to(tl.int32)))
    key_N = (order_key(x_N).to(tl.int64) << 32) | (0x7FFFFFFF - token_N).to(tl.int64)
    key_N = tl.where(token_N < V, key_N, _NOTHING)
    for index in range(num_top):
        key = tl.max(key_N)
        tl.store(keys + at.to(tl.int64) * num_top + index, key)
        key_N = tl.where(key_N == key, _NOTHING, key_N)


@triton.jit(do_not_specialize=["num_top", "num_chunks"])
def _row_kernel(
    logits, row_stride, token_ids, sums, larger, keys, packed, num_top, num_chunks, M: tl.constexpr, X: tl.constexpr
):
    row = tl.program_id(0)
    chunk_M = tl.arange(0, M)
    at_M = row * num_chunks + chunk_M
    best_M = tl.load(sums + 2 * at_M, mask=chunk_M < num_chunks, other=float("-inf")).to(tl.float64)
    sum_M = tl.load(sums + 2 * at_M + 1, mask=chunk_M < num_chunks, other=0.0).to(tl.float64)
    best = tl.max(best_M)
    whole = best + tl.log(tl.sum(tl.where(best_M > float("-inf"), sum_M * tl.exp(best_M - best), 0.0)))
    rank = 1 + tl.sum(tl.load(larger + at_M, mask=chunk_M < num_chunks, other=0))
    lowest = tl.full([], -3.4028234663852886e38, tl.float64)
    token = tl.load(token_ids + row)
    chosen = tl.load(logits + row.to(tl.int64) * row_stride + token).to(tl.float64)
    packed += row.to(tl.int64) * (2 * num_top + 3)
    tl.store(packed, tl.maximum(chosen - whole, lowest))
    tl.store(packed + num_top + 1, token.to(tl.float64))
    tl.store(packed + 2 * num_top + 2, rank.to(tl.float64))
    place_X = tl.arange(0, X)
    from_X = keys + row.to(tl.int64) * num_chunks * num_top + place_X
    key_X = tl.load(from_X, mask=place_X < num_chunks * num_top, other=_NOTHING)
    for index in range(num_top):
        key = tl.max(key_X)
        logit = of_order_key((key >> 32).to(tl.int32)).to(tl.float64)
        tl.store(packed + 1 + index, tl.maximum(logit - whole, lowest))
        tl.store(packed + num_top + 2 + index, (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.float64))
        key_X = tl.where(key_X == key, _NOTHING, key_X)


def variants() -> list[Variant]:
    """Of Qwen's vocabulary, with up to 20 likeliest tokens."""
    names = {"row_stride": "i32", "token_ids": "*i64", "sums": "*fp32", "larger": "*i32", "keys": "*i64"}
    ints = {"V": "i32", "num_top": "i32", "num_chunks": "i32", "packed": "*fp64"}
    found = []
    for dtype in ("bf16", "fp32"):
        types = {"logits": f"*{dtype}", **names, **ints}
        found.append(
            Variant(
                name=f"logprobs_chunks {dtype}",
                kernel=_chunk_kernel,
                types=types,
                constants={"N": CHUNK},
                aligned=("logits", "row_stride", "V"),
                num_warps=CHUNK_WARPS,
                max_registers=128,
            )
        )
    found.append(
        Variant(
            name="logprobs_rows fp32",
            kernel=_row_kernel,
            types={"logits": "*fp32", **names, **ints},
            constants={"M": 32, "X": 512},
            aligned=("logits", "row_stride"),
            num_warps=ROW_WARPS,
        )
    )
    return found
