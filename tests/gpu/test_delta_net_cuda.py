"""On a GPU: a gated delta net's kernels at real sizes, eager and in graphs, against the torch reference in float32."""

import random

import pytest
import torch

from baton.kernels.delta_net.delta_net import DeltaState
from baton.kernels.delta_net.layer import MAX_DECODE_ROWS, DeltaKept, DeltaProjected, DeltaWeights, delta_layer
from baton.kernels.delta_net.rows import StateRows
from baton.kernels.delta_net.sizes import CONV_RING, RING, conv_len, state_len, tail_len
from baton.kernels.implementation import Implementation
from baton.tests.kernels.harness import relative_error, same_bits

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
REFERENCE, TRITON = Implementation.REFERENCE, Implementation.TRITON
HEADS, DIM = 16, 128
NEAR = 1e-4  # relative error of outputs in float32; bfloat16 outputs are rounded beside
BFLOAT16_NEAR = 2**-8


@pytest.fixture(autouse=True)
def device():
    torch.cuda.set_device(CUDA)
    torch.backends.cuda.matmul.allow_tf32 = False


class Layer:
    """Random weights, and a pool that is NaN until it is written; sequence i has slot i."""

    def __init__(self, form, num_slots, dtype=torch.float32, num_values=2, num_heads=HEADS, invariant=True):
        generator = torch.Generator(CUDA).manual_seed(3)

        def draw(*shape):
            return torch.randn(*shape, generator=generator, device=CUDA)

        sizes = DIM, DIM, num_values
        self.form, self.dtype, self.num_slots, self.num_values, self.heads = (
            form, dtype, num_slots, num_values, num_heads
        )  # fmt: skip
        self.invariant = invariant
        self.weights = DeltaWeights(
            conv_HWX=draw(num_heads, 4, conv_len(*sizes)) / 2, a_log_HG=draw(num_heads, num_values) - 1,
            dt_bias_HG=draw(num_heads, num_values) - 2, norm_V=draw(DIM), eps=1e-6,
        )  # fmt: skip
        nan = float("nan")
        conv = torch.full((num_slots + 1, num_heads, CONV_RING, conv_len(*sizes)), nan, dtype=dtype, device=CUDA)
        tail = torch.full((num_slots + 1, num_heads, RING, tail_len(*sizes)), nan, device=CUDA)
        state = torch.full((num_slots + 1, num_heads, state_len(*sizes)), nan, device=CUDA)
        self.kept = DeltaKept(conv, DeltaState(tail, state))

    def inputs(self, num_rows, seed):
        """Views of one GEMM output, [T, H, ...]."""
        generator = torch.Generator(CUDA).manual_seed(seed)
        heads, values = self.heads, self.num_values
        shapes = [(heads, DIM)] * 2 + [(heads, values * DIM), (heads, values, DIM)] + [(heads, values)] * 2
        lengths = [torch.Size(shape).numel() for shape in shapes]
        rows_TX = torch.randn(num_rows, sum(lengths), generator=generator, device=CUDA).to(self.dtype)
        return [part.unflatten(1, shape) for part, shape in zip(rows_TX.split(lengths, dim=1), shapes, strict=True)]

    def run(self, parts, rows):
        names = ("query_THK", "key_THK", "value_THX", "z_THGV", "b_THG", "a_THG")
        x = DeltaProjected(**dict(zip(names, parts, strict=True)))
        return delta_layer(x, self.weights, self.kept, rows, invariant=self.invariant, implementation=self.form)

    def chunk(self, parts, start, slot=0):
        return self.run(parts, [self.rows([start], [len(parts[0])], [slot], len(parts[0]), start)])

    def rows(self, positions, counts, slots, num_rows, start=None):
        tensors = [torch.tensor(numbers, device=CUDA) for numbers in (positions, counts, slots)]
        named = dict(zip(("positions_B", "counts_B", "slots_B"), tensors, strict=True))
        return StateRows(first_row=0, num_rows=num_rows, scratch_slot=self.num_slots, start=start, **named)


def part(parts, start, stop):
    return [x[start:stop] for x in parts]


