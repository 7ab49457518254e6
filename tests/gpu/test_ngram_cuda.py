"""Prompt lookup on a GPU: the kernel beside its reference, over whole rows; and sequences that use it."""

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.prompt_lookup import PromptLookup
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.core.requests.tokenizer import Tokenizer
from baton.engine.local import LocalEngine
from baton.kernels.implementation import Implementation
from baton.kernels.sampling.ngram import ngram_drafts
from baton.model.loader import load_model
from baton.scripts.model_shape import write_shape

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize(("num_sequences", "width", "vocab"), [(1, 131_073, 50), (64, 8193, 9), (256, 2049, 3)])
def test_the_kernel_finds_what_the_reference_finds(num_sequences, width, vocab):
    generator = torch.Generator(device=CUDA).manual_seed(width)
    tokens_NL = torch.randint(0, vocab, (num_sequences + 3, width), generator=generator, device=CUDA, dtype=torch.int32)
    slot_B = torch.randperm(num_sequences + 3, device=CUDA)[:num_sequences]
    length_B = torch.randint(0, width, (num_sequences,), generator=generator, device=CUDA)
    for num_drafts, shortest, longest in ((1, 1, 1), (4, 2, 4), (3, 3, 16)):
        arguments = tokens_NL, slot_B, length_B, num_drafts
        lens = {"min_match_len": shortest, "max_match_len": longest}
        found = ngram_drafts(*arguments, **lens)
        assert torch.equal(found, ngram_drafts(*arguments, **lens, implementation=Implementation.REFERENCE))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_are_those_without_drafts(temperature, tmp_path):
    """Batch-invariant, so that a step's rows do not change what any of them is."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "head_dim": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 500}
    path = write_shape("qwen3-8b", tmp_path, **sizes)
    model = load_model(
        path, dtype=torch.bfloat16, device=CUDA, numerics=Numerics.INVARIANT, with_mtp=False, random_seed=1
    )
    tokenizer, found = Tokenizer.byte_level(path, 512), {}
    for k in (0, 4):
        engine = LocalEngine(
            model, tokenizer, num_blocks=400, block_size=16, num_draft_tokens=k, chunk_len=128, max_num_sequences=8,
            lookup=PromptLookup(min_match_len=1) if k else None,
        )  # fmt: skip
        results = engine.generate(
            [
                GenerationRequest(
                    key=AttemptKey(f"{k}-{at}", 1),
                    prompt_token_ids=tuple(range(at + 1, at + 9)) * (1 + at % 3),
                    sampling=SamplingParams(temperature=temperature, seed=at, max_tokens=60, ignore_eos=True),
                    deadline_s=float("inf"),
                    num_draft_tokens=k,
                )
                for at in range(12)
            ]
        )
        found[k] = [result.token_ids for result in results]
        accepted = sum(result.counts.num_accepted_tokens for result in results)
        assert (accepted > 0) == (k > 0)
    assert found[4] == found[0]
