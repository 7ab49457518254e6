"""The engine on the bundled model in float64: the same tokens in every arrangement, and transformers' own."""

import functools
import itertools

import pytest
import torch

from baton.core.requests.request import AttemptKey, FinishReason, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.engine.local import LocalEngine
from baton.engine.sampling import sampler

WHOLE = 4096
MAX_TOKENS = 14
MODES = {"greedy": {"temperature": 0.0}, "coupled": {"temperature": 1.0}}
TRUNCATED = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
CELLS = list(itertools.product(MODES, (0, 1, 2, 4), (16, 48, WHOLE)))


def requests_for(prompts, k, **sampling):
    return [
        GenerationRequest(
            key=AttemptKey(f"r{at}", 1),
            prompt_token_ids=prompt,
            sampling=SamplingParams(seed=at, **{"max_tokens": MAX_TOKENS, "ignore_eos": True} | sampling),
            deadline_s=float("inf"),
            num_draft_tokens=k,
        )
        for at, prompt in enumerate(prompts)
    ]


def engine_of(model, tokenizer, *, k=0, chunk_len=WHOLE, num_blocks=200, block_size=16, max_num_sequences=4):
    return LocalEngine(
        model,
        tokenizer,
        num_blocks=num_blocks,
        block_size=block_size,
        num_draft_tokens=k,
        chunk_len=chunk_len,
        max_num_sequences=max_num_sequences,
    )


@pytest.fixture(scope="module")
def alone(tiny_model, tiny_tokenizer, tiny_prompts):
    """Tokens of each prompt run by itself, whole, without drafts."""

    @functools.cache
    def tokens(mode):
        engine = engine_of(tiny_model, tiny_tokenizer, max_num_sequences=1)
        results = [engine.generate([request])[0] for request in requests_for(tiny_prompts, 0, **MODES[mode])]
        return [result.token_ids for result in results]

    return tokens


@pytest.mark.parametrize(("mode", "k", "chunk_len"), CELLS)
def test_same_tokens_in_every_arrangement(mode, k, chunk_len, tiny_model, tiny_tokenizer, tiny_prompts, alone):
    engine = engine_of(tiny_model, tiny_tokenizer, k=k, chunk_len=chunk_len)
    results = engine.generate(requests_for(tiny_prompts, k, **MODES[mode]))
    assert [result.token_ids for result in results] == alone(mode)
    assert {result.finish_reason for result in results} == {FinishReason.LENGTH}
    if k:
        assert sum(result.counts.num_accepted_tokens for result in results) > 0


@pytest.mark.slow
def test_invariant_numerics_give_the_same_tokens_in_float32(tiny_model_invariant, tiny_tokenizer, tiny_prompts):
    def run(k, **arrangement):
        engine = engine_of(tiny_model_invariant, tiny_tokenizer, k=k, **arrangement)
        greedy = engine.generate(requests_for(tiny_prompts, k, **MODES["greedy"]))
        sampled = engine.generate(requests_for(tiny_prompts, k, **TRUNCATED))
        return [result.token_ids for result in [*greedy, *sampled]]

    assert run(2, chunk_len=24, block_size=32) == run(0, max_num_sequences=1)


def test_same_tokens_with_truncated_sampling_and_mixed_rows(tiny_model, tiny_tokenizer, tiny_prompts):
    modes = [{"temperature": 0.0}, TRUNCATED, {"temperature": 1.0}]

    def run(k, order, **arrangement):
        requests = [requests_for(tiny_prompts[:6], k, max_tokens=8, **modes[at % 3])[at] for at in range(6)]
        engine = engine_of(tiny_model, tiny_tokenizer, k=k, **arrangement)
        results = engine.generate([requests[at] for at in order])
        return {result.key: result.token_ids for result in results}

    expected = run(0, range(6), max_num_sequences=1)
    assert run(3, [5, 2, 0, 4, 1, 3], chunk_len=7, block_size=32, max_num_sequences=3) == expected


@pytest.fixture(scope="module")
def transformers_tokens(tiny_directory, tiny_prompts):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_directory,
        dtype=torch.float64,
        experts_implementation="eager",  # the grouped kernel refuses float64
    )
    model.eval()
    generated = []
    for prompt in tiny_prompts:
        ids = torch.tensor([prompt])
        settings = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=MAX_TOKENS, min_new_tokens=MAX_TOKENS, pad_token_id=0
        )
        with torch.inference_mode():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        generated.append(tuple(output[0, len(prompt) :].tolist()))
    return generated


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("k", [0, 2])
def test_greedy_equals_transformers(k, tiny_model, tiny_tokenizer, tiny_prompts, transformers_tokens):
    engine = engine_of(tiny_model, tiny_tokenizer, k=k, chunk_len=48)
    results = engine.generate(requests_for(tiny_prompts, k, temperature=0.0))
    assert [result.token_ids for result in results] == transformers_tokens


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_blocks_never_written_do_not_matter(poison, tiny_model, tiny_tokenizer, tiny_prompts, alone):
    engine = engine_of(tiny_model, tiny_tokenizer, k=2, chunk_len=16)
    for layer in range(engine.pool.layout.num_layers):
        engine.pool.blocks(layer).fill_(poison)
    results = engine.generate(requests_for(tiny_prompts, 2, **MODES["greedy"]))
    assert [result.token_ids for result in results] == alone("greedy")


def test_drafts_that_share_the_targets_noise_are_accepted_more_often(
    tiny_model, tiny_tokenizer, tiny_prompts, monkeypatch
):
    def share():
        requests = requests_for(tiny_prompts * 2, 2, temperature=1.0, max_tokens=24)
        requests = [
            GenerationRequest(
                key=AttemptKey(f"s{at}", 1),
                prompt_token_ids=request.prompt_token_ids,
                sampling=request.sampling,
                deadline_s=request.deadline_s,
                num_draft_tokens=2,
            )
            for at, request in enumerate(requests)
        ]
        results = engine_of(tiny_model, tiny_tokenizer, k=2, max_num_sequences=8).generate(requests)
        num_drafts = sum(result.counts.num_draft_tokens for result in results)
        num_accepted = sum(result.counts.num_accepted_tokens for result in results)
        return num_accepted / num_drafts, [result.token_ids for result in results]

    coupled, tokens = share()
    monkeypatch.setattr(
        "baton.engine.speculation.drafting.choose", lambda logits, *_: sampler.choose(logits, None, None)
    )
    argmax, same_tokens = share()
    assert same_tokens == tokens
    print(f"accepted at temperature 1, k = 2: {coupled:.3f} coupled, {argmax:.3f} argmax")
    assert coupled > argmax


@pytest.mark.long
def test_stop_string_and_streaming(tiny_model, tiny_tokenizer, tiny_prompts):
    engine = engine_of(tiny_model, tiny_tokenizer, k=2)
    [whole] = engine.generate(requests_for(tiny_prompts[-2:-1], 2, temperature=0.0, max_tokens=24))
    text = tiny_tokenizer.decode(whole.token_ids)
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    [request] = requests_for(tiny_prompts[-2:-1], 2, temperature=0.0, max_tokens=24, stop=(stop,))
    events = list(engine.run(request))
    result = events[-1].result
    assert result.finish_reason is FinishReason.STOP
    streamed = tuple(token for event in events for token in event.token_ids)
    assert streamed == result.token_ids == whole.token_ids[: len(streamed)]
    assert stop in tiny_tokenizer.decode(streamed)
    assert stop not in tiny_tokenizer.decode(streamed[:-1])
