# mypy: ignore-errors
"""Float8 GEMMs with scales: the form of `kernels.gemm.fp8_triton` for Hopper alone.

Here warps are specialized: one warp copies tiles to shared memory by TMA, another brings scales, and one
or two warpgroups do nothing but multiply and add. So a tile of few rows of the weight needs no more than a tile's
warps, all that a multiprocessor has of shared memory is stages on their way, and where the weight has rows enough for
every multiprocessor nothing need be split. What tokens past the last multiply is never stored.

The copying warp fills all stages with the weight before it waits for the launch before (`kernels.dependent_launch`).
Two warpgroups have 64 rows of the tile each, or, if the tile has no more, take turns with groups of 128 columns, and
add their sums at the end, in one order.

Where tiles of a power of two would leave the last round of programs nearly empty, a tile has two parts, e.g. 64 and 16
rows of the weight, each with products and sums of its own.

It is written in Gluon, which Triton's interpreter cannot run: `fits` says where it may be used. Splits are for tiles
that fill a multiprocessor: it refuses them where a second program has place beside the first (`is_form`).
"""

# mypy: ignore-errors

import functools
from dataclasses import asdict, replace
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.gemm.fp8_cost import fitted
from baton.kernels.gemm.fp8_plan import TABLES, GemmPlan
from baton.kernels.gemm.fp8_warp_specialized_triton import gemm_kernel
from baton.kernels.gemm.fp8_weight import Fp8Weight
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.tuning import table
from baton.kernels.variant import Variant

_LAYOUT = gl.NVMMASharedLayout(128, 8, 2)
_SHARED_BYTES = 227 << 10  # of a multiprocessor, for programs
_RESERVED_BYTES = 1 << 10  # of each program
_REGISTERS = 1 << 16
_ALIGNMENT = 16
_TWO_PARTS = {64: (80, 136, 160, 192), 128: (136, 192)}  # rows of the weight, by tokens; others gained nothing
_ROWS_AT_ONCE = 16  # of activations that TMA copies; a tile has few then that it must fill with zeros


@functools.cache
def _is_hopper(device_index: int | None) -> bool:
    if device_index is None or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device_index)[0] == 9


def fits(weight: Fp8Weight, a_MK: torch.Tensor | None = None) -> bool:
    """Whether this form can do it: on Hopper, compiled, with rows that TMA can take.

    Args:
        weight: what is multiplied with.
        a_MK: float8; None: a new tensor without gaps.
    """
    values = weight.values_NK
    if not _is_hopper(values.device.index) or values.data_ptr() % _ALIGNMENT != 0:
        return False
    if a_MK is None:
        return True
    stride = a_MK.stride(0)
    return a_MK.data_ptr() % _ALIGNMENT == 0 and stride % _ALIGNMENT == 0 and stride >= weight.num_inputs


def is_form(plan: GemmPlan) -> bool:
    """Whether there is such a program."""
    rows, columns = (plan.BN, plan.BM) if plan.swap else (plan.BM, plan.BN)
    turns = turns_of(plan)
    rest = rest_of(plan)
    is_two_parts = plan.BN in _TWO_PARTS.get(plan.BM, ())
    return (
        (rows, plan.workers) in ((64, 1), (64, 2), (128, 2))
        and (columns in (16, 32, 64, 128) if rest == 0 else not plan.swap and plan.splits == 1 and is_two_parts)
        and 1 <= plan.depth * turns <= plan.stages
        # A worker waits for a phase's parity, so it must have seen the phase before: each stage has one worker.
        and plan.stages % turns == 0
        and (plan.groups, plan.fused) == (1, False)
        and shared_bytes(plan) + _RESERVED_BYTES <= _SHARED_BYTES
        and (plan.splits == 1 or programs_at_once(plan) == 1)
    )


def rest_of(plan: GemmPlan) -> int:
    """Rows of the weight in a tile beyond the largest power of two, the second part."""
    return plan.BN - (1 << plan.BN.bit_length() >> 1)


