# mypy: ignore-errors
"""The kernel of `kernels.kv.dequantize`: float8 blocks of a batch, times a scale, to 16-bit blocks in their order.

Shapes: X numbers of a block of one head (S * D).
"""

import torch
import triton
import triton.language as tl

from baton.kernels.variant import Variant


@triton.jit(do_not_specialize=["tables", "starts", "contexts", "key_scale", "value_scale", "table_stride"])
def dequantize_kernel(
    key, value, tables, starts, contexts, key_scale, value_scale, wide, wide_tables,
    key_stride_n, key_stride_h, table_stride: tl.int32,
    X: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Grid (KV heads, columns of the tables, sequences): one block of one head, K and V."""
    column, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads, num_columns = tl.num_programs(1), tl.num_programs(0)
    target = sequence * num_columns + column
    if head == 0:
        tl.store(wide_tables + target, target)
    if tl.load(starts + sequence + 1) <= tl.load(starts + sequence):
        return
    if column * BLOCK >= tl.load(contexts + sequence):
        return
    block = tl.load(tables + sequence.to(tl.int64) * table_stride + column).to(tl.int64)
    at_X = block * key_stride_n + head.to(tl.int64) * key_stride_h + tl.arange(0, X)
    key_X = tl.load(key + at_X).to(tl.float32)
    value_X = tl.load(value + at_X).to(tl.float32)
    if SCALED:
        key_X *= tl.load(key_scale + head * PER_HEAD)
        value_X *= tl.load(value_scale + head * PER_HEAD)
    wide_X = wide + (target.to(tl.int64) * num_heads + head) * (2 * X) + tl.arange(0, X)
    tl.store(wide_X, key_X.to(wide.dtype.element_ty))
    tl.store(wide_X + X, value_X.to(wide.dtype.element_ty))


def launch(
    key_NHSD: torch.Tensor,
    value_NHSD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_starts_E: torch.Tensor,
    context_lens_B: torch.Tensor,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    wide_NHPSD: torch.Tensor,
    wide_tables_BM: torch.Tensor,
) -> None:
    """Write the wide blocks and their tables; everything was checked before."""
    num_sequences, num_columns = block_tables_BM.shape
    _, num_kv_heads, block_size, head_dim = key_NHSD.shape
    scaled = key_scale is not None
    with torch.cuda.device_of(key_NHSD):
        dequantize_kernel[(num_columns, num_kv_heads, num_sequences)](
            key_NHSD, value_NHSD, block_tables_BM, query_starts_E, context_lens_B,
            *((key_scale, value_scale) if scaled else (wide_NHPSD, wide_NHPSD)), wide_NHPSD, wide_tables_BM,
            key_NHSD.stride(0), key_NHSD.stride(1), block_tables_BM.stride(0),
            X=block_size * head_dim, BLOCK=block_size, SCALED=scaled,
            PER_HEAD=int(scaled and key_scale.numel() > 1), num_warps=4,
        )  # fmt: skip


def variants() -> list[Variant]:
    """Of the shapes that are measured."""
    types = dict.fromkeys(("key", "value"), "*fp8e4nv") | dict.fromkeys(("tables", "starts", "contexts"), "*i64")
    types |= dict.fromkeys(("key_scale", "value_scale"), "*fp32") | {"wide": "*bf16", "wide_tables": "*i32"}
    types |= dict.fromkeys(("key_stride_n", "key_stride_h", "table_stride"), "i32")
    return [
        Variant(
            name=f"kv_dequantize S=16 D={head_dim}{'' if per_head else ' one scale'}",
            kernel=dequantize_kernel,
            types=types,
            constants={"X": 16 * head_dim, "BLOCK": 16, "SCALED": True, "PER_HEAD": per_head},
            aligned=("key", "value", "wide", "wide_tables", "key_stride_n", "key_stride_h"),
            num_warps=4,
            max_registers=64,
        )
        for head_dim, per_head in ((128, 1), (256, 1), (128, 0))
    ]
