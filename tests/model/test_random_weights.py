"""Weights that no file holds: the same for every worker, never mixed with others, and fit to compute with."""

import json
from pathlib import Path

import pytest
import torch

from baton.core.errors import ModelUnsupported
from baton.core.numerics import Numerics
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.core.requests.tokenizer import Tokenizer
from baton.engine.local import LocalEngine
from baton.model.checkpoint.random_weights import RandomTensor, random_tensors
from baton.model.checkpoint.weights import Cut
from baton.model.loader import load_model
from baton.model.tensor_spec import WeightSpec
from baton.scripts.model_shape import SHAPES, write_shape

CPU = torch.device("cpu")
# A published shape, with every size that costs made small.
SMALL = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 512, "head_dim": 16, "max_position_embeddings": 256}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "eos_token_id": 500}
SMALL_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SPEC = WeightSpec((32, 48), spread=1.0)
SMALL_SHARED = SMALL_MOE | {"shared_expert_intermediate_size": 96}
EXPERTS = {"moe": SMALL_MOE, "shared": SMALL_SHARED}
KINDS = {"tied": "qwen3-0.6b", "dense": "qwen3-8b", "moe": "qwen3-30b-a3b", "shared": "qwen1.5-moe-a2.7b"}


def shape_of(path, kind, **changes):
    return write_shape(KINDS[kind], path, **(SMALL | EXPERTS.get(kind, {}) | changes))


def load(path, *, seed=0, dtype=torch.float64, with_mtp=True, numerics=Numerics.DEFAULT):
    return load_model(path, dtype=dtype, device=CPU, numerics=numerics, with_mtp=with_mtp, random_seed=seed)


def generate(model, path, prompts, num_drafts=2, chunk_len=64):
    engine = LocalEngine(
        model,
        Tokenizer.byte_level(path, model.config.vocab_size),
        num_blocks=64,
        block_size=16,
        num_draft_tokens=num_drafts,
        chunk_len=chunk_len,
        max_num_sequences=4,
    )
    requests = [
        GenerationRequest(
            key=AttemptKey(f"r{at}", 1),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
            deadline_s=float("inf"),
            num_draft_tokens=num_drafts,
        )
        for at, prompt in enumerate(prompts)
    ]
    return [result.token_ids for result in engine.generate(requests)]


def prompts_of(num, length=20, vocab_size=512):
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(vocab_size, (length,), generator=generator).tolist()) for _ in range(num)]


@pytest.mark.parametrize("kind", KINDS)
def test_two_workers_make_the_same_model_and_its_answers_are_no_single_token(tmp_path, kind):
    path = shape_of(tmp_path, kind)
    one, other = load(path), load(path)
    assert one.kv_layout(16) == other.kv_layout(16)
    tokens = generate(one, path, prompts_of(4))
    assert tokens == generate(other, path, prompts_of(4), chunk_len=7)
    assert tokens == generate(load(path, with_mtp=False), path, prompts_of(4), num_drafts=0)
    assert len({token for answer in tokens for token in answer}) > 24, "not one token over and over"


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.fast)])
def test_deep_models_stay_finite_and_decided(tmp_path, kind, dtype):
    path = shape_of(tmp_path, kind, num_hidden_layers=40)
    model = load(path, dtype=dtype)
    tokens = generate(model, path, prompts_of(2))
    assert all(0 <= token < 512 for answer in tokens for token in answer)
    hidden = torch.randn(64, 64, dtype=torch.float32).to(dtype)
    logits = model.logits(hidden)
    assert logits.isfinite().all()
    assert 1.5 < logits.std() < 6.0


@pytest.mark.fast
def test_what_decides_the_numbers_decides_the_identity(tmp_path):
    path = shape_of(tmp_path, "dense")
    hashes = {load(path, seed=seed).config.model_hash for seed in (0, 0, 1)}
    assert len(hashes) == 2
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | {"rope_theta": 5.0}))
    assert load(path).config.model_hash not in hashes


@pytest.mark.fast
def test_random_weights_never_pass_for_the_checkpoint_of_the_directory():
    tiny = Path(__file__).parents[2] / "assets" / "tiny"
    common = {"dtype": torch.float32, "device": CPU, "numerics": Numerics.DEFAULT, "with_mtp": True}
    random, stored = load_model(tiny, random_seed=0, **common), load_model(tiny, **common)
    assert random.kv_layout(16).hash != stored.kv_layout(16).hash
    assert not torch.equal(random._lm_head_WD, stored._lm_head_WD)


@pytest.mark.fast
def test_a_tensor_depends_on_its_name_and_the_seed_alone():
    few, many = ({name: SPEC for name in names} for names in ("b", "abc"))
    (one,), other = random_tensors(few, torch.float32, CPU, 3).values(), random_tensors(many, torch.float32, CPU, 3)
    assert torch.equal(one.read(), other["b"].read())
    assert not torch.equal(one.read(), other["a"].read())
    assert not torch.equal(one.read(), RandomTensor("b", SPEC, torch.float32, CPU, 4).read())
    for cut in (Cut(0, 8, 16), Cut(1, 40, 8)):
        assert torch.equal(one.read(cut), one.read().narrow(cut.dim, cut.first, cut.count))


@pytest.mark.fast
def test_a_head_is_made_for_a_model_published_without_one_but_never_for_several(tmp_path):
    path = shape_of(tmp_path / "none", "dense")
    assert "mtp_num_hidden_layers" not in json.loads((path / "config.json").read_text())
    assert load(path).with_mtp
    with pytest.raises(ModelUnsupported):
        load(shape_of(tmp_path / "two", "dense", mtp_num_hidden_layers=2))


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPES)
def test_published_shapes_are_served(tmp_path, name):
    from baton.model.config import ModelConfig
    from baton.model.tensor_spec import tensor_spec

    path = write_shape(name, tmp_path)
    config = ModelConfig.from_directory(path, made_weights="random")
    num_weights = 0
    for shape in tensor_spec(config, with_mtp=False).required.values():
        num_weights += torch.Size(shape).numel()
    billions = {
        "qwen3-0.6b": 0.6,
        "qwen3-8b": 8.2,
        "qwen3-32b": 32.8,
        "qwen3-30b-a3b": 30.5,
        "qwen1.5-moe-a2.7b": 14.3,
        "glm-4.5-air": 106.85,
        "deepseek-v3": 671.03,
        "qwen2.5-7b": 7.62,
        "llama-3.1-8b": 8.03,
        "qwen3.5-35b-a3b": 34.66,
    }[name]
    assert num_weights / 1e9 == pytest.approx(billions, abs=0.05)
