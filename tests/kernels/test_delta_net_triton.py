"""A gated delta net's kernels in the interpreter: against the torch reference, and against themselves however cut.

Pools begin as NaN and lie between canaries. Layers are of two key heads, of 16 unless said, with one to four value
heads each.
"""

import random
from dataclasses import replace

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.delta_net import causal_conv_triton
from baton.kernels.delta_net.delta_net import DeltaState
from baton.kernels.delta_net.layer import (
    MAX_GATED_ROWS,
    DeltaKept,
    DeltaProjected,
    DeltaWeights,
    StateGates,
    delta_layer,
)
from baton.kernels.delta_net.rows import StateRows
from baton.kernels.delta_net.sizes import CONV_RING, RING, state_len, tail_len, unfit_delta_sizes
from baton.kernels.implementation import Implementation
from baton.tests.kernels.harness import Guards, relative_error, same_bits, strided

HEADS, KEY, NUM_SLOTS = 2, 16, 4
REFERENCE, TRITON = Implementation.REFERENCE, Implementation.TRITON
SLOW, LONG = pytest.mark.slow, pytest.mark.long
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-7}
BLOCKS_TOLERANCE = TOLERANCE | {torch.float32: 5e-6}  # blocks of 64 add in another order


class Layer:
    """Random weights, and a pool of its own."""

    def __init__(self, form, dtype=torch.float32, num_values=2, value_dim=16, num_taps=4, invariant=True, key_dim=KEY):
        generator = torch.Generator().manual_seed(3)

        def draw(*shape):
            return torch.randn(*shape, generator=generator)

        self.form, self.dtype, self.invariant = form, dtype, invariant
        self.sizes = sizes = key_dim, value_dim, num_values
        self.channels = 2 * key_dim + num_values * value_dim
        self.weights = DeltaWeights(
            conv_HWX=draw(HEADS, num_taps, self.channels), a_log_HG=draw(HEADS, num_values) - 1,
            dt_bias_HG=draw(HEADS, num_values) - 2, norm_V=draw(value_dim), eps=1e-6,
        )  # fmt: skip
        self.guards = Guards()
        conv = self.guards.empty(NUM_SLOTS + 1, HEADS, CONV_RING, self.channels, dtype=dtype)
        tail = self.guards.empty(NUM_SLOTS + 1, HEADS, RING, tail_len(*sizes), dtype=torch.float32)
        state = self.guards.empty(NUM_SLOTS + 1, HEADS, state_len(*sizes), dtype=torch.float32)
        self.kept = DeltaKept(conv, DeltaState(tail, state))

    def inputs(self, length, seed=0):
        """Of consecutive positions, each [length, ...]."""
        key_dim, value_dim, num_values = self.sizes
        generator = torch.Generator().manual_seed(seed)
        shapes = [(HEADS, key_dim)] * 2 + [(HEADS, num_values * value_dim), (HEADS, num_values, value_dim)]
        shapes += [(HEADS, num_values)] * 2
        return [torch.randn(length, *shape, generator=generator).to(self.dtype) for shape in shapes]

    def run(self, parts, rows):
        """Outputs [T, ...] of inputs [T, ...]."""
        names = ("query_THK", "key_THK", "value_THX", "z_THGV", "b_THG", "a_THG")
        x = DeltaProjected(**dict(zip(names, parts, strict=True)))
        return delta_layer(x, self.weights, self.kept, rows, invariant=self.invariant, implementation=self.form)

    def run_left(self, parts, gates, rows):
        """The same of inputs without b and a, which are left to the convolution."""
        x = DeltaProjected(
            **dict(zip(("query_THK", "key_THK", "value_THX", "z_THGV"), parts, strict=True)), gates=gates
        )
        return delta_layer(x, self.weights, self.kept, rows, invariant=self.invariant, implementation=self.form)

    def chunk(self, inputs, start, slot=0):
        length = len(inputs[0])
        return self.run(inputs, [rows_of([start], [length], [slot], length, start=start)])

    def decode(self, parts, num_rows, counts=None):
        """(inputs, first position, slot) each -> outputs [B, L, ...]."""
        rows = rows_of([p for _, p, _ in parts], counts or [num_rows] * len(parts), [s for *_, s in parts], num_rows)
        inputs = [torch.cat(x) for x in zip(*(inputs for inputs, _, _ in parts), strict=True)]
        return self.run(inputs, [rows]).unflatten(0, (len(parts), num_rows))


