"""The script that prunes draft vocabularies: what it keeps, what it writes, what it refuses."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.core.numerics import Numerics
from baton.model.loader import load_model
from baton.tests.model.checkpoints import VOCAB_SIZE, write_checkpoint

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "assets" / "tiny-pruned"
sys.path.insert(0, str(ROOT / "scripts"))
try:
    import prune_draft_vocab as prune  # type: ignore[import-not-found]
finally:
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture
def model(tmp_path):
    return write_checkpoint(tmp_path / "model", kind="qwen3", tokenizer=True)


def load(path):
    return load_model(path, dtype=torch.float32, device=torch.device("cpu"), numerics=Numerics.DEFAULT, with_mtp=True)


def run(model, out, *flags):
    return prune.main([str(model), str(out), *map(str, flags)])


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("kind", ["list", "mapping", "npy", "text"])
@pytest.mark.long
def test_the_most_counted_tokens_are_kept(model, tmp_path, kind, link, capsys):
    counts = [0] * 30
    for token, count in ((7, 5), (29, 9), (3, 5), (12, 1)):
        counts[token] = count
    file = tmp_path / f"counts.{'npy' if kind == 'npy' else 'json'}"
    source = ["--counts", file]
    if kind == "list":
        file.write_text(json.dumps(counts))
    elif kind == "mapping":
        file.write_text(json.dumps({token: count for token, count in enumerate(counts) if count}))
    elif kind == "npy":
        np.save(file, np.array(counts))
    else:
        halves = [tmp_path / "a.txt", tmp_path / "b.txt"]
        halves[0].write_text("w7 w7 w29 w29 w29 w3 w3 w3 w12")
        halves[1].write_text("w29 " * 6 + "w7 w3 w7 w3 w7")
        source = ["--text", *halves]
    out = tmp_path / "out"
    assert run(model, out, "--keep", 4, *source, *(["--link"] if link else [])) == 0
    assert "4 of 96 tokens (4.2%) cover 95.00% of the 20 counted" in capsys.readouterr().out
    pruned, whole = load(out), load(model)
    assert pruned.d2t_C.tolist() == [1, 3, 7, 29]  # 1 is the end token
    hidden_ND = torch.randn(5, 32)
    assert torch.equal(pruned.logits(hidden_ND), whole.logits(hidden_ND))
    wanted_NC = whole.logits(hidden_ND)[:, [1, 3, 7, 29]]
    assert torch.allclose(pruned.draft_logits(hidden_ND), wanted_NC, atol=1e-5)  # in GEMMs of other widths
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert any(path.name.startswith("model-") for path in out.iterdir()) is not link


def test_columns_are_of_the_head_that_is_stored_where_config_json_ties_it_all_the_same(tmp_path):
    model = write_checkpoint(tmp_path / "model", kind="qwen3", tokenizer=True, tie=False)
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
    (counts := tmp_path / "counts.json").write_text(json.dumps([0, 0, 5, 9]))
    assert run(model, out := tmp_path / "out", "--keep", 3, "--counts", counts) == 0
    hidden_ND = torch.randn(5, 32)
    wanted_NC = load(model).logits(hidden_ND)[:, [1, 2, 3]]
    assert torch.allclose(load(out).draft_logits(hidden_ND), wanted_NC, atol=1e-5)


@pytest.mark.parametrize(
    "flags",
    [
        ["--keep", "0"],
        ["--keep", str(VOCAB_SIZE + 1)],
        ["--keep", "4", "--counts", "missing.json"],
        ["--keep", "4", "--counts", "negative.json"],
        ["--keep", "4", "--counts", "long.json"],
        ["--keep", "4", "--counts", "text.json"],
        ["--keep", "4", "--counts", "minus.json"],
    ],
)
def test_unusable_input_is_refused(model, tmp_path, flags, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("negative.json").write_text("[1, -1]")
    Path("long.json").write_text(json.dumps([1] * (VOCAB_SIZE + 1)))
    Path("text.json").write_text('["a"]')
    Path("minus.json").write_text('{"-3": 4}')
    Path("good.json").write_text("[1, 2]")
    if "--counts" not in flags:
        flags = [*flags, "--counts", "good.json"]
    assert run(model, tmp_path / "out", *flags) == 1
    assert capsys.readouterr().err.startswith("prune_draft_vocab: ")
    assert not (tmp_path / "out").exists()


def test_a_model_is_pruned_once_and_needs_an_mtp_head(model, tmp_path, capsys):
    counts = tmp_path / "counts.json"
    counts.write_text("[1, 2]")
    assert run(model, tmp_path / "out", "--keep", 4, "--counts", counts) == 0
    assert run(tmp_path / "out", tmp_path / "again", "--keep", 4, "--counts", counts) == 1
    bare = write_checkpoint(tmp_path / "bare", kind="qwen3", with_mtp=False, tokenizer=True)
    assert run(bare, tmp_path / "again", "--keep", 4, "--counts", counts) == 1
    assert "no MTP head" in capsys.readouterr().err


@pytest.mark.long
def test_the_bundled_variant_is_the_bundled_model_with_a_smaller_draft_head():
    pruned, whole = load(SHIPPED), load(ROOT / "assets" / "tiny")
    assert len(pruned.d2t_C) == 1024
    assert {0, 1, 2} <= set(pruned.d2t_C.tolist())  # end of text and the marks of chat turns
    hidden_ND = torch.randn(4, 256)
    assert torch.equal(pruned.logits(hidden_ND), whole.logits(hidden_ND))
    assert torch.allclose(pruned.draft_logits(hidden_ND), whole.logits(hidden_ND)[:, pruned.d2t_C], atol=1e-4)
