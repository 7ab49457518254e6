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

from baton.kernels.variant import Variant

TILE = 2048
LANES = 2048
LISTED = 2048
NUM_WARPS = 8
NUM_STAGES = 4
MAX_REGISTERS = 128  # so that two programs of 256 threads share a multiprocessor

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_MAX_PASSES = tl.constexpr(40)


def launch(logits_BQV, rows, drafts, edited, bound_R, last_R) -> None:  # noqa: ANN001
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
def row_tokens(logits, base, edited, source, token_N, V, EDITED: tl.constexpr):
    """The logits of these tokens, float32; -inf beyond V. `source` is the row's place among edited ones, or -1."""
    inside_N = token_N < V
    if EDITED:
        raw_N = tl.load(logits + base + token_N, mask=inside_N & (source < 0), other=float("-inf")).to(tl.float32)
        from_N = edited + source.to(tl.int64) * V + token_N
        edited_N = tl.load(from_N, mask=inside_N & (source >= 0), other=float("-inf"))
        return tl.where(source >= 0, edited_N, raw_N)
    else:
        return tl.load(logits + base + token_N, mask=inside_N, other=float("-inf")).to(tl.float32)


@triton.jit
def num_usable(drafts, cap, sequence, K: tl.constexpr):
    """Drafts of a sequence before its cap and before any that is missing."""
    count = 0
    if K > 0:
        count = tl.load(cap + sequence).to(tl.int32)
    for place in tl.static_range(K):
        is_missing = tl.load(drafts + sequence * K + place) < 0
        count = tl.minimum(count, tl.where(is_missing, place, K))
    return tl.minimum(tl.maximum(count, 0), K)


@triton.jit
def order_key(x_N):
    """Whole numbers, int32, that rise with x; equal for both zeros."""
    bits_N = tl.where(x_N == 0.0, 0.0, x_N).to(tl.int32, bitcast=True)
    return bits_N ^ ((bits_N >> 31) & 0x7FFFFFFF)


