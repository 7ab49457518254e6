# mypy: ignore-errors
"""Rows sorted by expert in one launch, without a program that waits for another; and, beside it, rows made float8.

Each expert has a program (beyond 264 several share one): it counts the ids of all experts, so it knows where its blocks
begin, then writes its rows in the order they came. That reads the ids once (more often above one tile of them) for
each program, all in the L2 cache, and needs neither atomics in memory nor a second launch. Programs beyond the
experts' quantize one token each, which costs nothing while the others count.

Shapes: N = T * K ids, B of them at a time, E experts, F bins for all but the last, P places at a time.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.gemm.quantize_fp8_triton import raise_scales
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant, with_ue8m0

GROUP = 128
MAX_TILE = 4096  # ids at a time
_FILLED = tl.constexpr(128)  # places at a time
_GROUP = tl.constexpr(GROUP)
_LARGEST = tl.constexpr(448.0)
_SMALLEST = tl.constexpr(1e-10)


@triton.jit
def _load_ids(ids, start, num_ids, FIRST: tl.constexpr, E: tl.constexpr, B: tl.constexpr):
    """int32, counted from FIRST; E for what is no expert of these E."""
    place_B = start + tl.arange(0, B)
    id_B = tl.load(ids + place_B, mask=place_B < num_ids, other=-1) - FIRST
    return tl.where((id_B >= 0) & (id_B < E), id_B, E).to(tl.int32)


@triton.jit
def _quantize_token(x, x_stride, values, scales, token, D: tl.constexpr, G: tl.constexpr, UE8M0: tl.constexpr):
    group_G = tl.arange(0, G)
    mask_G1 = (group_G < D // _GROUP)[:, None]
    at_GK = group_G[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    value_GK = tl.load(x + token.to(tl.int64) * x_stride + at_GK, mask=mask_G1, other=0.0).to(tl.float32)
    scale_G = tl.maximum(tl.max(tl.abs(value_GK), axis=1), _SMALLEST) / _LARGEST
    if UE8M0:
        scale_G = raise_scales(scale_G)
    value_GK = value_GK / scale_G[:, None]
    tl.store(values + token.to(tl.int64) * D + at_GK, value_GK.to(values.dtype.element_ty), mask=mask_G1)
    tl.store(scales + token.to(tl.int64) * (D // _GROUP) + group_G, scale_G, mask=group_G < D // _GROUP)


@triton.jit(do_not_specialize=["num_ids", "num_blocks", "block_len", "x_stride"])
def _align_kernel(
    ids,
    num_ids: tl.int32,
    rows,
    block_expert,
    num_blocks: tl.int32,
    block_len: tl.int32,
    x,
    x_stride: tl.int64,
    values,
    scales,
    FIRST: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    OWN: tl.constexpr,
    B: tl.constexpr,
    MANY: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    QUANTIZE: tl.constexpr,
    UE8M0: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The blocks of OWN experts, or behind them a token. MANY: there are more than B ids, so several tiles.

    How long blocks are is no constant: other numbers of ids choose it than choose B, and each pair would be a form.
    """
    NUM_COUNTING: tl.constexpr = (E + OWN - 1) // OWN
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if QUANTIZE:
        if tl.program_id(0) >= NUM_COUNTING:
            _quantize_token(x, x_stride, values, scales, tl.program_id(0) - NUM_COUNTING, D, G, UE8M0)
            return
    bin_F = tl.arange(0, F)
    id_B = _load_ids(ids, 0, num_ids, FIRST, E, B)
    count_F = tl.histogram(id_B, F, mask=id_B < E - 1)
    if MANY:
        for start in range(B, num_ids, B):
            more_B = _load_ids(ids, start, num_ids, FIRST, E, B)
            count_F += tl.histogram(more_B, F, mask=more_B < E - 1)
    blocks_F = (count_F + block_len - 1) // block_len
    for own in tl.static_range(OWN):
        expert = tl.program_id(0) * OWN + own
        block = tl.sum(tl.where(bin_F < expert, blocks_F, 0))
        first = block * block_len
        count = _scatter_tile(id_B, 0, expert, rows, first, E, B)
        if MANY:
            for start in range(B, num_ids, B):
                more_B = _load_ids(ids, start, num_ids, FIRST, E, B)
                count += _scatter_tile(more_B, start, expert, rows, first + count, E, B)
        num_own = (count + block_len - 1) // block_len
        _fill(rows + first, count, num_own * block_len, -1)
        _fill(block_expert + block, 0, num_own, expert)
        if expert == E - 1:  # what no expert needs
            _fill(block_expert, block + num_own, num_blocks, -1)


@triton.jit
def _scatter_tile(id_B, start, expert, rows, first, E: tl.constexpr, B: tl.constexpr):
    """Write the places of the expert's ids, in their order, from `first` on, and return how many there are."""
    is_B = (id_B == expert) & (id_B < E)
    rank_B = tl.cumsum(is_B.to(tl.int32), axis=0) - 1
    tl.store(rows + first + rank_B, start + tl.arange(0, B), mask=is_B)
    return tl.sum(is_B.to(tl.int32), axis=0)


@triton.jit
def _fill(places, begin, end, value):
    """The places from `begin` up to `end`."""
    for index in range(begin, end, _FILLED):
        index_P = index + tl.arange(0, _FILLED)
        tl.store(places + index_P, value, mask=index_P < end)


