"""Draft heads over fewer tokens: their tables are normalised and checked, their logits are rows of the whole head."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import ModelTensorMisshapen, ModelTensorMissing, ModelTensorUnexpected, ModelUnsupported
from baton.core.numerics import Numerics
from baton.model.draft_head import HeadIds, invert_d2t, normalise_d2t
from baton.model.loader import load_model
from baton.tests.model.checkpoints import VOCAB_SIZE, write_checkpoint

pytestmark = pytest.mark.fast
TOKENS = [0, 1, 5, 17, 40, 95]


def load(path, *, with_mtp=True, dtype=torch.float64, random_seed=None):
    return load_model(
        path,
        dtype=dtype,
        device=torch.device("cpu"),
        numerics=Numerics.DEFAULT,
        with_mtp=with_mtp,
        random_seed=random_seed,
    )


def offsets(tokens):
    return [token - column for column, token in enumerate(tokens)]


@pytest.mark.parametrize("tokens", [TOKENS, [40, 0, 95, 5], [7]])
def test_both_forms_are_the_same_table(tokens):
    for form, values in (("absolute", tokens), ("offset", offsets(tokens))):
        assert normalise_d2t(torch.tensor(values), VOCAB_SIZE, form).tolist() == tokens


def test_the_form_that_makes_sense_is_found():
    assert normalise_d2t(torch.tensor([3, 1, 2]), 4, None).tolist() == [3, 1, 2]  # offsets would be 3, 2, 4
    assert normalise_d2t(torch.tensor([0, 0, 5]), 8, None).tolist() == [0, 1, 7]  # ids would repeat
    assert normalise_d2t(torch.tensor([4]), 8, None).tolist() == [4]  # the same either way


def test_a_table_that_could_be_either_must_be_named():
    with pytest.raises(ModelUnsupported, match="d2t_form"):
        normalise_d2t(torch.tensor([0, 1, 2]), 8, None)


@pytest.mark.parametrize(
    ("values", "form", "match"),
    [
        ([0, 1, 1], "absolute", "2 different"),
        ([0, 1, 8], "absolute", "holds 8"),
        ([0, -1], "absolute", "holds -1"),
        ([0, 0, 6], "offset", "holds 8"),
        ([1, 0], "offset", "1 different"),
        ([0, 0, 90], None, "no table of tokens"),
        ([0], "relative", "d2t_form"),
    ],
)
def test_unsound_tables_are_refused(values, form, match):
    with pytest.raises(ModelUnsupported, match=match):
        normalise_d2t(torch.tensor(values), 8, form)


def test_the_inverse():
    assert invert_d2t(torch.tensor([4, 0, 2]), 6).tolist() == [1, -1, 2, -1, 0, -1]


@pytest.fixture(params=[True, False], ids=["tied", "own"])
def pruned(request, tmp_path):
    """A checkpoint with a draft head over TOKENS, whose rows are lm_head's."""
    path = write_checkpoint(tmp_path / "model", kind="qwen3", tie=request.param)

    def change(tensors):
        head = tensors["model.embed_tokens.weight" if request.param else "lm_head.weight"]
        tensors["mtp.lm_head.weight"] = head[TOKENS].clone()
        tensors["mtp.d2t"] = torch.tensor(offsets(TOKENS))

    rewrite(path, change, draft_vocab_size=len(TOKENS), d2t_form="offset")
    return path


def rewrite(path, change, **config):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    values = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(values))


def test_logits_and_ids_of_a_pruned_head(pruned):
    model = load(pruned)
    hidden_ND = torch.randn(7, model.config.hidden_size, dtype=torch.float64)
    wanted_NC = model.logits(hidden_ND)[:, TOKENS]
    assert torch.allclose(model.draft_logits(hidden_ND), wanted_NC, rtol=0, atol=1e-12), "but for widths"
    assert model.draft_to_target(HeadIds(torch.tensor([[0, 5], [3, 3]]))).tolist() == [[0, 95], [17, 17]]
    assert model._t2d_V is None  # only probabilistic drafts need it
    assert [int(model.t2d()[token]) for token in TOKENS] == list(range(len(TOKENS)))
    assert model.t2d() is model.t2d()
    assert (len(TOKENS), model.config.hidden_size) in model.linear_shapes()


def test_without_one_columns_are_tokens(tiny_checkpoint):
    model = load(tiny_checkpoint())
    hidden_ND = torch.randn(3, model.config.hidden_size, dtype=torch.float64)
    assert torch.equal(model.draft_logits(hidden_ND), model.logits(hidden_ND))
    assert model.draft_to_target(HeadIds(torch.tensor([4]))).tolist() == [4]
    assert model.t2d() is None


def test_without_its_mtp_head_a_pruned_model_loads_neither(pruned):
    model = load(pruned, with_mtp=False)
    assert model.d2t_C is None


def test_published_inverses_are_not_read(pruned):
    rewrite(pruned, lambda tensors: tensors.update({"mtp.t2d": torch.zeros(VOCAB_SIZE, dtype=torch.bool)}))
    assert load(pruned).d2t_C.tolist() == TOKENS


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda tensors: tensors.pop("mtp.d2t"), ModelTensorMissing),
        (lambda tensors: tensors.pop("mtp.lm_head.weight"), ModelTensorMissing),
        (lambda tensors: tensors.update({"mtp.d2t": torch.zeros(6)}), ModelTensorMisshapen),
        (lambda tensors: tensors.update({"mtp.d2t": torch.arange(5)}), ModelTensorMisshapen),
        (lambda tensors: tensors.update({"mtp.lm_head.weight": torch.zeros(6, 3)}), ModelTensorMisshapen),
        (lambda tensors: tensors.update({"mtp.d2t": torch.arange(6) + 90}), ModelUnsupported),
        (lambda tensors: tensors.update({"mtp.d2t": -torch.arange(6)}), ModelUnsupported),
    ],
)
def test_damaged_draft_heads_are_refused(pruned, change, error):
    rewrite(pruned, change)
    with pytest.raises(error):
        load(pruned)


@pytest.mark.parametrize("size", [0, -1, VOCAB_SIZE + 1])
def test_absurd_sizes_are_refused(pruned, size):
    rewrite(pruned, lambda tensors: None, draft_vocab_size=size)
    with pytest.raises(ModelUnsupported, match="draft_vocab_size"):
        load(pruned)


def test_a_draft_head_that_config_does_not_name_is_unexpected(pruned):
    rewrite(pruned, lambda tensors: None, draft_vocab_size=None)
    with pytest.raises(ModelTensorUnexpected):
        load(pruned)


def test_int32_tables_are_read(pruned):
    rewrite(pruned, lambda tensors: tensors.update({"mtp.d2t": tensors["mtp.d2t"].int()}))
    assert load(pruned).d2t_C.tolist() == TOKENS


def test_random_weights_have_a_draft_head_too(pruned, tmp_path):
    shutil.copy(pruned / "config.json", tmp_path / "config.json")
    model = load(tmp_path, random_seed=0)
    assert model.d2t_C.tolist() == [0, 16, 32, 48, 64, 80]
    assert model.draft_logits(torch.ones(2, model.config.hidden_size, dtype=torch.float64)).shape == (2, 6)
