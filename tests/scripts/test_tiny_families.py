"""The tiny models of other families: their training form computes what Baton serves; a short training of each."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from baton.core.numerics import Numerics
from baton.model.loader import load_model
from baton.tests.model.harness import Paged

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
try:
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
    model = tiny_model.reload(model, tmp_path)
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