def joined(some):
    """[(parts of one sequence)] -> parts of all, one sequence after the other."""
    return [torch.cat(x) for x in zip(*some, strict=True)]


def assert_near(found, wanted, where=""):
    assert not found.isnan().any(), where
    error = relative_error(found, wanted)
    assert error <= (NEAR if found.dtype == torch.float32 else BFLOAT16_NEAR), (where, error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("num_sequences", [1, 3, 16, 65, 256])
def test_decode_steps_are_the_reference(num_sequences, num_rows, dtype):
    """From a random state in each pool, at random places; steps whose last rows are rejected, by chance."""
    layers = [Layer(form, num_sequences, dtype) for form in (REFERENCE, TRITON)]
    rng = random.Random(num_sequences * 10 + num_rows)
    generator = torch.Generator(CUDA).manual_seed(num_rows)
    positions = [rng.randrange(1, 4096) for _ in range(num_sequences)]
    for whole in zip(*(kept_parts(layer) for layer in layers), strict=True):
        drawn = torch.randn(whole[0].shape, generator=generator, device=CUDA, dtype=torch.float32)
        for x in whole:
            x.copy_(drawn / 8)
    for layer in layers:
        # half of the tiles are behind, where they may be: a step of 8 rows at most began in the tile before
        folded = [max(p // 16 - (slot % 2 and p % 16 < MAX_DECODE_ROWS), 0) for slot, p in enumerate(positions)]
        count_at = layer.num_values * DIM * DIM
        layer.kept.state.state_NHZ[:num_sequences, :, count_at] = torch.tensor(folded, device=CUDA)[:, None].float()
        decay = layer.kept.state.tail_NHRY[..., DIM + layer.num_values * DIM :]
        decay.copy_(-decay.abs())
    for step in range(6):
        parts = layers[0].inputs(num_sequences * num_rows, step)
        rows = layers[0].rows(positions, [num_rows] * num_sequences, list(range(num_sequences)), num_rows)
        wanted, found = (layer.run(parts, [rows]) for layer in layers)
        assert_near(found, wanted, step)
        positions = [position + rng.randint(1, num_rows) for position in positions]


def kept_parts(layer):
    return layer.kept.conv_NHRX, layer.kept.state.tail_NHRY, layer.kept.state.state_NHZ


@pytest.mark.parametrize("num_values", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 100, 512, 2048])
@pytest.mark.parametrize("invariant", [True, False])
def test_chunks_are_the_reference(length, num_values, invariant):
    """From position 0, and from odd places behind it; then both forms go on with the pool of the other."""
    layers = [Layer(form, 2, num_values=num_values, invariant=invariant) for form in (REFERENCE, TRITON)]
    at = 0
    for index, size in enumerate((length, 5, length, 3, length)):
        parts = layers[0].inputs(size, index)
        wanted, found = (layer.chunk(parts, at) for layer in layers)
        assert_near(found, wanted, index)
        at += size
    layers[0].form, layers[1].form = TRITON, REFERENCE
    for size in (1, 18):
        parts = layers[0].inputs(size, size)
        assert_near(layers[0].chunk(parts, at), layers[1].chunk(parts, at), "taken over")
        at += size


@pytest.mark.parametrize("length", [15, 16, 100, 2048])
def test_bfloat16_chunks_by_blocks_are_the_reference(length):
    """GEMMs of half precision; with decode steps between that leave a tile behind."""
    layers = [Layer(form, 2, torch.bfloat16, invariant=False) for form in (REFERENCE, TRITON)]
    at = 0
    for index, size in enumerate((length, 7, length)):
        parts = layers[0].inputs(size, index)
        wanted, found = (layer.chunk(parts, at) for layer in layers)
        assert_near(found, wanted, index)
        at += size
        parts = layers[0].inputs(8, 50 + index)
        rows = layers[0].rows([at], [8], [0], 8)
        wanted, found = (layer.run(parts, [rows]) for layer in layers)
        assert_near(found, wanted, (index, "step"))
        at += 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("start", "length"), [(0, 2048), (21, 8192)])
@pytest.mark.parametrize(("rate", "is_alike", "beta"), [(-8, True, 6), (-8, False, 6), (2, False, 0), (2, True, 6)])
def test_long_chunks_are_near_with_keys_alike_and_decay_of_any_strength(rate, is_alike, beta, start, length, dtype):
    """Against float32 of the same inputs; what is rounded to bfloat16 behind it is rounded in both."""
    layers = [Layer(REFERENCE, 1, invariant=False), Layer(TRITON, 1, dtype, invariant=False)]
    for layer in layers:
        layer.weights.a_log_HG.fill_(rate)
    for at, size in ((0, start), (start, length)):
        parts = layers[1].inputs(size, at)
        parts[4].fill_(beta)
        if is_alike:
            parts[1][:] = layers[1].inputs(1, 7)[1]
        if not size:
            continue
        wanted = layers[0].chunk([x.float() for x in parts], at)
        found = layers[1].chunk(parts, at).float()
        error, state_error = (
            relative_error(one, other)
            for one, other in (
                (found, wanted),
                [layer.kept.state.state_NHZ[0, :, : 2 * DIM * DIM] for layer in reversed(layers)],
            )
        )
        assert error <= (NEAR if dtype == torch.float32 else BFLOAT16_NEAR), at
        assert state_error <= (NEAR if dtype == torch.float32 else 2 * BFLOAT16_NEAR), at


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 37, 2048])
def test_several_chunks_go_in_one_launch(start, dtype):
    """Of different lengths, against each by itself; rows that are not real are 0."""
    counts, num_rows = [300, 1, 64, 0, 129], 300
    layers = [Layer(form, 5, dtype, invariant=False) for form in (REFERENCE, TRITON)]
    if start:
        for slot in range(5):
            for layer in layers:
                layer.chunk(layer.inputs(start, slot), 0, slot)
    parts = layers[0].inputs(5 * num_rows, 9)
    rows = layers[0].rows([start] * 5, counts, list(range(5)), num_rows, start)
    found = layers[1].run(parts, [rows]).unflatten(0, (5, num_rows))
    for slot, count in enumerate(counts):
        assert found[slot, count:].eq(0).all()
        if count:
            first = slot * num_rows
            assert_near(found[slot, :count], layers[0].chunk(part(parts, first, first + count), start, slot), slot)
    parts = layers[0].inputs(5, 10)
    rows = layers[0].rows([start + count for count in counts], [int(count > 0) for count in counts], list(range(5)), 1)
    wanted, found = (layer.run(parts, [rows]) for layer in layers)
    is_real = torch.tensor(counts, device=CUDA) > 0
    assert_near(found[is_real], wanted[is_real], "next")


