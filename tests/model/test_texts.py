"""Greedy texts of every family are those of `transformers.generate`, from a directory that transformers saved.

A text may leave the other's only at a near-tie: its bound is the tolerance that logits of this dtype have. Whatever
Baton says after one is judged by transformers, too, token by token.
"""

import itertools
import json

import pytest
import torch

from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.core.requests.tokenizer import Tokenizer
from baton.engine.local import LocalEngine
from baton.tests.model.checkpoints import write_checkpoint
from baton.tests.model.deepseek_checkpoints import DEEPSEEKS, DeepseekReference
from baton.tests.model.harness import prompt
from baton.tests.model.hybrid_checkpoints import HYBRIDS, HybridReference
from baton.tests.model.reference import Reference
from baton.tests.model.test_families import ROPES, load

VOCAB_SIZE = 384
NUM_TOKENS = 64
LENGTHS = (3, 17, 48, 90)
NUM_OF_LENGTH = 5
# What layers add outweighs a token's own embedding, which a tied head would repeat for ever.
GAINS = {"o_proj": 3.0, "out_proj": 3.0, "down_proj": 3.0}
FAMILIES = {
    "llama": {"rope_scaling": ROPES["llama3"]},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"rope_scaling": ROPES["yarn"]},
    "qwen3_moe": {},
    "qwen2_moe": {},
    "mixtral": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "qwen3_next": {},
    "deepseek_v3": {},
    "glm4_moe": {},
}
# Two tokens whose logits are nearer than this are tied. Scaled frequencies are float32 in transformers.
NEAR_TIES = {torch.float32: 2e-4, torch.float64: 2e-9}
SCALED_NEAR_TIE = 2e-4
CELLS = list(itertools.product(FAMILIES, (True, False), NEAR_TIES))
DEFAULT = {(kind, at % 2 == 0, torch.float32) for at, kind in enumerate(FAMILIES)}


@pytest.mark.parametrize(
    ("kind", "tie", "dtype"),
    [
        pytest.param(*cell, id=f"{cell[0]}-{'tied' if cell[1] else 'untied'}-{cell[2]}", marks=marks)
        for cell in CELLS
        for marks in [[] if cell in DEFAULT else [pytest.mark.slow]]
    ],
)
def test_greedy_texts_are_transformers(kind, tie, dtype, tmp_path, record_property):
    check_texts(kind, tie, dtype, tmp_path, record_property)


@pytest.mark.long
def test_greedy_texts_of_one_family_are_transformers(tmp_path, record_property):
    check_texts("llama", False, torch.float64, tmp_path, record_property)


def test_a_text_may_part_only_at_a_near_tie(tmp_path):
    model = Reference(saved_by_transformers(tmp_path, kind="llama", tie=False), torch.float64).model
    ids = prompt(20, VOCAB_SIZE)
    [wanted] = texts_of_transformers(model, [ids])
    at = 30
    twin = next(token for token in range(VOCAB_SIZE) if token not in wanted)
    got = [*wanted[:at], twin, *wanted[at + 1 :]]
    with pytest.raises(AssertionError, match=f"token {at} of the text"):
        require_near_tie(model, ids, wanted, got, 1e-9)
    with torch.no_grad():
        for matrix in (model.lm_head.weight, model.model.embed_tokens.weight):
            matrix[twin] = matrix[wanted[at]]
    assert f"{twin} and {wanted[at]} are 0.0e+00 apart" in require_near_tie(model, ids, wanted, got, 1e-9)
    with pytest.raises(AssertionError, match=f"then token {NUM_TOKENS - 1} is"):
        require_near_tie(model, ids, wanted, [*got[:-1], (got[-1] + 1) % VOCAB_SIZE], 1e-9)


