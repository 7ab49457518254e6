"""Experts that may move, before any does: the same model with copies and without, and what each expert got."""

import pytest
import torch

from baton.core.errors import ModelUnsupported
from baton.core.numerics import Numerics
from baton.kernels.moe import moe
from baton.kernels.ops import Ops
from baton.model.config import ModelConfig
from baton.model.tp_fit import require_cut
from baton.tests.model.harness import Paged, prompt
from baton.tests.model.ranks import on_ranks
from baton.tests.model.test_expert_parallel import EP, FAMILIES, experts_of
from baton.tests.model.test_parallel import DENSE, SPARSE, Rank, load, run

CELLS = [
    pytest.param(*cell, id="{}, {} ranks, {} more".format(*cell), marks=[pytest.mark.fast] if cell in fast else [])
    for fast in [(("qwen3_moe", 2, 4), ("deepseek_v3", 4, 4))]
    for cell in (
        *fast, ("qwen3_moe", 2, 0), ("qwen3_moe", 4, 0), ("qwen2_moe", 4, 24), ("mixtral", 2, 8), ("glm4_moe", 2, 2),
        ("qwen3_5_moe", 4, 4), ("qwen3_next", 2, 0), ("some layers dense", 2, 2),
    )
]  # fmt: skip


@pytest.fixture(autouse=True)
def both_forms(monkeypatch):
    """Prompts are sorted by expert and few rows are not."""
    monkeypatch.setattr(moe, "_MAX_DENSE_WORK", 60)


def moving(num_redundant):
    return EP | {"num_redundant_experts": num_redundant}


@pytest.mark.parametrize(("kind", "size", "num_redundant"), CELLS)
@pytest.mark.long
def test_logits_are_those_of_one_process(kind, size, num_redundant, tiny_checkpoint):
    path = tiny_checkpoint(**FAMILIES[kind])
    whole = load(path)
    wanted, _ = run(whole)

    def work(group):
        model = load(path, group, **moving(num_redundant))
        num_slots = whole.config.num_experts + num_redundant
        for layer in model.sparse_layers:
            assert layer.experts.held.num_all == num_slots
            assert len(layer.experts.down_EDI) == num_slots // size
        for layer, all_of_it in zip(model.sparse_layers, experts_of(whole), strict=True):
            numbers = list(layer.experts.held.numbers)
            assert torch.equal(layer.experts.gate_up_EJD, all_of_it.gate_up_EJD[numbers])
            assert torch.equal(layer.experts.down_EDI, all_of_it.down_EDI[numbers])
        return run(model, group)[0], [layer.slots.load_E for layer in model.sparse_layers]

    ranks = on_ranks(size, work)
    for logits, loads in ranks:
        assert (logits - wanted).abs().max() <= 1e-9
        assert torch.equal(logits, ranks[0][0])
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(loads, ranks[0][1], strict=True))