LENGTH = 150


@pytest.fixture(scope="module")
def texts():
    """Three sequences' inputs, and what the reference makes of them."""
    torch.cuda.set_device(CUDA)
    layer = Layer(REFERENCE, 1)
    inputs = [layer.inputs(LENGTH, seed) for seed in range(3)]
    return inputs, [layer.chunk(parts, 0) for parts in inputs]


def one_after_the_other(parts):
    layer = Layer(TRITON, 1)
    found = [layer.chunk(part(parts, 0, 1), 0)]
    for at in range(1, LENGTH):
        found.append(layer.run(part(parts, at, at + 1), [layer.rows([at], [1], [0], 1)]))
    return torch.cat(found)


def test_two_hundred_cuts(texts):
    parts, wanted = texts[0][0], texts[1][0]
    steps = one_after_the_other(parts)
    assert_near(steps, wanted)
    layer, num_unequal = Layer(TRITON, 1), 0
    for seed in range(200):
        rng, at, found = random.Random(seed), 0, []
        while at < LENGTH:
            count = min(rng.choice([1, 1, 2, 3, 4, 7, 15, 16, 17, 33, 64]), LENGTH - at)
            if at and count <= 4 and rng.random() < 0.4:
                found.append(layer.run(part(parts, at, at + count), [layer.rows([at], [count], [0], count)]))
            else:
                found.append(layer.chunk(part(parts, at, at + count), at))
            at += count
        assert_near(torch.cat(found), wanted, seed)
        num_unequal += not same_bits(torch.cat(found), steps)
    assert num_unequal == 0, "cuts have other bits than one row after the other"


