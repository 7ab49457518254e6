"""Kernels in Gluon whose warps are specialized, on the CPU: their sources run by a model of Gluon."""

from collections import Counter

import pytest
import torch

from baton.kernels.attention import prefill_hopper_triton as attention_prefill_hopper_triton
from baton.kernels.implementation import Implementation
from baton.kernels.mla import decode_hopper_triton, prefill_hopper_triton
from baton.kernels.moe import gemm_hopper_triton
from baton.kernels.moe.gemm import experts_grouped
from baton.tests.kernels.gluon_model import Model, Race, Stuck, check_order, counts_of
from baton.tests.kernels.harness import relative_error, same_bits
from baton.tests.kernels.moe_inputs import Draw
from baton.tests.kernels.test_attention_prefill import Sequences
from baton.tests.kernels.test_mla_decode import Problem as DecodeProblem
from baton.tests.kernels.test_mla_prefill import SERVED, Problem
from baton.tests.kernels.test_moe_gemm import naive

LONG, SHORT = prefill_hopper_triton._LONG, prefill_hopper_triton._SHORT
BOTH = pytest.mark.parametrize("options", [LONG, SHORT], ids=["long", "short"])


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """As if CPUs were Hopper GPUs of three multiprocessors, and few rows enough for each expert."""
    monkeypatch.setattr(attention_prefill_hopper_triton, "num_multiprocessors", lambda _: 3)
    monkeypatch.setattr(gemm_hopper_triton, "_FEWEST_ROWS", 0)
    monkeypatch.setattr(decode_hopper_triton, "_is_hopper", lambda _: True)


@pytest.fixture
def attend(monkeypatch):
    """Runs expanded attention over latents by the form for Hopper; what it gave, and the model."""

    def run(problem, options, seed=0, changes=(), most=None):
        model = Model(prefill_hopper_triton.mla_prefill_hopper_kernel, seed, changes)
        monkeypatch.setattr(prefill_hopper_triton, "_launch_attend", model)
        monkeypatch.setattr(prefill_hopper_triton, "default_options", lambda *_: options)
        return problem.run(most=most), model

    return run


@pytest.fixture
def multiply(monkeypatch):
    """Runs float8 experts by the form for Hopper."""

    def run(inputs, weights, seed=0, changes=()):
        model = Model(gemm_hopper_triton.grouped_kernel, seed, changes)
        monkeypatch.setattr(gemm_hopper_triton, "_launch_grouped", model)
        return experts_grouped(*inputs, weights, implementation=Implementation.TRITON), model

    return run


@pytest.fixture
def decode(monkeypatch):
    """Runs absorbed attention over latents by the form for Hopper."""

    def run(problem, seed=0, changes=(), **options):
        model = Model(decode_hopper_triton.mla_hopper_kernel, seed, changes)
        monkeypatch.setattr(decode_hopper_triton, "_launch_attend", model)
        options = {"tile": 64, "rows": 64, "swap": False, "stages": 2, "warps": 8, "slots": 1, "hopper": True} | options
        return problem.run(options), model

    return run


def latents(*lengths, **named):
    return DecodeProblem(lengths, **{"latent": 512, "turned": 64, "scale": 0.06} | named)


def prompts(*chunks, num_heads=1):
    return Problem(chunks, **SERVED | {"num_heads": num_heads})


def experts(num_tokens, kind="fp8", inner_size=128, hidden=256, num_experts=3):
    """Of a batch, one of whose experts has no row."""
    draw = Draw(num_tokens)
    weights = draw.weights(num_experts + 1, inner_size, hidden, kind)
    x_TD = draw.normal(num_tokens, hidden, dtype=torch.bfloat16)
    expert_TK = draw.experts(num_tokens, num_experts, 2)
    return (x_TD, draw.normal(num_tokens, 2).softmax(dim=1), expert_TK), weights


