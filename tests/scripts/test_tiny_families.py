"""The tiny models of other families: their training form computes what Baton serves; a short training of each."""

import dataclasses
import json
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.requests.tokenizer import Tokenizer
from baton.model.loader import load_model
from baton.tests.model.harness import Paged

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
try:
    import tiny_card  # type: ignore[import-not-found]
    import tiny_eval  # type: ignore[import-not-found]
    import tiny_hybrid  # type: ignore[import-not-found]
    import tiny_mla  # type: ignore[import-not-found]
    import tiny_model  # type: ignore[import-not-found]
    import train_tiny  # type: ignore[import-not-found]
finally:
    sys.path.remove(str(ROOT / "scripts"))

SMALL = {"vocab": 270, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "top_k": 2, "expert_width": 16}
SHAPES = {
    "hybrid": tiny_hybrid.HybridShape(
        **SMALL,
        max_positions=64,
        experts=4,
        shared_width=8,
        layers=4,
        delta_key_heads=2,
        delta_value_heads=4,
        delta_key_dim=8,
        delta_value_dim=12,
    ),
    "mla": tiny_mla.MlaShape(
        **SMALL,
        max_positions=64,
        experts=8,
        layers=3,
        dense_width=24,
        groups=4,
        kept_groups=2,
        query_rank=24,
        latent_dim=16,
        nope_dim=12,
        rope_dim=8,
        value_dim=10,
    ),
}
FAMILIES = pytest.mark.parametrize("family", SHAPES)
SHIPPED = {family: ROOT / "assets" / f"tiny-{family}" for family in SHAPES}
TEXT = (ROOT / "tests" / "e2e" / "corpus.txt").read_text()


def random_model(family):
    """A model none of whose weights is zero, as some are at the beginning."""
    torch.manual_seed(0)
    model = train_tiny.FAMILIES[family][1](SHAPES[family], torch.float32).eval()
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("A_log", "dt_bias")):
            torch.nn.init.normal_(weight, -1.0)
        elif name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(weight, std=0.2)
        elif weight.ndim == 1:
            weight.data += 0.1 * torch.randn(weight.shape)
        else:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[-1] ** -0.5)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.5)
    return model


