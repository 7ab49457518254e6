"""Rows of `kv_scatter` within one GPU: a prompt's blocks copied between two pools, by number of multiprocessors.

`baton bench kv` measures it between two GPUs, where the link is the limit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.bench.kernel_bench.case import Call, KernelCase, Systems
from baton.kernels.kv.scatter import (
    MAX_LAYERS,
    PoolAddress,
    ScatterRange,
    ScatterWorkspace,
    Tuning,
    WriteCompletion,
    kv_scatter,
    kv_scatter_reference,
)
from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.layout import KVLayout

_BLOCK_SIZE = 16
_NUM_PROGRAMS = (4, 8, 16, 32, 64, 132)


@dataclass(frozen=True, slots=True)
class _Shape:
    """`num_blocks` blocks of `num_layers` layers, each of `num_heads` x 2 x 16 x `head_dim` two-byte elements."""

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
    """Two pools, with the blocks of one prompt scattered over each."""

    def __init__(self, shape: _Shape, device: torch.device) -> None:
        self.shape = shape
        self.geometry = _geometry(shape)
        num_bytes = self.geometry.num_bytes
        self.source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
        self.target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.from_blocks = torch.randperm(shape.num_blocks, device=device).int()
        self.to_indices = torch.randperm(shape.num_blocks, device=device)
        self.to_blocks = self.to_indices.int()
        self.piece = ScatterRange(
            layers=tuple(range(shape.num_layers)),
            first=0,
            count=shape.num_blocks * _BLOCK_SIZE,
            head_first=0,
            head_count=shape.num_heads,
        )

    def launch(self, num_programs: int, *, with_digest: bool) -> Call:
        """Make one launch for all layers; its completion word is on the device."""
        device = self.source.device
        workspace = ScatterWorkspace(device, self.piece.count)
        words = torch.zeros(1 + MAX_LAYERS, dtype=torch.int64, device=device)
        source = PoolAddress(self.source.data_ptr(), self.geometry.layers)
        target = PoolAddress(self.target.data_ptr(), self.geometry.layers)
        tuning = Tuning(num_programs)

        def call() -> torch.Tensor:
            completion = WriteCompletion(words.data_ptr(), 1)
            kv_scatter(
                source, self.from_blocks, target, self.to_blocks, self.piece, workspace, completion, tuning,
                with_digest=with_digest,
            )  # fmt: skip
            return self.target

        return call

    def layers(self, pool: torch.Tensor) -> torch.Tensor:
        """View the pool as [layers, blocks, words], without the scratch block."""
        whole = pool.view(torch.int64).view(self.shape.num_layers, self.shape.num_blocks + 1, -1)
        return whole[:, : self.shape.num_blocks]

    def by_index(self) -> torch.Tensor:
        """Copy the same blocks by torch's indexing."""
        source, target = self.layers(self.source), self.layers(self.target)
        picked = source.index_select(1, self.from_blocks)
        target.index_copy_(1, self.to_indices, picked)
        return self.target

    def by_copy(self) -> None:
        """Copy as many contiguous bytes, by the copy engine or whatever the driver chooses."""
        self.target.copy_(self.source)

    def by_reference(self) -> torch.Tensor:
        """Copy position by position, on any device."""
        from_blocks, to_blocks = self.from_blocks.tolist(), self.to_blocks.tolist()
        shape = (self.shape.num_blocks + 1, self.shape.num_heads, 2, _BLOCK_SIZE, -1)
        source, target = self.source.view(shape), self.target.view(shape)
        kv_scatter_reference(source, from_blocks, target, to_blocks, self.piece)
        return self.target


def _geometry(shape: _Shape) -> PoolGeometry:
    layout = KVLayout.of_attention(
        model_hash="bench",
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_heads,
        head_dim=shape.head_dim,
        block_size=_BLOCK_SIZE,
        dtype="bfloat16",
    )
    return PoolGeometry(layout, shape.num_blocks)


def _prepare(shape: _Shape, num_programs: int) -> Callable[[torch.device, int], Systems]:
    def prepare(device: torch.device, num_sets: int) -> Systems:
        moves = [_Move(shape, device) for _ in range(num_sets)]
        if (
            device.type == "cpu"
        ):  # one system stands for ours where no kernel runs, which tests the bench, not the kernel
            return {"ours": [move.by_reference for move in moves], "torch": [move.by_index for move in moves]}
        return {
            "ours": [move.launch(num_programs, with_digest=True) for move in moves],
            "no_digest": [move.launch(num_programs, with_digest=False) for move in moves],
            "torch": [move.by_index for move in moves],
            "copy": [move.by_copy for move in moves],
        }

    return prepare


def cases() -> list[KernelCase]:
    """Whole prompts and single layers, and a small case for CPUs."""
    rows = [(_PROMPT, num) for num in _NUM_PROGRAMS] + [(_LAYER, num) for num in (8, 32, 132)]
    return [
        KernelCase(
            kernel="kv_scatter",
            shape=f"{shape} SMs={num_programs} digest",
            num_bytes=2 * shape.num_bytes,
            set_bytes=2 * shape.num_bytes,
            prepare=_prepare(shape, num_programs),
            only_gpu=shape is not _TINY,
        )
        for shape, num_programs in [*rows, (_TINY, 1)]
    ]