def check_texts(kind, tie, dtype, tmp_path, record_property):
    path = saved_by_transformers(tmp_path, kind=kind, tie=tie, overrides=FAMILIES[kind])
    if kind in HYBRIDS or kind in DEEPSEEKS:
        model = (HybridReference if kind in HYBRIDS else DeepseekReference)(path, kind, dtype).model
    else:
        model = Reference(path, dtype).model
    prompts = [
        [prompt(length, VOCAB_SIZE, seed=1000 * length + index) for index in range(NUM_OF_LENGTH)] for length in LENGTHS
    ]
    wanted = [text for of_length in prompts for text in texts_of_transformers(model, of_length)]
    assert len({token for text in wanted for token in text}) > 100, "texts say too little"
    assert len({tuple(text) for text in wanted}) == len(wanted)
    prompts = list(itertools.chain.from_iterable(prompts))
    got = texts_of_baton(path, dtype, prompts)
    bound = SCALED_NEAR_TIE if FAMILIES[kind] else NEAR_TIES[dtype]
    ties = [require_near_tie(model, *texts, bound) for texts in zip(prompts, wanted, got, strict=True)]
    record_property("near-ties", [tie for tie in ties if tie])
    if FAMILIES[kind]:
        config = json.loads((path / "config.json").read_text())
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
        (path / "config.json").write_text(json.dumps(config))
        plain = texts_of_baton(path, dtype, prompts)
        assert all(one != text for one, text in zip(plain, wanted, strict=True)), "the scaling of positions is not felt"


def saved_by_transformers(path, **options):
    """A directory as transformers writes it."""
    write_checkpoint(path / "written", with_mtp=False, vocab_size=VOCAB_SIZE, tokenizer=True, **options)
    model = Reference(path / "written", torch.float32).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter *= next((gain for part, gain in GAINS.items() if part in name), 1.0)
    model.save_pretrained(path / "saved")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (path / "saved" / name).write_bytes((path / "written" / name).read_bytes())
    return path / "saved"


@torch.no_grad()
def texts_of_transformers(model, prompts):
    """Prompts of one length."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
    ids = torch.stack(prompts)
    return model.generate(ids, attention_mask=torch.ones_like(ids))[:, ids.shape[1] :].tolist()


def texts_of_baton(path, dtype, prompts):
    """All prompts in one batch."""
    engine = LocalEngine(
        load(path, dtype=dtype),
        Tokenizer.from_directory(path),
        num_blocks=256,
        block_size=16,
        num_draft_tokens=0,
        chunk_len=64,
        max_num_sequences=len(prompts),
    )
    requests = [
        GenerationRequest(
            key=AttemptKey(f"r{at}", 1),
            prompt_token_ids=tuple(ids.tolist()),
            sampling=SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
            deadline_s=float("inf"),
            num_draft_tokens=0,
        )
        for at, ids in enumerate(prompts)
    ]
    return [list(result.token_ids) for result in engine.generate(requests)]


@torch.no_grad()
def require_near_tie(model, prompt_ids, wanted, got, bound):
    """Nothing if the texts are equal; else they part at a near-tie, which is returned in words.

    From there on each of Baton's tokens is the best after those before it, or as near to it.
    """
    if got == wanted:
        return ""
    assert len(got) == len(wanted)
    at = next(at for at, pair in enumerate(zip(got, wanted, strict=True)) if pair[0] != pair[1])
    ids = torch.cat([prompt_ids, torch.tensor(got)])
    logits = model(ids[None, :-1], use_cache=False).logits[0, len(prompt_ids) - 1 :]
    gaps = logits.amax(dim=-1) - logits.gather(1, torch.tensor(got)[:, None])[:, 0]
    gap = float(abs(logits[at, wanted[at]] - logits[at, got[at]]))
    where = f"token {at} of the text after {prompt_ids[:4].tolist()}: {got[at]} and {wanted[at]} are {gap:.1e} apart"
    assert gap <= bound, where
    assert gaps.max() <= bound, f"{where}; then token {int(gaps.argmax())} is {gaps.max():.1e} below the best"
    return where