@BOTH
@pytest.mark.parametrize(
    "chunks",
    [((1, 1), (63, 64)), ((64, 65), (1, 128)), ((65, 129),), ((128, 300), (3, 4)), ((129, 256), (2, 257))],
    ids=str,
)
@pytest.mark.parametrize("most", [None, 100])
def test_expanded_latents_in_any_order(attend, chunks, options, most):
    """Rows and keys at the edges of tiles, one window or several; NaN past each sequence's end."""
    problem = prompts(*chunks)
    out, model = attend(problem, options, most=most)
    problem.check(out)
    model.check_order()
    assert same_bits(attend(problem, options, 1, most=most)[0], out)


@BOTH
def test_expanded_latents_of_another_sequence_may_be_nan(attend, options):
    problem = prompts((3, 100), (70, 70), (5, 90), num_heads=2)
    out, _ = attend(problem, options)
    problem.rows[problem.tables[1, :5]] = torch.nan
    spoiled, _ = attend(problem, options)
    assert same_bits(spoiled[:3], out[:3])
    assert same_bits(spoiled[73:], out[73:])
    assert spoiled[3:73].isnan().all()


@pytest.mark.parametrize("kind", ["fp8", "ue8m0"])
@pytest.mark.parametrize(("num_tokens", "hidden", "inner_size"), [(1, 256, 128), (90, 512, 384), (100, 768, 256)])
def test_experts_in_any_order(multiply, kind, num_tokens, hidden, inner_size):
    """Blocks of a row, half empty and full ones; more groups than are under way; several tiles of a program."""
    inputs, weights = experts(num_tokens, kind, inner_size, hidden)
    out, model = multiply(inputs, weights)
    assert relative_error(out, naive(*inputs, weights)) < 6e-3
    model.check_order()
    assert same_bits(multiply(inputs, weights, 1)[0], out)


