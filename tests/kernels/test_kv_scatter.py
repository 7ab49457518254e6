"""The kernels that move and digest blocks: their numbers in the interpreter, and what they compile to for sm_90a."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from baton.kernels.kv import scatter_triton as kv_scatter_triton
from baton.kernels.kv.pool_digest import kv_digest
from baton.kernels.kv.scatter import (
    PoolAddress,
    ScatterRange,
    ScatterWorkspace,
    Tuning,
    WriteCompletion,
    kv_digest_reference,
    kv_scatter,
    kv_scatter_reference,
)
from baton.kernels.launcher import Launcher
from baton.kvcache.layout import KVLayout
from baton.kvtransfer import device_stream, rank_kernels
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.protocol.frame import KVRange
from baton.tests.kvtransfer.kept import geometry_of, latent, state

NUM_POSITIONS = 70
CPU = torch.device("cpu")


def layout(block_size, *, heads=4, row_len=8, dtype="bfloat16", extra=()):
    return KVLayout.of_attention(
        model_hash="m", num_layers=2, num_kv_heads=heads, head_dim=row_len, block_size=block_size, dtype=dtype,
        more=extra,
    )  # fmt: skip


class Pool:
    """A pool in memory, poisoned, with blocks in random order for one sequence."""

    def __init__(self, layout, seed, *, rank=0, size=1, num_positions=NUM_POSITIONS, extra_blocks=2):
        generator = np.random.default_rng(seed)
        needed = -(-num_positions // layout.block_size)
        self.geometry = geometry_of(layout, needed + extra_blocks, rank, size)
        self.memory = generator.integers(0, 256, self.geometry.num_bytes, dtype=np.uint8)
        order = list(range(needed + extra_blocks))
        random.Random(seed).shuffle(order)
        self.blocks = order[:needed]
        self.blocks_N = torch.tensor(self.blocks, dtype=torch.int32)
        self.io = PoolIO(self.memory, self.geometry)
        assert self.memory.ctypes.data % 16 == 0
        self.address = PoolAddress(self.memory.ctypes.data, self.geometry.layers)


def run_scatter(source, target, piece, *, num_programs=3, with_digest=True, launches=1):
    workspace = ScatterWorkspace(CPU, 256)
    words = np.zeros(1 + len(piece.layers), dtype=np.uint64)
    for launch in range(launches):
        kv_scatter(
            source.address, source.blocks_N, target.address, target.blocks_N, piece, workspace,
            WriteCompletion(words.ctypes.data, 7 + launch), Tuning(num_programs), with_digest=with_digest,
        )  # fmt: skip
    assert int(words[0]) == 7 + launches - 1
    assert not workspace.sums.any()  # ready for the next launch
    return [int(word) for word in words[1:]]


def copied_by_pool_io(source, target, piece):
    """What the target holds after the same copy by NumPy, and the digests."""
    memory = target.memory.copy()
    io = PoolIO(memory, target.geometry)
    digests = []
    for layer in piece.layers:
        span = KVRange(layer, piece.first, piece.count, piece.head_first, piece.head_count)
        source.io.copy(source.blocks, io, target.blocks, span)
        digests.append(source.io.digest(source.blocks, span))
    return memory, digests


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize(("from_size", "to_size"), [(16, 16), (16, 64), (64, 16), (64, 64)])
def test_it_moves_and_digests_as_numpy_does(dtype, from_size, to_size):
    source = Pool(layout(from_size, dtype=dtype), 1)
    target = Pool(layout(to_size, dtype=dtype), 2)
    piece = ScatterRange(layers=(1,), first=5, count=62, head_first=0, head_count=4)
    wanted, digests = copied_by_pool_io(source, target, piece)
    assert run_scatter(source, target, piece) == digests
    assert np.array_equal(target.memory, wanted)


@pytest.mark.fast
@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 32), (15, 2), (16, 16), (33, 37)])
def test_spans_of_any_edges(first, count):
    source, target = Pool(layout(16), 3), Pool(layout(16), 4)
    piece = ScatterRange(layers=(0,), first=first, count=count, head_first=1, head_count=2)
    wanted, digests = copied_by_pool_io(source, target, piece)
    assert run_scatter(source, target, piece, num_programs=2) == digests
    assert np.array_equal(target.memory, wanted)


@pytest.mark.parametrize(("from_ranks", "to_ranks"), [(1, 2), (2, 1), (4, 2), (1, 4)])
def test_heads_go_to_pools_that_hold_others(from_ranks, to_ranks):
    digest = 0
    targets = [Pool(layout(16), 20 + rank, rank=rank, size=to_ranks) for rank in range(to_ranks)]
    sources = [Pool(layout(16), 10 + rank, rank=rank, size=from_ranks) for rank in range(from_ranks)]
    for source in sources:
        mine = source.geometry.layer(1)
        for target in targets:
            theirs = target.geometry.layer(1)
            low = max(mine.head_first, theirs.head_first)
            count = min(mine.heads.stop, theirs.heads.stop) - low
            if count <= 0:
                continue
            piece = ScatterRange(layers=(1,), first=0, count=20, head_first=low, head_count=count)
            wanted, digests = copied_by_pool_io(source, target, piece)
            assert run_scatter(source, target, piece, num_programs=1) == digests
            assert np.array_equal(target.memory, wanted)
            digest += digests[0]
    whole = sum(pool.io.digest(pool.blocks, KVRange(1, 0, 20, pool.geometry.layer(1).head_first,
                pool.geometry.layer(1).num_heads)) for pool in targets)  # fmt: skip
    assert (digest - whole) % (1 << 64) == 0


def test_other_kinds_of_layers():
    compressed = latent(144 * 4)  # 144 words: no power of two
    recurrent = state(3, 300 * 4)  # columns left over
    both = layout(16, extra=(compressed, recurrent))
    source, target = Pool(both, 5), Pool(both, 6)
    for layer, count, heads in ((2, 20, 1), (3, 1, 3)):
        piece = ScatterRange(layers=(layer,), first=0, count=count, head_first=0, head_count=heads)
        wanted, digests = copied_by_pool_io(source, target, piece)
        assert run_scatter(source, target, piece) == digests
        assert np.array_equal(target.memory, wanted)


@pytest.mark.fast
def test_many_layers_in_one_launch_each_with_its_digest():
    source, target = Pool(layout(16), 7), Pool(layout(64), 8)
    piece = ScatterRange(layers=(0, 1), first=0, count=30, head_first=0, head_count=4)
    wanted, digests = copied_by_pool_io(source, target, piece)
    assert run_scatter(source, target, piece, launches=2) == digests
    assert np.array_equal(target.memory, wanted)
    assert run_scatter(source, target, piece, with_digest=False) == [0, 0]


@pytest.mark.fast
@pytest.mark.parametrize("layers", [(0, 3, 5), (5, 1, 3), (5, 3, 1, 0)])
def test_layers_of_one_shape_in_any_order_with_others_between(layers):
    other, alike = latent(24), latent(8, heads=4, parts=2, dtype="bfloat16")
    more = (other, alike, other, alike)
    source, target = Pool(layout(16, extra=more), 7), Pool(layout(64, extra=more), 8)
    piece = ScatterRange(layers=layers, first=3, count=41, head_first=1, head_count=3)
    wanted, digests = copied_by_pool_io(source, target, piece)
    assert run_scatter(source, target, piece, launches=2) == digests
    assert np.array_equal(target.memory, wanted)


@pytest.mark.fast
def test_layers_of_two_shapes_are_no_launch():
    pool = Pool(layout(16, extra=(latent(24),)), 7)
    with pytest.raises(AssertionError, match="one shape"):
        run_scatter(pool, pool, ScatterRange(layers=(0, 2), first=0, count=3, head_first=0, head_count=1))


@pytest.mark.fast
@pytest.mark.parametrize("num_programs", [1, 5])
def test_kv_digest_is_numpys_and_torchs(num_programs):
    pool = Pool(layout(16), 9, rank=1, size=2)
    piece = ScatterRange(layers=(0, 1), first=3, count=60, head_first=2, head_count=2)
    words = np.zeros(3, dtype=np.uint64)
    before = pool.memory.copy()
    workspace = ScatterWorkspace(CPU, 128)
    completion = WriteCompletion(words.ctypes.data, 1)
    kv_digest(pool.address, pool.blocks_N, piece, workspace, completion, Tuning(num_programs))
    assert np.array_equal(pool.memory, before)
    assert words[0] == 1
    for layer in range(2):
        shape = pool.geometry.layer(layer)
        assert int(words[1 + layer]) == pool.io.digest(pool.blocks, KVRange(layer, 3, 60, 2, 2))
        flat = torch.from_numpy(pool.memory[shape.offset_bytes : shape.offset_bytes + shape.num_bytes]).view(
            torch.int64
        )
        words_NHPSW = flat.view(shape.num_blocks, 2, 2, 16, -1)
        reference = kv_digest_reference(words_NHPSW, pool.blocks, piece, layer=layer, head_first=2)
        assert reference == int(words[1 + layer])


@pytest.mark.fast
def test_the_torch_reference_moves_as_numpy_does():
    source, target = Pool(layout(16), 11), Pool(layout(64), 12)
    piece = ScatterRange(layers=(1,), first=9, count=50, head_first=1, head_count=3)
    wanted, _ = copied_by_pool_io(source, target, piece)

    def view(pool):
        shape = pool.geometry.layer(1)
        flat = torch.from_numpy(pool.memory[shape.offset_bytes : shape.offset_bytes + shape.num_bytes]).view(
            torch.int64
        )
        return flat.view(shape.num_blocks, shape.num_heads, 2, shape.rows_per_block, -1)

    kv_scatter_reference(view(source), source.blocks, view(target), target.blocks, piece)
    assert np.array_equal(target.memory, wanted)


def test_for_hopper_it_compiles_to_wide_accesses_without_spills():
    script = Path(__file__).with_name("compile_kv_move.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    for name, facts in json.loads(run.stdout)["kernels"].items():
        assert facts["spills"] == 0, name
        assert facts["registers"] <= 128, name  # 16 warps on one multiprocessor
        assert facts["wide_loads"] >= 4, name
        wanted = 0 if name.startswith("digest") else facts["wide_loads"]
        assert facts["wide_stores"] == wanted, name
        assert facts["release"] == ["atom.global.sys.acq_rel.add.u64"], name
        assert facts["fence"] and facts["flag"], name


@triton.jit
def _turns_kernel(turns, num_groups, num_units):
    for group in range(num_groups):
        first = kv_scatter_triton.first_unit(tl.program_id(0), tl.num_programs(0), group, num_units)
        for unit in range(first, num_units, tl.num_programs(0)):
            tl.store(turns + group * num_units + unit, tl.program_id(0))


@pytest.mark.fast
@pytest.mark.parametrize(("num_programs", "num_units"), [(3, 7), (4, 4), (7, 3), (1, 2), (5, 1)])
def test_tiles_go_round_the_programs_from_group_to_group(num_programs, num_units):
    turns = torch.full((9, num_units), -1, dtype=torch.int32)
    _turns_kernel[(num_programs,)](turns, 9, num_units)
    assert turns.flatten().tolist() == [tile % num_programs for tile in range(9 * num_units)]


class _Recorded:
    """A kernel whose launches are only written down."""

    def __init__(self, kernel):
        self.names, self.launches = kernel.arg_names, []

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.launches.append((dict(zip(self.names, arguments, strict=False)), constants))

        return launch


def _is_compiled(variant, arguments, constants):
    """Whether a launch is the variant: its constants, its options, and what its integers are specialized for."""
    options = {"num_warps": variant.num_warps}
    aligned = [arguments[name] % 16 == 0 for name in variant.aligned if isinstance(arguments[name], int)]
    return {**variant.constants, **options} == constants and all(aligned)


@pytest.mark.fast
def test_what_serving_launches_is_compiled_ahead_of_time(monkeypatch):
    recorded = _Recorded(kv_scatter_triton.move_kernel)
    variants = kv_scatter_triton.variants()
    monkeypatch.setattr(kv_scatter_triton, "launch_move", Launcher(recorded))
    source = Pool(layout(16, heads=8, row_len=128), 1)
    target = Pool(layout(16, heads=8, row_len=128), 2)
    tunings = [device_stream.FEW, device_stream.MANY, rank_kernels.VERIFY, rank_kernels.FILL]
    tunings += [Tuning(8, num_warps, tile_words) for num_warps, tile_words in kv_scatter_triton.FORMS]
    for tuning in tunings:
        for piece in (
            ScatterRange(layers=(1,), first=3, count=9, head_first=0, head_count=8),
            ScatterRange(layers=(0, 1), first=0, count=64, head_first=1, head_count=5),
        ):
            # The word may lie anywhere: what is aligned here is not in the next slot.
            kv_scatter(
                source.address, source.blocks_N, target.address, target.blocks_N, piece, ScatterWorkspace(CPU, 256),
                WriteCompletion(1 << 20 | 8, 1), tuning,
            )  # fmt: skip
    for arguments, constants in recorded.launches:
        assert any(_is_compiled(variant, arguments, constants) for variant in variants), constants
        numbers = {name for name, value in arguments.items() if isinstance(value, int)}
        assert numbers <= {*variants[0].aligned, *kv_scatter_triton.PLAIN}, (
            "an integer is specialized that no variant speaks of"
        )
