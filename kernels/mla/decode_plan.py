"""Plans how `mla_decode` uses a GPU: tiles and pipeline by a rule, parts from bounds.

Plans depend only on sizes that the host knows, so that they are the same for every replay of a CUDA graph; the contents
of tensors are never read. A *part* is the share of a sequence's positions that one program takes, as in
`kernels.attention.decode_plan`, whose cost model chooses the number of parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.kernels.attention import decode_plan as attention_plan

MAX_ROWS = 64  # query rows of one program; sums of more do not fit its registers
_SLOTS = 132  # programs that an H200 runs at once: one per multiprocessor, whose shared memory it fills


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAPlanOptions:
    """Tuned options; the fields of a row of the committed table.

    Attributes:
        tile: positions of a step.
        rows: query rows of a program, padded: 16, 32 or 64.
        swap: whether latents are the left operands.
        stages: pipeline stages.
        warps: warps of a program.
        slots: programs that the GPU runs at once.
        max_part_len: maximum positions of a part.
        pdl: whether the second kernel uses programmatic dependent launch.
        hopper: whether `decode_hopper_triton` computes it, whose tile, rows, stages and warps are fixed.
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
    """Parameters of one call, besides its tensors.

    Attributes:
        scale: factor of scores.
        latent_dim: columns of a row that are values.
        max_context_len: upper bound of every position + 1; the tables cover it.
        num_parts: parts of each sequence.
        options: kernel options.
    """

    scale: float
    latent_dim: int
    max_context_len: int
    num_parts: int
    options: MLAPlanOptions


def default_options(num_rows: int, *, on_hopper: bool = False) -> MLAPlanOptions:
    """Options by rule, for shapes that no table has.

    The Hopper kernel is the fastest for few rows, too.

    Args:
        num_rows: rows of one sequence: heads times queries.
        on_hopper: whether the Hopper kernel can compute it.
    """
    rows = min(MAX_ROWS, attention_plan.rows_of_program(num_rows))
    if on_hopper or rows == MAX_ROWS:
        return MLAPlanOptions(tile=64, rows=MAX_ROWS, swap=False, stages=2, warps=8, hopper=on_hopper)
    return MLAPlanOptions(tile=64, rows=rows, swap=True, stages=2, warps=4)


def options_of_row(row: Mapping[str, Any]) -> MLAPlanOptions:
    """Convert a row of the committed table."""
    return MLAPlanOptions(**row)


def table_shape(num_rows: int, latent_dim: int) -> str:
    """Name of a shape in the committed table."""
    return f"rows={num_rows} C={latent_dim}"


def num_parts(
    num_sequences: int, num_rows: int, max_context_len: int, row_bytes: int, latent_dim: int, options: MLAPlanOptions
) -> int:
    """Number of parts of a sequence with `num_rows` query rows, over latent rows of `row_bytes`."""
    num_programs = num_sequences * -(-num_rows // options.rows)
    out_bytes = min(num_rows, options.rows) * latent_dim * 4
    plan = attention_plan.PlanOptions(
        tile=options.tile, rows=options.rows, swap=options.swap, stages=options.stages, warps=options.warps,
        slots=options.slots, max_part_len=options.max_part_len,
    )  # fmt: skip
    return attention_plan.num_parts(num_programs, max_context_len, row_bytes, out_bytes, plan)
