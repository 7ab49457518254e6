"""Rows sorted by expert in one launch, without a program that waits for another; and, beside it, rows made float8.

Each expert has a program: it counts the ids of all experts, so it knows where its blocks begin, then writes its rows in
the order they came. That reads the ids once for each program, all in the L2 cache, and needs neither atomics in memory
nor a second launch. Programs beyond the experts' quantize one token each, which costs nothing while the others count.

More ids than a tile holds are counted by a launch before, chunk by chunk; then each expert has several programs, which
take chunks each and know from the counts where their rows go. So no program reads all ids.

Shapes: N = T * K ids, B of them at a time, E experts, F bins, R rows of a block, P chunks.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant

GROUP = 128
MAX_TILE = 4096  # ids at a time
MAX_CHUNKS = 32  # that are counted, each by a program
_COUNTED_TILE = 2048  # ids at a time, of counted chunks
_COUNTED_PROGRAMS = 1024  # that sort counted ids, about
_GROUP = tl.constexpr(GROUP)
_LARGEST = tl.constexpr(448.0)
_SMALLEST = tl.constexpr(1e-10)


@triton.jit
def _load_ids(ids, start, num_ids, E: tl.constexpr, B: tl.constexpr):
    """int32, E for what is no expert."""
    place_B = start + tl.arange(0, B)
    id_B = tl.load(ids + place_B, mask=place_B < num_ids, other=-1)
    return tl.where((id_B >= 0) & (id_B < E), id_B, E).to(tl.int32)


@triton.jit
def _quantize_token(x, x_stride, values, scales, token, D: tl.constexpr, G: tl.constexpr):
    group_G = tl.arange(0, G)
    mask_G1 = (group_G < D // _GROUP)[:, None]
    at_GK = group_G[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    value_GK = tl.load(x + token.to(tl.int64) * x_stride + at_GK, mask=mask_G1, other=0.0).to(tl.float32)
    scale_G = tl.maximum(tl.max(tl.abs(value_GK), axis=1), _SMALLEST) / _LARGEST
    value_GK = value_GK / scale_G[:, None]
    tl.store(values + token.to(tl.int64) * D + at_GK, value_GK.to(values.dtype.element_ty), mask=mask_G1)
    tl.store(scales + token.to(tl.int64) * (D // _GROUP) + group_G, scale_G, mask=group_G < D // _GROUP)


@triton.jit(do_not_specialize=["num_ids", "chunk_len"])
def _count_kernel(
    ids, num_ids: tl.int32, counts, chunk_len: tl.int32, E: tl.constexpr, F: tl.constexpr, B: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """How many ids of a chunk each expert has: int32 [chunks, F]."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * chunk_len
    count_F = tl.zeros([F], tl.int32)
    for start in range(first, tl.minimum(first + chunk_len, num_ids), B):
        id_B = _load_ids(ids, start, num_ids, E, B)
        count_F += tl.histogram(id_B, F, mask=id_B < E)
    tl.store(counts + tl.program_id(0) * F + tl.arange(0, F), count_F)