def rows_of(positions, counts, slots, num_rows, start=None, first_row=0):
    tensors = [torch.tensor(numbers) for numbers in (positions, counts, slots)]
    names = ("positions_B", "counts_B", "slots_B")
    named = dict(zip(names, tensors, strict=True))
    return StateRows(first_row=first_row, num_rows=num_rows, scratch_slot=NUM_SLOTS, start=start, **named)


def part(inputs, start, stop):
    return [x[start:stop] for x in inputs]


def assert_near(found, wanted, dtype=torch.float32, tolerances=TOLERANCE):
    tolerance = tolerances[dtype]
    assert found.dtype == wanted.dtype == dtype
    assert wanted.float().std() > 0.05
    assert torch.allclose(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)


def plain(layer, inputs, slot=0):
    """Outputs of every position, one after the other."""
    found = [layer.chunk(part(inputs, 0, 1), 0, slot)]
    for at in range(1, len(inputs[0])):
        found.append(layer.decode([(part(inputs, at, at + 1), at, slot)], 1)[0])
    return torch.cat(found)


SHAPES = [
    {},
    {"num_values": 1, "value_dim": 32, "num_taps": 2},
    {"num_values": 3, "num_taps": 5},
    {"num_values": 4, "value_dim": 64, "dtype": torch.bfloat16},
]
LENGTHS = ((1, 50, 16), (16, 17, 3), (33, 15, 32))  # of chunks one after the other


@pytest.mark.parametrize("shape", [*SHAPES[:3], pytest.param(SHAPES[3], marks=SLOW)])
def test_one_position_after_the_other_is_the_reference(shape):
    reference, triton = Layer(REFERENCE, **shape), Layer(TRITON, **shape)
    inputs = reference.inputs(18)
    assert_near(plain(triton, inputs), reference.chunk(inputs, 0), reference.dtype)
    triton.guards.check()


@pytest.mark.parametrize("key_dim", [64, pytest.param(128, marks=SLOW)])
def test_keys_of_several_parts_are_the_reference_and_have_the_same_bits_however_cut(key_dim):
    """A tile's keys lie in parts of 32 channels, of which heads of 16 have one."""
    reference, triton, whole = (Layer(form, key_dim=key_dim) for form in (REFERENCE, TRITON, TRITON))
    inputs = reference.inputs(18)
    found = plain(triton, inputs)
    assert_near(found, reference.chunk(inputs, 0))
    assert same_bits(whole.chunk(inputs, 0), found)
    triton.guards.check()


@pytest.mark.parametrize(
    ("length", "shape"),
    [
        *((17, shape) for shape in SHAPES[:3]),
        (1, SHAPES[3]),
        *(pytest.param(length, shape, marks=SLOW) for length in (1, 16) for shape in SHAPES[:3]),
        *(pytest.param(length, SHAPES[3], marks=SLOW) for length in (16, 17)),
    ],
)
def test_a_chunk_is_the_reference_and_leaves_what_the_reference_goes_on_with(shape, length):
    """And the other way round: pools of both forms are one."""
    layers = [Layer(form, **shape) for form in (REFERENCE, TRITON)]
    inputs = layers[0].inputs(length + 40)
    first = [layer.chunk(part(inputs, 0, length), 0, 1) for layer in layers]
    assert_near(first[1], first[0], layers[0].dtype)
    layers[0].form, layers[1].form = TRITON, REFERENCE
    more = [layer.chunk(part(inputs, length, length + 19), length, 1) for layer in layers]
    assert_near(more[1], more[0], layers[0].dtype)
    for at in range(length + 19, length + 25, 3):
        step = [layer.decode([(part(inputs, at, at + 3), at, 1)], 3)[0] for layer in layers]
        assert_near(step[1], step[0], layers[0].dtype)
    for layer in layers:
        layer.guards.check()


