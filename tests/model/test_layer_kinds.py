"""One layer of each kind stands for all that launch the same; a pass leaves out the others while it is asked to."""

import pytest
import torch

from baton.core.numerics import Numerics, Quantization
from baton.model.layers import RMSNorm
from baton.model.loader import load_model
from baton.tests.model.checkpoints import write_checkpoint
from baton.tests.model.eagle_checkpoints import write_drafter
from baton.tests.model.harness import Paged, noting_layers, prompt
from baton.tests.model.ranks import on_ranks
from baton.worker.tp_group import agree_on_layers

pytestmark = pytest.mark.fast
MIXED = {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
DRAWN = {
    "all alike": ({"kind": "llama", "layers": 4, "with_mtp": False}, [0]),
    "some dense": ({"layers": 5, "overrides": {"decoder_sparse_step": 2}}, [0, 1, 4]),
    "hybrid": ({"kind": "qwen3_5", "layers": 4, "overrides": MIXED}, [0, 2]),
}


DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 4}
FLOAT8 = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32}


def load(path, **options):
    return load_model(
        path,
        device=torch.device("cpu"),
        numerics=Numerics.DEFAULT,
        **{"dtype": torch.float64, "with_mtp": True, **options},
    )


def computed_layers(model, monkeypatch):
    """Which layers a pass over a prompt computes, and what it gives."""
    found = noting_layers(model, monkeypatch)
    ids = prompt(9)
    hidden = Paged(model).prefill(ids, chunk_len=9)
    monkeypatch.undo()
    return found, hidden


@pytest.mark.parametrize("name", DRAWN)
def test_a_pass_computes_one_layer_of_each_kind(name, tmp_path, monkeypatch):
    sizes, kinds = DRAWN[name]
    model = load(write_checkpoint(tmp_path / "model", **sizes), with_mtp=sizes.get("with_mtp", True))
    every, wanted = computed_layers(model, monkeypatch)
    assert every == list(range(sizes["layers"]))
    with model.one_of_each_layer():
        assert computed_layers(model, monkeypatch)[0] == kinds
    after, found = computed_layers(model, monkeypatch)
    assert after == every
    assert torch.equal(found, wanted)


def test_layers_that_a_drafter_reads_are_computed(tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path / "model", kind="llama", layers=8, with_mtp=False, tie=False)
    drafter = write_drafter(tmp_path / "drafter", path, aux=(2, 3, 6))
    model = load(path, with_mtp=False, draft_path=drafter)
    tapped = sorted(model._decoder._aux_layers)
    with model.one_of_each_layer():
        found, hidden = computed_layers(model, monkeypatch)
    assert found == sorted({0, *tapped}) and len(tapped) == 3
    assert hidden.shape[1] == model.trunk_width


def test_the_first_layer_of_a_float8_model_stands_for_no_other(tmp_path):
    """Its norm adds nothing, and with experts alone no other norm both adds and quantizes; nor does one that keeps."""
    path = write_checkpoint(tmp_path / "model", layers=4, overrides=FLOAT8)
    model = load(path, dtype=torch.bfloat16, with_mtp=False, quantization=Quantization.FP8)
    with model.one_of_each_layer():
        assert sorted(model._decoder._skipped_layers) == [2, 3]
    sizes = MIXED | FLOAT8 | DELTA | {"intermediate_size": 128}
    path = write_checkpoint(tmp_path / "hybrid", kind="qwen3_5", layers=4, with_mtp=False, overrides=sizes)
    model = load(path, dtype=torch.bfloat16, with_mtp=False, quantization=Quantization.FP8)
    assert model.alike_layers() == {3}


class OtherNorm(RMSNorm):
    """Launches something else."""


OtherNorm.__module__ = RMSNorm.__module__


def replaced(model, index, change):
    """A weight of one layer in another form."""
    attention = model._decoder.layers[index].attention
    attention.out_DQ = change(attention.out_DQ)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.float(),
        lambda weight: weight.T.contiguous().T,
        lambda weight: torch.cat([weight.flatten(), weight.new_zeros(1)])[1:].view(weight.shape),
    ],
    ids=["dtype", "strides", "address"],
)
def test_a_weight_of_another_form_makes_another_kind(change, tmp_path):
    model = load(write_checkpoint(tmp_path / "model", kind="llama", layers=4, with_mtp=False), with_mtp=False)
    replaced(model, 2, change)
    with model.one_of_each_layer():
        assert sorted(model._decoder._skipped_layers) == [1, 3]
    model._decoder.layers[3].mlp_norm.__class__ = OtherNorm
    with model.one_of_each_layer():
        assert sorted(model._decoder._skipped_layers) == [1]


def test_an_error_in_between_leaves_no_layer_out(tmp_path):
    model = load(write_checkpoint(tmp_path / "model", kind="llama", layers=4, with_mtp=False), with_mtp=False)
    with pytest.raises(KeyError), model.one_of_each_layer():
        raise KeyError
    assert not model._decoder._skipped_layers


def test_ranks_skip_the_same_layers_though_their_weights_differ(tmp_path):
    """One rank's weight of one layer has another form: no rank skips that layer."""
    path = write_checkpoint(tmp_path / "model", kind="llama", layers=4, with_mtp=False)

    def skipped(group):
        model = load(path, with_mtp=False)
        if group.rank == 1:
            replaced(model, 2, lambda weight: weight.float())
        agree_on_layers(model, group)
        with model.one_of_each_layer():
            return sorted(model._decoder._skipped_layers)

    assert on_ranks(2, skipped) == [[1, 3], [1, 3]]


def test_a_float8_norm_that_adds_what_experts_made_is_of_another_kind(tmp_path, monkeypatch):
    """Than one that adds a dense MLP's rows; layers that are computed add what those before them made."""
    sizes = FLOAT8 | {"intermediate_size": 128}
    for dense, layers, skipped in (([0], 5, [3, 4]), ([0, 1, 4], 5, []), ([0, 3], 6, [])):
        overrides = sizes | {"mlp_only_layers": dense}
        path = write_checkpoint(tmp_path / f"{dense}", layers=layers, overrides=overrides)
        model = load(path, dtype=torch.bfloat16, with_mtp=False, quantization=Quantization.FP8)
        with model.one_of_each_layer():
            assert sorted(model._decoder._skipped_layers) == skipped
        if dense == [0]:  # a layer that a drafter reads has its rows added up
            monkeypatch.setattr(model._decoder, "_aux_layers", [2])
            assert model.alike_layers() == {4}