@triton.jit
def of_order_key(key_N):
    """The numbers of `order_key`."""
    return (key_N ^ ((key_N >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _lane_bound(lane_L, wanted):
    """A number that at least so many lanes reach; found by its 16 upper bits, which is all of a bfloat16."""
    key_L = order_key(lane_L).to(tl.int64) + 2147483648
    bound = tl.min(key_L * 0)
    for index in range(16):
        trial = bound + (tl.full([], 1, tl.int64) << (31 - index))
        bound = tl.where(tl.sum((key_L >= trial).to(tl.int32)) >= wanted, trial, bound)
    found = of_order_key((bound - 2147483648).to(tl.int32))
    return tl.where(bound <= 0x7FFFFF, float("-inf"), found)


@triton.jit
def _weight(x_N, best, temperature, by_mass):
    mass_N = tl.exp((x_N - best) / temperature)
    return tl.where(by_mass, mass_N, 1.0)


@triton.jit
def _total(
    logits, base, edited, source, V, best, temperature, bound, last, least, EDITED: tl.constexpr, N: tl.constexpr
):
    """Mass of a row's tokens up to (bound, last), float64."""
    sum_N = tl.zeros([N], tl.float32)
    for start in tl.range(0, V, N, num_stages=1):
        token_N = start + tl.arange(0, N)
        x_N = row_tokens(logits, base, edited, source, token_N, V, EDITED)
        stays_N = ((x_N > bound) | ((x_N == bound) & (token_N <= last))) & (x_N >= least) & (token_N < V)
        sum_N += tl.where(stays_N, _weight(x_N, best, temperature, True), 0.0)
    return tl.sum(sum_N.to(tl.float64))


@triton.jit
def _lowest(logits, base, edited, source, V, best, EDITED: tl.constexpr, N: tl.constexpr):
    """A row's least logit that is not -inf."""
    lowest_N = tl.full([N], float("inf"), tl.float32)
    for start in tl.range(0, V, N, num_stages=1):
        x_N = row_tokens(logits, base, edited, source, start + tl.arange(0, N), V, EDITED)
        lowest_N = tl.minimum(lowest_N, tl.where(x_N == float("-inf"), best, x_N))
    return tl.min(lowest_N)


@triton.jit
def _close_in(
    logits, base, edited, source, V, best, temperature, bound, last, least, lowest, by_mass, need,
    EDITED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The largest number v such that tokens of at least v weigh `need`, of those up to (bound, last)."""
    low, high = tl.maximum(bound, lowest), tl.full([], float("inf"), tl.float32)
    found = low
    index = 0
    while index < _MAX_PASSES:
        if index < 6:
            step = (tl.minimum(high, best) - low) * 0.25
            pivot_0, pivot_1, pivot_2 = low + step, low + 2 * step, low + 3 * step
        else:
            low_key, high_key = order_key(low).to(tl.int64), order_key(high).to(tl.int64)
            pivot_0 = of_order_key((low_key + (high_key - low_key) // 4).to(tl.int32))
            pivot_1 = of_order_key((low_key + (high_key - low_key) // 2).to(tl.int32))
            pivot_2 = of_order_key((high_key - (high_key - low_key) // 4).to(tl.int32))
        sum_0N, sum_1N, sum_2N = tl.zeros([N], tl.float32), tl.zeros([N], tl.float32), tl.zeros([N], tl.float32)
        top_N, bottom_N = tl.full([N], float("-inf"), tl.float32), tl.full([N], float("inf"), tl.float32)
        for start in range(0, V, N):
            token_N = start + tl.arange(0, N)
            x_N = row_tokens(logits, base, edited, source, token_N, V, EDITED)
            stays_N = ((x_N > bound) | ((x_N == bound) & (token_N <= last))) & (x_N >= least) & (token_N < V)
            weight_N = tl.where(stays_N, _weight(x_N, best, temperature, by_mass), 0.0)
            sum_0N += tl.where(x_N >= pivot_0, weight_N, 0.0)
            sum_1N += tl.where(x_N >= pivot_1, weight_N, 0.0)
            sum_2N += tl.where(x_N >= pivot_2, weight_N, 0.0)
            top_N = tl.maximum(top_N, tl.where(stays_N & (x_N < high), x_N, float("-inf")))
            bottom_N = tl.minimum(bottom_N, tl.where(stays_N & (x_N >= low), x_N, float("inf")))
        top, bottom = tl.max(top_N), tl.min(bottom_N)
        found = top
        if top <= bottom:  # one number is left
            index = _MAX_PASSES
        else:
            reaches_0 = tl.sum(sum_0N.to(tl.float64)) >= need
            reaches_1 = tl.sum(sum_1N.to(tl.float64)) >= need
            reaches_2 = tl.sum(sum_2N.to(tl.float64)) >= need
            high = tl.where(reaches_2, high, tl.where(reaches_1, pivot_2, tl.where(reaches_0, pivot_1, pivot_0)))
            low = tl.where(reaches_2, pivot_2, tl.where(reaches_1, pivot_1, tl.where(reaches_0, pivot_0, low)))
            index += 1
    return found


@triton.jit
def _last_equal(
    logits, base, edited, source, V, best, temperature, bound, last, least, value, by_mass, need,
    EDITED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The id, among tokens equal to `value`, with which `need` is reached."""
    above_N = tl.zeros([N], tl.float32)
    for start in tl.range(0, V, N, num_stages=1):
        token_N = start + tl.arange(0, N)
        x_N = row_tokens(logits, base, edited, source, token_N, V, EDITED)
        above_N += tl.where(x_N > value, _weight(x_N, best, temperature, by_mass), 0.0)
    weight = _weight(value, best, temperature, by_mass).to(tl.float64)
    wanted = tl.ceil(((need - tl.sum(above_N.to(tl.float64))) / weight).to(tl.float32)).to(tl.int32)
    wanted = tl.maximum(wanted, 1)
    seen = 0
    found = V - 1
    for start in tl.range(0, V, N, num_stages=1):
        token_N = start + tl.arange(0, N)
        x_N = row_tokens(logits, base, edited, source, token_N, V, EDITED)
        stays_N = ((x_N > bound) | ((x_N == bound) & (token_N <= last))) & (x_N >= least)
        equal_N = ((x_N == value) & stays_N & (token_N < V)).to(tl.int32)
        count = tl.sum(equal_N)
        if (seen < wanted) & (seen + count >= wanted):
            is_it_N = (tl.cumsum(equal_N, axis=0) == wanted - seen) & (equal_N > 0)
            found = tl.min(tl.where(is_it_N, token_N, V))
        seen += count
    return found


@triton.jit
def _border(key_C, weight_C, need, num_bits):
    """The largest key, of so many bits, such that what is not below it weighs `need`; 0 if all weigh less."""
    found = tl.full([], 0, tl.int64)
    for index in range(num_bits):
        trial = found | (tl.full([], 1, tl.int64) << (num_bits - 1 - index))
        reached = tl.sum(tl.where(key_C >= trial, weight_C, 0))
        found = tl.where(reached.to(tl.float64) >= need, trial, found)
    return found


@triton.jit
def _of_list(
    listed_x, listed_id, count, best, temperature, top_k, top_p, least, whole, unit_bits, id_bits, C: tl.constexpr
):
    """Of a list with all tokens that reach some bound: the last that stays, and whether that is certain."""
    place_C = tl.arange(0, C)
    x_C = tl.load(listed_x + place_C, mask=place_C < count, other=float("-inf"))
    id_C = tl.load(listed_id + place_C, mask=place_C < count, other=0)
    scaled_C = tl.div_rn(x_C - best, temperature)
    has_C = (place_C < count) & (x_C >= least)
    num_has = tl.sum(has_C.to(tl.int32))
    last_id = (tl.full([], 1, tl.int64) << id_bits) - 1
    key_C = ((order_key(scaled_C).to(tl.int64) + 2147483648) << id_bits) | (last_id - id_C)
    key_C = tl.where(has_C, key_C, -1)
    border = tl.full([], 0, tl.int64)
    if top_k > 0:
        border = _border(key_C, has_C.to(tl.int64), top_k.to(tl.float64), 32 + id_bits)
    is_complete = ((top_k > 0) & (num_has >= top_k)) | (num_has < count)
    if top_p < 1.0:
        unit = (tl.full([], 1, tl.int64) << unit_bits).to(tl.float64)
        mass_C = tl.floor(tl.exp(scaled_C.to(tl.float64)) * unit + 0.5).to(tl.int64)
        mass_C = tl.where(key_C >= border, mass_C, 0)
        listed = tl.sum(mass_C).to(tl.float64)
        need = top_p * tl.where(top_k > 0, listed, whole * unit)
        if listed >= need:
            is_complete = is_complete | (top_k <= 0)
            border = tl.maximum(border, _border(key_C, mass_C, need, 32 + id_bits))
    # Without any border, the least of the list.
    border = tl.maximum(border, tl.min(tl.where(has_C, key_C, 0x7FFFFFFFFFFFFFFF)))
    last = (last_id - (border & last_id)).to(tl.int32)
    # Read again, rather than kept in registers all the while.
    x_C = tl.load(listed_x + place_C, mask=place_C < count, other=float("-inf"))
    id_C = tl.load(listed_id + place_C, mask=place_C < count, other=-1)
    bound = tl.max(tl.where(id_C == last, x_C, float("-inf")))
    return bound, last, is_complete


@triton.jit(do_not_specialize=["edited", "edited_row", "listed_x", "listed_id", "id_bits"])
def _bounds_kernel(
    logits, row_stride, edited, edited_row, drafts, cap, law_B, temperature_B, top_k_B, top_p_B, min_p_B,
    bound_R, last_R, listed_x, listed_id, V, id_bits,
    Q: tl.constexpr, LAWS: tl.constexpr, EDITED: tl.constexpr, HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_MIN: tl.constexpr,
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
    reach = _lane_bound(lane_L, wanted)
    floor = tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-300)), float("-inf")).to(tl.float32)
    listed_x += row.to(tl.int64) * C
    listed_id += row.to(tl.int64) * C
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
                mass_N += tl.where(stays_N, _weight(x_N, best, temperature, True), 0.0)
        elif HAS_P:
            mass_N += _weight(x_N, best, temperature, True)
    least = tl.full([], float("-inf"), tl.float32)
    if HAS_MIN:
        least = tl.min(least_N)
    bound, last = tl.full([], float("-inf"), tl.float32), V
    is_complete = tl.full([], 0, tl.int1)
    whole = tl.sum(mass_N.to(tl.float64))
    if count <= C:
        tl.debug_barrier()
        bound, last, is_complete = _of_list(
            listed_x, listed_id, count, best, temperature, top_k, top_p, least, whole, 62 - id_bits, id_bits, C
        )
        is_complete = is_complete | (count >= V)
    if not is_complete:
        bound, last = tl.full([], float("-inf"), tl.float32), V
        lowest = _lowest(logits, base, edited, source, V, best, EDITED, N // 2)
        for stage in range(2):  # by count, then by mass
            by_mass = stage == 1
            need = tl.where(by_mass, 0.0, top_k.to(tl.float64))
            if by_mass & (top_p < 1.0):
                if top_k > 0:
                    whole = _total(
                        logits, base, edited, source, V, best, temperature, bound, last, least, EDITED, N // 2
                    )
                need = top_p * whole
            if need > 0.0:
                value = _close_in(
                    logits, base, edited, source, V, best, temperature, bound, last, least, lowest, by_mass, need,
                    EDITED, N // 2,
                )  # fmt: skip
                last = _last_equal(
                    logits, base, edited, source, V, best, temperature, bound, last, least, value, by_mass, need,
                    EDITED, N // 2,
                )  # fmt: skip
                bound = value
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