@pytest.mark.parametrize("seeds", [(0, 1), pytest.param((2, 3, 4, 5), marks=SLOW)])
def test_a_prompt_cut_anywhere_has_the_bits_of_one_position_after_the_other(seeds):
    wanted, length = None, 36
    for seed in seeds:
        rng, layer, at, found = random.Random(seed), Layer(TRITON, num_values=1), 0, []
        inputs = layer.inputs(length)
        if wanted is None:
            wanted = plain(Layer(TRITON, num_values=1), inputs)
        while at < length:
            count = min(rng.choice([1, 2, 3, 7, 15, 16, 17, 33]), length - at)
            if at and count <= 7:  # rows of a step that decodes, all accepted
                found.append(layer.decode([(part(inputs, at, at + count), at, 0)], count)[0])
            else:
                found.append(layer.chunk(part(inputs, at, at + count), at))
            at += count
        assert same_bits(torch.cat(found), wanted), seed
    assert_near(wanted, Layer(REFERENCE, num_values=1).chunk(inputs, 0))


@pytest.mark.parametrize("seeds", [(0,), pytest.param((1, 2, 3), marks=SLOW)])
def test_speculation_of_any_depth_and_luck_has_the_bits_of_one_position_after_the_other(seeds):
    """Three sequences in one step, whose drafts are right or wrong by chance, and rows without room."""
    length = 24
    texts = [Layer(TRITON, num_values=1).inputs(length, seed) for seed in range(3)]
    wanted = [plain(Layer(TRITON, num_values=1), inputs) for inputs in texts]
    for seed in seeds:
        rng, layer = random.Random(f"trace {seed}"), Layer(TRITON, num_values=1)
        found, ats = [], []
        for slot, inputs in enumerate(texts):
            ats.append(rng.randint(6, 15))
            found.append([layer.chunk(part(inputs, 0, ats[slot]), 0, slot)])
        while min(ats) < length:
            num_rows = rng.randint(1, 7)
            running = [slot for slot in range(3) if ats[slot] < length]
            parts, counts, goods = [], [], []
            for slot in running:
                good = min(rng.randint(1, num_rows), length - ats[slot])
                rows = part(texts[slot], ats[slot], ats[slot] + good)
                wrong = layer.inputs(num_rows - good, rng.randrange(1 << 30))
                parts.append(([torch.cat(pair) for pair in zip(rows, wrong, strict=True)], ats[slot], slot))
                counts.append(rng.randint(good, num_rows))
                goods.append(good)
            out_BLX = layer.decode(parts, num_rows, counts)
            for index, slot in enumerate(running):
                assert out_BLX[index, counts[index] :].eq(0).all()
                found[slot].append(out_BLX[index, : goods[index]])
                ats[slot] += goods[index]
        layer.guards.check()
        for slot in range(3):
            assert same_bits(torch.cat(found[slot]), wanted[slot]), (seed, slot)


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        *((LENGTHS[0], shape) for shape in SHAPES[:2]),
        *((lengths, SHAPES[1]) for lengths in LENGTHS[1:]),
        *(pytest.param(LENGTHS[0], shape, marks=SLOW) for shape in SHAPES[2:]),
        *(pytest.param(lengths, SHAPES[at], marks=SLOW) for lengths in LENGTHS[1:] for at in (0, 2, 3)),
    ],
)
def test_chunks_by_blocks_are_the_reference_with_decode_steps_between(shape, lengths):
    """Default numerics; a decode step before each chunk may leave a tile that is behind, and ends within one."""
    layers = [Layer(form, invariant=False, **shape) for form in (REFERENCE, TRITON)]
    inputs, at = layers[0].inputs(130), 0
    for length in lengths:
        found = [layer.chunk(part(inputs, at, at + length), at) for layer in layers]
        assert_near(found[1], found[0], layers[0].dtype, BLOCKS_TOLERANCE)
        at += length
        for num_rows in (8, 3):
            found = [layer.decode([(part(inputs, at, at + num_rows), at, 0)], num_rows) for layer in layers]
            assert_near(found[1], found[0], layers[0].dtype, BLOCKS_TOLERANCE)
            at += num_rows
    for layer in layers:
        layer.guards.check()


