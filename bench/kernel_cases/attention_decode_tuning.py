"""What the tuned table of `attention_decode` is chosen from: candidates by rows and D, of the shapes that are measured.

A division by work has one program for each slot; shapes that one row of the table is for are timed together, equally
long, ragged and spread.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from baton.bench.kernel_bench.case import Call, TuningPoint
from baton.bench.kernel_cases.attention_decode import HEADS, Shape, make
from baton.kernels.attention.decode_plan import Options, rows_of_program, table_shape

_MANY = 16  # sequences from which on lengths may be ragged
_RAGGED_LEN = 4096  # and contexts
# tile, rows (0: as many as there are, padded), swap, stages, warps, programs of a multiprocessor
_TILES: Mapping[tuple[int, bool], Sequence[tuple[int, int, bool, int, int, int]]] = {
    (128, False): (
        (64, 0, True, 3, 4, 2), (64, 0, True, 2, 4, 3), (128, 0, True, 2, 4, 1), (128, 0, True, 3, 8, 1),
        (64, 0, False, 3, 4, 3), (32, 0, False, 4, 4, 4), (64, 64, False, 3, 4, 2),
    ),
    (256, False): (
        (64, 0, True, 3, 8, 1), (64, 0, True, 2, 8, 1), (32, 0, False, 3, 4, 3), (32, 0, False, 4, 4, 2),
        (64, 0, False, 3, 8, 1), (64, 64, False, 2, 8, 1),
    ),
    (128, True): ((64, 0, False, 3, 4, 3), (64, 0, True, 3, 4, 3), (64, 64, False, 3, 4, 2)),
    (256, True): ((32, 0, False, 3, 4, 3), (64, 0, False, 3, 8, 1)),
}  # fmt: skip
# Direct forms of float8 by rows and D: tile, stages, warps, programs of a multiprocessor, and what else they say.
_DIRECT: Mapping[tuple[int, int], Sequence[tuple[int, int, int, int, Mapping[str, object]]]] = {
    (16, 128): (
        (64, 3, 4, 3, {"direct": 1, "apart": True, "registers": 168}),
        (64, 4, 4, 3, {"direct": 1, "apart": True, "registers": 168}),
        (64, 5, 4, 2, {"direct": 1, "apart": True}),
        (64, 3, 4, 3, {"direct": 2, "apart": True, "registers": 168}),
        (32, 4, 2, 4, {"direct": 1, "apart": True}),
        (128, 3, 4, 2, {"direct": 1, "apart": True}),
        (64, 3, 4, 3, {"direct": 1}),
        (64, 4, 4, 3, {"direct": 1}),
        (64, 3, 4, 4, {"direct": 2}),
        (128, 3, 4, 2, {"direct": 1}),
        (128, 3, 8, 2, {"direct": 1}),
    ),
    (32, 128): (
        (64, 3, 4, 3, {"direct": 1}),
        (64, 4, 4, 3, {"direct": 1}),
        (64, 3, 4, 3, {"direct": 2}),
        (32, 4, 4, 3, {"direct": 1}),
        (128, 3, 8, 1, {"direct": 1}),
    ),
    (16, 256): (
        (32, 3, 4, 3, {"direct": 1}),
        (32, 4, 4, 3, {"direct": 1}),
        (32, 3, 4, 3, {"direct": 2}),
        (64, 3, 4, 2, {"direct": 1}),
        (64, 3, 8, 2, {"direct": 1}),
        (128, 3, 8, 1, {"direct": 1}),
    ),
    (32, 256): (
        (32, 3, 4, 2, {"direct": 1}),
        (32, 4, 4, 2, {"direct": 1}),
        (32, 3, 4, 3, {"direct": 2, "registers": 168}),
        (64, 3, 4, 2, {"direct": 1}),
        (64, 3, 8, 1, {"direct": 1}),
        (128, 3, 8, 1, {"direct": 1}),
    ),
}
_LONG = 1 << 20  # positions times sequences times KV heads, from which on a launch is long
# Divided by work: which of `_TILES`, and programs of a multiprocessor that are wanted. More than it holds at once are
# as many rounds of shorter shares, of which the last leaves less idle.
_BY_WORK: Mapping[int, Sequence[tuple[int, int]]] = {
    128: ((0, 2), (0, 4), (0, 6), (0, 8), (0, 12), (4, 4), (4, 6), (4, 8), (5, 8), (6, 6)),
    256: ((0, 3), (0, 6), (2, 6), (2, 9), (4, 1), (4, 3), (4, 6)),
}
# Of long launches by rows and D, and the size from which on: tile, rows, swap, stages, warps, programs of a
# multiprocessor, and the longest part (0: divided by work).
_LONG_FORMS: Mapping[tuple[int, int], tuple[int, Sequence[tuple[int, int, bool, int, int, int, int]]]] = {
    (16, 256): (
        1 << 19,
        (
            (32, 16, False, 3, 4, 3, 4096), (32, 16, False, 3, 4, 3, 1024), (32, 16, False, 3, 4, 3, 0),
            (32, 16, False, 3, 4, 6, 0), (64, 16, False, 3, 8, 1, 8192), (64, 16, False, 3, 8, 1, 1024),
            (64, 16, False, 3, 8, 1, 0), (64, 16, False, 3, 8, 2, 0), (32, 16, False, 4, 4, 2, 0),
        ),
    ),
    (32, 256): (
        1 << 19,
        (
            (32, 32, False, 3, 4, 3, 4096), (32, 32, False, 3, 4, 2, 1024), (32, 32, False, 3, 4, 2, 0),
            (32, 32, False, 3, 4, 4, 0), (64, 32, False, 3, 8, 1, 8192), (64, 32, False, 3, 8, 1, 1024),
            (64, 32, False, 3, 8, 1, 0), (64, 32, False, 2, 4, 2, 0), (64, 32, True, 3, 8, 1, 0),
            (64, 64, False, 3, 8, 1, 0),
        ),
    ),
    (64, 256): (
        1 << 19,
        (
            (64, 64, False, 2, 8, 1, 4096), (64, 64, False, 3, 8, 1, 4096), (32, 64, False, 2, 4, 2, 4096),
            (32, 64, False, 4, 4, 1, 4096), (32, 64, False, 3, 8, 1, 4096), (64, 64, False, 2, 8, 1, 0),
            (64, 64, False, 3, 8, 1, 0), (32, 32, False, 3, 4, 2, 0),
        ),
    ),
    (32, 128): (
        1 << 21,
        (
            (64, 32, False, 3, 4, 3, 4096), (64, 32, False, 3, 4, 2, 8192), (64, 32, False, 3, 4, 2, 0),
            (64, 32, False, 3, 4, 3, 0), (64, 32, True, 3, 4, 2, 8192), (64, 32, True, 3, 4, 2, 0),
            (64, 64, False, 3, 4, 2, 8192), (64, 64, False, 3, 4, 2, 0), (128, 32, False, 3, 8, 1, 0),
        ),
    ),
}  # fmt: skip
# Of short ones: the same, with the programs that parts are counted for in halves of what the GPU has multiprocessors.
_SHORT_FORMS: Mapping[int, Sequence[tuple[int, bool, int, int, int]]] = {
    128: (
        (64, False, 3, 4, 4),
        (64, False, 3, 4, 6),
        (64, False, 3, 4, 8),
        (64, False, 3, 4, 12),
        (64, True, 3, 4, 4),
        (64, True, 3, 4, 6),
        (128, True, 2, 4, 2),
        (32, False, 4, 4, 8),
        (64, False, 3, 8, 4),
    ),
    256: (
        (32, False, 3, 4, 4),
        (32, False, 3, 4, 6),
        (32, False, 3, 4, 12),
        (64, False, 3, 8, 1),
        (64, False, 3, 8, 2),
        (64, False, 3, 8, 4),
        (32, False, 3, 8, 4),
        (32, False, 2, 4, 6),
    ),
}
_SHORT_SIZES = (8192, 32_768, 65_536, 131_072)  # of a sequence of 4,096, and of 16 of 1,024
_MAX_CANDIDATES = 40


def _candidates(head_dim: int, num_rows: int, is_float8: bool, size: int, has_many: bool) -> list[Mapping[str, object]]:
    """Small launches: with and without the second kernel's early start; long ones: parts of several lengths.

    Of several sequences, also divisions by work.
    """
    rows = rows_of_program(num_rows)
    if not is_float8 and size >= _LONG_FORMS.get((rows, head_dim), (1 << 62, ()))[0]:
        return _long_candidates(rows, head_dim)
    if not is_float8 and size in _SHORT_SIZES:
        return _short_candidates(rows, head_dim)
    forms: list[tuple[int, Mapping[str, object]]] = [
        (each, {"tile": tile, "rows": own_rows or rows, "swap": swap, "stages": stages, "warps": warps})
        for tile, own_rows, swap, stages, warps, each in _TILES[head_dim, is_float8]
    ]
    tiled = len(forms)
    if is_float8:
        forms += [
            (each, {"tile": tile, "rows": rows, "swap": False, "stages": stages, "warps": warps, **others})
            for tile, stages, warps, each, others in _DIRECT.get((rows, head_dim), ())
        ]
    found: list[Mapping[str, object]] = []
    for each, base in forms:
        slots = 132 * each
        if size < _LONG:
            shares = (slots,) if is_float8 else (slots // 2, slots, 2 * slots)
            found += [{**base, "slots": share, "pdl": True} for share in shares]
            found.append({**base, "slots": slots, "pdl": False})
        else:
            lengths = (2048, 8192) if is_float8 else (1024, 2048, 4096, 8192)
            found += [{**base, "slots": slots, "max_part_len": length, "pdl": True} for length in lengths]
    if not has_many:
        return found
    if is_float8:
        divided = [(base, count) for _, base in (*forms[tiled : tiled + 2], forms[0]) for count in (3, 6, 9)]
    else:
        divided = [(forms[index][1], count) for index, count in _BY_WORK[head_dim]]
    by_work = [{**base, "slots": 132 * count, "shares": True, "pdl": True} for base, count in divided]
    return found[: _MAX_CANDIDATES - len(by_work)] + by_work


def _long_candidates(rows: int, head_dim: int) -> list[Mapping[str, object]]:
    """Those of `_LONG_FORMS`."""
    found: list[Mapping[str, object]] = []
    for tile, own_rows, swap, stages, warps, each, part_len in _LONG_FORMS[rows, head_dim][1]:
        base = {"tile": tile, "rows": own_rows, "swap": swap, "stages": stages, "warps": warps, "slots": 132 * each}
        if own_rows == 32 and not swap and warps == 8:  # else the assembler spills, to make room for two programs
            base["registers"] = 168
        found.append({**base, "pdl": True, **({"max_part_len": part_len} if part_len else {"shares": True})})
    return found


def _short_candidates(rows: int, head_dim: int) -> list[Mapping[str, object]]:
    """Those of `_SHORT_FORMS`."""
    return [
        {"tile": tile, "rows": rows, "swap": swap, "stages": stages, "warps": warps, "slots": 66 * halves, "pdl": True}
        for tile, swap, stages, warps, halves in _SHORT_FORMS[head_dim]
    ]


def _prepare_candidate(
    shapes: Sequence[Shape], device: torch.device, num_sets: int, options: Mapping[str, object]
) -> Sequence[Call]:
    Options(**options)  # type: ignore[arg-type]  # a row that is none fails here
    return [partial(make(shape, device).run, options=options) for _ in range(num_sets) for shape in shapes]


def _tuned_shapes() -> list[tuple[Shape, bool]]:
    """What the table is made for, and whether it is for this number of queries alone."""
    sizes = ((1, 1024), (1, 32768), (64, 1024), (16, 8192), (64, 8192))
    shapes = [Shape(*HEADS[0], *size, 1) for size in (*sizes, (16, 1024), (256, 8192))]
    shapes += [Shape(*HEADS[1], *size, q) for q in (1, 4) for size in sizes]
    more_sizes = ((1, 4096), (16, 1024), (64, 4096), (256, 1024), (256, 8192))
    shapes += [Shape(*HEADS[2], *size, q) for q in (1, 4) for size in (*sizes, *more_sizes)]
    shapes += [Shape(*HEADS[1], 256, 8192, 4), Shape(*HEADS[1], 16, 1024, 4), Shape(*HEADS[2], 64, 4096, 8)]
    shapes += [Shape(*heads, *size, 8) for heads in HEADS[1:] for size in sizes]
    float8_sizes = ((1, 1024), (16, 8192), (64, 8192))
    shapes += [Shape(*HEADS[0], *size, 1, True) for size in float8_sizes]
    shapes += [Shape(*HEADS[1], *size, 4, True) for size in float8_sizes]
    shapes += [Shape(*HEADS[2], *size, q, True) for q in (1, 4) for size in float8_sizes]
    found = [(shape, False) for shape in (*shapes, *_ragged(shapes))]
    own = [Shape(*HEADS[0], *size, q) for q in (4, 8) for size in (*sizes, (16, 1024), (64, 4096))]
    return found + [(shape, True) for shape in (*own, *_ragged(own))]


def _ragged(shapes: Sequence[Shape]) -> list[Shape]:
    """Of shapes of many long sequences the same, ragged and spread: what is served is never of equal lengths."""
    many = [shape for shape in shapes if shape.num_sequences >= _MANY and shape.context_len >= _RAGGED_LEN]
    spread = [replace(shape, is_spread=True) for shape in many if shape.context_len >= 2 * _RAGGED_LEN]
    return [replace(shape, is_ragged=True) for shape in many] + spread


def tuning() -> list[TuningPoint]:
    """Each kind of rows at the sizes of the anchors; shapes that one row of the table is for are timed together."""
    together: dict[tuple[str, int], list[Shape]] = defaultdict(list)
    for shape, is_own in _tuned_shapes():
        kind = "fp8" if shape.is_float8 else "bf16"
        name = table_shape(shape.num_rows, shape.head_dim, kind, shape.num_queries if is_own else None)
        together[name, shape.num_sequences * shape.num_kv_heads * shape.context_len].append(shape)
    points = []
    for (name, size), shapes in together.items():
        first = shapes[0]
        has_many = any(shape.num_sequences >= _MANY for shape in shapes)
        candidates = _candidates(first.head_dim, first.num_rows, first.is_float8, size, has_many)
        points.append(
            TuningPoint(
                kernel="attention_decode",
                shape=name,
                size=size,
                candidates=candidates,
                set_bytes=sum(shape.kv_bytes for shape in shapes),
                prepare=partial(_prepare_candidate, shapes),
            )
        )
    return points
