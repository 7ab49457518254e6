"""Rows of `kv_scatter` within one GPU: the blocks of a prompt from one pool to the other, by number of multiprocessors.

As they are, and made float8 of bfloat16 on the way, which writes half of what it reads.

Between two GPUs it is measured by `baton bench kv`, whose link is the limit there.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.bench.kernel_case import Call, KernelCase, Systems
from baton.kernels.float8_kv import DTYPE, as_bytes
from baton.kernels.kv_reference import kv_scatter_fp8_reference, kv_scatter_reference
from baton.kernels.kv_scatter import MAX_LAYERS, Completion, Piece, PoolAddress, Tuning, Workspace, kv_scatter
from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.layout import KVLayout

_BLOCK_SIZE = 16
_NUM_PROGRAMS = (4, 8, 16, 32, 64, 132)


@dataclass(frozen=True, slots=True)
class _Shape:
    """So many blocks of so many layers, each of `num_heads` x 2 x 16 x `head_dim` elements of two bytes."""

    num_layers: int
    num_blocks: int
    num_heads: int
    head_dim: int

    @property
    def block_bytes(self) -> int:
        return self.num_heads * 2 * _BLOCK_SIZE * self.head_dim * 2

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.num_blocks * self.block_bytes

    def __str__(self) -> str:
        return f"{self.num_layers * self.num_blocks} x {self.block_bytes / 1024:g} KiB"


_PROMPT = _Shape(36, 64, 8, 128)  # 1024 positions of Qwen3-8B
_LAYER = _Shape(1, 64, 8, 128)
_TINY = _Shape(1, 4, 2, 16)


class _Move:
    """Two pools, and the blocks of one prompt scattered over each."""

    def __init__(self, shape: _Shape, device: torch.device, *, to_fp8: bool) -> None:
        self.shape, self.to_fp8 = shape, to_fp8
        self.geometry = _geometry(shape, "bfloat16")
        self.to_geometry = _geometry(shape, "float8_e4m3fn") if to_fp8 else self.geometry
        num_bytes = self.geometry.num_bytes
        if to_fp8:
            self.source = torch.randn(num_bytes // 2, dtype=torch.bfloat16, device=device).view(torch.uint8)
        else:
            self.source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
        self.target = torch.zeros(self.to_geometry.num_bytes, dtype=torch.uint8, device=device)
        self.scales_LPH = torch.ones(shape.num_layers, 2, 1, device=device)
        self.from_blocks = torch.randperm(shape.num_blocks, device=device).int()
        self.to_indices = torch.randperm(shape.num_blocks, device=device)
        self.to_blocks = self.to_indices.int()
        self.piece = Piece(
            layer=0,
            first=0,
            count=shape.num_blocks * _BLOCK_SIZE,
            head_first=0,
            head_count=shape.num_heads,
            num_layers=shape.num_layers,
        )

    def launch(self, num_programs: int, *, with_digest: bool) -> Call:
        """One launch for all layers; the word that says that it is done lies on the device."""
        device = self.source.device
        workspace = Workspace(device, self.piece.count)
        words = torch.zeros(1 + MAX_LAYERS, dtype=torch.int64, device=device)
        source = PoolAddress(self.source.data_ptr(), self.geometry.layers)
        target = PoolAddress(self.target.data_ptr(), self.to_geometry.layers)
        scales_LPH = self.scales_LPH if self.to_fp8 else None
        tuning = Tuning(num_programs)

        def call() -> torch.Tensor:
            completion = Completion(words.data_ptr(), 1)
            kv_scatter(
                source, self.from_blocks, target, self.to_blocks, self.piece, workspace, completion, tuning,
                with_digest=with_digest, scales_LPH=scales_LPH,
            )  # fmt: skip
            return self.target

        return call

    def layers(self, pool: torch.Tensor) -> torch.Tensor:
        """The pool as [layers, blocks, words or elements], without the scratch block."""
        dtype = torch.int64 if not self.to_fp8 else torch.bfloat16 if pool is self.source else torch.uint8
        whole = pool.view(dtype).view(self.shape.num_layers, self.shape.num_blocks + 1, -1)
        return whole[:, : self.shape.num_blocks]

    def by_index(self) -> torch.Tensor:
        """The same blocks by torch's own indexing."""
        source, target = self.layers(self.source), self.layers(self.target)
        picked = source.index_select(1, self.from_blocks)
        target.index_copy_(1, self.to_indices, as_bytes(picked.to(DTYPE)) if self.to_fp8 else picked)
        return self.target

    def by_copy(self) -> None:
        """As many bytes that lie together, by the copy engine or what the driver chooses."""
        self.target.copy_(self.source)

    def by_reference(self) -> torch.Tensor:
        """Position by position, on any device."""
        from_blocks, to_blocks = self.from_blocks.tolist(), self.to_blocks.tolist()
        shape = (self.shape.num_blocks + 1, self.shape.num_heads, 2, _BLOCK_SIZE, -1)
        if self.to_fp8:
            source, target = self.source.view(torch.bfloat16).view(shape), self.target.view(DTYPE).view(shape)
            kv_scatter_fp8_reference(source, from_blocks, target, to_blocks, self.piece, self.scales_LPH[0])
        else:
            source, target = self.source.view(shape), self.target.view(shape)
            kv_scatter_reference(source, from_blocks, target, to_blocks, self.piece)
        return self.target


def _geometry(shape: _Shape, dtype: str) -> PoolGeometry:
    layout = KVLayout(
        model_hash="bench",
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_heads,
        head_dim=shape.head_dim,
        block_size=_BLOCK_SIZE,
        dtype=dtype,
    )
    return PoolGeometry(layout, shape.num_blocks)


def _prepare(shape: _Shape, num_programs: int, to_fp8: bool) -> Callable[[torch.device, int], Systems]:
    def prepare(device: torch.device, num_sets: int) -> Systems:
        moves = [_Move(shape, device, to_fp8=to_fp8) for _ in range(num_sets)]
        if device.type == "cpu":  # one system stands for ours where no kernel runs: the bench is tried, not the kernel
            return {"ours": [move.by_reference for move in moves], "torch": [move.by_index for move in moves]}
        systems: dict[str, list[Call]] = {
            "ours": [move.launch(num_programs, with_digest=True) for move in moves],
            "no_digest": [move.launch(num_programs, with_digest=False) for move in moves],
            "torch": [move.by_index for move in moves],
        }
        return systems if to_fp8 else systems | {"copy": [move.by_copy for move in moves]}

    return prepare


def cases() -> list[KernelCase]:
    """Whole prompts and single layers, and one small row for a CPU."""
    rows = [(_PROMPT, num, False) for num in _NUM_PROGRAMS] + [(_LAYER, num, False) for num in (8, 32, 132)]
    rows += [(_PROMPT, num, True) for num in _NUM_PROGRAMS] + [(_LAYER, num, True) for num in (8, 32, 132)]
    return [
        KernelCase(
            kernel="kv_scatter",
            shape=f"{shape} SMs={num_programs} digest{' to fp8' if to_fp8 else ''}",
            num_bytes=(3 * shape.num_bytes) // 2 if to_fp8 else 2 * shape.num_bytes,
            set_bytes=2 * shape.num_bytes,
            prepare=_prepare(shape, num_programs, to_fp8),
            only_gpu=shape is not _TINY,
        )
        for shape, num_programs, to_fp8 in [*rows, (_TINY, 1, False), (_TINY, 1, True)]
    ]
