"""Plans of attention whose positions are divided by tiles of rows, and the sum of the parts, against plain loops."""

import random

import pytest
import torch

import baton.tests.kernels.interpreter  # noqa: F401  (repairs it)
from baton.kernels.attention.decode_plan import SplitKVPlans, TileDivision
from baton.kernels.attention.row_tile_plan_triton import ENTRY_LEN, launch_plan, make_parts, merge, num_slots_of

pytestmark = pytest.mark.fast
SEEDS = range(40)


def drawn(seed, most_chunks=12):
    """Rows and positions of chunks, of which some have none; query heads of a KV head; rows and positions of tiles."""
    draw = random.Random(seed)
    most = draw.choice((3, 40, 700))
    lens = [draw.choice((0, 1, draw.randint(1, most))) for _ in range(draw.randint(1, most_chunks))]
    contexts = [rows + draw.choice((0, draw.randrange(3000), draw.randrange(30_000))) for rows in lens]
    return lens, contexts, draw.choice((1, 3, 8)), draw.choice((64, 128, 192)), draw.choice((64, 128))


def plan_of(lens, contexts, group, tile_rows, tile, num_slots):
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    plan = launch_plan(
        starts, torch.tensor(contexts, dtype=torch.int32), group=group, tile_rows=tile_rows, tile=tile,
        num_slots=num_slots, max_context_len=max(contexts),
    )  # fmt: skip
    return starts, plan, plan.view(num_slots, ENTRY_LEN).tolist()


def slots_for(lens, group, tile_rows, num_kv_heads=2, num_multiprocessors=132):
    return num_slots_of(
        num_multiprocessors=num_multiprocessors, num_kv_heads=num_kv_heads, num_tokens=sum(lens),
        num_sequences=len(lens), group=group, tile_rows=tile_rows, max_query_len=max(lens),
    )  # fmt: skip


def programs(lens, contexts, group, tile_rows, tile, each):
    """How many there are if parts have up to so many steps."""
    count = 0
    for rows, context in zip(lens, contexts, strict=True):
        num_steps = -(-context // tile)
        count += -(-rows * group // tile_rows) * -(-num_steps // each)
    return count


@pytest.mark.parametrize("seed", SEEDS)
def test_every_step_of_every_tile_is_planned_once_by_the_fewest_that_fit(seed):
    lens, contexts, group, tile_rows, tile = drawn(seed)
    num_slots = slots_for(lens, group, tile_rows)
    _, _, entries = plan_of(lens, contexts, group, tile_rows, tile, num_slots)
    steps = {}
    for chunk, first, end, context, first_row, num_parts in entries:
        if end == 0:
            continue
        assert context == contexts[chunk]
        assert first < end
        assert 0 <= first_row < lens[chunk] * group
        assert first_row % tile_rows == 0
        steps.setdefault((chunk, first_row), []).append((first, end, num_parts))
    longest = 0
    for chunk, (rows, context) in enumerate(zip(lens, contexts, strict=True)):
        for first_row in range(0, rows * group, tile_rows):
            parts = sorted(steps.pop((chunk, first_row)))
            assert {num_parts for _, _, num_parts in parts} == {len(parts)}
            ends = [0, *(end for _, end, _ in parts)]
            assert [first for first, _, _ in parts] == ends[:-1]
            assert ends[-1] == -(-context // tile)
            longest = max(longest, *(end - first for first, end, _ in parts))
    assert not steps
    if sum(lens):
        assert longest == 1 or programs(lens, contexts, group, tile_rows, tile, longest - 1) > num_slots


def test_a_chunks_programs_lie_together_and_those_of_a_part_side_by_side():
    lens, contexts = [5, 0, 300], [900, 0, 2000]
    _, _, entries = plan_of(lens, contexts, 1, 128, 128, 16)
    found = [(chunk, first, first_row) for chunk, first, end, _, first_row, _ in entries if end]
    assert found == sorted(found)
    assert {chunk for chunk, _, _ in found} == {0, 2}
    assert len(found) <= 16


def test_there_is_a_program_for_every_tile_however_many():
    for seed in SEEDS:
        lens, _, group, tile_rows, _ = drawn(seed)
        tiles = sum(-(-rows * group // tile_rows) for rows in lens)
        assert slots_for(lens, group, tile_rows, num_multiprocessors=1) >= tiles


@pytest.mark.parametrize("seed", range(8))
def test_parts_are_added_up_by_their_weights_and_single_ones_are_left(seed):
    """Rows of weight 0 were never written; and nothing but rows of several parts is touched."""
    lens, contexts, group, tile_rows, tile = drawn(seed, most_chunks=4)
    lens = [min(rows, 60) for rows in lens]
    num_kv_heads, head_dim = 2, 64
    num_slots = slots_for(lens, group, tile_rows, num_kv_heads, 40)
    starts, plan, entries = plan_of(lens, contexts, group, tile_rows, tile, num_slots)
    generator = torch.Generator().manual_seed(seed)
    query = torch.empty(sum(lens), num_kv_heads * group, head_dim)
    parts, logs = make_parts(query, num_slots, num_kv_heads, tile_rows)
    parts.copy_(torch.randn(parts.shape, generator=generator))
    logs.copy_(torch.randn(logs.shape, generator=generator) * 5)
    unseen = torch.rand(logs.shape, generator=generator) < 0.3
    logs[unseen], parts[unseen] = float("-inf"), float("nan")
    out = torch.full(query.shape, 7.0)
    places = parts.view(num_slots, num_kv_heads, tile_rows, head_dim), logs.view(num_slots, num_kv_heads, tile_rows)
    wanted = out.double()
    of_row = {}
    for slot, (chunk, _, end, _, first_row, num_parts) in enumerate(entries):
        if end and num_parts > 1:
            for row in range(first_row, min(first_row + tile_rows, lens[chunk] * group)):
                of_row.setdefault((chunk, row), []).append((slot, row - first_row))
    for (chunk, row), where in of_row.items():
        token = starts[chunk].item() + row // group
        for head in range(num_kv_heads):
            log = torch.stack([places[1][slot, head, at] for slot, at in where]).double()
            value = torch.stack([places[0][slot, head, at] for slot, at in where]).double()
            weight = torch.exp2(log - log.max()) if log.max() > float("-inf") else torch.zeros_like(log)
            mixed = (weight[:, None] * value.nan_to_num(0.0)).sum(0) / max(weight.sum().item(), 1e-30)
            wanted[token, head * group + row % group] = mixed
    merge(
        parts, logs, starts, plan, out, num_kv_heads=num_kv_heads, tile_rows=tile_rows, num_sequences=len(lens),
        max_query_len=max(lens),
    )  # fmt: skip
    assert torch.allclose(out.double(), wanted, atol=1e-5)


def test_layers_of_a_pass_share_a_plan_of_the_same_tiles():
    plans, starts, lens = SplitKVPlans(), torch.tensor([0, 3], dtype=torch.int32), torch.tensor([70], dtype=torch.int32)
    sizes = {"tile": 64, "tile_rows": 128, "group": 2, "max_context_len": 128}
    first = plans.find(lens, starts, TileDivision(num_slots=8, **sizes))
    assert plans.find(lens, starts, TileDivision(num_slots=8, **sizes)) is first
    assert len(plans.find(lens, starts, TileDivision(num_slots=9, **sizes))) == 9 * ENTRY_LEN
