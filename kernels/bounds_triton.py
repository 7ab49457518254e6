"""Where top-k, top-p and min-p cut a row of logits, without sorting it: one program for a row.

What stays is a prefix of the tokens in order (the likelier first, among equals the lower id), so that it is said by its
last token: the logit and the id. The first pass keeps the largest logit of each of some thousand lanes; as lanes are
tokens of their own, the C-th largest of these is a bound that at least C tokens reach, and seldom many more. The second
pass lists the tokens that reach it, and the border is found in this list, with the whole numbers of the reference.
Where the border lies behind the list (a flat row with top-p alone, a long run of equals), it is closed in by values:
three pivots to a pass, then the last of the equals is counted off in order of ids.

Shapes: N tokens of a tile, L lanes, C listed tokens.
"""

import torch
import triton
import triton.language as tl

from baton.kernels.border_triton import behind_list, lane_bound, of_list, weight_of
from baton.kernels.row_triton import num_usable, row_tokens
from baton.kernels.variant import Variant

TILE = 2048
LANES = 2048
LISTED = 2048
NUM_WARPS = 8
NUM_STAGES = 4
MAX_REGISTERS = 128  # so that two programs of 256 threads share a multiprocessor

_INTERPRETED = bool(triton.knobs.runtime.interpret)


def launch(logits_BQV, rows, drafts, edited, bound_R, last_R) -> None:
    """Bounds of every row: one program each. `drafts` are None where each sequence has one row."""
    num_sequences, num_rows, vocab_size = logits_BQV.shape
    count = num_sequences * num_rows
    listed_x = torch.empty(count, LISTED, dtype=torch.float32, device=logits_BQV.device)
    listed_id = torch.empty(count, LISTED, dtype=torch.int32, device=logits_BQV.device)
    spare = rows.temperature_B
    _bounds_kernel[(count,)](
        logits_BQV,
        logits_BQV.stride(0 if num_rows == 1 else 1),
        listed_x if edited is None else edited.logits_EV,
        listed_id if edited is None else edited.place_R,
        rows.seed_B if drafts is None else drafts.ids_BK,
        rows.seed_B if drafts is None else drafts.cap_B,
        last_R if drafts is None else drafts.law_B,
        rows.temperature_B,
        rows.seed_B if rows.top_k_B is None else rows.top_k_B,
        spare if rows.top_p_B is None else rows.top_p_B,
        spare if rows.min_p_B is None else rows.min_p_B,
        bound_R,
        last_R,
        listed_x,
        listed_id,
        vocab_size,
        max(1, (vocab_size - 1).bit_length()),
        Q=num_rows,
        LAWS=drafts is not None,
        EDITED=edited is not None,
        HAS_K=rows.top_k_B is not None,
        HAS_P=rows.top_p_B is not None,
        HAS_MIN=rows.min_p_B is not None,
        N=TILE,
        L=LANES,
        C=LISTED,
        STAGES=1 if edited is not None else NUM_STAGES,
        num_warps=NUM_WARPS,
        **({} if _INTERPRETED or torch.version.hip else {"maxnreg": MAX_REGISTERS}),
    )


