"""A model cut over ranks: the same logits, KV heads where the layout says, the same bits in invariant numerics."""

import itertools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import ModelUnsupported, WorkerLost
from baton.core.numerics import KVDtype, Numerics
from baton.engine.speculation.drafting import over_vocabulary
from baton.engine.tp.collectives import GlooGroup, open_store
from baton.kernels.gemm.linear import linear_invariant
from baton.kernels.selftest import check_invariance
from baton.model.config import ModelConfig
from baton.model.draft_head import HeadIds
from baton.model.loader import load_model
from baton.model.parallel import Alone, ShardPlan
from baton.tests.model.harness import Paged, prompt
from baton.tests.model.ranks import on_ranks

DENSE = {"kind": "qwen3", "num_heads": 8, "num_kv_heads": 2, "tie": False}
SPARSE = {"kind": "qwen3_moe", "num_heads": 8, "num_kv_heads": 4}
MIXED = {"kind": "qwen3_moe", "num_heads": 8, "num_kv_heads": 1, "layers": 4, "overrides": {"decoder_sparse_step": 2}}
SHARED = {"kind": "qwen2_moe", "num_heads": 8, "num_kv_heads": 4}
KINDS = {"dense": DENSE, "sparse": SPARSE, "mixed": MIXED, "shared": SHARED}
WIDE_SHARED = SHARED | {"num_heads": 16, "overrides": {"moe_intermediate_size": 32}}
CASES = [
    pytest.param(
        kind, size, id=f"{kind}, {size} ranks", marks=[pytest.mark.fast] if (kind, size) == ("sparse", 2) else []
    )
    for kind in KINDS
    for size in (2, 4)
]
PROMPT_LEN = 70


class Rank:
    """What a plan asks of a communicator that is not used."""

    how = "ranks do not exchange"

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def all_sum(self, x):
        raise AssertionError

    all_gather = all_sum


def load(path, communicator=None, *, dtype=torch.float64, numerics=Numerics.DEFAULT, **options):
    options = {"numerics": numerics, "with_mtp": True, "communicator": communicator, **options}
    return load_model(path, dtype=dtype, device=torch.device("cpu"), **options)


def run(model, group=None):
    """Logits of a prompt in chunks, of its MTP entries, of two sequences decoded beside each other; and the pool."""
    ids = prompt(PROMPT_LEN)
    paged = Paged(model, num_sequences=2, group=group)
    hidden = paged.prefill(ids[:-2], chunk_len=31)
    drafts = paged.mtp(ids[1:-2], hidden[:-1], paged.prefill_batch([(0, 0, PROMPT_LEN - 3)]))
    paged.prefill(ids[:20], sequence=1)
    batch = paged.decode_batch([1, 0], [20, PROMPT_LEN - 2], 2)
    decoded = paged.trunk(torch.stack([ids[20:22], ids[-2:]]), batch)
    return torch.cat([paged.logits(part) for part in (hidden, drafts, decoded)]), paged.pool


@pytest.mark.parametrize(("kind", "size"), CASES)
@pytest.mark.long
def test_logits_and_kv_of_any_number_of_ranks(kind, size, tiny_checkpoint):
    path = tiny_checkpoint(**KINDS[kind])
    wanted, whole = run(load(path))
    ranks = on_ranks(size, lambda group: run(load(path, group), group))
    for rank, (logits, pool) in enumerate(ranks):
        assert (logits - wanted).abs().max() <= 1e-9
        assert torch.equal(logits, ranks[0][0])  # not near: the same bits, or ranks would decide differently
        for layer in range(whole.layout.num_layers):
            heads = whole.layout.heads_of(layer, rank, size)
            theirs, ours = pool.blocks(layer), whole.blocks(layer)[:, heads.first : heads.stop]
            assert torch.equal(theirs.isnan(), ours.isnan())
            assert (theirs - ours).nan_to_num().abs().max() <= 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "size"), CASES)
@pytest.mark.long
def test_invariant_numerics_give_the_same_bits(kind, size, dtype, tiny_checkpoint):
    path = tiny_checkpoint(**KINDS[kind])
    options = {"dtype": dtype, "numerics": Numerics.INVARIANT}
    wanted, _ = run(load(path, **options))
    for logits, _ in on_ranks(size, lambda group: run(load(path, group, **options), group)):
        assert torch.equal(logits, wanted)


def test_invariant_numerics_give_the_same_bits_with_float8_kv(tmp_path, tiny_checkpoint):
    path = shutil.copytree(tiny_checkpoint(**SPARSE), tmp_path / "scaled")
    file = path / "model.safetensors"
    scale = {"model.layers.0.self_attn.v_scale": torch.tensor([0.37])}
    save_file({**load_file(file), **scale}, file, metadata={"format": "pt"})
    options = {"dtype": torch.float32, "numerics": Numerics.INVARIANT, "kv_dtype": KVDtype.FP8}
    wanted, whole = run(load(path, **options))
    for rank, (logits, pool) in enumerate(on_ranks(2, lambda group: run(load(path, group, **options), group))):
        assert torch.equal(logits, wanted)
        for layer in range(whole.layout.num_layers):
            heads = whole.layout.heads_of(layer, rank, 2)
            ours = whole.blocks(layer)[:, heads.first : heads.stop]
            assert torch.equal(pool.blocks(layer).view(torch.uint8), ours.view(torch.uint8))


