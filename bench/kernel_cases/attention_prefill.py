"""Rows of `baton bench kernels` for `attention_prefill`, and the candidates of its tuned table.

"torch" gathers the blocks and calls `scaled_dot_product_attention`, sequence by sequence. For chunks whose positions
are split, "undivided" is the implementation that only splits rows; for float8 KV, "unwidened" is the one that
dequantizes while reading.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch

from baton.bench.kernel_bench.baselines import PagedAttention, fa3, vllm_attention
from baton.bench.kernel_bench.case import Call, KernelCase, Systems, TuningPoint
from baton.kernels.attention import paged as attention
from baton.kernels.attention import prefill_triton as attention_prefill_triton
from baton.kernels.attention import short_chunks as attention_short_chunks
from baton.kernels.attention.decode_plan import PlanOptions, rows_of_program
from baton.kernels.attention.ordered import attention_ordered_prefill
from baton.kernels.attention.prefill import NAME, attention_prefill, shape_of

_BLOCK_SIZE = 16
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Chunks of a step, as (rows, cached positions before them) per sequence, and the model's heads."""

    label: str
    chunks: tuple[tuple[int, int], ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    kv_dtype: torch.dtype = torch.bfloat16
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_tokens(self) -> int:
        """Rows of all chunks."""
        return sum(rows for rows, _ in self.chunks)

    @property
    def num_flops(self) -> int:
        """FLOPs of both matmuls, for the positions that rows see."""
        seen = sum(rows * (2 * prefix + rows + 1) // 2 for rows, prefix in self.chunks)
        return 4 * self.num_heads * self.head_dim * seen

    @property
    def kv_bytes(self) -> int:
        """Bytes read from the pool."""
        positions = sum(rows + prefix for rows, prefix in self.chunks)
        return positions * self.num_kv_heads * 2 * self.head_dim * self.kv_dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes read and written."""
        return self.kv_bytes + 2 * self.num_tokens * self.num_heads * self.head_dim * self.dtype.itemsize

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads}/{self.head_dim}"
        return f"{heads} {self.label}{' fp8 KV' if self.kv_dtype == _FP8 else ''}"


class Batch:
    """One set of buffers: a layer of a pool with the sequences' blocks scattered over it."""

    def __init__(self, work: PrefillWork, device: torch.device) -> None:
        contexts = [rows + prefix for rows, prefix in work.chunks]
        counts = [-(-context // _BLOCK_SIZE) for context in contexts]
        shape = (sum(counts) + 1, work.num_kv_heads, 2, _BLOCK_SIZE, work.head_dim)
        blocks_NHPSD = torch.randn(shape, device=device, dtype=work.dtype).to(work.kv_dtype)
        self.key_NHSD, self.value_NHSD = blocks_NHPSD[:, :, 0], blocks_NHPSD[:, :, 1]
        ids = torch.randperm(sum(counts))
        tables_BM = torch.full((len(counts), max(counts)), sum(counts))
        for sequence, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
            tables_BM[sequence, :count] = ids[end - count : end]
        self.tables_BM = tables_BM.to(device)
        self.query_lens = [rows for rows, _ in work.chunks]
        self.context_lens = contexts
        starts = torch.tensor([0, *accumulate(self.query_lens)], dtype=torch.int32)
        self.starts_E, self.contexts_B = starts.to(device), torch.tensor(contexts, dtype=torch.int32).to(device)
        query_shape = (work.num_tokens, work.num_heads, work.head_dim)
        self.query_TAD = torch.randn(query_shape, device=device, dtype=work.dtype)
        one = torch.ones(1, device=device) if work.kv_dtype == _FP8 else None
        self.key_scale = self.value_scale = one

    def ours(self, *, invariant: bool = False, options: Mapping[str, object] | None = None) -> Call:
        """Make a call of the public function."""
        return partial(
            attention_prefill,
            self.query_TAD,
            self.key_NHSD,
            self.value_NHSD,
            self.tables_BM,
            self.starts_E,
            self.contexts_B,
            max_query_len=max(self.query_lens),
            key_scale=self.key_scale,
            value_scale=self.value_scale,
            invariant=invariant,
            options=options,
        )

    def ordered(self) -> Call:
        """Make a call of ours in batch-invariant numerics, where decode steps have the same bits."""
        places = (self.query_TAD, self.key_NHSD, self.value_NHSD, self.tables_BM, self.starts_E, self.contexts_B)
        return partial(attention_ordered_prefill, *places)

    def torch(self) -> Call:
        """Make a call of the library's attention."""
        lens = (self.query_lens, self.context_lens)
        return partial(
            attention.attention_prefill, self.query_TAD, self.key_NHSD, self.value_NHSD, self.tables_BM, *lens
        )

    def for_others(self) -> PagedAttention:
        """Describe the buffers, so that baselines can make their own."""
        return PagedAttention(
            query_THD=self.query_TAD,
            key_NHSD=self.key_NHSD,
            value_NHSD=self.value_NHSD,
            block_table=self.tables_BM,
            q_lens=self.query_lens,
            kv_lens=self.context_lens,
            scale=self.query_TAD.shape[2] ** -0.5,
        )


_MIXED = ((2048, 0), (1, 3000), (1024, 4096), (300, 8192), (16, 16384), (777, 1234), (128, 12000), (2048, 6000))
_LARGE = 8192, 2048, 512
_MAX_SHORT_LEN = 128
_CHUNKS = {8192: ((8192, 0),), 2048: ((2048, 6144),), 512: ((512, 32256),), 16: ((16, 8192),) * 8}
_HEADS = ((32, 8, 128), (32, 4, 128), (16, 2, 256))
_SHORT = (((16, 8192),) * 8, ((16, 8192),), ((64, 32704),), ((128, 32640),), ((1, 2000), (16, 30000), (9, 500)))


def _label(chunks: tuple[tuple[int, int], ...]) -> str:
    rows, prefix = chunks[0]
    return f"{len(chunks)} x {rows} over {prefix}" if prefix else f"{len(chunks)} x {rows} causal"


def works() -> list[PrefillWork]:
    """The models' shapes, each with long chunks and a mixed batch; a tiny one for CPUs comes last."""
    found = []
    for heads in _HEADS:
        for chunks in _CHUNKS.values():
            found.append(PrefillWork(_label(chunks), chunks, *heads))
        found.append(PrefillWork("mixed 8", _MIXED, *heads))
    found.append(PrefillWork("1 x 2048 over 30720", ((2048, 30720),)))
    found += [PrefillWork(_label(_CHUNKS[rows]), _CHUNKS[rows], kv_dtype=_FP8) for rows in (*_LARGE, 16)]
    found.append(PrefillWork("mixed 8", _MIXED, kv_dtype=_FP8))
    found += [PrefillWork(_label(chunks), chunks) for chunks in _SHORT[1:4]] + [PrefillWork("mixed 3", _SHORT[4])]
    found.append(PrefillWork("tiny", ((20, 0), (3, 40)), 4, 2, 32, torch.float32, torch.float32))
    return found


def _undivided(work: PrefillWork) -> Mapping[str, object]:
    """Options of the implementation that does not split positions."""
    rows = max(rows for rows, _ in work.chunks) * work.num_heads // work.num_kv_heads
    return attention_prefill_triton.rule(rows, work.head_dim, work.kv_dtype.itemsize)


def _prepare(work: PrefillWork, device: torch.device, num_sets: int) -> Systems:
    if device.type == "cuda" and work.dtype is torch.float32:  # the tiny case: the kernels take only 16-bit numbers
        work = replace(work, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    batches = [Batch(work, device) for _ in range(num_sets)]
    systems = {
        "ours": [batch.ours() for batch in batches],
        "invariant": [batch.ours(invariant=True) for batch in batches],
    }
    if max(batches[0].query_lens) <= _MAX_SHORT_LEN:
        systems["undivided"] = [batch.ours(options=_undivided(work)) for batch in batches]
    elif work.kv_dtype == _FP8:
        systems["unwidened"] = [batch.ours(options=_undivided(work)) for batch in batches]
    if work.kv_dtype != _FP8:
        systems["ordered"] = [batch.ordered() for batch in batches]
        systems["torch"] = [batch.torch() for batch in batches]
    others = [batch.for_others() for batch in batches] if device.type == "cuda" else []
    return systems | fa3(others) | vllm_attention(others)


def cases() -> list[KernelCase]:
    """A case for each of `works`."""
    found = works()
    return [
        KernelCase(
            kernel=NAME,
            shape=str(work),
            num_bytes=work.num_bytes,
            num_flops=work.num_flops,
            set_bytes=work.num_bytes,
            prepare=partial(_prepare, work),
            only_gpu=work is not found[-1],
        )
        for work in found
    ]


def _option(
    BM: int, BN: int, num_warps: int, num_stages: int, *, overlap: bool = False, ahead: bool = False
) -> Mapping[str, object]:
    stages = {"num_warps": num_warps, "num_stages": num_stages}
    return {"BM": BM, "BN": BN, "OVERLAP": overlap, "AHEAD": ahead, **stages}


# Over float8 KV. Registers decide: 64K of them fit one program of 8 warps with an overlapped tile of 128 x 128, or two
# of 4 warps with 64 x 64, which overlap each other but read K and V twice as often.
_CANDIDATES = (
    _option(128, 128, 8, 2, overlap=True),
    _option(128, 64, 8, 2, overlap=True),
    _option(128, 64, 8, 3, overlap=True),
    _option(128, 64, 8, 2, overlap=True, ahead=True),
    _option(128, 64, 8, 3, overlap=True, ahead=True),
    _option(128, 64, 8, 4, overlap=True, ahead=True),
    _option(128, 128, 8, 2),
    _option(128, 64, 8, 2),
    _option(128, 64, 8, 3),
    _option(64, 64, 4, 2, overlap=True),
    _option(64, 64, 4, 3, overlap=True, ahead=True),
    _option(64, 64, 4, 2),
    _option(64, 64, 4, 3),
    _option(64, 128, 4, 2),
)
# For chunks whose positions are split: tile, rows (0: as many as there are, padded), whether K and V are the left
# operands, stages, warps, and target programs per multiprocessor.
_SHARES: Sequence[tuple[int, int, bool, int, int, int]] = (
    (64, 0, False, 3, 4, 1), (64, 0, False, 3, 4, 2), (128, 0, False, 2, 4, 1), (32, 0, False, 4, 4, 2),
    (32, 0, False, 4, 4, 3), (64, 32, True, 3, 4, 2), (64, 0, True, 3, 4, 2), (64, 32, False, 3, 4, 3),
)  # fmt: skip


def _share_candidates(work: PrefillWork) -> list[Mapping[str, object]]:
    num_rows = max(work.chunks)[0] * work.num_heads // work.num_kv_heads
    return [
        {
            "tile": tile, "rows": own_rows or rows_of_program(num_rows), "swap": swap, "stages": stages,
            "warps": warps, "slots": 132 * each, "shares": True, "pdl": True,
        }
        for tile, own_rows, swap, stages, warps, each in _SHARES
    ]  # fmt: skip


def _prepare_candidate(
    work: PrefillWork, device: torch.device, num_sets: int, options: Mapping[str, object]
) -> Sequence[Call]:
    if attention_short_chunks.is_ours(options):
        PlanOptions(**options)  # type: ignore[arg-type]  # a row that is none fails here
    return [Batch(work, device).ours(options=options) for _ in range(num_sets)]


def tuning() -> list[TuningPoint]:
    """Float8 KV: eight short chunks over long prefixes, and longer chunks; 16-bit KV has `prefill_plan`."""
    short = PrefillWork(_label(_SHORT[0]), _SHORT[0], kv_dtype=_FP8)
    group = short.num_heads // short.num_kv_heads
    longest = max(short.chunks)[0]
    points = [
        TuningPoint(
            kernel=attention_short_chunks.NAME,
            shape=attention_short_chunks.shape_of(longest, group, short.head_dim, short.kv_dtype),
            size=longest,
            candidates=_share_candidates(short),
            set_bytes=short.num_bytes,
            prepare=partial(_prepare_candidate, short),
        )
    ]
    for work in (PrefillWork(_label(chunks), chunks, kv_dtype=_FP8) for chunks in _CHUNKS.values()):
        points.append(
            TuningPoint(
                kernel=NAME,
                shape=shape_of(group, work.head_dim, work.kv_dtype.itemsize),
                size=max(work.chunks)[0],
                candidates=_CANDIDATES,
                set_bytes=work.num_bytes,
                prepare=partial(_prepare_candidate, work),
            )
        )
    return points