@triton.jit
def _list(
    logits, base, edited, source, V, best, temperature, reach, floor, listed_x, listed_id,
    EDITED: tl.constexpr, HAS_P: tl.constexpr, HAS_MIN: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """List the tokens that reach a bound, in order of ids; how many they are, the row's mass, and what min-p leaves."""
    count = 0
    mass_N = tl.zeros([N], tl.float32)
    least_N = tl.full([N], float("inf"), tl.float32)
    for start in tl.range(0, V, N, num_stages=STAGES):
        token_N = start + tl.arange(0, N)
        x_N = row_tokens(logits, base, edited, source, token_N, V, EDITED)
        is_listed_N = (x_N >= reach) & (token_N < V)
        num_listed = tl.sum(is_listed_N.to(tl.int32))
        if (num_listed > 0) & (count + num_listed <= C):
            at_N = count + tl.cumsum(is_listed_N.to(tl.int32), axis=0) - 1
            tl.store(listed_x + at_N, x_N, mask=is_listed_N)
            tl.store(listed_id + at_N, token_N, mask=is_listed_N)
        count += num_listed
        if HAS_MIN:
            stays_N = tl.div_rn(x_N - best, temperature) >= floor
            least_N = tl.minimum(least_N, tl.where(stays_N & (token_N < V), x_N, float("inf")))
            if HAS_P:
                mass_N += tl.where(stays_N, weight_of(x_N, best, temperature, True), 0.0)
        elif HAS_P:
            mass_N += weight_of(x_N, best, temperature, True)
    return count, mass_N, least_N


@triton.jit(do_not_specialize=["edited", "edited_row", "listed_x", "listed_id", "id_bits"])
def _bounds_kernel(  # noqa: C901
    logits, row_stride, edited, edited_row, drafts, cap, law_B, temperature_B, top_k_B, top_p_B, min_p_B,
    bound_R, last_R, listed_x, listed_id, V, id_bits,
    Q: tl.constexpr, LAWS: tl.constexpr, EDITED: tl.constexpr, HAS_K: tl.constexpr, HAS_P: tl.constexpr,
    HAS_MIN: tl.constexpr,
    N: tl.constexpr, L: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    sequence, place = row // Q, row % Q
    temperature = tl.load(temperature_B + sequence).to(tl.float32)
    law = 0
    if LAWS:
        law = tl.load(law_B + sequence)
    if (law < 0) | (place > num_usable(drafts, cap, sequence, Q - 1)):
        return
    top_k = tl.full([], 0, tl.int64)
    top_p, min_p = tl.full([], 1.0, tl.float64), tl.full([], 0.0, tl.float64)
    if HAS_K:
        top_k = tl.load(top_k_B + sequence)
    if HAS_P:
        top_p = tl.load(top_p_B + sequence).to(tl.float64)
    if HAS_MIN:
        min_p = tl.load(min_p_B + sequence).to(tl.float64)
    tl.store(bound_R + row, float("-inf"))
    tl.store(last_R + row, V)
    if (temperature <= 0.0) | ((top_k <= 0) & (top_p >= 1.0) & (min_p <= 0.0)):
        return
    temperature = tl.maximum(temperature, 1e-30)
    top_k = tl.where(top_k >= V, 0, top_k)
    base = row.to(tl.int64) * row_stride
    source = -1
    if EDITED:
        source = tl.load(edited_row + row)
    lane_N = tl.full([N], float("-inf"), tl.float32)
    for start in tl.range(0, V, N, num_stages=STAGES):
        token_N = start + tl.arange(0, N)
        lane_N = tl.maximum(lane_N, row_tokens(logits, base, edited, source, token_N, V, EDITED))
    lane_L = tl.max(tl.reshape(lane_N, [L, N // L]), axis=1)
    best = tl.max(lane_L)
    if best == float("-inf"):
        return
    wanted = tl.where((top_k > 0) & (top_k <= C // 2), top_k, C // 2).to(tl.int32)
    reach = lane_bound(lane_L, wanted)
    floor = tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-300)), float("-inf")).to(tl.float32)
    listed_x += row.to(tl.int64) * C
    listed_id += row.to(tl.int64) * C
    count, mass_N, least_N = _list(
        logits, base, edited, source, V, best, temperature, reach, floor, listed_x, listed_id, EDITED, HAS_P, HAS_MIN,
        N, C, STAGES,
    )  # fmt: skip
    least = tl.full([], float("-inf"), tl.float32)
    if HAS_MIN:
        least = tl.min(least_N)
    bound, last = tl.full([], float("-inf"), tl.float32), V
    is_complete = tl.full([], 0, tl.int1)
    whole = tl.sum(mass_N.to(tl.float64))
    if count <= C:
        tl.debug_barrier()
        bound, last, is_complete = of_list(
            listed_x, listed_id, count, best, temperature, top_k, top_p, least, whole, 62 - id_bits, id_bits, C
        )
        is_complete = is_complete | (count >= V)
    if not is_complete:
        bound, last = behind_list(
            logits, base, edited, source, V, best, temperature, top_k, top_p, least, whole, EDITED, N // 2
        )
    last = tl.where(bound < least, V, last)
    tl.store(bound_R + row, tl.maximum(bound, least))
    tl.store(last_R + row, last)


def variants() -> list[Variant]:
    """Those of Qwen's vocabulary, bfloat16 and float32."""
    types = {
        "row_stride": "i32", "edited": "*fp32", "edited_row": "*i32", "drafts": "*i64", "cap": "*i64", "law_B": "*i32",
        "temperature_B": "*fp64", "top_k_B": "*i64", "top_p_B": "*fp64", "min_p_B": "*fp64", "bound_R": "*fp32",
        "last_R": "*i32", "listed_x": "*fp32", "listed_id": "*i32", "V": "i32", "id_bits": "i32",
    }  # fmt: skip
    found = []
    for dtype, num_rows, has_min in (("bf16", 1, False), ("fp32", 1, False), ("fp32", 4, False), ("bf16", 4, True)):
        constants = {
            "Q": num_rows,
            "LAWS": num_rows > 1,
            "EDITED": has_min,
            "HAS_K": True,
            "HAS_P": True,
            "HAS_MIN": has_min,
        }
        constants |= {"N": TILE, "L": LANES, "C": LISTED, "STAGES": 1 if has_min else NUM_STAGES}
        found.append(
            Variant(
                name=f"sampling_bounds {dtype} Q={num_rows}{' min-p edited' if has_min else ''}",
                kernel=_bounds_kernel,
                types={"logits": f"*{dtype}", **types},
                constants=constants,
                aligned=("logits", "row_stride", "V"),
                num_warps=NUM_WARPS,
                max_registers=MAX_REGISTERS,
                options={"maxnreg": MAX_REGISTERS},
            )
        )
    return found