@dataclass(frozen=True, slots=True)
class ToQuantize:
    """Rows to quantize beside the sort.

    Attributes:
        x_TD: the rows.
        values_TD: where their float8 values go.
        scale_TG: where their scales go.
        ue8m0: whether scales are rounded up to powers of two.
    """

    x_TD: torch.Tensor
    values_TD: torch.Tensor
    scale_TG: torch.Tensor
    ue8m0: bool


def launch(
    expert_TK: torch.Tensor,
    rows: torch.Tensor,
    block_expert: torch.Tensor,
    num_experts: int,
    block_len: int,
    first_expert: int,
    quantized: ToQuantize | None,
) -> None:
    """One launch."""
    num_ids = expert_TK.numel()
    tile = tile_of(num_ids)
    x, values, scales, ue8m0 = rows, rows, rows, False
    if quantized is not None:
        x, values, scales, ue8m0 = quantized.x_TD, quantized.values_TD, quantized.scale_TG, quantized.ue8m0
    hidden = x.shape[-1] if quantized is not None else GROUP
    num_programs = triton.cdiv(num_experts, own_of(num_experts)) + (x.shape[0] if quantized is not None else 0)
    arguments = (
        expert_TK, num_ids, rows, block_expert, block_expert.numel(), block_len, x, x.stride(0), values, scales,
    )  # fmt: skip
    size = tile if num_ids <= tile else tile + 1  # all that is read of how many there are
    kept = _constants(num_experts, size, hidden, quantized is not None, ue8m0, first_expert, expert_TK.device)
    with torch.cuda.device_of(expert_TK):
        _launch_align((num_programs,), arguments, kept)


@functools.lru_cache(maxsize=256)
def _constants(
    num_experts: int,
    num_ids: int,
    hidden: int,
    quantizes: bool,
    ue8m0: bool,
    first_expert: int,
    device: torch.device,
) -> Constants:
    warps = warps_of(tile_of(num_ids))
    by_name = constants(num_experts, num_ids, hidden, quantizes, first_expert) | {"num_warps": warps}
    by_name["UE8M0"] = ue8m0
    return Constants(by_name | dependent_launch(device))


_launch_align = Launcher(_align_kernel)


def tile_of(num_ids: int) -> int:
    """Ids at a time: one of four lengths, so that few specializations exist."""
    return next((tile for tile in (256, 1024, 2048) if num_ids <= tile), MAX_TILE)


def own_of(num_experts: int) -> int:
    """Experts of one program: one, until two programs count on a multiprocessor."""
    return triton.cdiv(num_experts, 264)


def warps_of(tile: int) -> int:
    """Of a program that has so many ids at a time."""
    return 4 if tile <= 256 else 8


def constants(num_experts: int, num_ids: int, hidden: int, quantizes: bool, first_expert: int = 0) -> dict[str, object]:
    """The constants of a launch."""
    tile = tile_of(num_ids)
    return {
        "FIRST": first_expert,
        "E": num_experts,
        "F": triton.next_power_of_2(max(1, num_experts - 1)),
        "OWN": own_of(num_experts),
        "B": tile,
        "MANY": num_ids > tile,
        "D": hidden,
        "G": triton.next_power_of_2(max(1, hidden // GROUP)),
        "QUANTIZE": quantizes,
        "UE8M0": False,
    }


def variants() -> list[Variant]:
    """The lengths of tiles, at the experts of the shapes that are measured, all and a rank's; a form for other GPUs."""
    found = []
    for first, num_experts, num_ids, hidden, early in (
        (0, 128, 8, 2048, True),
        (0, 128, 512, 2048, True),
        (0, 256, 2048, 2048, True),
        (0, 256, 65536, 2048, True),
        (0, 128, 2048, 0, True),
        (0, 128, 2048, 0, False),
        (0, 256, 65536, 0, True),
        (0, 257, 576, 2048, True),
        (0, 257, 576, 0, True),
        (64, 64, 512, 2048, True),
        (224, 32, 65536, 2048, True),
        (64, 64, 2048, 0, True),
        (224, 32, 65536, 0, True),
    ):
        quantizes = hidden > 0
        types = {
            "num_ids": "i32",
            "num_blocks": "i32",
            "block_len": "i32",
            "x_stride": "i64",
            "scales": "*fp32",
            "rows": "*i32",
        }
        types |= {"ids": "*i32", "block_expert": "*i32", "x": "*bf16", "values": "*fp8e4nv"}
        if not quantizes:
            types |= {"x": "*i32", "values": "*i32", "scales": "*i32"}
        kind = f"{f' from {first}' if first else ''}{' fp8' if quantizes else ''}{'' if early else ' late'}"
        found.append(
            Variant(
                name=f"moe_align E={num_experts} ids={num_ids}{kind}",
                kernel=_align_kernel,
                types=types,
                constants=constants(num_experts, num_ids, hidden or GROUP, quantizes, first) | {"EARLY": early},
                aligned=("ids", "rows", "block_expert", "x", "values", "scales"),
                num_warps=warps_of(tile_of(num_ids)),
                max_registers=128,
                max_shared_bytes=49_152,
                on_amd=not early,  # and gfx942 has another float8
            )
        )
    return with_ue8m0(found, "moe_align E=256 ids=2048 fp8", "moe_align E=256 ids=65536 fp8")