@pytest.mark.parametrize(("kind", "size", "num_redundant"), [("qwen3_moe", 2, 4), ("deepseek_v3", 4, 4)])
def test_invariant_numerics_give_the_same_bits(kind, size, num_redundant, tiny_checkpoint):
    path, options = tiny_checkpoint(**FAMILIES[kind]), {"dtype": torch.bfloat16, "numerics": Numerics.INVARIANT}
    wanted, _ = run(load(path, **options))
    for logits, _ in on_ranks(size, lambda group: run(load(path, group, **options, **moving(num_redundant)), group)):
        assert torch.equal(logits, wanted)


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.long
def test_tokens_of_sequences_are_counted_and_rows_of_padding_are_not(kind, tiny_checkpoint, monkeypatch):
    """In every layer and the MTP head's, of prompts and decode rows: what a router chose for rows of sequences."""
    path, name = tiny_checkpoint(**FAMILIES[kind]), "route_by_sigmoid" if kind == "deepseek_v3" else "route"
    plain = getattr(Ops, name)

    def passes(model, group=None):
        ids, paged = prompt(40), Paged(model, num_sequences=3, group=group)
        hidden = paged.prefill(ids, chunk_len=31)
        paged.mtp(ids[1:], hidden[:-1], paged.prefill_batch([(0, 0, 39)]))
        paged.prefill(ids[:9], sequence=1)
        batch = paged.decode_batch([1, None, 0], [9, 0, 40], 3, num_real=2)
        paged.trunk(torch.stack([ids[:3]] * 3), batch)
        return (batch.slots_BQ < paged.pool.scratch_slot).flatten()

    chosen, whole = [], load(path)
    num_layers = len(whole.sparse_layers)

    def noting(*args, **named):
        made = plain(*args, **named)
        chosen.append(made[1][:, : whole.config.num_experts_per_token])  # without a shared expert
        return made

    monkeypatch.setattr(Ops, name, noting)
    is_real_T = passes(whole)
    monkeypatch.setattr(Ops, name, plain)
    assert is_real_T.tolist() == [True, True, False, False, False, False, True, True, False]
    trunk = num_layers - 1
    assert [len(its) for its in chosen] == [31] * trunk + [9] * trunk + [39] + [9] * 2 * trunk
    chosen[-trunk:] = [its[is_real_T] for its in chosen[-trunk:]]
    wanted = torch.zeros(num_layers, whole.config.num_experts, dtype=torch.int64)
    layers = [*range(trunk)] * 2 + [trunk] + [*range(trunk)] * 2
    for layer, choice_TK in zip(layers, chosen, strict=True):
        wanted[layer] += choice_TK.flatten().bincount(minlength=whole.config.num_experts)

    def work(group):
        model = load(path, group, **moving(4))
        passes(model, group)
        return torch.stack([layer.slots.load_E for layer in model.sparse_layers])

    for loads in on_ranks(2, work):
        assert torch.equal(loads, wanted)


@pytest.mark.fast
@pytest.mark.long
def test_experts_stay_where_nothing_is_said_or_one_rank_has_all(tiny_checkpoint):
    path = tiny_checkpoint(**SPARSE)
    for model in (load(path, **moving(4)), load(path, Rank(0, 2), **EP), load(path, Rank(0, 2))):
        assert {layer.slots for layer in model.sparse_layers} == {None}
    assert len(experts_of(load(path, **moving(4)))[0].down_EDI) == 8
    assert len(experts_of(load(path, Rank(0, 2), **moving(0)))[0].down_EDI) == 4
    hashes = {load(path, Rank(1, 2), **options).config.model_hash for options in ({}, EP, moving(4))}
    assert len(hashes) == 1, "KV may be handed to any other"


@pytest.mark.fast
@pytest.mark.long
def test_experts_of_no_rank_alone_are_dealt_with_copies_of_some(tiny_checkpoint):
    """Six over four ranks: two copies make them even."""
    path = tiny_checkpoint(**SPARSE | {"overrides": {"num_experts": 6}})
    wanted, _ = run(load(path))
    for logits, _ in on_ranks(4, lambda group: run(load(path, group, **moving(2)), group)):
        assert (logits - wanted).abs().max() <= 1e-9


@pytest.mark.fast
@pytest.mark.parametrize(
    ("num_redundant", "size", "option", "why"),
    [
        (3, 2, "num_redundant_experts", "8 experts and 3 redundant ones cannot be dealt evenly over 2 ranks"),
        (10, 2, "num_redundant_experts", "10 are more than a copy of each of 8 at each of 2 ranks"),
        (0, 16, "enable_expert_parallel", "8 experts cannot be dealt evenly over 16 ranks"),
    ],
)
def test_slots_that_cannot_be_dealt_are_refused(num_redundant, size, option, why, tiny_checkpoint):
    config = ModelConfig.from_directory(tiny_checkpoint(**SPARSE | {"num_heads": 16}))
    with pytest.raises(ModelUnsupported, match=f"^--{option.replace('_', '-')}: {why}") as e:
        require_cut(config, size, Numerics.DEFAULT, **moving(num_redundant))
    assert e.value.fields == {"option": option, "value": size}
    require_cut(config, 1, Numerics.DEFAULT, **moving(num_redundant))
    dense = ModelConfig.from_directory(tiny_checkpoint(**DENSE))
    with pytest.raises(ModelUnsupported, match="the model is dense"):
        require_cut(dense, 1, Numerics.DEFAULT, **moving(num_redundant))
