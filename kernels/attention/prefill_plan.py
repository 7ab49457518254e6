"""Chooses how attention of chunks uses a Hopper GPU, by a model of the time of each form, for any heads and sizes.

Forms are tiles of 128 or 192 rows whose programs walk over all positions, tiles of 128 rows whose positions are
divided between programs, too, the loops of decode steps, divided as well, and for few rows the kernel of other GPUs.
A program takes one step after another, of so many positions, and there is one program on a multiprocessor; so a form's
time follows from the steps of the busiest multiprocessor and from the rounds of programs. The host knows bounds only:
the rows of all chunks, their number, the longest one, and the most positions.

The constants were fitted to 141 drawn shapes on an H200 (`benchmarks/results/attention-prefill-h200.json`), KV in
bfloat16. What is chosen takes 1.02 of the time of the best form there, on average.

Legend: as in `kernels.attention.prefill`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from baton.kernels.attention.decode_plan import rows_of_program
from baton.kernels.attention.prefill_triton import rule
from baton.kernels.attention.row_tile_plan_triton import num_slots_of

_FEW_ROWS, _FEW_POSITIONS = 256, 512  # up to both, a kernel without warpgroups is quickest; to divide takes more
_PREFIX = 0.6  # mean prefix of several chunks, over the longest one's
_OTHERS_PREFIX = 0.4  # the same without the longest one
_UNEVEN = 0.4  # what is left idle at the end by programs of unequal lengths, in steps of a mean one


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """What the host knows of the chunks of a step, and the model's heads.

    Attributes:
        num_rows: rows of all chunks.
        num_sequences: number of chunks.
        longest: most rows of one chunk.
        max_context_len: most positions that a chunk's last row sees.
        group: query heads of a KV head.
        num_kv_heads: KV heads.
        head_dim: head size.
    """

    num_rows: int
    num_sequences: int
    longest: int
    max_context_len: int
    group: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class _Walk:
    """A form whose programs walk over all positions: its tile, and its time in us.

    Attributes:
        rows: rows of a tile.
        keys: positions of a step.
        start_us: of the launch.
        step_us: of a step.
        round_us: of each round of programs, besides its steps.
    """

    rows: int
    keys: int
    start_us: float
    step_us: float
    round_us: float


@dataclass(frozen=True, slots=True)
class _Parts:
    """A form whose programs have one part of a tile of 128 rows each: its time in us.

    Attributes:
        keys: positions of a step.
        start_us: of the launches.
        step_us: of a step.
        rows_us: of writing a part's rows and reading them again, of a full tile.
        part_us: of one part more in a row's sum.
    """

    keys: int
    start_us: float
    step_us: float
    rows_us: float
    part_us: float


@dataclass(frozen=True, slots=True)
class _Shares:
    """A form that divides positions into equal shares of programs: positions of a step, and its time in us."""

    keys: int
    start_us: float
    step_us: float


# By head size.
_TWO_GROUPS = {
    64: _Walk(128, 128, 4.3, 1.33, 0.9),
    128: _Walk(128, 128, 2.9, 1.57, 4.9),
    256: _Walk(128, 64, 1.9, 1.47, 7.2),
}
_THREE_GROUPS = _Walk(192, 64, 1.8, 1.2, 6.6)  # of heads of 128 alone
_DIVIDED = {
    64: _Parts(128, 0.0, 1.76, 5.7, 0.52),
    128: _Parts(128, 5.9, 1.94, 7.1, 0.34),
    256: _Parts(64, 6.5, 2.39, 9.5, 0.45),
}
_DECODE_LOOPS = {64: _Shares(64, 7.4, 0.9), 128: _Shares(64, 8.0, 1.66), 256: _Shares(64, 11.6, 2.49)}


def choose(chunks: Chunks, num_multiprocessors: int, *, may_divide: bool) -> Mapping[str, Any]:
    """Return the options of the form that should be quickest, in the tuned table's format.

    Args:
        chunks: of heads of 64, 128 or 256.
        num_multiprocessors: of the GPU.
        may_divide: whether the forms that divide positions can take the tensors.
    """
    longest_rows = chunks.longest * chunks.group
    if longest_rows <= _FEW_ROWS and chunks.max_context_len <= _FEW_POSITIONS:
        return rule(longest_rows, chunks.head_dim, 2)
    two = _TWO_GROUPS[chunks.head_dim]
    forms = [(_walking_us(two, chunks, num_multiprocessors), _groups(chunks.head_dim, 2))]
    if chunks.head_dim == 128:
        forms.append((_walking_us(_THREE_GROUPS, chunks, num_multiprocessors), _groups(chunks.head_dim, 3)))
    if may_divide and chunks.max_context_len > _FEW_POSITIONS:
        divided_us = _parts_us(_DIVIDED[chunks.head_dim], chunks, two.rows, num_multiprocessors)
        forms.append((divided_us, _groups_divided(chunks.head_dim, num_multiprocessors)))
        loops = _decode_loops(longest_rows, chunks.head_dim, num_multiprocessors)
        forms.append((_shares_us(_DECODE_LOOPS[chunks.head_dim], chunks, loops["rows"], loops["slots"]), loops))
    return min(forms, key=itemgetter(0))[1]


def invariant_options(head_dim: int) -> Mapping[str, Any]:
    """Return options that are the same for all chunks."""
    return _groups(head_dim, 2)


def hopper_options(head_dim: int) -> tuple[Mapping[str, Any], ...]:
    """Return all options of the kernel for Hopper that `choose` may return, but for the number of slots."""
    three = (_groups(head_dim, 3),) if head_dim == 128 else ()
    return (_groups(head_dim, 2), *three, _groups_divided(head_dim, 132))


def all_options(head_dim: int, num_multiprocessors: int, *, may_divide: bool) -> tuple[Mapping[str, Any], ...]:
    """Return all options that `choose` may return for such heads."""
    walking = [options for options in hopper_options(head_dim) if "slots" not in options]
    few = [rule(num_rows, head_dim, 2) for num_rows in (1, _FEW_ROWS)]
    if not may_divide:
        return (*walking, *few)
    loops = [_decode_loops(num_rows, head_dim, num_multiprocessors) for num_rows in (16, 32, 64)]
    return (*walking, *few, _groups_divided(head_dim, num_multiprocessors), *loops)


def _groups(head_dim: int, groups: int) -> dict[str, Any]:
    """Options of the form for Hopper; heads of 64 leave warpgroups that do not take turns too much idle."""
    return {
        "GROUPS": groups,
        "BN": 128 if groups == 2 and head_dim <= 128 else 64,
        "STAGES": 2 if groups == 2 else 4,
        "TURNS": groups == 3 or head_dim == 64,
        "PIN": False,
        "PERSISTENT": groups == 2,
    }


def _groups_divided(head_dim: int, num_multiprocessors: int) -> dict[str, Any]:
    return _groups(head_dim, 2) | {"TURNS": False, "slots": num_multiprocessors}


def _decode_loops(longest_rows: int, head_dim: int, num_multiprocessors: int) -> dict[str, Any]:
    is_wide = head_dim > 128
    return {
        "tile": 64,
        "rows": rows_of_program(longest_rows),
        "swap": False,
        "stages": 2 if is_wide else 3,
        "warps": 8 if is_wide else 4,
        "slots": num_multiprocessors * (1 if is_wide else 2),
        "shares": True,
        "pdl": True,
    }


def _walking_us(form: _Walk, chunks: Chunks, num_multiprocessors: int) -> float:
    """Time of programs of one tile of rows each."""
    mean_rows = chunks.num_rows / chunks.num_sequences
    prefix = (chunks.max_context_len - chunks.longest) * (_PREFIX if chunks.num_sequences > 1 else 1)
    most = chunks.num_sequences * -(-chunks.longest * chunks.group // form.rows)
    num_tiles = min(chunks.num_rows * chunks.group // form.rows + chunks.num_sequences, most)
    first_rows = min(mean_rows, form.rows / chunks.group)  # of a chunk's first tile
    mean_steps = math.ceil((prefix + (first_rows + mean_rows) / 2) / form.keys)
    rounds = num_tiles * chunks.num_kv_heads / num_multiprocessors
    evenness = (prefix + first_rows) / (prefix + mean_rows)
    longest_steps = math.ceil(chunks.max_context_len / form.keys)
    uneven = max(longest_steps, (rounds + (_UNEVEN if rounds > 1 else 0)) * mean_steps)
    even = math.ceil(rounds) * mean_steps
    if chunks.num_sequences > 1:
        even = max(even, longest_steps)
    steps = evenness * even + (1 - evenness) * uneven
    return form.start_us + form.step_us * steps + form.round_us * (rounds + max(1, math.ceil(rounds))) / 2


def _parts_us(form: _Parts, chunks: Chunks, rows: int, num_multiprocessors: int) -> float:
    """Time of programs of a part of a tile each, as `row_tile_plan_triton` plans them."""
    num_others = chunks.num_sequences - 1
    num_slots = num_slots_of(
        num_multiprocessors=num_multiprocessors, num_kv_heads=chunks.num_kv_heads, num_tokens=chunks.num_rows,
        num_sequences=chunks.num_sequences, group=chunks.group, tile_rows=rows, max_query_len=chunks.longest,
    )  # fmt: skip
    most_steps = math.ceil(chunks.max_context_len / form.keys)
    num_steps: float = -(-chunks.longest * chunks.group // rows) * most_steps
    if num_others:
        mean_rows = (chunks.num_rows - chunks.longest) / num_others
        mean_tiles = max(1, math.ceil(mean_rows * chunks.group / rows))
        prefix = _OTHERS_PREFIX * (chunks.max_context_len - chunks.longest)
        num_steps += num_others * mean_tiles * ((prefix + mean_rows) / form.keys + 0.5)
    each = max(1, math.ceil(num_steps / num_slots))
    rounds = math.ceil(num_slots * chunks.num_kv_heads / num_multiprocessors)
    share_of_tile = min(chunks.longest * chunks.group, rows) / rows
    sums_us = form.rows_us * share_of_tile + form.part_us * most_steps / each
    return form.start_us + form.step_us * each * rounds + sums_us


def _shares_us(form: _Shares, chunks: Chunks, rows: int, slots: int) -> float:
    """Time of programs of a share of the positions, for one tile of rows each."""
    num_programs = chunks.num_kv_heads * -(-chunks.longest * chunks.group // rows)
    num_shares = max(1, slots // num_programs)
    positions = chunks.max_context_len
    if chunks.num_sequences > 1:
        mean_rows = chunks.num_rows / chunks.num_sequences
        positions = chunks.num_sequences * int(_PREFIX * (positions - chunks.longest) + mean_rows)
    steps: float = math.ceil(positions / form.keys / num_shares)
    if chunks.num_sequences > 1:
        steps += chunks.num_sequences / 2  # pieces of sequences that end in between
    return form.start_us + form.step_us * steps * max(1, -(-num_programs // slots))