def turns_of(plan: GemmPlan) -> int:
    """Workers that take turns with the groups of the same rows; 0 if there is no such tile."""
    rows = plan.BN if plan.swap else plan.BM
    return plan.workers * 64 // rows if rows in (64, 128) else 0


def num_counters(plan: GemmPlan, num_rows: int, num_outputs: int) -> int:
    """That a launch wants."""
    halves = (plan.BN if plan.swap else plan.BM) // 64
    return -(-num_rows // plan.BM) * -(-num_outputs // plan.BN) * halves if plan.splits > 1 else 0


def _boxes(plan: GemmPlan) -> tuple[int, int]:
    """Rows of activations and of the weight that TMA copies at once: of the weight what divides both parts."""
    return min(plan.BM, _ROWS_AT_ONCE), rest_of(plan) or min(plan.BN, 64 if plan.swap else plan.BN)


def shared_bytes(plan: GemmPlan) -> int:
    """That a program takes, or a few more."""
    rows, columns = (plan.BN, plan.BM) if plan.swap else (plan.BM, plan.BN)
    joined = 64 * columns * 4 if plan.workers > rows // 64 else 0
    num_blocks = 2 if rest_of(plan) else 1
    return plan.stages * (128 * (plan.BM + plan.BN) + 4 * plan.BM * num_blocks + 16) + joined + 384


def programs_at_once(plan: GemmPlan) -> int:
    """Of a multiprocessor."""
    return max(1, _SHARED_BYTES // (shared_bytes(plan) + _RESERVED_BYTES))


def launch(
    a_MK: torch.Tensor,
    scales_GM: torch.Tensor,
    weight: Fp8Weight,
    c_MN: torch.Tensor,
    plan: GemmPlan,
    counters: torch.Tensor,
) -> None:
    """Compute `c_MN`; all arguments were checked and fit.

    Args:
        a_MK: float8; rows may be strided.
        scales_GM: of the activations; rows may be strided.
        weight: what they are multiplied with.
        c_MN: bfloat16; rows may be strided.
        plan: how, with workers.
        counters: int32 zeros, one for each 64 rows of a tile, of the current stream; left as zeros.
    """
    num_rows, K = a_MK.shape
    N = weight.num_outputs
    num_programs = -(-num_rows // plan.BM) * -(-N // plan.BN) * plan.splits
    a_box, w_box = _boxes(plan)
    partials = c_MN
    if plan.splits > 1:
        partials = torch.empty(num_programs * plan.BM * plan.BN, dtype=torch.float32, device=c_MN.device)
    arguments = (
        TensorDescriptor(a_MK, [num_rows, K], [a_MK.stride(0), 1], [a_box, 128], _LAYOUT),
        scales_GM,
        _described(weight, w_box),
        weight.scales_BG,
        c_MN,
        partials,
        counters,
        num_rows,
        N,
        K,
        scales_GM.stride(0),
        weight.scales_BG.stride(0),
        c_MN.stride(0),
        plan.splits,
    )
    device = c_MN.device
    constants = _launch_constants(plan, device)
    if device.index is None or device.index == torch.cuda.current_device():
        _launch_gemm((num_programs,), arguments, constants)
        return
    with torch.cuda.device(device):
        _launch_gemm((num_programs,), arguments, constants)


def _described(weight: Fp8Weight, box: int) -> TensorDescriptor:
    found = weight.prepared.get(("hopper", box))
    if found is None:
        N, K = weight.values_NK.shape
        found = TensorDescriptor(weight.values_NK, [N, K], [K, 1], [box, 128], _LAYOUT)
        weight.prepared["hopper", box] = found
    return found


@functools.lru_cache(maxsize=1024)
def _launch_constants(plan: GemmPlan, device: torch.device) -> Constants:
    return Constants(_constants(plan) | _options(plan) | dependent_launch(device, plan.pdl))


def _options(plan: GemmPlan) -> dict[str, Any]:
    """Registers are shared by the programs that a multiprocessor has place for."""
    num_programs = programs_at_once(plan)
    num_threads = 128 * (plan.workers + 1)
    limit = {"maxnreg": _REGISTERS // (num_programs * num_threads) // 8 * 8} if num_programs > 1 else {}
    return {"num_warps": 4} | limit


def _constants(plan: GemmPlan) -> dict[str, Any]:
    """All but `EARLY`."""
    a_box, w_box = _boxes(plan)
    return {
        "BM": plan.BM,
        "BN": plan.BN,
        "STAGES": plan.stages,
        "SWAP": plan.swap,
        "GROUPS": plan.workers,
        "DEPTH": plan.depth,
        "SPLIT": plan.splits > 1,
        "REST": rest_of(plan),
        "A_BOX": a_box,
        "W_BOX": w_box,
    }


_launch_gemm = Launcher(gemm_kernel)


def variant(plan: GemmPlan) -> Variant:
    """What is compiled for a plan."""
    a_box, w_box = _boxes(plan)
    integers = ("num_rows", "N", "K", "a_scale_stride", "w_scale_stride", "c_stride", "num_splits")
    traits = [
        f"{plan.BM}x{plan.BN} stages={plan.stages} workers={plan.workers} depth={plan.depth}",
        *[name for name, holds in (("split", plan.splits > 1), ("pdl", plan.pdl)) if holds],
    ]
    options = _options(plan)
    return Variant(
        name=f"gemm_fp8 hopper {'swap' if plan.swap else 'plain'} {' '.join(traits)}",
        kernel=gemm_kernel,
        types={
            "a": f"tensordesc<fp8e4nv[{a_box}, 128],{_LAYOUT!r}>",
            "a_scales": "*fp32",
            "w": f"tensordesc<fp8e4nv[{w_box}, 128],{_LAYOUT!r}>",
            "w_scales": "*fp32",
            "c": "*bf16",
            "partials": "*fp32" if plan.splits > 1 else "*bf16",
            "counters": "*i32",
            **dict.fromkeys(integers, "i32"),
        },
        constants=_constants(plan) | {"EARLY": plan.pdl},
        aligned=("a_scales", "w_scales", "c", "partials", "counters", "N", "K", "c_stride"),
        num_warps=options.pop("num_warps"),
        contains=("QGMMA", "UTMALDG"),
        lacks=("HMMA",),
        max_registers=options.get("maxnreg", 255),
        on_amd=False,
        options=options | ({"launch_pdl": True} if plan.pdl else {}),
    )


def variants() -> list[Variant]:
    """What the tables and predictions launch, each once; and one of each kind of tile."""
    rows = [row for name in TABLES for sizes in table().get(name, {}).values() for row in sizes.values()]
    plans = [GemmPlan(**row) for row in rows if row.get("workers")]
    predicted = [GemmPlan(**asdict(cost.tile)) for cost in fitted().tiles]
    found: dict[str, Variant] = {}
    for plan in (
        *plans,
        *predicted,
        *[split for plan in predicted if is_form(split := replace(plan, splits=2))],
        GemmPlan(swap=False, BM=64, BN=32, stages=8, workers=2),
        GemmPlan(swap=False, BM=64, BN=32, stages=8, workers=1),
        GemmPlan(swap=False, BM=64, BN=64, stages=12, workers=2, splits=2),
        GemmPlan(swap=False, BM=128, BN=64, stages=8, workers=2),
        GemmPlan(BM=16, BN=64, stages=20, workers=1, depth=4),
        GemmPlan(BM=32, BN=64, stages=16, workers=2, splits=2),
        GemmPlan(BM=64, BN=128, stages=8, workers=2, splits=4),
    ):
        found[variant(plan).name] = variant(plan)
    return list(found.values())