@triton.jit(do_not_specialize=["num_ids", "num_blocks", "x_stride", "chunk_len", "num_chunks"])
def _align_kernel(
    ids,
    num_ids: tl.int32,
    rows,
    block_expert,
    num_blocks: tl.int32,
    x,
    x_stride: tl.int64,
    values,
    scales,
    counts,
    chunk_len: tl.int32,
    num_chunks: tl.int32,
    E: tl.constexpr,
    F: tl.constexpr,
    OWN: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    P: tl.constexpr,
    SLICES: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    QUANTIZE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The blocks of OWN experts, or behind them a token. With several SLICES, a program takes P / SLICES chunks."""
    NUM_COUNTING: tl.constexpr = (E + OWN - 1) // OWN * SLICES
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if QUANTIZE:
        if tl.program_id(0) >= NUM_COUNTING:
            _quantize_token(x, x_stride, values, scales, tl.program_id(0) - NUM_COUNTING, D, G)
            return
    bin_F = tl.arange(0, F)
    part = tl.program_id(0) % SLICES
    if SLICES > 1:
        chunk_P1 = tl.arange(0, P)[:, None]
        at_PF = chunk_P1 * F + bin_F[None, :]
        count_PF = tl.load(counts + at_PF, mask=chunk_P1 < num_chunks, other=0)
        count_F = tl.sum(count_PF, axis=0)
        before_F = tl.sum(tl.where(chunk_P1 < part * (P // SLICES), count_PF, 0), axis=0)
    else:
        id_B = _load_ids(ids, 0, num_ids, E, B)
        count_F = tl.histogram(id_B, F, mask=id_B < E)
    blocks_F = (count_F + R - 1) // R
    pad_R = tl.arange(0, R)
    for own in tl.static_range(OWN):
        expert = tl.program_id(0) // SLICES * OWN + own
        block = tl.sum(tl.where(bin_F < expert, blocks_F, 0))
        if SLICES > 1:
            before = block * R + tl.sum(tl.where(bin_F == expert, before_F, 0))
            first = part * (P // SLICES) * chunk_len
            for start in range(first, tl.minimum(first + P // SLICES * chunk_len, num_ids), B):
                more_B = _load_ids(ids, start, num_ids, E, B)
                _scatter_tile(more_B, start, expert, rows, before, E, B)
                before += tl.sum((more_B == expert).to(tl.int32))
        else:
            _scatter_tile(id_B, 0, expert, rows, block * R, E, B)
        if part == 0:
            count = tl.sum(tl.where(bin_F == expert, count_F, 0))
            num_own = (count + R - 1) // R
            tl.store(rows + block * R + count + pad_R, -1, mask=count + pad_R < num_own * R)
            for index in range(0, num_own, R):
                tl.store(block_expert + block + index + pad_R, expert, mask=index + pad_R < num_own)
            if expert == E - 1:  # what no expert needs
                for index in range(block + num_own, num_blocks, R):
                    tl.store(block_expert + index + pad_R, -1, mask=index + pad_R < num_blocks)


@triton.jit
def _scatter_tile(id_B, start, expert, rows, first, E: tl.constexpr, B: tl.constexpr):
    """The places of the expert's ids, in their order, from `first` on."""
    is_B = (id_B == expert) & (id_B < E)
    rank_B = tl.cumsum(is_B.to(tl.int32), axis=0) - 1
    tl.store(rows + first + rank_B, start + tl.arange(0, B), mask=is_B)


def launch(
    expert_TK: torch.Tensor,
    rows: torch.Tensor,
    block_expert: torch.Tensor,
    num_experts: int,
    block_len: int,
    quantized: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> None:
    """One launch, or two above MAX_TILE ids; `quantized` is (x, its float8 values, their scales), where wanted."""
    num_ids = expert_TK.numel()
    device = expert_TK.device
    x, values, scales = quantized if quantized is not None else (rows, rows, rows)
    hidden = x.shape[-1] if quantized is not None else GROUP
    size = min(num_ids, MAX_TILE + 1)  # all that is read of how many there are
    kept, counting = _constants(num_experts, block_len, tile_of(size), size > MAX_TILE, hidden, quantized is not None,
                                device)  # fmt: skip
    fixed = kept.by_name
    counts, chunk_len, num_chunks = rows, 0, 0
    with torch.cuda.device_of(expert_TK):
        if counting is not None:
            tile = fixed["B"]
            chunk_len = triton.cdiv(triton.cdiv(num_ids, fixed["P"]), tile) * tile
            num_chunks = triton.cdiv(num_ids, chunk_len)
            counts = torch.empty(num_chunks, fixed["F"], dtype=torch.int32, device=device)
            _launch_count((num_chunks,), (expert_TK, num_ids, counts, chunk_len), counting)
        num_programs = triton.cdiv(num_experts, fixed["OWN"]) * fixed["SLICES"]
        num_programs += x.shape[0] if quantized is not None else 0
        arguments = (
            expert_TK, num_ids, rows, block_expert, block_expert.numel(), x, x.stride(0), values, scales, counts,
            chunk_len, num_chunks,
        )  # fmt: skip
        _launch_align((num_programs,), arguments, kept)


@functools.lru_cache(maxsize=256)
def _constants(
    num_experts: int, block_len: int, tile: int, is_counted: bool, hidden: int, quantizes: bool, device: torch.device
) -> tuple[Constants, Constants | None]:
    """Of the launch that sorts, and of the one before it that counts, if there is one."""
    by_name = constants(num_experts, block_len, tile + is_counted, hidden, quantizes)
    options = {"num_warps": warps_of(by_name["B"]), **dependent_launch(device)}
    counting = {name: by_name[name] for name in ("E", "F", "B")} | options
    return Constants(by_name | options), Constants(counting) if is_counted else None


_launch_count = Launcher(_count_kernel)
_launch_align = Launcher(_align_kernel)


def tile_of(num_ids: int) -> int:
    """Ids at a time: one of four lengths, so that few specializations exist."""
    return next((tile for tile in (256, 1024, 2048) if num_ids <= tile), MAX_TILE)


def own_of(num_experts: int) -> int:
    """Experts of one program: as many programs as a GPU holds at once, about."""
    return triton.cdiv(num_experts, 512)


def warps_of(tile: int) -> int:
    """Of a program that has so many ids at a time."""
    return 4 if tile <= 256 else 8


def constants(num_experts: int, block_len: int, num_ids: int, hidden: int, quantizes: bool) -> dict[str, Any]:
    """The constants of the launch that sorts."""
    is_counted = num_ids > MAX_TILE
    own = own_of(num_experts)
    slices = min(max(_COUNTED_PROGRAMS * own // num_experts, 2), MAX_CHUNKS)
    return {
        "E": num_experts,
        "F": triton.next_power_of_2(num_experts),
        "OWN": own,
        "R": block_len,
        "B": _COUNTED_TILE if is_counted else tile_of(num_ids),
        "P": MAX_CHUNKS,
        "SLICES": 1 << slices.bit_length() - 1 if is_counted else 1,
        "D": hidden,
        "G": triton.next_power_of_2(max(1, hidden // GROUP)),
        "QUANTIZE": quantizes,
    }


def variants() -> list[Variant]:
    """The lengths of tiles, at the experts of the shapes that are measured, and a form for other GPUs."""
    found = []
    for num_experts, num_ids, hidden, early in (
        (128, 8, 2048, True),
        (128, 512, 2048, True),
        (256, 2048, 2048, True),
        (256, 65536, 2048, True),
        (128, 2048, 0, True),
        (128, 2048, 0, False),
    ):
        quantizes = hidden > 0
        types = {"num_ids": "i32", "num_blocks": "i32", "x_stride": "i64", "scales": "*fp32", "rows": "*i32"}
        types |= {"counts": "*i32", "chunk_len": "i32", "num_chunks": "i32"}
        types |= {"ids": "*i32", "block_expert": "*i32", "x": "*bf16", "values": "*fp8e4nv"}
        if not quantizes:
            types |= {"x": "*i32", "values": "*i32", "scales": "*i32"}
        found.append(
            Variant(
                name=f"moe_align E={num_experts} ids={num_ids}{' fp8' if quantizes else ''}{'' if early else ' late'}",
                kernel=_align_kernel,
                types=types,
                constants=constants(num_experts, 16, num_ids, hidden or GROUP, quantizes) | {"EARLY": early},
                aligned=("ids", "rows", "block_expert", "x", "values", "scales", "counts"),
                num_warps=warps_of(min(tile_of(num_ids), 2048)),
                max_registers=128,
                max_shared_bytes=49_152,
                on_amd=not early,  # and gfx942 has another float8
            )
        )
    found.append(
        Variant(
            name="moe_align counts E=256",
            kernel=_count_kernel,
            types={"ids": "*i32", "num_ids": "i32", "counts": "*i32", "chunk_len": "i32"},
            constants={"E": 256, "F": 256, "B": _COUNTED_TILE, "EARLY": True},
            aligned=("ids", "counts"),
            num_warps=warps_of(_COUNTED_TILE),
            max_registers=128,
            max_shared_bytes=49_152,
            on_amd=False,
        )
    )
    return found