def test_speculation_traces(texts):
    """Drafts are right or wrong by chance, rows without room among them; bits are those of one row after the other."""
    parts, wanted = texts
    steps = [one_after_the_other(x) for x in parts]
    num_unequal = 0
    for seed in range(70):
        rng, layer = random.Random(f"trace {seed}"), Layer(TRITON, 3)
        found, ats = [], []
        for slot in range(3):
            ats.append(rng.randint(1, 60))
            found.append([layer.chunk(part(parts[slot], 0, ats[slot]), 0, slot)])
        while min(ats) < LENGTH:
            num_rows = rng.randint(1, 5)
            running = [slot for slot in range(3) if ats[slot] < LENGTH]
            some, counts, goods = [], [], []
            for slot in running:
                good = min(rng.randint(1, num_rows), LENGTH - ats[slot])
                wrong = layer.inputs(num_rows - good, rng.randrange(1 << 30))
                some.append(joined([part(parts[slot], ats[slot], ats[slot] + good), wrong]))
                counts.append(rng.randint(good, num_rows))
                goods.append(good)
            rows = layer.rows([ats[slot] for slot in running], counts, running, num_rows)
            out_BLX = layer.run(joined(some), [rows]).unflatten(0, (len(running), num_rows))
            for index, slot in enumerate(running):
                found[slot].append(out_BLX[index, : goods[index]])
                ats[slot] += goods[index]
        for slot in range(3):
            assert_near(torch.cat(found[slot]), wanted[slot], (seed, slot))
            num_unequal += not same_bits(torch.cat(found[slot]), steps[slot])
    assert num_unequal == 0, "texts have other bits than one row after the other"


def test_decode_rows_have_the_same_bits_in_any_batch():
    layer = Layer(TRITON, 64)
    parts = layer.inputs(64 * 40, 1)
    by_sequence = [x.unflatten(0, (64, 40)) for x in parts]
    for slot in range(64):
        layer.chunk([x[slot, : 20 + slot % 16] for x in by_sequence], 0, slot)
    before = [x.clone() for x in kept_parts(layer)]
    positions = [20 + slot % 16 for slot in range(64)]
    found = {}
    for group in (1, 3, 16, 64):
        for x, was in zip(kept_parts(layer), before, strict=True):
            x.copy_(was)
        out = []
        for first in range(0, 64, group):
            slots = list(range(first, min(first + group, 64)))
            some = joined([[x[slot, positions[slot] : positions[slot] + 4] for x in by_sequence] for slot in slots])
            rows = layer.rows([positions[slot] for slot in slots], [4] * len(slots), slots, 4)
            out.append(layer.run(some, [rows]))
        found[group] = torch.cat(out)
    for group, out in found.items():
        assert same_bits(out, found[1]), group


def test_a_captured_step_is_the_eager_one_and_never_waits():
    layers = [Layer(TRITON, 16, torch.bfloat16) for _ in range(2)]
    prompt = layers[0].inputs(16 * 30, 2)
    for layer in layers:
        for slot in range(16):
            layer.chunk(part(prompt, slot * 30, slot * 30 + 14 + slot), 0, slot)
    positions = [14 + slot for slot in range(16)]
    rows = layers[0].rows(positions, [3] * 16, list(range(16)), 3)
    static = layers[0].inputs(48, 3)
    saved = [x.clone() for x in kept_parts(layers[0])]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        layers[0].run(static, [rows])
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            out_TX = layers[0].run(static, [rows])
            graph.capture_end()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for x, was in zip(kept_parts(layers[0]), saved, strict=True):
        x.copy_(was)
    for step in range(8):
        parts = layers[0].inputs(48, 100 + step)
        for x, new in zip(static, parts, strict=True):
            x.copy_(new)
        graph.replay()
        assert same_bits(out_TX, layers[1].run(parts, [rows]))
        rows.positions_B.add_(torch.tensor([1 + (slot + step) % 3 for slot in range(16)], device=CUDA))
    for one, other in zip(kept_parts(layers[0]), kept_parts(layers[1]), strict=True):
        assert same_bits(one, other)