@FAMILIES
def test_training_form_is_serving_form(family, tmp_path):
    model = random_model(family)
    tiny_model.export(model, tmp_path, 0)
    written, model = model.state_dict(), tiny_model.reload(model, tmp_path)
    for name, weight in model.state_dict().items():  # what is published is read back as what it was
        torch.testing.assert_close(weight, written[name], rtol=2**-8, atol=0)
    served = load_model(
        tmp_path, dtype=torch.float32, device=torch.device("cpu"), numerics=Numerics.DEFAULT, with_mtp=True
    )
    tokens = torch.randint(3, 270, (50,))
    paged = Paged(served)
    hidden = paged.prefill(tokens)
    with torch.no_grad():
        ours, _ = model(tokens[None])
        entries, _, _ = model.draft(tokens[None, 1:], ours[:, :-1], torch.arange(49))
    torch.testing.assert_close(paged.logits(hidden), model.logits(ours[0]), rtol=1e-4, atol=1e-4)
    drafted = paged.mtp(tokens[1:], hidden[:-1], paged.prefill_batch([(0, 0, 49)]))
    torch.testing.assert_close(paged.logits(drafted), model.logits(entries[0]), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = tmp_path_factory.mktemp("source")
    for index in range(40):
        lines = [f"def f{index}_{row}(x):\n    return x + {row}\n" for row in range(20)]
        (root / f"m{index:02}.py").write_text("\n".join(lines))
    return root


@pytest.fixture(scope="module", params=SHAPES)
def trained(request, source, tmp_path_factory):
    plan = dataclasses.replace(
        train_tiny.FAMILIES[request.param][2],
        out=tmp_path_factory.mktemp(request.param),
        corpus=source,
        device="cpu",
        trunk_seconds=0.0,
        head_seconds=0.0,
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
    return request.param, plan.out, train_tiny.train(plan, SHAPES[request.param])


def test_a_training_leaves_a_whole_directory(trained):
    family, out, report = trained
    assert {path.name for path in out.iterdir()} == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "training.json",
    }  # fmt: skip
    assert json.loads((out / "training.json").read_text()) == report
    assert report["plan"]["family"] == family
    assert f"# tiny-{family}\n" in (out / "README.md").read_text()


@FAMILIES
def test_training_and_decoding_chain_alike(family):
    model = random_model(family)
    line, last = torch.randint(3, 270, (1, 24)), 12
    with torch.no_grad():
        hidden, _ = model(line)
        ends = torch.tensor([last])
        drafts = tiny_eval.chain_drafts(model, line[:, : last + 1], hidden[:, : last + 1], ends, 3)
    line[0, last + 1 : last + 3] = drafts[0, :2]
    seen = []

    def keep(state, *_):
        seen.append(int(model.logits(state)[0, last - 1].argmax()))
        return torch.zeros(()), torch.zeros(())

    train_tiny.chained_loss(model, line, 0.5, keep)
    assert seen == drafts[0].tolist()


def test_chunks_are_the_recurrence():
    """By value and gradient; some keys repeat, without forgetting, which powers of a triangle would not survive."""
    torch.manual_seed(0)
    span, keys, values = 77, 8, 12
    query, key = (torch.nn.functional.normalize(torch.randn(2, span, 3, keys).double(), dim=-1) for _ in range(2))
    key[:, 5:70] = key[:, 5:6]
    value, beta = torch.randn(2, span, 3, values).double(), torch.rand(2, span, 3).double()
    beta[:, 5:70] = 1.0
    decay = -0.1 * torch.rand(2, span, 3).double()
    decay[:, 5:70] = 0.0
    inputs = [x.requires_grad_() for x in (query, key, value, decay, beta)]
    state, rows = torch.zeros(2, 3, keys, values).double(), []
    for place in range(span):
        state = state * decay[:, place, :, None, None].exp()
        missed = value[:, place] - torch.einsum("bhkv,bhk->bhv", state, key[:, place])
        state = state + key[:, place, :, :, None] * (beta[:, place, :, None] * missed)[:, :, None]
        rows.append(torch.einsum("bhkv,bhk->bhv", state, query[:, place]))
    wanted = torch.stack(rows, 1)
    found = tiny_hybrid.delta_rule(*inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    weight = torch.randn_like(wanted)
    gradients = (torch.autograd.grad((x * weight).sum(), inputs) for x in (found, wanted))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_bias_grows_where_little_comes():
    model = random_model("mla").train()
    gates = [mlp.gate for mlp in model.modules() if isinstance(mlp, tiny_mla.SigmoidMlp)]
    assert len(gates) == 3
    before = [gate.e_score_correction_bias.clone() for gate in gates]
    model(torch.randint(3, 270, (2, 64)))
    model.adjust_routers(model.model)
    for index, (gate, old) in enumerate(zip(gates, before, strict=True)):
        grown = gate.e_score_correction_bias - old
        if index == 2:  # the head's, which drafted nothing
            assert not grown.any()
            continue
        load = model.model.layers[index + 1].mlp.load
        torch.testing.assert_close(load.sum(), torch.tensor(1.0))
        assert (grown[load < 1 / 8] > 0).all()
        assert (grown[load > 1 / 8] < 0).all()


def test_time_binds_a_phase_where_seconds_are_given():
    now = [0.0]
    schedule = train_tiny.Schedule(3, 100.0, lambda: now[0])
    assert schedule.left(0) == 1.0
    now[0] = 40.0  # compiling
    assert schedule.left(1) == 1.0
    assert schedule.left(schedule.SETTLED) == 1.0
    now[0] = 70.0
    assert schedule.left(9) == 0.5
    assert not schedule.is_last(9)
    now[0] = 101.0
    assert schedule.is_last(10)
    steps = train_tiny.Schedule(3, 0.0, lambda: now[0])
    assert (steps.left(2), steps.is_last(2), steps.is_last(3)) == (None, False, True)


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_compiler_that_fails_costs_speed_only(fails, capsys):
    dropped = []

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(*_):
            raise AssertionError("no backward")

    weight = torch.ones((), requires_grad=True)

    def compute(compiled):
        if compiled and fails == "forward":
            raise OSError("no compiler")
        return (Broken.apply(weight) if compiled else weight * 2,)

    compiled, (loss,) = train_tiny.first_step(compute, True, lambda: dropped.append(True))
    assert (compiled, float(loss.detach()), float(weight.grad), dropped) == (False, 2.0, 2.0, [True])
    assert "compilation failed" in capsys.readouterr().out


@FAMILIES
def test_flags_reach_the_shape_of_the_family(family):
    plan, shape = train_tiny.parse(["--family", family, "--layers", "6", "--trunk-seconds", "9"])
    assert (plan.family, plan.out.name, plan.trunk_seconds) == (family, f"tiny-{family}", 9.0)
    assert type(shape) is type(SHAPES[family])
    assert shape.layers == 6


@FAMILIES
def test_a_shipped_model_is_small_and_its_card_true(family):
    path = SHIPPED[family]
    report = json.loads((path / "training.json").read_text())
    assert sum(file.stat().st_size for file in path.iterdir()) <= 12_000_000
    assert (path / "README.md").read_text() == tiny_card.render(report)
    assert report["held_out_bits_per_byte"] <= 1.10
    assert report["speculation"]["k1"]["acceptance"] >= 0.60
    assert report["speculation"]["k3"]["tokens_per_step"] >= 2.0
    shape = train_tiny.FAMILIES[family][0](**report["shape"])
    assert json.loads((path / "config.json").read_text()) == shape.config(0)
    assert report["parameters"]["total"] * 2 < (path / "model.safetensors").stat().st_size
    # Of other seconds a command without them would make another model than the card says.
    plan = train_tiny.FAMILIES[family][2]
    assert {key: getattr(plan, key) for key in report["plan"] if key != "compile"} == {
        key: value for key, value in report["plan"].items() if key != "compile"
    }


@pytest.fixture(scope="module")
def shipped():
    """By family: what Baton serves of what is shipped, in float32."""
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "numerics": Numerics.DEFAULT, "with_mtp": True}
    return cache(lambda family: load_model(SHIPPED[family], **options))


@pytest.fixture(scope="module")
def text():
    """Tokens of text that is in no training corpus."""
    return torch.tensor(Tokenizer.from_directory(SHIPPED["mla"]).encode(TEXT)[700:800])


@FAMILIES
def test_shipped_drafts_are_what_baton_drafts(family, shipped, text):
    """Each further entry takes a drafted token and the head's own output: in Baton, as one decode row."""
    report = json.loads((SHIPPED[family] / "training.json").read_text())
    shape, kind, _ = train_tiny.FAMILIES[family]
    model = tiny_model.reload(kind(shape(**report["shape"]), torch.float32), SHIPPED[family])
    paged = Paged(shipped(family))
    hidden = paged.prefill(text)[:-1]
    num_entries = len(hidden)
    out = paged.mtp(text[1:], hidden, paged.prefill_batch([(0, 0, num_entries)]))[-1:]
    with torch.no_grad():
        tokens, states = text[None, 1:], model(text[None])[0][:, :-1]
        for draft in range(4):
            entries, _, _ = model.draft(tokens, states, torch.arange(num_entries + draft))
            wanted = model.logits(entries[0, -1:])
            torch.testing.assert_close(paged.logits(out), wanted, rtol=0, atol=2e-4)
            token = wanted.argmax(-1)
            tokens, states = torch.cat([tokens, token[None]], 1), torch.cat([states, entries[:, -1:]], 1)
            out = paged.mtp(token, out, paged.decode_batch([0], [num_entries + draft], 1))


@FAMILIES
def test_transformers_computes_the_shipped_logits(family, shipped, text, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    reference, found = transformers.AutoModelForCausalLM.from_pretrained(
        SHIPPED[family], output_loading_info=True, dtype=torch.float32
    )
    assert not found["missing_keys"]
    of_head = {"hybrid": "mtp.", "mla": "model.layers.5."}[family]
    assert all(key.startswith(of_head) for key in found["unexpected_keys"])
    paged = Paged(shipped(family))
    with torch.no_grad():
        wanted = reference(text[None]).logits[0]
    torch.testing.assert_close(paged.logits(paged.prefill(text)), wanted, rtol=0, atol=2e-4)
