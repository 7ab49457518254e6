# mypy: ignore-errors
"""The Triton kernels around attention of chunks whose positions are divided: a plan before it, and a sum after it.

Every tile of rows of every chunk has as many parts as its chunk: of `each` steps or less, the least for which all parts
are no more than the programs of a KV head. So a program has one part, and a chunk that has one alone has its result at
once. `prefill_warp_specialized_triton` attends; this refuses to know how.

A plan is int32, for each program of a KV head: its chunk, its first step, the one after its last, the chunk's
positions, the tile's first row, and the number of the chunk's parts. The programs of a chunk lie together, those of a
part side by side; those of none have no steps.

Shapes: B chunks (as many as are looked at together), I programs (as many as are written together), R rows, C parts of a
step of the sum, D head size.
"""

import torch
import triton
import triton.language as tl

from baton.kernels.variant import Variant

ENTRY_LEN = 6  # numbers of a program
_SEARCHED = 64
_WRITTEN = 32
_OF_A_WARP = 2048  # numbers of a step of the sum, which a warp has in registers
_MOST_WARPS = 4

_ENTRY_LEN = tl.constexpr(ENTRY_LEN)


@triton.jit
def _sizes(
    starts, contexts, index_B, num_sequences, max_context_len, G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Tiles of rows of these chunks, and their steps and positions; 0 of those that have no rows, or are none."""
    is_one_B = index_B < num_sequences
    start_B = tl.load(starts + index_B, mask=is_one_B, other=0).to(tl.int32)
    end_B = tl.load(starts + index_B + 1, mask=is_one_B, other=0).to(tl.int32)
    len_B = tl.load(contexts + index_B, mask=is_one_B & (end_B > start_B), other=0).to(tl.int32)
    len_B = tl.minimum(len_B, max_context_len)
    return tl.where(is_one_B, tl.cdiv((end_B - start_B) * G, BM), 0), tl.cdiv(len_B, BN), len_B


@triton.jit
def _programs_before(
    starts, contexts, sequence, num_sequences, max_context_len, each,
    G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SEARCHED: tl.constexpr,
):  # fmt: skip
    """Programs of the chunks before one, if parts have up to `each` steps."""
    count = 0
    for first in range(0, sequence, SEARCHED):
        index_B = first + tl.arange(0, SEARCHED)
        tiles_B, steps_B, _ = _sizes(starts, contexts, index_B, num_sequences, max_context_len, G, BM, BN)
        count += tl.sum(tl.where(index_B < sequence, tiles_B * tl.cdiv(steps_B, each), 0))
    return count


@triton.jit(do_not_specialize=["starts", "contexts", "max_context_len", "num_slots"])
def plan_row_tiles_kernel(
    starts, contexts, plan, max_context_len: tl.int32, num_slots: tl.int32,
    G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SEARCHED: tl.constexpr, WRITTEN: tl.constexpr,
):  # fmt: skip
    """Grid (chunks,): each finds the steps of a part, as all others do, and writes its own programs.

    The last one writes those of none, too.
    """
    sequence = tl.program_id(0)
    num_sequences = tl.num_programs(0)
    low = 0  # too few steps
    each = tl.maximum(tl.cdiv(max_context_len, BN), 1)  # enough: then no chunk is divided
    while each - low > 1:
        middle = (low + each) // 2
        count = _programs_before(
            starts, contexts, num_sequences, num_sequences, max_context_len, middle, G, BM, BN, SEARCHED
        )
        fits = count <= num_slots
        each = tl.where(fits, middle, each)
        low = tl.where(fits, low, middle)
    place = _programs_before(starts, contexts, sequence, num_sequences, max_context_len, each, G, BM, BN, SEARCHED)
    start = tl.load(starts + sequence).to(tl.int32)
    num_tiles = tl.cdiv((tl.load(starts + sequence + 1).to(tl.int32) - start) * G, BM)
    length = 0
    if num_tiles > 0:
        length = tl.minimum(tl.load(contexts + sequence).to(tl.int32), max_context_len)
    num_steps = tl.cdiv(length, BN)
    num_parts = tl.cdiv(num_steps, each)
    count = num_tiles * num_parts
    for first in range(0, count, WRITTEN):
        index_I = first + tl.arange(0, WRITTEN)
        is_mine_I = (index_I < count) & (place + index_I < num_slots)
        part_I = index_I // num_tiles
        entry_I = plan + (place + index_I) * _ENTRY_LEN
        nothing_I = tl.zeros_like(index_I)
        tl.store(entry_I, nothing_I + sequence, mask=is_mine_I)
        tl.store(entry_I + 1, part_I * num_steps // num_parts, mask=is_mine_I)
        tl.store(entry_I + 2, (part_I + 1) * num_steps // num_parts, mask=is_mine_I)
        tl.store(entry_I + 3, nothing_I + length, mask=is_mine_I)
        tl.store(entry_I + 4, index_I % num_tiles * BM, mask=is_mine_I)
        tl.store(entry_I + 5, nothing_I + num_parts, mask=is_mine_I)
    if sequence == num_sequences - 1:
        for first in range(place + count, num_slots, WRITTEN):
            index_I = first + tl.arange(0, WRITTEN)
            for number in tl.static_range(_ENTRY_LEN):
                at_I = plan + index_I * _ENTRY_LEN + number
                tl.store(at_I, tl.zeros_like(index_I), mask=index_I < num_slots)


@triton.jit(do_not_specialize=["starts", "num_row_steps"])
def merge_row_tiles_kernel(
    parts, part_logs, starts, plan, out, num_row_steps: tl.int32, out_stride, out_head_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (programs of a KV head times steps of ROWS rows of a tile, KV heads); a chunk's first part's sum up."""
    slot, row_step, head = tl.program_id(0) // num_row_steps, tl.program_id(0) % num_row_steps, tl.program_id(1)
    entry = plan + slot * _ENTRY_LEN
    sequence, low, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    first_row, num_parts = tl.load(entry + 4), tl.load(entry + 5)
    start = tl.load(starts + sequence)
    num_rows = (tl.load(starts + sequence + 1) - start).to(tl.int32) * G
    begin = row_step * ROWS
    if PDL:  # of all programs: what follows this launch relies on the one before it, too
        tl.extra.cuda.gdc_wait()
    if (low > 0) | (end == 0) | (num_parts == 1) | (first_row + begin >= num_rows):
        return
    stride = tl.cdiv(num_rows, BM) * H * BM
    row_R = tl.arange(0, ROWS)
    part_C = tl.arange(0, PARTS)
    column_D = tl.arange(0, D)
    own_R = first_row + begin + row_R
    is_row_R = own_R < num_rows
    most_R = tl.full([ROWS], float("-inf"), tl.float32)
    total_R = tl.zeros([ROWS], tl.float32)
    mixed_RD = tl.zeros([ROWS, D], tl.float32)
    base = (slot * H + head) * BM + begin
    for first in range(0, num_parts, PARTS):
        is_part_RC = is_row_R[:, None] & (first + part_C < num_parts)[None, :]
        at_RC = base + row_R[:, None] + (first + part_C)[None, :] * stride
        log_RC = tl.load(part_logs + at_RC, mask=is_part_RC, other=float("-inf"))
        at_RCD = at_RC.to(tl.int64)[:, :, None] * D + column_D[None, None, :]
        part_RCD = tl.load(parts + at_RCD, mask=is_part_RC[:, :, None], other=0.0)
        new_R = tl.maximum(most_R, tl.max(log_RC, axis=1))
        base_R = tl.where(new_R == float("-inf"), 0.0, new_R)
        weight_RC = tl.exp2(log_RC - base_R[:, None])
        fade_R = tl.exp2(most_R - base_R)
        # Parts of weight 0 were never written.
        share_RCD = tl.where(weight_RC[:, :, None] > 0, weight_RC[:, :, None] * part_RCD, 0.0)
        mixed_RD = mixed_RD * fade_R[:, None] + tl.sum(share_RCD, axis=1)
        total_R = total_R * fade_R + tl.sum(weight_RC, axis=1)
        most_R = new_R
    mixed_RD = mixed_RD / tl.where(total_R > 0, total_R, 1.0)[:, None]
    at_R = (start + own_R // G).to(tl.int64) * out_stride + (head * G + own_R % G) * out_head_stride
    tl.store(out + at_R[:, None] + column_D[None, :], mixed_RD, mask=is_row_R[:, None])


def num_slots_of(
    *, num_multiprocessors: int, num_kv_heads: int, num_tokens: int, num_sequences: int, group: int, tile_rows: int,
    max_query_len: int,
) -> int:  # fmt: skip
    """Programs of a KV head: one for each multiprocessor, or for every tile of rows that there may be."""
    most_tiles = min(
        num_tokens * group // tile_rows + num_sequences, num_sequences * -(-max_query_len * group // tile_rows)
    )
    return max(num_multiprocessors // num_kv_heads, most_tiles)


def launch_plan(
    starts_E: torch.Tensor, contexts_B: torch.Tensor, *, group: int, tile_rows: int, tile: int, num_slots: int,
    max_context_len: int,
) -> torch.Tensor:  # fmt: skip
    """A plan for these chunks: int32, on their device."""
    plan = torch.empty(num_slots * ENTRY_LEN, dtype=torch.int32, device=starts_E.device)
    with torch.cuda.device_of(starts_E):
        plan_row_tiles_kernel[(contexts_B.shape[0],)](
            starts_E, contexts_B, plan, max_context_len, num_slots,
            G=group, BM=tile_rows, BN=tile, SEARCHED=_SEARCHED, WRITTEN=_WRITTEN, num_warps=1,
        )  # fmt: skip
    return plan


def make_parts(query_TAD: torch.Tensor, num_slots: int, num_kv_heads: int, tile_rows: int) -> tuple[torch.Tensor, ...]:
    """Places of the parts, [programs, H, rows of a tile, D] float32, and of the logarithms of their weights."""
    num_rows, device = num_slots * num_kv_heads * tile_rows, query_TAD.device
    parts = torch.empty(num_rows, query_TAD.shape[2], dtype=torch.float32, device=device)
    return parts, torch.empty(num_rows, dtype=torch.float32, device=device)


def merge(
    parts: torch.Tensor,
    part_logs: torch.Tensor,
    starts_E: torch.Tensor,
    plan: torch.Tensor,
    out_TAD: torch.Tensor,
    *,
    num_kv_heads: int,
    tile_rows: int,
    num_sequences: int,
    max_query_len: int,
) -> None:
    """Add the parts of every row up; rows of chunks of one part are left as they are."""
    num_heads, head_dim = out_TAD.shape[1:]
    group, num_slots = num_heads // num_kv_heads, plan.shape[0] // ENTRY_LEN
    rows, step, num_warps = merge_shape(num_slots, num_sequences, head_dim)
    num_row_steps = -(-min(tile_rows, max_query_len * group) // rows)
    # An early launch reads the plan before it waits. Attention is none, so that the plan was there when it began.
    pdl = out_TAD.is_cuda and torch.version.hip is None
    with torch.cuda.device_of(out_TAD):
        merge_row_tiles_kernel[(num_slots * num_row_steps, num_kv_heads)](
            parts, part_logs, starts_E, plan, out_TAD, num_row_steps, out_TAD.stride(0), out_TAD.stride(1),
            H=num_kv_heads, G=group, D=head_dim, BM=tile_rows, ROWS=rows, PARTS=step, PDL=pdl,
            num_warps=num_warps,
            **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip


def merge_shape(num_slots: int, num_sequences: int, head_dim: int) -> tuple[int, int, int]:
    """Rows of a step of the sum, parts, and warps: parts as a chunk of mean length has, within limits.

    Up to sixteen parts of heads of 128 one warp has all of a row, and nothing is exchanged between warps.
    """
    most = _MOST_WARPS * _OF_A_WARP // head_dim
    parts = min(most, max(4, 1 << (max(1, num_slots // num_sequences) - 1).bit_length()))
    return max(1, _OF_A_WARP // (parts * head_dim)), parts, max(1, parts * head_dim // _OF_A_WARP)


# KV heads, head size, programs of a KV head, chunks.
_SERVED = (
    (4, 128, 33, 1),
    (4, 128, 33, 8),
    (8, 128, 16, 1),
    (8, 128, 16, 4),
    (2, 256, 66, 1),
    (2, 256, 66, 8),
    (8, 64, 16, 4),
)


def variants() -> list[Variant]:
    """The plan, and the sums of some served heads."""
    made = []
    for num_kv_heads, head_dim, num_slots, num_sequences in _SERVED:
        rows, step, num_warps = merge_shape(num_slots, num_sequences, head_dim)
        made.append(
            Variant(
                name=f"attention_prefill parts merge H={num_kv_heads} D={head_dim} parts={step}",
                kernel=merge_row_tiles_kernel,
                types={
                    **dict.fromkeys(("parts", "part_logs"), "*fp32"),
                    **dict.fromkeys(("starts", "plan"), "*i32"),
                    "out": "*bf16",
                    **dict.fromkeys(("num_row_steps", "out_stride", "out_head_stride"), "i32"),
                },
                constants={
                    "H": num_kv_heads,
                    "G": 8,
                    "D": head_dim,
                    "BM": 128,
                    "ROWS": rows,
                    "PARTS": step,
                    "PDL": False,
                },
                aligned=("parts", "part_logs", "out", "plan", "out_stride", "out_head_stride"),
                num_warps=num_warps,
                max_registers=168,
            )
        )
    plan = Variant(
        name="attention_prefill parts plan",
        kernel=plan_row_tiles_kernel,
        types={
            **dict.fromkeys(("starts", "contexts", "plan"), "*i32"),
            **dict.fromkeys(("max_context_len", "num_slots"), "i32"),
        },
        constants={"G": 8, "BM": 128, "BN": 128, "SEARCHED": _SEARCHED, "WRITTEN": _WRITTEN},
        aligned=("plan",),
        num_warps=1,
        max_registers=128,
    )
    return [plan, *made]