def test_default_numerics_do_move_with_the_number_of_ranks(tiny_checkpoint):
    path = tiny_checkpoint(**SPARSE)
    wanted, _ = run(load(path, dtype=torch.float32))
    logits, _ = on_ranks(2, lambda group: run(load(path, group, dtype=torch.float32), group))[1]
    assert not torch.equal(logits, wanted)
    assert (logits - wanted).abs().max() < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_cutting_the_outputs_of_a_gemm_moves_no_bit_in_invariant_numerics(dtype):
    generator = torch.Generator().manual_seed(3)
    x_TK = torch.randn(37, 700, generator=generator).to(dtype)
    weight_NK = torch.randn(1003, 700, generator=generator).to(dtype)
    wanted_TN = linear_invariant(x_TK, weight_NK)
    for num_rows, length in itertools.product((1, 5, 37), (5, 16, 128, 256, 336, 512)):
        for first in range(0, 1003, length):
            part_TN = linear_invariant(x_TK[:num_rows], weight_NK[first : first + length])
            assert torch.equal(part_TN, wanted_TN[:num_rows, first : first + length]), (num_rows, length, first)
    check_invariance([(1003, 700)], dtype, torch.device("cpu"), num_ranks=4)


@pytest.mark.long
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "own"])
@pytest.mark.parametrize("numerics", Numerics)
def test_columns_of_no_token_are_never_likely(tie, numerics, tiny_checkpoint):
    """61 tokens at four ranks, 16 columns each; at eight ranks, four have none."""
    path = tiny_checkpoint(**DENSE | {"tie": tie, "vocab_size": 61})
    hidden_ND = torch.randn(5, 32, dtype=torch.float64)
    wanted_NV = load(path, numerics=numerics).logits(hidden_ND)
    for size in (4, 8):
        parts = [load(path, Rank(rank, size), numerics=numerics).logits(hidden_ND) for rank in range(size)]
        assert {part.shape for part in parts} == {(5, 16)}
        logits_NX = torch.cat(parts, dim=1)
        assert torch.allclose(logits_NX[:, :61], wanted_NV, atol=1e-12)
        assert (logits_NX[:, 61:] == -torch.inf).all()


@pytest.mark.fast
@pytest.mark.parametrize("tokens", [[1, 5, 17, 40, 70], [70, 5, 40, 1, 17], [2, 3]], ids=str)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.long
def test_a_pruned_draft_head_is_cut_by_token(size, tokens, tiny_checkpoint, tmp_path):
    path = shutil.copytree(tiny_checkpoint(**DENSE), tmp_path / "pruned")
    tensors = load_file(path / "model.safetensors")
    tensors["mtp.lm_head.weight"] = tensors["lm_head.weight"][tokens].clone()
    tensors["mtp.d2t"] = torch.tensor(tokens)
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"draft_vocab_size": len(tokens), "d2t_form": "absolute"}))
    whole = load(path)
    hidden_ND = torch.randn(5, whole.config.hidden_size, dtype=torch.float64)
    wanted_NV = over_vocabulary(whole.draft_logits(hidden_ND), whole)
    assert (wanted_NV > -torch.inf).all(0).nonzero().flatten().tolist() == sorted(tokens)
    assert whole.draft_to_target(HeadIds(torch.arange(len(tokens)))).tolist() == sorted(tokens)

    def work(group):
        model = load(path, group)
        return model.vocab.gather(over_vocabulary(model.draft_logits(hidden_ND), model))

    for logits_NV in on_ranks(size, work):
        assert torch.allclose(logits_NV, wanted_NV, atol=1e-12)


def test_weights_without_a_checkpoint_are_cut_alike(tiny_checkpoint):
    options = {"dtype": torch.float64, "device": torch.device("cpu"), "numerics": Numerics.DEFAULT, "with_mtp": True}
    path = tiny_checkpoint(**SPARSE)
    wanted, _ = run(load_model(path, random_seed=3, **options))
    for logits, _ in on_ranks(2, lambda g: run(load_model(path, random_seed=3, communicator=g, **options), g)):
        assert (logits - wanted).abs().max() <= 1e-9


