"""Rows dealt to ranks: every rank gives the same shape, each row comes back in its place, and padding never does."""

import numpy as np
import pytest
import torch

from baton.core.errors import ModelUnsupported
from baton.core.numerics import Numerics
from baton.model.config import ModelConfig
from baton.model.dealt_rows import DealtBatch, RowDeal
from baton.model.inputs import PrefillBatch
from baton.model.parallel import ShardPlan
from baton.model.tensor_spec import tensor_spec
from baton.tests.model.harness import Paged, prompt
from baton.tests.model.ranks import on_ranks
from baton.tests.model.test_parallel import SPARSE, Rank, load

CPU = torch.device("cpu")
LATENT = {"kind": "deepseek_v3", "layers": 3}
DP = {"dp_attention": True}
WIDTH = 5


def dealt_to_all(owner_T, size, *, may_wait=False):
    """Each rank's, over a gather that all of them have to join with one shape."""
    given = []

    def all_gather(x):
        given.append(x)
        return torch.stack(given) if len(given) == size else x.expand(size, *x.shape)

    deals = [RowDeal(rank=rank, size=size, all_gather=all_gather) for rank in range(size)]
    return [deal.rows(np.array(owner_T), CPU, may_wait=may_wait) for deal in deals], given


OWNERS = {
    "in turn": (2, [0, 1, 0, 1, 0, 1]),
    "an idle rank": (2, [1, 1, 1]),
    "one row": (4, [2]),
    "uneven": (4, [3, 3, 0, 3, 1, 3, 0]),
    "every rank": (4, [0, 1, 2, 3, 3, 2, 1, 0]),
}


@pytest.mark.fast
@pytest.mark.parametrize(("size", "owner_T"), OWNERS.values(), ids=OWNERS)
def test_every_row_comes_back_and_no_padding(size, owner_T):
    x_TD = torch.arange(1.0, 1 + len(owner_T) * WIDTH).view(-1, WIDTH)
    ranks, given = dealt_to_all(owner_T, size)
    most = max(owner_T.count(rank) for rank in range(size))
    for rank, dealt in enumerate(ranks):
        own_OD = dealt.own(x_TD)
        assert dealt.own_O.tolist() == [row for row, owner in enumerate(owner_T) if owner == rank]
        assert dealt.is_idle == (rank not in owner_T)
        assert dealt.num_each == most
        shared_TD = dealt.shared(own_OD)
        assert given[-1].shape == (most, WIDTH)
    assert torch.equal(shared_TD, x_TD)  # of the last rank, when all have given theirs


@pytest.mark.fast
def test_random_deals_come_back():
    draw = np.random.default_rng(7)
    for _ in range(200):
        size = int(draw.choice([2, 4, 8]))
        owner_T = draw.integers(0, size, draw.integers(1, 40)).tolist()
        x_TD = torch.from_numpy(draw.normal(size=(len(owner_T), WIDTH)))
        ranks, _ = dealt_to_all(owner_T, size)
        assert torch.equal([dealt.shared(dealt.own(x_TD)) for dealt in ranks][-1], x_TD)


@pytest.mark.fast
def test_a_rank_has_all_of_attention_and_its_part_of_the_rest(tiny_checkpoint):
    config = ModelConfig.from_directory(tiny_checkpoint(**LATENT))
    cut = tensor_spec(config, with_mtp=True).weights
    for rank in range(2):
        plan = ShardPlan(config, Rank(rank, 2), Numerics.DEFAULT, **DP)
        assert (plan.deal.rank, plan.deal.size) == (rank, 2)
        for name, spec in cut.items():
            is_attention = ".self_attn." in name
            if name != "lm_head.weight":
                assert plan.cut(name) == (None if is_attention else spec.cut(rank, 2)), name
    assert any(spec.cut_dim is not None for name, spec in cut.items() if ".self_attn." in name)
    assert ShardPlan(config, Rank(0, 1), Numerics.DEFAULT, **DP).deal is None, "alone, a rank deals nothing"