@pytest.mark.parametrize(
    ("shape", "seeds"),
    [
        ({"num_values": 1}, (0, 1)),
        ({"num_values": 3, "value_dim": 32, "num_taps": 5}, (2,)),
        pytest.param({"num_values": 2, "num_taps": 2}, (3, 4, 5, 6), marks=SLOW),
    ],
)
def test_a_prompt_by_blocks_may_be_cut_anywhere(shape, seeds):
    """Default numerics: chunks begin and end anywhere in tiles and blocks, with decode steps among them."""
    length = 300
    inputs = Layer(REFERENCE, **shape).inputs(length)
    wanted = Layer(REFERENCE, invariant=False, **shape).chunk(inputs, 0)
    for seed in seeds:
        rng, layer, at, found = random.Random(seed), Layer(TRITON, invariant=False, **shape), 0, []
        while at < length:
            count = min(rng.choice([1, 3, 8, 15, 16, 40, 63, 64, 65, 100, 129]), length - at)
            if at and count <= 8:
                found.append(layer.decode([(part(inputs, at, at + count), at, 0)], count)[0])
            else:
                found.append(layer.chunk(part(inputs, at, at + count), at))
            at += count
        layer.guards.check()
        assert_near(torch.cat(found), wanted)


@pytest.mark.parametrize(
    ("start", "counts", "is_behind"),
    [
        (0, (70, 1, 64, 0), False),
        (21, (5, 100, 0, 43), True),
        *(
            pytest.param(start, counts, is_behind, marks=SLOW)
            for start, counts, is_behind in ((21, (5, 100, 0, 43), False), (32, (128, 33, 100, 7), True))
        ),
    ],
)
def test_several_sequences_go_by_blocks_in_one_launch(start, counts, is_behind):
    """Of different lengths, from random states, against each by itself: what is not real is 0 and writes nothing."""
    layers = [Layer(form, invariant=False) for form in (REFERENCE, TRITON)]
    num_rows, slots = max(counts), [2, 0, 3, 1]
    inputs = layers[0].inputs(4 * num_rows)
    for layer in layers:
        generator = torch.Generator().manual_seed(7)
        for x in layer.kept.parts:
            x.copy_(torch.randn(x.shape, generator=generator) / 8)
        _, tail, state = layer.kept.parts
        tail[..., KEY + 2 * 16 :] = -tail[..., KEY + 2 * 16 :].abs()
        state[:, :, 2 * KEY * 16] = start // 16 - is_behind
    before = [x.clone() for x in layers[1].kept.parts]
    rows = rows_of([start] * 4, counts, slots, num_rows, start=start)
    out_BLX = layers[1].run(inputs, [rows]).unflatten(0, (4, num_rows))
    layers[1].guards.check()
    for index, (slot, count) in enumerate(zip(slots, counts, strict=True)):
        assert out_BLX[index, count:].eq(0).all()
        if not count:
            for was, now in zip(before, layers[1].kept.parts, strict=True):
                assert same_bits(was[slot], now[slot])
            continue
        its_inputs = part(inputs, index * num_rows, index * num_rows + count)
        assert relative_error(out_BLX[index, :count], layers[0].chunk(its_inputs, start, slot)) < 3e-6
        end = start + count
        for its, ring, begin, length in ((0, CONV_RING, max(end - 3, 0), 64), (1, RING, end // 16 * 16, 50)):
            for position in range(begin, end):
                wanted, found = (layer.kept.parts[its][slot, :, position % ring, :length] for layer in layers)
                assert relative_error(found, wanted) < 3e-6, (its, position)
        wanted, found = (layer.kept.state.state_NHZ[slot, :, : 2 * KEY * 16 + 1] for layer in layers)
        assert relative_error(found, wanted) < 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rate", "is_alike", "beta"), [(-9, True, 9), (-9, False, 9), (3, False, 0), (3, True, 9)])
def test_blocks_are_near_with_keys_alike_and_decay_of_any_strength(rate, is_alike, beta, dtype):
    """Powers of what rows take from each other would be past float32, and sums of decays are far below 0."""
    outs, states = [], []
    for form, its_dtype in ((REFERENCE, torch.float32), (TRITON, dtype)):
        layer = Layer(form, its_dtype, invariant=False)
        layer.weights.a_log_HG.fill_(rate)
        inputs = Layer(form, dtype).inputs(200)
        if is_alike:
            inputs[1][:] = inputs[1][:1]
        inputs[4].fill_(beta)
        outs.append(layer.chunk([x.to(its_dtype) for x in inputs], 0).float())
        states.append(layer.kept.state.state_NHZ[0, :, : 2 * KEY * 16])
    # of a state that each row almost writes anew, sums are small beside what is added
    most_state, most_out = {torch.float32: (3e-5, 3e-6), torch.bfloat16: (2**-7, 2**-7)}[dtype]
    assert relative_error(states[1], states[0]) < most_state
    assert relative_error(outs[1], outs[0]) < most_out


@pytest.mark.long
@pytest.mark.parametrize("num_rows", [1, pytest.param(2, marks=LONG), pytest.param(8, marks=LONG)])
@pytest.mark.parametrize(("places", "is_behind"), [((0, 3, 6, 7), True), ((0, 8, 12, 15), False)])
def test_decode_rows_from_any_state_and_any_ring(num_rows, places, is_behind):
    """Every number of the pool is random. The tile before the step's may be behind where a step of 8 rows at most can
    have begun in it, and nowhere else: there k and g of a longer step would lie where the fold reads."""
    found = []
    for form in (REFERENCE, TRITON):
        layer, generator = Layer(form, num_values=2), torch.Generator().manual_seed(7)
        for x in layer.kept.parts:
            x.copy_(torch.randn(x.shape, generator=generator) / 8)
        _, tail, state = layer.kept.parts
        tail[..., KEY + 2 * 16 :] = -tail[..., KEY + 2 * 16 :].abs()
        positions = [16 * (2 + slot) + place for slot, place in enumerate(places)]
        state[:NUM_SLOTS, :, 2 * KEY * 16] = torch.tensor([p // 16 - is_behind for p in positions])[:, None].float()
        steps = []
        for step in range(3):
            inputs = layer.inputs(num_rows, step)
            steps.append(layer.decode([(inputs, p, slot) for slot, p in enumerate(positions)], num_rows))
            positions = [p + 1 + (slot + step) % num_rows for slot, p in enumerate(positions)]
        layer.guards.check()
        found.append(torch.stack(steps))
    assert_near(found[1], found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 5, *(pytest.param(n, marks=LONG) for n in (3, 4, 8))])
def test_decode_rows_have_the_same_bits_where_each_is_a_program_of_its_own(num_rows, dtype, monkeypatch):
    """How many decode beside a sequence decides that; a tile ends in a step, behind its first row, or not at all."""
    found = []
    for most in (0, 4 * num_rows):  # of rows that are programs of their own
        monkeypatch.setattr(causal_conv_triton, "_MAX_APART", most)
        layer, generator = Layer(TRITON, dtype), torch.Generator().manual_seed(5)
        conv, tail, state = layer.kept.parts
        for x in (conv, tail, state):
            x.copy_(torch.randn(x.shape, generator=generator) / 8)
        tail[..., KEY + 2 * 16 :] = -tail[..., KEY + 2 * 16 :].abs()
        state[:, :, 2 * KEY * 16] = 1
        parts = [(layer.inputs(num_rows, slot), p, slot) for slot, p in enumerate((29, 31, 0))]
        out_BLX = layer.decode(parts, num_rows, [num_rows, num_rows, min(num_rows, 2)])
        layer.guards.check()
        found.append((out_BLX, *(x[:NUM_SLOTS] for x in layer.kept.parts)))
    for apart, together in zip(*found, strict=True):
        assert same_bits(apart, together)
    assert found[0][0].float().std() > 0.05


def gates_of(num_rows, num_values, row_len, dtype, *, interleaved=False, whole=False):
    """Rows and weights that the state's gates are products of; of whole 32nds, whose sums are exact, if `whole`."""
    generator = torch.Generator().manual_seed(row_len)

    def draw(*shape):
        if whole:
            return (torch.randint(-8, 9, shape, generator=generator) / 32).to(dtype)
        return (torch.randn(*shape, generator=generator) / 4).to(dtype)

    x_TD = draw(num_rows, 2 * row_len)[:, :row_len]  # strided
    weight_XD = draw(2 * HEADS * num_values, row_len)
    if interleaved:
        return StateGates(x_TD, *weight_XD.unflatten(0, (HEADS, 2, num_values)).unbind(1))
    return StateGates(x_TD, *weight_XD.unflatten(0, (2, HEADS, num_values)).unbind(0))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("shape", "row_len"),
    [({}, 8), ({"num_values": 3, "num_taps": 5}, 300), ({"num_values": 1, "value_dim": 32, "num_taps": 2}, 512)],
)
def test_gates_that_are_left_to_the_convolution_have_the_bits_of_a_launch_of_their_own(shape, row_len, interleaved):
    """From sums that are exact; also rows that are not real, and a state that is folded in the step."""
    apart, left = Layer(TRITON, **shape), Layer(TRITON, **shape)
    num_values = apart.sizes[2]
    inputs = apart.inputs(3, seed=5)
    for layer in (apart, left):
        for slot, length in enumerate((15, 16, 4)):
            layer.chunk(layer.inputs(length, seed=slot), 0, slot)
    rows = rows_of([15, 16, 4], [1, 1, 0], [0, 1, 2], 1)
    gates = gates_of(3, num_values, row_len, apart.dtype, interleaved=interleaved, whole=True)
    wanted = apart.run([*inputs[:4], *gates.project()], [rows])
    found = left.run_left(inputs[:4], gates, [rows])
    assert same_bits(found, wanted)
    for was, now in zip(apart.kept.parts, left.kept.parts, strict=True):
        assert same_bits(was, now)
    left.guards.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_that_are_left_to_the_convolution_are_the_reference(dtype):
    reference, triton = Layer(REFERENCE, dtype=dtype), Layer(TRITON, dtype=dtype)
    found, wanted = [], []
    for at in range(18):
        inputs = part(reference.inputs(18), at, at + 1)
        gates = gates_of(1, 2, 96, dtype)
        rows = rows_of([at], [1], [0], 1)
        wanted.append(reference.run_left(inputs[:4], gates, [rows]))
        found.append(triton.run_left(inputs[:4], gates, [rows]))
    assert_near(torch.cat(found), torch.cat(wanted), dtype)
    triton.guards.check()


@pytest.mark.long
@pytest.mark.parametrize("length", [1, pytest.param(15, marks=LONG), 16, pytest.param(33, marks=LONG)])
def test_the_image_of_a_slot_is_that_of_the_layout(length):
    """What the layout says a prompt keeps is enough: all else of a slot may be lost, and the text goes on as it was."""
    kept, copied = Layer(TRITON), Layer(TRITON)
    inputs = kept.inputs(length + 4)
    kept.chunk(part(inputs, 0, length), 0)
    (conv, tail, state), (conv2, tail2, state2) = kept.kept.parts, copied.kept.parts
    state2[1] = state[0]
    assert int(state[0, 0, 2 * KEY * 16]) == length // 16
    for position in range(length - length % 16, length):
        tail2[1, :, position % RING] = tail[0, :, position % RING]
    for position in range(max(0, length - 3), length):
        conv2[1, :, position % CONV_RING] = conv[0, :, position % CONV_RING]
    rows = part(inputs, length, length + 4)
    assert same_bits(kept.decode([(rows, length, 0)], 4), copied.decode([(rows, length, 1)], 4))


@pytest.mark.long
def test_rows_that_are_not_real_write_nothing_and_read_nothing():
    layer = Layer(TRITON)
    inputs = layer.inputs(30)
    layer.chunk(part(inputs, 0, 20), 0, 2)
    before = [x.clone() for x in layer.kept.parts]
    out_BLX = layer.decode([(part(inputs, 0, 3), 0, 2), (part(inputs, 0, 3), 20, 2)], 3, counts=[0, 0])
    assert out_BLX.eq(0).all()
    for was, now in zip(before, layer.kept.parts, strict=True):
        assert same_bits(was, now)


@pytest.mark.fast
@LONG
def test_a_pass_of_chunks_and_decode_rows_with_strided_views():
    """As a layer has them: columns of one GEMM output, numbers that are columns of a table."""
    found = []
    for form in (REFERENCE, TRITON):
        layer = Layer(form)
        inputs = layer.inputs(60)
        for slot in (0, 1):
            layer.chunk(part(inputs, 0, 17 + slot), 0, slot)
        some = [
            rows_of([0], [9], [2], 9, start=0),
            rows_of([0], [20], [3], 20, start=0, first_row=9),
            rows_of([17, 18], [4, 3], [0, 1], 4, first_row=29),
        ]
        some[2] = replace(
            some[2], **{name: strided(getattr(some[2], name)) for name in ("positions_B", "counts_B", "slots_B")}
        )
        wide_TX = torch.cat([x[:37].flatten(1) for x in inputs], dim=1)
        parts = [
            view.unflatten(1, x.shape[1:])
            for view, x in zip(wide_TX.split([x[0].numel() for x in inputs], dim=1), inputs, strict=True)
        ]
        out_TX = layer.run(parts, some)
        found.append(torch.cat([out_TX[:36]]))  # the last row is not real
        layer.guards.check()
    assert_near(found[1], found[0])


@pytest.mark.fast
def test_what_does_not_fit_is_refused_by_name():
    layer = Layer(TRITON)
    inputs = layer.inputs(9)
    with pytest.raises(KernelArgumentInvalid, match="rows: are 9 of a sequence that decodes, not 8 at most"):
        layer.decode([(inputs, 20, 0)], 9)
    with pytest.raises(KernelArgumentInvalid, match="rows: are 8 of 9"):
        layer.run(inputs, [rows_of([0], [8], [0], 8, start=0)])
    with pytest.raises(KernelArgumentInvalid, match="key_THK"):
        layer.run([inputs[0], inputs[1].bfloat16(), *inputs[2:]], [rows_of([0], [9], [0], 9, start=0)])
    with pytest.raises(KernelArgumentInvalid, match="z_THGV"):
        layer.run([*inputs[:3], inputs[3][:8], *inputs[4:]], [rows_of([0], [9], [0], 9, start=0)])
    gates = gates_of(2, 2, 8, torch.float32)
    of_one_row = [x[:2] for x in inputs[:4]]
    for unfit in (rows_of([0], [2], [0], 2, start=0), rows_of([0], [2], [0], 2)):
        with pytest.raises(KernelArgumentInvalid, match=f"gates: are .* one of each of {MAX_GATED_ROWS} sequences"):
            layer.run_left(of_one_row, gates, [unfit])
    two = rows_of([0, 0], [1, 1], [0, 1], 1)
    with pytest.raises(KernelArgumentInvalid, match="x_TD"):
        layer.run_left(of_one_row, replace(gates, x_TD=gates.x_TD.bfloat16()), [two])
    with pytest.raises(KernelArgumentInvalid, match="a_HGD"):
        layer.run_left(of_one_row, replace(gates, a_HGD=gates.a_HGD[..., :7]), [two])
    kept, state = layer.kept, layer.kept.state.state_NHZ
    odd = torch.empty(len(state), HEADS, state.shape[2] + 1)[..., :-1]
    layer.kept = replace(kept, state=replace(kept.state, state_NHZ=odd))
    with pytest.raises(KernelArgumentInvalid, match="state_NHZ: has strides that are no multiples of 4"):
        layer.run(inputs, [rows_of([0], [9], [0], 9, start=0)])
    assert unfit_delta_sizes(128, 128) == ""
    assert "24" in unfit_delta_sizes(128, 24)


@pytest.mark.fast
@pytest.mark.long
def test_a_kept_decision_lets_no_wrong_argument_pass():
    """A right call of the same sizes came before each."""
    layer, rows = Layer(TRITON), rows_of([0], [1], [0], 1, start=0)
    inputs = layer.inputs(1)
    layer.run(inputs, [rows])
    weights, kept = layer.weights, layer.kept
    wrong = [
        (replace(weights, **{name: bent}), kept, rows)
        for name in ("conv_HWX", "a_log_HG", "dt_bias_HG", "norm_V")
        for right in [getattr(weights, name)]
        for bent in (right.bfloat16(), right[:1], torch.stack([right, right], dim=-1)[..., 0])
    ]
    for bent in (kept.conv_NHRX.bfloat16(), kept.conv_NHRX[:, :, ::2], kept.conv_NHRX[1:]):
        wrong.append((weights, replace(kept, conv_NHRX=bent), rows))
    for name in ("tail_NHRY", "state_NHZ"):
        right = getattr(kept.state, name)
        for bent in (right.bfloat16(), right[:, :1], right[..., :-8], torch.stack([right, right], dim=-1)[..., 0]):
            wrong.append((weights, replace(kept, state=replace(kept.state, **{name: bent})), rows))
    for name in ("positions_B", "counts_B", "slots_B"):
        wrong += [(weights, kept, replace(rows, **{name: bent})) for bent in (torch.tensor([0.0]), torch.tensor([[0]]))]
    for number, (layer.weights, layer.kept, bent_rows) in enumerate(wrong):
        try:
            layer.run(inputs, [bent_rows])
        except KernelArgumentInvalid:
            continue
        pytest.fail(f"call {number} passed")