# Changes of sources: what must not be done, and is to be seen in some order.
WAIT_FOR_SCORES = "score_RN = warpgroup_mma_wait(1, deps=[score_RN])\n"
WAIT_FOR_MIXED = "    mixed_RD, wide_RN = warpgroup_mma_wait(0, deps=[mixed_RD, wide_RN])\n"
VALUES_READ = "    mbarrier.arrive(value_empty.index(before), count=1)\n"
ATTENTION_FAULTS = {
    "values are given back before the matmul has read them": (
        WAIT_FOR_MIXED + VALUES_READ, VALUES_READ + WAIT_FOR_MIXED,
    ),
    "one matmul of the scores is not waited for": (
        WAIT_FOR_SCORES, WAIT_FOR_SCORES.replace("wait(1", "wait(2"),
    ),
    "the producer waits for the wrong phase": ("parity = ((step // STAGES) & 1) ^ 1", "parity = (step // STAGES) & 1"),
    "values are waited for by their own step's parity": (
        "value_full.index(before), ((count - 1) // STAGES) & 1", "value_full.index(before), (count // STAGES) & 1",
    ),
    "the producer waits for keys alone": ("            mbarrier.wait(value_empty.index(stage), parity)\n", ""),
    "the producer waits for values alone": ("            mbarrier.wait(key_empty.index(stage), parity)\n", ""),
    "keys are read before they are there": (
        "mbarrier.wait(key_full.index(stage), (count // STAGES) & 1)", "pass",
    ),
    "values are not given back": (VALUES_READ, ""),
    "no fence after the last values": ("    fence_async_shared()\n    _barrier()\n", "    _barrier()\n"),
    "no fence after the queries": ("    turned_tile.store(turned_RP)\n    fence_async_shared()\n",
                                   "    turned_tile.store(turned_RP)\n"),
    "the last values have no arrival": ("    _barrier()\n    mbarrier.arrive(full.index(stage), count=1)\n",
                                                   ""),
    "the last values are said to be there before they are": (
        "    for box in range(boxes):\n",
        "    mbarrier.arrive(full.index(stage), count=1)\n    for box in range(boxes):\n",
    ),
    "asynchronous copies that are in no group": (
        "value_boxes.index((stage * halves + half) * boxes + box).store(found[half])",
        "async_copy.async_copy_global_to_shared(value_boxes.index((stage * halves + half) * boxes + box), "
        "value + half * 64 + at_SC, mask=is_there_S1)",
    ),
    "more bytes are expected": ("BN * V * 2", "BN * V * 4"),
    "fewer arrivals end a phase": ("init(value_empty.index(stage), count=GROUPS)", "init(value_empty.index(stage), 1)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", ATTENTION_FAULTS)
def test_faults_of_expanded_latents_are_found(attend, fault):
    problem, (old, new) = prompts((70, 600)), ATTENTION_FAULTS[fault]
    with pytest.raises((Race, Stuck)):
        attend(problem, LONG, changes=[(old, new)])[1].check_order()


EXPERT_FAULTS = {
    "a stage is given back before it is read": (
        "                    x_piece = x_pieces",
        "                    mbarrier.arrive(empty.index(stage), count=1)\n                    x_piece = x_pieces",
    ),
    "a product is read before it is there": ("product_RN = warpgroup_mma_wait(0", "product_RN = warpgroup_mma_wait(1"),
    "the second half of the rows gives nothing back": (
        "            else:\n                for _ in range(K // 128):",
        "            else:\n                for _ in range(0):",
    ),
    "one arrival fills a stage": ("init(full.index(stage), count=2)", "init(full.index(stage), count=1)"),
    "one arrival empties a stage": ("init(empty.index(stage), count=2)", "init(empty.index(stage), count=1)"),
    "a stage is read before it is full": ("mbarrier.wait(full.index(stage), (count // STAGES) & 1)", "pass"),
    "a stage is written before it is empty": (
        "mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)", "pass"
    ),
    "a stage's phases are taken for those of another": ("(count // STAGES) & 1)", "(count // 2) & 1)"),
    "scales are there before they are stored": (
        "                        for part in gl.static_range(4):\n                            scales.index",
        "                        mbarrier.arrive(full.index(stage), count=1)\n"
        "                        for part in gl.static_range(4):\n                            scales.index",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", EXPERT_FAULTS)
def test_faults_of_experts_are_found(multiply, fault):
    inputs, weights = experts(60, hidden=768, num_experts=2)
    with pytest.raises((Race, Stuck)):
        multiply(inputs, weights, changes=[EXPERT_FAULTS[fault]])[1].check_order()


def missed(machine):
    """Waits and arrivals of a run without which the check is content, and which something waits for."""
    waits = {what[1::2] for trace in machine.traces for what in trace if what[0] == "wait"}
    for who, trace in enumerate(machine.traces):
        arrivals = Counter()
        for index, what in enumerate(trace):
            if what[0] == "arrive":
                phase = arrivals[what[1]]
                arrivals[what[1]] += 1
                is_needed = (what[1], phase) in waits
            else:
                is_needed = what[0] == "wait" and what[3] >= 0
            if is_needed:
                changed = [
                    trace[:index] + trace[index + 1 :] if at == who else t for at, t in enumerate(machine.traces)
                ]
                try:
                    check_order(changed, counts_of(machine))
                except (Race, Stuck):
                    continue
                yield who, index, what


@BOTH
def test_every_wait_and_arrival_of_expanded_latents_is_needed(attend, options):
    """But for what others imply: of two stages, that keys were read, by the wait for the values of the tile before; and
    that the first values, which threads have stored, are there, by that for the keys of the next tile.
    """
    _, model = attend(prompts((70, 600)), options)
    for machine in model.machines:
        key_empty, first_values = (2, 3), 4
        found = list(missed(machine))
        assert {what[0] for _, _, what in found} == {"wait"}
        assert all(what[1] in key_empty or what[1:] == (first_values, 0, 0) for _, _, what in found)


def test_every_wait_and_arrival_of_experts_is_needed(multiply):
    """But for those of the first tiles by the warpgroup that reads none of them."""
    inputs, weights = experts(60, hidden=768, num_experts=2)
    _, model = multiply(inputs, weights)
    for machine in model.machines:
        assert all((who, what[0], what[3]) == (1, "wait", 0) for who, _, what in missed(machine))


@pytest.mark.parametrize("lengths", [(1, 63), (64, 65), (128, 129), (192, 200), (256, 300), (321,), (385,)], ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
def test_latents_in_any_order(decode, lengths, block_size):
    """Any number of tiles: pairs, and one alone; NaN past each sequence's end."""
    problem = latents(*lengths, block_size=block_size)
    out, model = decode(problem)
    problem.check(out)
    assert model.check_order() > 30
    assert same_bits(decode(problem, 1)[0], out)


@pytest.mark.parametrize("most", [64, 128, 192])
@pytest.mark.parametrize("num_queries", [1, 5])
def test_parts_of_latents(decode, num_queries, most):
    """Of sequences of which some have no tile for some parts."""
    problem = latents(330, 70, 5, num_queries=num_queries, num_heads=16)
    out, model = decode(problem, max_part_len=most, slots=16)
    assert any(place[1] > 0 for place in (machine.place for machine in model.machines))
    problem.check(out)
    model.check_order()


@pytest.mark.parametrize("num_queries", range(1, 6))
def test_rows_over_latents_see_up_to_themselves(decode, num_queries):
    """Ends of rows before and in the last tile, and rows of two programs."""
    problem = latents(130, 66, 20, num_queries, num_queries=num_queries, num_heads=30, block_size=32)
    problem.check(decode(problem)[0])


def test_scores_over_latents_may_be_large(decode):
    """Weights of each tile are of the highest score so far, or they would not be finite."""
    problem = latents(64 * 6, 200, 64 * 5, num_heads=16, scale=6.0)
    problem.check(decode(problem)[0])


def test_rows_over_latents_at_negative_positions_are_zero(decode):
    problem = latents(70, num_queries=3)
    problem.positions -= 69
    out, _ = decode(problem)
    problem.check(out)
    assert [bool(row.any()) for row in out[0]] == [False, False, True]
    problem.positions -= 100
    assert not decode(problem)[0].any()


WAIT_FOR_SUMS = "    mixed_RH = warpgroup_mma_wait(0, deps=[mixed_RH])\n    _barrier()\n"
WAIT_FOR_LATENT_SCORES = "    score_RT = warpgroup_mma_wait(0, deps=[score_RT])\n    _barrier()\n"
LEFT_READ, RIGHT_READ, TURNED_READ = (
    f"    mbarrier.arrive(empty[{place}], count=1)\n" for place in ("_LEFT", "_RIGHT", "WHICH * 3 + _TURNED")
)
LATENT_FAULTS = {
    "the left half is given back before it is multiplied": (WAIT_FOR_SUMS + LEFT_READ, LEFT_READ + WAIT_FOR_SUMS),
    "the right half is given back before it is multiplied": (WAIT_FOR_SUMS + RIGHT_READ, RIGHT_READ + WAIT_FOR_SUMS),
    "columns with RoPE are given back before the scores": (
        WAIT_FOR_LATENT_SCORES + TURNED_READ, TURNED_READ + WAIT_FOR_LATENT_SCORES,
    ),
    "the second tile is given back beside its matmul": ("warpgroup_mma_wait(1", "warpgroup_mma_wait(2"),
    "weights are ready before they are stored": (
        "    weights[WHICH].store(short_RT)\n",
        "    mbarrier.arrive(ready[WHICH], count=1)\n    weights[WHICH].store(short_RT)\n",
    ),
    "no fence after the weights": ("].store(new_R)\n    fence_async_shared()\n", "].store(new_R)\n"),
    "no fence after the end is cleared": ("_like(part_TE)))\n    fence_async_shared()\n", "_like(part_TE)))\n"),
    "the end is cleared before all of it is there": (
        "wait(full[tile + group], parity)\n        _clear", "wait(full[tile], parity)\n        _clear"
    ),
    "queries are read before the other half is there": ("    mbarrier.wait(loaded[1 - WHICH], 0)\n", ""),
    "totals are read before they are stored": ("    mbarrier.wait(ended[1 - WHICH], 0)\n", ""),
    "copies wait for the wrong phase": ("parity = (pair & 1) ^ 1", "parity = pair & 1"),
}  # fmt: skip


@pytest.mark.parametrize("fault", LATENT_FAULTS)
def test_faults_of_latents_are_found(decode, fault):
    with pytest.raises((Race, Stuck)):
        decode(latents(64 * 5 + 3, block_size=64), changes=[LATENT_FAULTS[fault]])[1].check_order()


def test_every_wait_and_arrival_of_latents_is_needed(decode):
    """But for waits by which a warpgroup sees halves of tiles whose arrival the other's weights imply."""
    _, model = decode(latents(64 * 6, block_size=64))
    left_of_second, right_of_first = {(0, 5), (0, 6)}, {(1, 2), (1, 3)}
    for machine in model.machines:
        found = list(missed(machine))
        assert {what[0] for _, _, what in found} == {"wait"}
        assert {(who, what[1]) for who, _, what in found} == left_of_second | right_of_first


TURNS = {"GROUPS": 2, "BN": 128, "STAGES": 2, "TURNS": True, "PIN": True, "PERSISTENT": False}
PERSISTENT = {**TURNS, "PERSISTENT": True}
THREE = {"GROUPS": 3, "BN": 64, "STAGES": 2, "TURNS": False, "PIN": False, "PERSISTENT": False}


@pytest.fixture
def attend_paged(monkeypatch):
    """Runs attention over paged KV by the form for Hopper."""

    def run(sequences, options, seed=0, changes=()):
        model = Model(attention_prefill_hopper_triton.prefill_kernel, seed, changes)
        monkeypatch.setattr(attention_prefill_hopper_triton, "_launch_prefill", model)
        return sequences.run(options=options), model

    return run


@pytest.mark.parametrize("options", [TURNS, PERSISTENT, THREE], ids=["turns", "persistent", "three"])
@pytest.mark.parametrize("chunks", [[(150, 60)], [(1, 40), (65, 127)], [(40, 300), (2, 0)]], ids=str)
def test_paged_attention_in_any_order(attend_paged, chunks, options):
    """Chunks of rows after so many positions; a program's walks follow each other where programs are few."""
    sequences = Sequences(chunks, heads=(4, 2), head_dim=64, block_size=32)
    out, model = attend_paged(sequences, options)
    assert model.machines
    assert relative_error(out, sequences.wanted()) < 4e-3
    model.check_order()
    assert same_bits(attend_paged(sequences, options, 1)[0], out)


PAGED_FAULTS = {
    "both warpgroups begin": ("(count & 1) ^ (WHICH == 0)", "(count & 1) ^ 1"),
    "no fence after the last values": ("    fence_async_shared()\n    mbarrier", "    mbarrier"),
    "tiles of each walk are counted anew": (
        "        count += 1\n    return count", "        count += 1\n    return 0",
    ),
    "the producer waits for keys alone": ("        mbarrier.wait(value_empty.index(stage), parity)\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", PAGED_FAULTS)
def test_faults_of_paged_attention_are_found(attend_paged, fault):
    sequences = Sequences([(200, 150)], heads=(4, 2), head_dim=64, block_size=32)
    with pytest.raises((Race, Stuck)):
        attend_paged(sequences, PERSISTENT, changes=[PAGED_FAULTS[fault]])[1].check_order()
