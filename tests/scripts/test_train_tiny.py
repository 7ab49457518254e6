"""The tiny model's script: its split, its parts, a three-step training, and what is shipped."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "assets" / "tiny"
sys.path.insert(0, str(ROOT / "scripts"))
try:
    import tiny_card  # type: ignore[import-not-found]
    import tiny_corpus  # type: ignore[import-not-found]
    import tiny_eval  # type: ignore[import-not-found]
    import tiny_model  # type: ignore[import-not-found]
    import train_tiny  # type: ignore[import-not-found]
finally:
    sys.path.remove(str(ROOT / "scripts"))

SHAPE = tiny_model.TinyShape(
    vocab=280,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    experts=4,
    top_k=2,
    expert_width=16,
    max_positions=64,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a tree of small sources with one copy and some files to be left out."""
    root = tmp_path_factory.mktemp("source")
    (root / "inner").mkdir()
    for index in range(40):
        lines = [f"def f{index}_{row}(x):\n    return x + {row}\n" for row in range(20)]
        (root / "inner" / f"m{index:02}.py").write_text("\n".join(lines))
    (root / "copy.py").write_bytes((root / "inner" / "m00.py").read_bytes())
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    (root / "crlf.py").write_bytes("a = 'é'\r\n\tb\x00  🎉 \n\n".encode())
    (root / "site-packages").mkdir()
    (root / "site-packages" / "other.py").write_text("x = 1\n")
    return root


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = tiny_model.Tiny(SHAPE, torch.float32).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return model


@pytest.fixture(scope="module")
def trained(source, tmp_path_factory):
    plan = train_tiny.TrainingPlan(
        out=tmp_path_factory.mktemp("out"),
        corpus=source,
        device="cpu",
        steps=3,
        head_steps=2,
        batch=2,
        head_batch=2,
        length=64,
        eval_every=2,
        prompts=3,
        fresh=6,
        compile=0,
    )
    return plan.out, train_tiny.train(plan, SHAPE)


def test_documents_are_distinct_and_readable(source):
    paths = [document.path for document in tiny_corpus.read_documents(source)]
    assert paths == sorted(paths)
    assert len(paths) == 41  # one of the two copies, and neither latin nor site-packages
    assert "latin.py" not in paths
    assert not any("site-packages" in path for path in paths)


def test_split_is_by_file_and_repeatable(source):
    documents = list(tiny_corpus.read_documents(source))
    first, again, other = (tiny_corpus.split(documents, seed, 0.1) for seed in (0, 0, 1))
    assert first == again
    assert {d.path for d in first.held_out} != {d.path for d in other.held_out}
    assert len(first.held_out) == 4
    train, held_out = ({d.path for d in part} for part in (first.train, first.held_out))
    assert not train & held_out
    assert train | held_out == {d.path for d in documents}


def test_split_is_capped(source):
    documents = list(tiny_corpus.read_documents(source))
    corpus = tiny_corpus.split(documents, 0, share=1.0, cap=3000)
    assert 0 < sum(document.size for document in corpus.held_out) <= 3000


def test_fingerprint_follows_content(source):
    documents = list(tiny_corpus.read_documents(source))
    changed = [*documents[:-1], tiny_corpus.Document(documents[-1].path, "pass\n")]
    prints = {tiny_corpus.split(part, 0).fingerprint for part in (documents, changed)}
    assert len(prints) == 2


def test_shared_lines_are_counted():
    lines = "".join(f"line {row}\n" for row in range(10))
    train = [tiny_corpus.Document("a.py", lines)]
    corpora = [
        tiny_corpus.Corpus(train, [tiny_corpus.Document("b.py", text)], "")
        for text in (lines, lines.upper(), lines + lines.upper())
    ]
    assert [tiny_corpus.shared_share(corpus) for corpus in corpora] == [1.0, 0.0, 0.5]


def test_tokenizer_keeps_every_byte(source):
    documents = list(tiny_corpus.read_documents(source))
    tokenizer = tiny_corpus.train_tokenizer(documents[:5], 280)
    assert tokenizer.get_vocab_size() == 280
    assert [tokenizer.token_to_id(token) for token in tiny_corpus.SPECIALS] == [0, 1, 2]
    tiny_corpus.encode(tokenizer, documents)  # raises where a file does not survive


def test_stream_covers_an_epoch_and_marks_starts():
    files = [np.full(size, size) for size in (5, 9, 20)]
    windows = tiny_corpus.Stream(files, 0, 4, 0).epoch()
    assert windows.shape == (9, 5)
    whole = tiny_corpus.Stream(files, 0, 4, 0).epoch()
    assert (windows == whole).all()
    assert 0 in windows


