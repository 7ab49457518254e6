# mypy: ignore-errors
"""The launch of `kernels.sampling.logit_edits`: a program for a chunk of an edited row.

Biases are few and lie anywhere, so each program looks through its sequence's and takes those of its chunk.

Shapes: N tokens of a chunk.
"""

import triton
import triton.language as tl

from baton.kernels.variant import Variant

CHUNK = 4096
NUM_WARPS = 8


def launch(logits_BQV, edits, logits_EV, place_R) -> None:
    """Write the edited rows and their places."""
    _, num_rows, vocab_size = logits_BQV.shape
    none, reals = edits.sequence_P, logits_EV
    has_mask, has_bias = edits.bitmask_PQW is not None, edits.bias_ids_PW is not None
    penalizes = edits.penalties_P3 is not None
    _edit_kernel[(logits_EV.shape[0], triton.cdiv(vocab_size, CHUNK))](
        logits_BQV,
        logits_BQV.stride(0 if num_rows == 1 else 1),
        edits.sequence_P,
        edits.drafts_BK,
        edits.bitmask_PQW if has_mask else place_R,
        edits.bitmask_PQW.shape[2] if has_mask else 0,
        edits.bias_ids_PW if has_bias else none,
        edits.bias_values_PW if has_bias else reals,
        edits.bias_ids_PW.shape[1] if has_bias else 0,
        edits.penalties_P3 if penalizes else reals,
        edits.counts_NX if penalizes else place_R,
        edits.in_prompt_NX if penalizes else place_R,
        edits.counts_NX.shape[1] if penalizes else 0,
        edits.slot_P if penalizes else none,
        logits_EV,
        place_R,
        vocab_size,
        Q=num_rows,
        MASKED=has_mask,
        BIASED=has_bias,
        PENALIZED=penalizes,
        N=CHUNK,
        num_warps=NUM_WARPS,
    )


@triton.jit(do_not_specialize=["num_words", "num_biases", "table_width"])
def _edit_kernel(
    logits, row_stride, sequences, drafts, bitmask, num_words, bias_ids, bias_values, num_biases, penalties, counts,
    in_prompt, table_width, slots, out, place_R, V,
    Q: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, PENALIZED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    edited, chunk = tl.program_id(0), tl.program_id(1)
    place, row_in = edited // Q, edited % Q
    sequence = tl.load(sequences + place)
    row = sequence * Q + row_in
    token_N = chunk * N + tl.arange(0, N)
    inside_N = token_N < V
    x_N = tl.load(logits + row * row_stride + token_N, mask=inside_N, other=float("-inf")).to(tl.float32)
    if chunk == 0:
        tl.store(place_R + row, edited)
    if MASKED:
        word_N = tl.load(bitmask + edited.to(tl.int64) * num_words + token_N // 32, mask=inside_N, other=0)
        x_N = tl.where(((word_N >> (token_N % 32)) & 1) == 0, float("-inf"), x_N)
    if BIASED:
        for index in range(num_biases):
            token = tl.load(bias_ids + place * num_biases + index)
            if (token >= chunk * N) & (token < chunk * N + N):
                value = tl.load(bias_values + place * num_biases + index).to(tl.float32)
                x_N += tl.where(token_N == token, value, 0.0)
    if PENALIZED:
        base = tl.load(slots + place) * table_width
        count_N = tl.load(counts + base + token_N, mask=inside_N, other=0)
        said_N = tl.load(in_prompt + base + token_N, mask=inside_N, other=0) != 0
        for before in range(row_in):
            count_N += (token_N == tl.load(drafts + sequence * (Q - 1) + before)).to(tl.int32)
        repetition = tl.load(penalties + 3 * place).to(tl.float32)
        presence = tl.load(penalties + 3 * place + 1).to(tl.float32)
        frequency = tl.load(penalties + 3 * place + 2).to(tl.float32)
        scaled_N = tl.where(x_N > 0, tl.div_rn(x_N, repetition), x_N * repetition)
        x_N = tl.where((count_N > 0) | said_N, scaled_N, x_N)
        x_N = x_N - frequency * count_N.to(tl.float32)
        x_N = x_N - tl.where(count_N > 0, presence, 0.0)
    tl.store(out + edited.to(tl.int64) * V + token_N, x_N, mask=inside_N)


def variants() -> list[Variant]:
    """Everything at once, for three drafts and for none, and each alone."""
    types = {
        "row_stride": "i32", "sequences": "*i64", "drafts": "*i64", "bitmask": "*i32", "num_words": "i32",
        "bias_ids": "*i64", "bias_values": "*fp64", "num_biases": "i32", "penalties": "*fp64", "counts": "*i32",
        "in_prompt": "*i1", "table_width": "i32", "slots": "*i64", "out": "*fp32", "place_R": "*i32", "V": "i32",
    }  # fmt: skip
    kinds = ("MASKED", "BIASED", "PENALIZED")
    return [
        Variant(
            name=f"edit_rows {dtype} Q={num_rows}{' ' * bool(alone)}{alone.lower()}",
            kernel=_edit_kernel,
            types={"logits": f"*{dtype}", **types},
            constants={"Q": num_rows, "N": CHUNK} | {kind: alone in ("", kind) for kind in kinds},
            aligned=("logits", "row_stride", "V"),
            num_warps=NUM_WARPS,
            max_registers=128,
        )
        for dtype, num_rows, alone in (("bf16", 4, ""), ("fp32", 1, ""), *(("bf16", 4, kind) for kind in kinds))
    ]
