"""How `mla_decode` spreads over a GPU: tiles and pipeline by a rule, parts from bounds.

Everything here comes from sizes that the host knows, so that it is the same for every replay of a graph. It refuses to
look at tensors. A *part* is a share of a sequence's positions that one program takes, as in
`kernels.attention.decode_plan`, whose prediction says how many there are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.kernels.attention import decode_plan as attention_plan

MAX_ROWS = 64  # of queries that one program takes; sums of more do not fit its registers
_SLOTS = 132  # programs that an H200 holds at once: one for each multiprocessor, whose shared memory it fills


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAPlanOptions:
    """What is tuned; the fields of a row of the committed table.

    Attributes:
        tile: positions of a step.
        rows: of queries of a program, padded: 16, 32 or 64.
        swap: latents are the left operands.
        stages: of the pipeline.
        warps: of a program.
        slots: programs that the GPU holds at once.
        max_part_len: positions of a part, at most.
        pdl: programmatic dependent launch of the second kernel.
        hopper: by `decode_hopper_triton`, whose tiles, rows, stages and warps are always the same.
    """

    tile: int
    rows: int
    swap: bool
    stages: int
    warps: int
    slots: int = _SLOTS
    max_part_len: int = 4096
    pdl: bool = True
    hopper: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MLALaunch:
    """What one call needs beside its tensors.

    Attributes:
        scale: of scores.
        latent_dim: columns of a row that are values.
        max_context_len: bound of every position + 1; the tables cover it.
        num_parts: of each sequence.
        options: of the kernel.
    """

    scale: float
    latent_dim: int
    max_context_len: int
    num_parts: int
    options: MLAPlanOptions


def default_options(num_rows: int, *, on_hopper: bool = False) -> MLAPlanOptions:
    """The rule where no table knows better.

    The form for Hopper is the fastest for few rows too: such a step waits for latents, which TMA brings sooner.

    Args:
        num_rows: of one sequence's queries: heads times queries.
        on_hopper: its form can do it.
    """
    rows = min(MAX_ROWS, attention_plan.rows_of_program(num_rows))
    if on_hopper or rows == MAX_ROWS:
        return MLAPlanOptions(tile=64, rows=MAX_ROWS, swap=False, stages=2, warps=8, hopper=on_hopper)
    return MLAPlanOptions(tile=64, rows=rows, swap=True, stages=2, warps=4)


def options_of_row(row: Mapping[str, Any]) -> MLAPlanOptions:
    """A row of the committed table."""
    return MLAPlanOptions(**row)


def table_shape(num_rows: int, latent_dim: int) -> str:
    """What the committed table calls a shape."""
    return f"rows={num_rows} C={latent_dim}"


def num_parts(
    num_sequences: int, num_rows: int, max_context_len: int, row_bytes: int, latent_dim: int, options: MLAPlanOptions
) -> int:
    """Parts of a sequence of `num_rows` rows of queries, over rows of `row_bytes`."""
    num_programs = num_sequences * -(-num_rows // options.rows)
    out_bytes = min(num_rows, options.rows) * latent_dim * 4
    plan = attention_plan.PlanOptions(
        tile=options.tile, rows=options.rows, swap=options.swap, stages=options.stages, warps=options.warps,
        slots=options.slots, max_part_len=options.max_part_len,
    )  # fmt: skip
    return attention_plan.num_parts(num_programs, max_context_len, row_bytes, out_bytes, plan)
