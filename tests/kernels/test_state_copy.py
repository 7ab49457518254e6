"""Checkpoints in passing: what a chunk leaves in another slot is the state that it has at that position."""

from dataclasses import replace

import pytest
import torch

from baton.kernels.delta_net.state_copy import copy_state
from baton.tests.kernels.harness import same_bits
from baton.tests.kernels.test_delta_net_triton import NUM_SLOTS, REFERENCE, TRITON, Layer, part, rows_of

FORMS = pytest.mark.parametrize("form", [REFERENCE, TRITON], ids=str)


def segments(start, cuts, stop, slot, targets):
    """Rows of one chunk, [start, stop), that leaves a checkpoint at each cut."""
    found, first = [], start
    for cut, target in zip((*cuts, stop), (*targets, None), strict=True):
        if cut > first:
            rows = rows_of([first], [cut - first], [slot], cut - first, start=first, first_row=first - start)
            found.append(replace(rows, keep_in=target))
        first = cut
    return found


@pytest.mark.fast
@FORMS
def test_a_slot_is_copied_whole_and_no_other_is_touched(form):
    layer = Layer(form, num_values=3)
    for seed, whole in enumerate(layer.kept.parts):
        generator = torch.Generator().manual_seed(seed)
        whole.copy_(torch.randn(whole.shape, generator=generator).to(whole.dtype))
    before = [whole.clone() for whole in layer.kept.parts]
    rows = replace(rows_of([0], [1], [2], 1, start=0), keep_in=1)
    copy_state(layer.kept.parts, rows, in_triton=form is TRITON)
    for old, new in zip(before, layer.kept.parts, strict=True):
        assert same_bits(new[1], old[2])
        others = [0, 2, 3, NUM_SLOTS]
        assert same_bits(new[others], old[others])
    layer.guards.check()


@pytest.mark.long
@FORMS
@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize(("start", "cuts", "stop"), [(0, (16,), 21), (0, (32, 48), 48), (5, (16, 64), 90)])
def test_a_chunk_leaves_the_states_of_the_ends_of_its_blocks(form, invariant, start, cuts, stop):
    layers = [Layer(form, invariant=invariant) for _ in range(2)]
    inputs = layers[0].inputs(stop)
    for layer in layers:
        if start:
            layer.chunk(part(inputs, 0, start), 0)
    targets = range(1, 1 + len(cuts))
    got = layers[0].run(part(inputs, start, stop), segments(start, cuts, stop, 0, targets))
    wanted, first = [], start
    for cut, target in zip(cuts, targets, strict=True):
        wanted.append(layers[1].chunk(part(inputs, first, cut), first))
        for kept, alone in zip(layers[0].kept.parts, layers[1].kept.parts, strict=True):
            assert same_bits(kept[target], alone[0])
        first = cut
    if stop > first:
        wanted.append(layers[1].chunk(part(inputs, first, stop), first))
    assert same_bits(got, torch.cat(wanted))
    for kept, alone in zip(layers[0].kept.parts, layers[1].kept.parts, strict=True):
        assert same_bits(kept[0], alone[0])
    layers[0].guards.check()
