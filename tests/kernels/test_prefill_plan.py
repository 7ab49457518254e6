"""The form of attention of chunks that is chosen on Hopper: against measured times, and what it must keep to."""

import json
import math
import random
import statistics
from pathlib import Path

import pytest

from baton.kernels.attention import prefill_plan
from baton.kernels.attention.decode_plan import options_of_row
from baton.kernels.attention.prefill_plan import Chunks, choose

pytestmark = pytest.mark.fast
RESULTS = Path(__file__).parents[2] / "benchmarks/results/attention-prefill-h200.json"
HEADS = [(28, 4, 128), (32, 8, 128), (32, 32, 128), (16, 2, 256), (16, 4, 256), (14, 2, 64)]
MEASURED = json.loads(RESULTS.read_text())


def chunks_of(heads, chunks):
    """`chunks`: rows, and positions before them."""
    num_heads, num_kv_heads, head_dim = heads
    return Chunks(
        num_rows=sum(rows for rows, _ in chunks),
        num_sequences=len(chunks),
        longest=max(rows for rows, _ in chunks),
        max_context_len=16 * max(-(-(rows + prefix) // 16) for rows, prefix in chunks),
        group=num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


def name_of(options):
    """Of a form, in the table of what was measured."""
    if "BM" in options:
        return "plain"
    if "tile" in options:
        return "decode_loops"
    return {2: "two_groups", 3: "three_groups"}[options["GROUPS"]] + "_divided" * ("slots" in options)


@pytest.mark.parametrize("kind", ["fitted", "judged"])
def test_what_is_chosen_is_nearly_the_best_of_what_was_measured(kind):
    """And beside FlashAttention-3."""
    losses, gains, untimed = [], [], []
    for row in MEASURED[kind]:
        name = name_of(choose(chunks_of(row["heads"], row["chunks"]), 132, may_divide=True))
        if name in row["us"]:
            losses.append(row["us"][name] / min(row["us"].values()))
            gains.append(row["fa3"] / row["us"][name])
        else:
            untimed.append(name)
    assert len(losses) >= 129
    assert len(untimed) - untimed.count("plain") <= 1, "plain is for few rows and positions alone, and was not timed"
    assert statistics.geometric_mean(losses) < 1.03
    assert sorted(losses)[int(0.9 * len(losses))] < 1.12
    assert statistics.mean(gains) > 1.09
    assert min(gains) > 0.6


def drawn(draw):
    chunks = []
    for _ in range(draw.choice((1, 1, 2, 8))):
        rows = int(math.exp(draw.uniform(0, math.log(4096))))
        chunks.append((rows, draw.choice((0, draw.randrange(30_000)))))
    return chunks_of(draw.choice(HEADS), chunks)


def test_options_are_of_a_form_that_may_take_the_call():
    draw, seen = random.Random(5), set()
    for _ in range(2000):
        chunks, may_divide = drawn(draw), draw.random() < 0.7
        num_multiprocessors = draw.choice((78, 132))
        options = choose(chunks, num_multiprocessors, may_divide=may_divide)
        name = name_of(options)
        seen.add((name, chunks.head_dim))
        assert may_divide or "slots" not in options
        everything = prefill_plan.all_options(chunks.head_dim, num_multiprocessors, may_divide=may_divide)
        assert options in everything, "a warm-up compiles these"
        if name == "decode_loops":
            assert options_of_row(options).slots % num_multiprocessors == 0
        elif name == "plain":
            assert chunks.longest * chunks.group <= 256
        else:
            known = [{**own, "slots": num_multiprocessors} if "slots" in own else own
                     for own in prefill_plan.hopper_options(chunks.head_dim)]  # fmt: skip
            assert options in known
    names = ("plain", "two_groups", "two_groups_divided", "decode_loops")
    assert seen == {(name, head_dim) for name in names for head_dim in (64, 128, 256)} | {("three_groups", 128)}


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_few_rows_over_many_positions_are_divided_and_many_rows_are_not(heads):
    for prefix in (8_000, 30_000):
        assert "slots" in choose(chunks_of(heads, [(40, prefix)]), 132, may_divide=True)
    for chunks in [(4096, 0)], [(2048, 6144)], [(1024, 0)] * 8:
        assert "slots" not in choose(chunks_of(heads, chunks), 132, may_divide=True)


def test_a_round_that_few_programs_are_in_takes_as_long_as_a_full_one():
    """Of 128 rows of two query heads: 16 tiles of each KV head, and 17, which are four more than multiprocessors."""
    form = prefill_plan._TWO_GROUPS[128]
    one, two = (prefill_plan._walking_us(form, chunks_of((16, 8, 128), [(rows, 20_000)]), 132) for rows in (1024, 1080))
    assert two > 1.8 * one


def test_a_tile_more_than_multiprocessors_takes_larger_tiles():
    """136 tiles of 128 rows would be two rounds, 91 of 192 are one."""
    assert name_of(choose(chunks_of((16, 8, 128), [(1031, 15_717)]), 132, may_divide=False)) == "three_groups"
    assert name_of(choose(chunks_of((16, 8, 128), [(1000, 15_717)]), 132, may_divide=False)) == "two_groups"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_invariant_options_are_one_form_that_is_warmed_up(head_dim):
    assert prefill_plan.invariant_options(head_dim) in prefill_plan.hopper_options(head_dim)
    assert "slots" not in prefill_plan.invariant_options(head_dim)
