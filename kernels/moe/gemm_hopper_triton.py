# mypy: ignore-errors
"""The grouped GEMMs of float8 experts over chunks of prompts: the form of `kernels.moe.gemm_triton` for Hopper alone.

What is computed is as said there, but an expert's rows lie one after another, in blocks of 128, so that TMA can copy
them: a launch of its own puts quantized rows, and their scales beside each other, where their experts have them. The
first GEMM leaves what lies between the GEMMs there, too. Warps are specialized: one copies tiles, another brings
scales, and two warpgroups of 64 rows each multiply and add. A program has 256 rows of a weight, half of them of the
gate and half of the up projection in the first GEMM, which is what keeps the traffic from the L2 cache below what it
can bear. Programs are as many as multiprocessors; each does one tile after another.

It is written in Gluon, which Triton's interpreter cannot run: `fits` says where it may be used.

Shapes: P rows of all blocks, G groups of 128 columns.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.attention import prefill_hopper_triton as attention_prefill_hopper_triton
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.moe.align import GROUP, Alignment
from baton.kernels.moe.gemm_triton import GroupedGemm
from baton.kernels.moe.gemm_warp_specialized_triton import grouped_kernel
from baton.kernels.variant import Variant

BLOCK_LEN = 128
_TILE = 256  # rows of a weight
_STAGES = 4
_LAYOUT = gl.NVMMASharedLayout(128, 8, 2)
_PLACED = 8  # rows that a program puts in place
_FEWEST_ROWS = 96  # of an expert, on average, below which blocks of 128 are too empty; half of it where weights
_LARGE = 1 << 22  # have so many elements that they decide, not launches
_ALIGNMENT = 16
_GROUP = tl.constexpr(GROUP)


def fits(weights: Any, num_rows: int) -> bool:
    """Whether this form can compute it and is faster: on Hopper, compiled, and with enough rows for each expert."""
    num_experts, hidden, inner_size = weights.down_EDI.shape
    fewest = _FEWEST_ROWS if inner_size * hidden < _LARGE else _FEWEST_ROWS // 2
    return (
        attention_prefill_hopper_triton.num_multiprocessors(weights.down_EDI.device.index) > 0
        and hidden % _TILE == 0
        and inner_size % GROUP == 0
        and num_rows >= fewest * num_experts
        and weights.gate_up_EJD.data_ptr() % _ALIGNMENT == weights.down_EDI.data_ptr() % _ALIGNMENT == 0
    )


@triton.jit(do_not_specialize=["scale_stride"])
def _place_kernel(
    values, scales, rows, block_expert, placed, placed_scales, scale_stride: tl.int32,
    CHOSEN: tl.constexpr, D: tl.constexpr, B: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each row's float8 values and scales, from its token's; rows that pad a block stay as they are."""
    first = tl.program_id(0) * ROWS
    if tl.load(block_expert + first // BLOCK) < 0:
        return
    place_R = first + tl.arange(0, ROWS)
    row_R = tl.load(rows + place_R)
    group_G = tl.arange(0, G)
    is_there_RG = (row_R >= 0)[:, None] & (group_G < D // _GROUP)[None, :]
    scale_RG = tl.load(scales + (row_R // CHOSEN)[:, None] * (D // _GROUP) + group_G[None, :], mask=is_there_RG)
    to_RG = placed_scales + group_G[None, :].to(tl.int64) * scale_stride + place_R[:, None]
    tl.store(to_RG, scale_RG, mask=is_there_RG)
    column_B = tl.arange(0, B)
    for index in range(ROWS):
        row = tl.load(rows + first + index)
        if row >= 0:
            token = (row // CHOSEN).to(tl.int64)
            at = (first + index).to(tl.int64) * D
            value_B = tl.load(values + token * D + column_B, mask=column_B < D)
            tl.store(placed + at + column_B, value_B, mask=column_B < D)


_launch_place = Launcher(_place_kernel)
_launch_grouped = Launcher(grouped_kernel)


def launch(gemm: GroupedGemm, x_TD: torch.Tensor, x_scale_TG: torch.Tensor) -> torch.Tensor:
    """Three launches, of x in float8, contiguous; see `gemm_triton.launch`. Blocks are of BLOCK_LEN rows."""
    weights, weight_TK = gemm.weights, gemm.weight_TK
    _, hidden, inner_size = weights.down_EDI.shape
    num_rows, device = weight_TK.numel(), x_TD.device
    rows, block_expert = gemm.alignment.rows, gemm.alignment.block_expert
    num_places = len(rows)
    # Where the placed rows lie the parts come to lie, when nothing reads those rows any more.
    shared = torch.empty(
        max(num_places, num_rows * gemm.part_dtype.itemsize) * hidden, dtype=torch.uint8, device=device
    )
    placed_PD = shared[: num_places * hidden].view(x_TD.dtype).view(num_places, hidden)
    part_ND = shared[: num_rows * hidden * gemm.part_dtype.itemsize].view(gemm.part_dtype).view(num_rows, hidden)
    placed_scale_GP = torch.empty(hidden // GROUP, num_places, dtype=torch.float32, device=device)
    inner_PI = torch.empty(num_places, inner_size, dtype=x_TD.dtype, device=device)
    inner_scale_GP = torch.empty(inner_size // GROUP, num_places, dtype=torch.float32, device=device)
    gate_up, down = (_described(weight.flatten(0, 1), 128) for weight in (weights.gate_up_EJD, weights.down_EDI))
    common = rows, block_expert, weight_TK
    to_inner = _described(placed_PD, 64), placed_scale_GP, gate_up, weights.gate_up_scale, *common, inner_PI
    to_part = _described(inner_PI, 64), inner_scale_GP, down, weights.down_scale, *common, part_ND
    sizes = inner_scale_GP, len(block_expert), num_places
    programs = (attention_prefill_hopper_triton.num_multiprocessors(device.index),)
    num_chosen = weight_TK.shape[1]
    place_rows(x_TD, x_scale_TG, gemm.alignment, placed_PD, placed_scale_GP, num_chosen=num_chosen)
    with torch.cuda.device_of(x_TD):
        _launch_grouped(programs, (*to_inner, *sizes), _grouped_constants(2 * inner_size, hidden, True, weights.ue8m0))
        _launch_grouped(programs, (*to_part, *sizes), _grouped_constants(hidden, inner_size, False, False))
    return part_ND


def place_rows(
    x_TD: torch.Tensor,
    x_scale_TG: torch.Tensor,
    alignment: Alignment,
    placed_PD: torch.Tensor,
    placed_scale_GP: torch.Tensor,
    *,
    num_chosen: int,
) -> None:
    """Copy each row's values and scales from its token's to its place; places that no row has stay as they are."""
    num_places, hidden = placed_PD.shape
    rows, block_expert = alignment.rows, alignment.block_expert
    arguments = x_TD, x_scale_TG, rows, block_expert, placed_PD, placed_scale_GP, num_places
    with torch.cuda.device_of(x_TD):
        _launch_place((num_places // _PLACED,), arguments, _place_constants(num_chosen, alignment.block_len, hidden))


def _described(rows_PK: torch.Tensor, box: int) -> TensorDescriptor:
    return TensorDescriptor(rows_PK, list(rows_PK.shape), [rows_PK.stride(0), 1], [box, GROUP], _LAYOUT)


@functools.lru_cache(maxsize=256)
def _place_constants(num_chosen: int, block_len: int, hidden: int) -> Constants:
    return Constants({
        "CHOSEN": num_chosen, "D": hidden, "B": triton.next_power_of_2(hidden),
        "G": triton.next_power_of_2(hidden // GROUP), "BLOCK": block_len, "ROWS": _PLACED, "num_warps": 4,
    })  # fmt: skip


@functools.lru_cache(maxsize=256)
def _grouped_constants(num_outputs: int, num_inputs: int, is_gated: bool, ue8m0: bool) -> Constants:
    return Constants({
        "N": num_outputs, "K": num_inputs, "STAGES": _STAGES, "GATED": is_gated, "UE8M0": ue8m0, "num_warps": 4,
    })  # fmt: skip


def variants() -> list[Variant]:
    """Of DeepSeek-V3.1's experts, whose scales are powers of two, and of the 35B's."""
    found = []
    for inner_size, hidden, ue8m0 in ((2048, 7168, True), (512, 2048, False)):
        placed = dict(_place_constants(8, BLOCK_LEN, hidden).by_name)
        found.append(
            Variant(
                name=f"moe_gemm hopper place {hidden}",
                kernel=_place_kernel,
                types={
                    **dict.fromkeys(("values", "placed"), "*fp8e4nv"),
                    **dict.fromkeys(("scales", "placed_scales"), "*fp32"),
                    **dict.fromkeys(("rows", "block_expert"), "*i32"),
                    "scale_stride": "i32",
                },
                constants=placed,
                aligned=("values", "scales", "rows", "block_expert", "placed", "placed_scales"),
                num_warps=placed.pop("num_warps"),
                max_registers=128,
                on_amd=False,
            )
        )
        for is_gated in (True, False):
            sizes = (2 * inner_size, hidden) if is_gated else (hidden, inner_size)
            constants = dict(_grouped_constants(*sizes, is_gated, is_gated and ue8m0).by_name)
            found.append(
                Variant(
                    name=f"moe_gemm hopper {'gated' if is_gated else 'down'} {inner_size}x{hidden}",
                    kernel=grouped_kernel,
                    types={
                        "x": f"tensordesc<fp8e4nv[64, 128],{_LAYOUT!r}>",
                        "weight": f"tensordesc<fp8e4nv[128, 128],{_LAYOUT!r}>",
                        **dict.fromkeys(("x_scales", "weight_scales", "weights", "out_scales"), "*fp32"),
                        **dict.fromkeys(("rows", "block_expert"), "*i32"),
                        "out": "*fp8e4nv" if is_gated else "*bf16",
                        **dict.fromkeys(("num_blocks", "scale_stride"), "i32"),
                    },
                    constants=constants,
                    aligned=("x_scales", "weight_scales", "rows", "block_expert", "weights", "out", "out_scales"),
                    num_warps=constants.pop("num_warps"),
                    contains=("QGMMA", "UTMALDG", "USETMAXREG"),
                    lacks=("HMMA",),
                    may_spill=is_gated,  # three registers, outside of the walk over groups
                    on_amd=False,
                )
            )
    return found