@pytest.mark.fast
@pytest.mark.long
def test_every_weight_is_at_some_rank_in_order(tiny_checkpoint):
    """What the ranks read of a tensor, side by side, is the tensor; replicated KV heads once each."""
    path = tiny_checkpoint(**DENSE)
    whole = load(path)
    for size in (2, 4, 8):
        models = [load(path, Rank(rank, size)) for rank in range(size)]
        head = torch.cat([model._lm_head_WD for model in models])
        assert torch.equal(head[: len(whole._lm_head_WD)], whole._lm_head_WD)
        assert not head[len(whole._lm_head_WD) :].any()
        for layer, parts in zip(
            whole._decoder.layers, zip(*(model._decoder.layers for model in models), strict=True), strict=True
        ):
            assert torch.equal(torch.cat([part.attention.out_DQ for part in parts], 1), layer.attention.out_DQ)
            assert torch.equal(torch.cat([part.mlp.down_DI for part in parts], 1), layer.mlp.down_DI)
            widths = [128 // size, 16 * max(1, 2 // size), 16 * max(1, 2 // size)]
            queries = [part.attention.qkv_QD.split(widths)[0] for part in parts]
            keys = [part.attention.qkv_QD.split(widths)[1] for part in parts]
            whole_queries, whole_keys, _ = layer.attention.qkv_QD.split([128, 32, 32])
            assert torch.equal(torch.cat(queries), whole_queries)
            assert torch.equal(torch.cat(keys[:: max(1, size // 2)]), whole_keys)
            for rank, key in enumerate(keys):
                assert torch.equal(key, keys[rank // max(1, size // 2) * max(1, size // 2)])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("size", "kind", "numerics", "why"),
    [
        (3, DENSE, Numerics.DEFAULT, "num_attention_heads = 8"),
        (16, DENSE, Numerics.DEFAULT, "num_attention_heads = 8"),
        (2, DENSE | {"num_heads": 6, "num_kv_heads": 3}, Numerics.DEFAULT, "num_key_value_heads = 3"),
        (32, DENSE | {"num_heads": 32}, Numerics.DEFAULT, "intermediate_size = 48"),
        (16, SPARSE | {"num_heads": 16}, Numerics.DEFAULT, "moe_intermediate_size = 24"),
        (16, WIDE_SHARED, Numerics.DEFAULT, "shared_expert_intermediate_size = 40"),
        (16, DENSE | {"num_heads": 16}, Numerics.INVARIANT, "8 slices"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_by_name(size, kind, numerics, why, tiny_checkpoint):
    config = ModelConfig.from_directory(tiny_checkpoint(**kind))
    with pytest.raises(ModelUnsupported, match=why) as caught:
        ShardPlan(config, Rank(0, size), numerics)
    assert caught.value.fields == {"option": "tp", "value": size}


@pytest.mark.fast
def test_a_broadcast_is_in_place():
    def tell(group):
        values = torch.tensor([[group.rank, 7], [8, group.rank]])
        assert group.broadcast(values) is values
        if group.size > 1:
            with pytest.raises(AssertionError):
                group.broadcast(values.T)
        return values.tolist()

    assert on_ranks(3, tell) == [[[0, 7], [8, 0]]] * 3
    assert tell(Alone()) == [[0, 7], [8, 0]]


@pytest.mark.fast
def test_what_ranks_say_to_each_other():
    def talk(group):
        x = torch.full((3, 2), 1.0 + group.rank, dtype=torch.bfloat16)
        return (
            group.all_sum(x).tolist(),
            group.broadcast(torch.tensor([group.rank, 7])).tolist(),
            group.broadcast_bytes(b"plan" * group.rank + b"!"),
            group.broadcast_bytes(b"" if group.rank == 0 else b"x"),
            group.gather_bytes(b"r" * group.rank),
            group.gather_bytes(b""),
            group.all_sum(torch.empty(0, 4)).shape,
            group.all_gather(torch.tensor([[group.rank, 5]])).tolist(),
        )

    for heard in on_ranks(3, talk):
        assert heard == (
            [[6.0, 6.0]] * 3,
            [0, 7],
            b"!",
            b"",
            [b"", b"r", b"rr"],
            [b""] * 3,
            (0, 4),
            [[[0, 5]], [[1, 5]], [[2, 5]]],
        )


def test_a_sum_has_one_order():
    """Every rank adds the same tree; a sum in order of arrival would differ in the last bits."""

    def work(group):
        generator = torch.Generator().manual_seed(group.rank)
        return [group.all_sum(torch.randn(200, generator=generator)) for _ in range(20)]

    first = on_ranks(4, work)
    parts = [torch.Generator().manual_seed(rank) for rank in range(4)]
    for index in range(20):
        a, b, c, d = (torch.randn(200, generator=generator) for generator in parts)
        for rank in range(4):
            assert torch.equal(first[rank][index], (a + b) + (c + d))


def test_a_rank_that_is_gone_ends_the_group_by_name():
    def work(group):
        if group.rank == 1:
            return None
        with pytest.raises(WorkerLost, match="rank 0 of 2"):
            group.all_sum(torch.ones(3))
        return True

    assert on_ranks(2, work, timeout_s=5.0) == [True, None]


def test_a_rank_that_never_comes_is_not_waited_for_for_ever():
    with pytest.raises(WorkerLost):
        GlooGroup(0, 2, open_store(0, 2, 0, 1.0), 1.0)
