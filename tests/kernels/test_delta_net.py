"""The gated delta net and its convolution: against transformers, and against themselves, bit for bit, however cut.

Every cut, depth of speculation and neighbour gives the bits of one position after the other. Slots begin as NaN.
"""

import inspect
import random

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels.delta_net.causal_conv import causal_conv
from baton.kernels.delta_net.delta_net import DeltaState, delta_net, delta_rows
from baton.kernels.delta_net.rows import StateRows
from baton.kernels.delta_net.sizes import CONV_RING, RING, state_len, tail_len

HEADS, VALUES, KEY, VALUE, TAPS = 2, 2, 24, 16, 4
CHANNELS = 2 * KEY + VALUES * VALUE
LENGTH, NUM_SLOTS = 53, 4


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Layer:
    """Random weights, and slots that are NaN until they are written."""

    def __init__(self, dtype=torch.float32, num_slots=NUM_SLOTS):
        generator = torch.Generator().manual_seed(3)

        def draw(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.dtype, self.scratch = dtype, num_slots
        self.weight_HWX = draw(HEADS, TAPS, CHANNELS)
        self.a_log_HG, self.dt_bias_HG = draw(HEADS, VALUES) - 1, draw(HEADS, VALUES) - 2  # it forgets slowly
        self.conv_NHRX = torch.full((num_slots + 1, HEADS, CONV_RING, CHANNELS), float("nan"), dtype=dtype)
        tail = torch.full((num_slots + 1, HEADS, RING, tail_len(KEY, VALUE, VALUES)), float("nan"), dtype=dtype)
        state = torch.full((num_slots + 1, HEADS, state_len(KEY, VALUE, VALUES)), float("nan"), dtype=dtype)
        self.kept = DeltaState(tail, state)

    def run(self, inputs, rows):
        """Outputs [B, L, H, G, V] of inputs [B, L, ...]."""
        x_BLHX, b_BLHG, a_BLHG = inputs
        mixed_BLHX = causal_conv(x_BLHX, self.weight_HWX, self.conv_NHRX, rows)
        made = delta_rows(mixed_BLHX, (b_BLHG, a_BLHG), self.a_log_HG, self.dt_bias_HG, KEY)
        return delta_net(made, self.kept, rows)

    def chunk(self, inputs, start, slot=0):
        """One sequence's rows of a prompt."""
        rows = rows_of([start], [len(inputs[0])], [slot], len(inputs[0]), self.scratch, start=start)
        return self.run([x[None] for x in inputs], rows)[0]

    def decode(self, parts, num_rows, counts=None):
        """(inputs, first position, slot) each -> outputs [B, L, ...]."""
        counts = counts or [num_rows] * len(parts)
        rows = rows_of([p for _, p, _ in parts], counts, [slot for *_, slot in parts], num_rows, self.scratch)
        return self.run([torch.stack(x) for x in zip(*(inputs for inputs, _, _ in parts), strict=True)], rows)


def rows_of(positions, counts, slots, num_rows, scratch, start=None):
    tensors = (torch.tensor(numbers) for numbers in (positions, counts, slots))
    names = ("positions_B", "counts_B", "slots_B")
    return StateRows(
        first_row=0, num_rows=num_rows, scratch_slot=scratch, start=start, **dict(zip(names, tensors, strict=True))
    )


def inputs_of(length, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((length, HEADS, CHANNELS), (length, HEADS, VALUES), (length, HEADS, VALUES))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def part(inputs, start, stop):
    return [x[start:stop] for x in inputs]


@pytest.fixture(scope="module")
def plain():
    """Outputs of every position, one after the other, from a prompt of one token on."""

    def run(inputs, dtype=torch.float32):
        layer = Layer(dtype)
        found = [layer.chunk(part(inputs, 0, 1), 0)]
        for at in range(1, len(inputs[0])):
            found.append(layer.decode([(part(inputs, at, at + 1), at, 0)], 1)[0])
        return torch.cat(found)

    return run


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
def test_it_is_transformers(form, dtype, tolerance, plain):
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    source = "\n".join(inspect.getsource(f) for f in (theirs.l2norm, theirs.torch_recurrent_gated_delta_rule))
    source += "\n" + inspect.getsource(theirs.torch_chunk_gated_delta_rule)
    source = "\n".join(line for line in source.splitlines() if not line.startswith("@"))
    names = dict(vars(theirs))
    exec(source.replace("torch.float32", str(dtype)), names)
    inputs = inputs_of(LENGTH, dtype=dtype)
    layer = Layer(dtype)
    x_LHX, b_LHG, a_LHG = inputs
    # transformers has all queries first, then all keys, then all values.
    weight_XW = layer.weight_HWX.mT.flatten(0, 1)
    mixed = torch.nn.functional.conv1d(
        x_LHX.flatten(1).T[None], weight_XW[:, None], padding=TAPS - 1, groups=len(weight_XW)
    )[0, :, :LENGTH].T.unflatten(1, (HEADS, CHANNELS))
    query, key, value = torch.nn.functional.silu(mixed).split([KEY, KEY, VALUES * VALUE], dim=2)
    g = -layer.a_log_HG.exp() * torch.nn.functional.softplus(a_LHG + layer.dt_bias_HG)
    out, _ = names[f"torch_{form}_gated_delta_rule"](
        query[None], key[None], value.unflatten(2, (VALUES, VALUE)).flatten(1, 2)[None],
        g=g.flatten(1)[None], beta=b_LHG.sigmoid().flatten(1)[None], use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    wanted = out[0].unflatten(1, (HEADS, VALUES))
    assert wanted.std() > 0.05
    for found in (plain(inputs, dtype), layer.chunk(inputs, 0)):
        assert (found - wanted).abs().max() <= tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_prompt_cut_anywhere_has_the_bits_of_one_position_after_the_other(dtype, plain):
    inputs = inputs_of(LENGTH, dtype=dtype)
    wanted = plain(inputs, dtype)
    for seed in range(60):
        rng, layer, at, found = random.Random(seed), Layer(dtype), 0, []
        while at < LENGTH:
            count = min(rng.choice([1, 1, 2, 3, 4, 7, 15, 16, 17, 33, 64]), LENGTH - at)
            if at and count <= 4 and rng.random() < 0.3:  # rows of a step that decodes, all accepted
                found.append(layer.decode([(part(inputs, at, at + count), at, 0)], count)[0])
            else:
                found.append(layer.chunk(part(inputs, at, at + count), at))
            at += count
        assert torch.equal(torch.cat(found), wanted), seed


def test_speculation_of_any_depth_and_luck_has_the_bits_of_one_position_after_the_other(plain):
    """Three sequences in one step, whose drafts are right or wrong by chance, and rows without room."""
    texts = [inputs_of(LENGTH, seed) for seed in range(3)]
    wanted = [plain(inputs) for inputs in texts]
    num_traces = 0
    for seed in range(70):
        rng, layer = random.Random(f"trace {seed}"), Layer()
        found, ats = [], []
        for slot, inputs in enumerate(texts):
            ats.append(rng.randint(1, 30))
            found.append([layer.chunk(part(inputs, 0, ats[slot]), 0, slot)])
        while min(ats) < LENGTH:
            num_rows = rng.randint(1, 5)
            running = [slot for slot in range(3) if ats[slot] < LENGTH]
            parts, counts, goods = [], [], []
            for slot in running:
                good = min(rng.randint(1, num_rows), LENGTH - ats[slot])
                rows = part(texts[slot], ats[slot], ats[slot] + good)
                wrong = inputs_of(num_rows - good, rng.randrange(1 << 30))
                parts.append(([torch.cat(pair) for pair in zip(rows, wrong, strict=True)], ats[slot], slot))
                counts.append(rng.randint(good, num_rows))
                goods.append(good)
            out_BLHGV = layer.decode(parts, num_rows, counts)
            for index, slot in enumerate(running):
                found[slot].append(out_BLHGV[index, : goods[index]])
                ats[slot] += goods[index]
        for slot in range(3):
            assert torch.equal(torch.cat(found[slot]), wanted[slot]), (seed, slot)
            num_traces += 1
    assert num_traces >= 200


@pytest.mark.long
def test_a_slot_that_changes_hands_says_nothing_of_who_had_it(plain):
    layer = Layer()
    for seed in range(4):
        inputs = inputs_of(40 + seed, seed)
        found = [layer.chunk(part(inputs, 0, 37), 0)]
        found += [layer.decode([(part(inputs, at, at + 1), at, 0)], 1)[0] for at in range(37, 40 + seed)]
        assert torch.equal(torch.cat(found), plain(inputs)), seed


@pytest.mark.long
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 40])
def test_the_image_of_a_slot_is_that_of_the_layout(length):
    """What the layout says a prompt keeps is enough: all else of a slot may be lost, and the text goes on as it was."""
    inputs = inputs_of(length + 18)
    kept, copied = Layer(), Layer()
    kept.chunk(part(inputs, 0, length), 0)
    copied.kept.state_NHZ[1] = kept.kept.state_NHZ[0]
    assert int(kept.kept.state_NHZ[0, 0, VALUES * KEY * VALUE]) == length // 16  # which is its position
    for position in range(length - length % 16, length):
        copied.kept.tail_NHRY[1, :, position % RING] = kept.kept.tail_NHRY[0, :, position % RING]
    for position in range(max(0, length - 3), length):
        copied.conv_NHRX[1, :, position % CONV_RING] = kept.conv_NHRX[0, :, position % CONV_RING]
    for at in range(length, length + 18):
        rows = part(inputs, at, at + 1)
        assert torch.equal(kept.decode([(rows, at, 0)], 1), copied.decode([(rows, at, 1)], 1))


@pytest.mark.fast
def test_padding_writes_nothing_but_scratch(plain):
    inputs, layer = inputs_of(30), Layer()
    layer.chunk(part(inputs, 0, 20), 0, 2)
    before = [x[:-1].clone() for x in (layer.conv_NHRX, *(layer.kept.tail_NHRY, layer.kept.state_NHZ))]
    layer.decode([(part(inputs, 0, 3), 0, 2)] * 2, 3, counts=[0, 0])
    for was, now in zip(before, (layer.conv_NHRX, layer.kept.tail_NHRY, layer.kept.state_NHZ), strict=True):
        assert torch.equal(was.nan_to_num(7.0), now[:-1].nan_to_num(7.0))


@pytest.mark.fast
def test_more_decode_rows_than_rings_take_are_refused():
    inputs = inputs_of(17)
    with pytest.raises(KernelArgumentInvalid, match="ring of 16"):
        Layer().decode([(part(inputs, 0, 15), 20, 0)], 15)
    made = delta_rows(inputs[0][None], (inputs[1][None], inputs[2][None]), *[torch.zeros(HEADS, VALUES)] * 2, KEY)
    with pytest.raises(KernelArgumentInvalid, match="17 of a sequence"):
        delta_net(made, Layer().kept, rows_of([20], [17], [0], 17, NUM_SLOTS))