def test_windows_score_every_token_once():
    files = [np.arange(1, size) for size in (4, 33, 150)]
    inputs, targets = tiny_eval.scored_windows(files, 0, 32, 16)
    assert inputs.shape == targets.shape
    scored = targets[targets != tiny_eval.IGNORED]
    assert scored.tolist() == [token for file in files for token in [*file, 0]]
    for row, goals in zip(inputs, targets, strict=True):
        (places,) = np.nonzero(goals != tiny_eval.IGNORED)
        assert (row[places[1:]] == goals[places[:-1]]).all()
        assert places[0] == 0 or places[0] >= 16


@pytest.mark.parametrize("depth", [1, 3])
def test_speculation_writes_what_greedy_writes(model, depth):
    random = np.random.default_rng(1)
    prompts = [random.integers(3, 280, size) for size in (4, 9, 17)]
    result = tiny_eval.speculate(model, prompts, depth, 10)
    assert result.outputs == [tiny_eval.greedy(model, prompt.tolist(), 10) for prompt in prompts]
    assert len(result.accepted) == depth


def test_training_and_decoding_chain_alike(model):
    torch.manual_seed(1)
    line = torch.randint(3, 280, (1, 24))
    last = 12
    with torch.no_grad():
        hidden, _ = model(line)
        ends = torch.tensor([last])
        drafts = tiny_eval.chain_drafts(
            model, line[:, : last + 1], hidden[:, : last + 1], ends, len(train_tiny.DEPTH_WEIGHTS)
        )
    line[0, last + 1 : last + 3] = drafts[0, :2]
    seen = []

    def keep(state, *_):
        seen.append(int(model.logits(state)[0, last - 1].argmax()))
        return torch.zeros(()), torch.zeros(())

    train_tiny.chained_loss(model, line, 0.5, keep)
    assert seen == drafts[0].tolist()


def test_training_exports_what_transformers_loads(trained, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    out, report = trained
    assert json.loads((out / "training.json").read_text()) == report
    reference, info = transformers.Qwen3MoeForCausalLM.from_pretrained(
        out, output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"]
    assert all(key.startswith("mtp.") for key in info["unexpected_keys"])
    ours = tiny_model.reload(tiny_model.Tiny(SHAPE, torch.float32), out)
    tokens = torch.randint(0, 280, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ours(tokens)[0]), reference(tokens).logits)


def test_training_exports_a_tokenizer(trained):
    transformers = pytest.importorskip("transformers")
    out, _ = trained
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = " a\r\n\tb  é 🎉\n\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0)


def test_every_expert_is_stored_alone(trained):
    names = tiny_model.published(tiny_model.Tiny(SHAPE, torch.float32))
    for prefix in ("model.layers.1", "mtp.layers.0"):
        assert names[f"{prefix}.mlp.experts.3.down_proj.weight"].shape == (32, 16)
        assert names[f"{prefix}.mlp.gate.weight"].shape == (4, 32)
    assert names["mtp.fc.weight"].shape == (32, 64)
    assert all(weight.dtype == torch.bfloat16 for weight in names.values())


def test_flags_reach_the_plan_and_the_shape():
    plan, shape = train_tiny.parse(["--steps", "7", "--head-dim", "8", "--out", "x"])
    assert (plan.steps, shape.head_dim, plan.out) == (7, 8, Path("x"))


def test_a_corpus_that_is_not_there_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as refused:
        train_tiny.parse(["--corpus", "/nowhere"])
    assert refused.value.code == 2
    assert "argument --corpus: /nowhere is no directory" in capsys.readouterr().err


@pytest.mark.skipif(not SHIPPED.is_dir(), reason="the model is not in this checkout")
def test_shipped_model_is_small_and_its_card_true():
    report = json.loads((SHIPPED / "training.json").read_text())
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 12_000_000
    assert (SHIPPED / "README.md").read_text() == tiny_card.render(report)
    assert report["held_out_bits_per_byte"] <= 1.10
    assert report["speculation"]["k1"]["acceptance"] >= 0.62
    assert report["speculation"]["k3"]["tokens_per_step"] >= 2.0
    shape = tiny_model.TinyShape(**report["shape"])
    assert json.loads((SHIPPED / "config.json").read_text()) == shape.config(0)
    weights = SHIPPED / "model.safetensors"
    assert report["parameters"]["total"] * 2 < weights.stat().st_size