@pytest.mark.fast
def test_heads_need_not_be_as_many_as_ranks(tiny_checkpoint):
    config = ModelConfig.from_directory(tiny_checkpoint(**LATENT, num_heads=2))
    with pytest.raises(ModelUnsupported, match="num_attention_heads"):
        ShardPlan(config, Rank(0, 4), Numerics.DEFAULT)
    for numerics in Numerics:
        assert ShardPlan(config, Rank(0, 4), numerics, **DP).deal is not None


@pytest.mark.fast
@pytest.mark.parametrize("size", [1, 2])
def test_attention_over_heads_is_refused(size, tiny_checkpoint):
    with pytest.raises(ModelUnsupported, match=r"--enable-dp-attention: attention of .* is over heads") as e:
        load(tiny_checkpoint(**SPARSE), Rank(0, size), **DP)
    assert e.value.fields == {"option": "enable_dp_attention", "value": size}


LENGTHS = (9, 20)  # of two prompts in one pass, whose owners are ranks 0 and 1


def logits_of(model, group, owners):
    """Logits of two prompts computed in one pass, and of their MTP entries; and what holds the pool."""
    paged = Paged(model, num_sequences=2, group=group)
    spans = [(at, 0, length) for at, length in enumerate(LENGTHS)]
    ids = torch.cat([prompt(length, seed=at) for at, length in enumerate(LENGTHS)])
    batch = whole = paged.prefill_batch(spans)
    assert isinstance(whole, PrefillBatch)
    if model.deal is not None:
        mine = [span for span in spans if owners[span[0]] == group.rank]
        rows = model.deal.rows(np.repeat(np.array(owners), LENGTHS), CPU, may_wait=True)
        batch = DealtBatch(own=paged.prefill_batch(mine) if mine else whole, rows=rows)
    hidden = paged.trunk(ids, batch)
    return torch.cat([paged.logits(hidden), paged.logits(paged.mtp(ids, hidden, batch))]), paged


@pytest.mark.parametrize("held", [False, True], ids=["parts of experts", "whole experts"])
@pytest.mark.parametrize(("size", "owners"), [(2, (0, 1)), (2, (1, 1)), (4, (3, 0))])
def test_logits_are_those_of_one_process(size, owners, held, tiny_checkpoint):
    path = tiny_checkpoint(**LATENT)
    wanted, whole = logits_of(load(path), None, owners)
    options = {"expert_parallel": held, **DP}
    ranks = on_ranks(size, lambda group: logits_of(load(path, group, **options), group, owners))
    for rank, (logits, paged) in enumerate(ranks):
        assert (logits - wanted).abs().max() <= 1e-9
        assert torch.equal(logits, ranks[0][0])
        places = [whole.places(at, length) for at, length in enumerate(LENGTHS) if owners[at] == rank]
        own = sorted(torch.cat(places).tolist()) if places else []
        for layer in range(whole.pool.layout.num_layers):
            theirs_NX, ours_NX = (each.pool.blocks(layer)[:, 0, 0].flatten(0, 1) for each in (paged, whole))
            is_written_N = ~theirs_NX.isnan().any(dim=1)
            assert is_written_N.nonzero()[:, 0].tolist() == own, "a rank keeps latents of its own sequences alone"
            assert torch.allclose(theirs_NX[own], ours_NX[own], rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_invariant_numerics_give_the_same_bits(dtype, tiny_checkpoint):
    path, owners = tiny_checkpoint(**LATENT), (1, 0)
    options = {"dtype": dtype, "numerics": Numerics.INVARIANT}
    wanted, _ = logits_of(load(path, **options), None, owners)
    for logits, _ in on_ranks(2, lambda group: logits_of(load(path, group, **options, **DP), group, owners)):
        assert torch.equal(logits, wanted)
