# mypy: ignore-errors
"""`state_copy` in Triton: one launch for all three tensors, so that a tape of launches may have it.

B: elements of a step of a program.
"""

import functools

import torch
import triton
import triton.language as tl

from baton.kernels.delta_net.sizes import CONV_RING, RING, conv_len, state_len, tail_len
from baton.kernels.dependent_launch import dependent_launch
from baton.kernels.launcher import Constants, Launcher
from baton.kernels.variant import Variant

_STEP, _NUM_WARPS = 2048, 4
_NUM_PROGRAMS = 8  # for each head


@triton.jit
def _copy_head(x, source, target, slot_stride, head_stride, SIZE: tl.constexpr, B: tl.constexpr):
    """What one head has in a slot."""
    head = tl.program_id(0) * head_stride
    to_head, from_head = x + target * slot_stride + head, x + source * slot_stride + head
    for start in range(tl.program_id(1) * B, SIZE, tl.num_programs(1) * B):
        at_B = start + tl.arange(0, B)
        tl.store(to_head + at_B, tl.load(from_head + at_B, mask=at_B < SIZE), mask=at_B < SIZE)


@triton.jit(do_not_specialize=["target"])
def _copy_state_kernel(
    conv, tail, state, slots, target: tl.int32,
    conv_slot, conv_head, tail_slot, tail_head, state_slot, state_head,
    CONV: tl.constexpr, TAIL: tl.constexpr, STATE: tl.constexpr, B: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source, to = tl.load(slots).to(tl.int64), target.to(tl.int64)
    _copy_head(conv, source, to, conv_slot, conv_head, CONV, B)
    _copy_head(tail, source, to, tail_slot, tail_head, TAIL, B)
    _copy_head(state, source, to, state_slot, state_head, STATE, B)


_launch_copy = Launcher(_copy_state_kernel)


def launch(parts: tuple[torch.Tensor, ...], slots_B: torch.Tensor, target: int) -> None:
    """Copy the first of the slots; see `state_copy.copy_state`."""
    strides = (stride for part_NH in parts for stride in part_NH.stride()[:2])
    sizes = tuple(part_NH[0, 0].numel() for part_NH in parts)
    arguments = (*parts, slots_B, target, *strides)
    _launch_copy((parts[0].shape[1], _NUM_PROGRAMS), arguments, _constants(sizes, slots_B.device))


@functools.lru_cache(maxsize=256)
def _constants(sizes: tuple[int, int, int], device: torch.device) -> Constants:
    return Constants(_by_name(*sizes) | dependent_launch(device) | {"num_warps": _NUM_WARPS})


def _by_name(conv_size: int, tail_size: int, state_size: int) -> dict[str, int]:
    return {"CONV": conv_size, "TAIL": tail_size, "STATE": state_size, "B": _STEP}


def variants() -> list[Variant]:
    """Of the model that is measured, whose value heads are two of a key head."""
    sizes = CONV_RING * conv_len(128, 128, 2), RING * tail_len(128, 128, 2), state_len(128, 128, 2)
    types = {"conv": "*bf16", "tail": "*fp32", "state": "*fp32", "slots": "*i64", "target": "i32"}
    strides = [f"{name}_{way}" for name in ("conv", "tail", "state") for way in ("slot", "head")]
    return [
        Variant(
            name=f"delta_state_copy{'' if early else ' late'}",
            kernel=_copy_state_kernel,
            types=types | dict.fromkeys(strides, "i32"),
            constants=_by_name(*sizes) | {"EARLY": early},
            aligned=("conv", "tail", "state", *strides),
            num_warps=_NUM_WARPS,
            max_registers=128,
            max_shared_bytes=8192,
            on_amd=not early,
        )
        for early in (True, False)
    ]
