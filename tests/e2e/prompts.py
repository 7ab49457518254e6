"""Prompts of mixed length for the end-to-end suites: real token ids of the bundled model, seeded."""

import random
from pathlib import Path

from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams

CORPUS = Path(__file__).with_name("corpus.txt")  # this repository's own code, once: prompts are not to change with it


def token_prompts(tokenizer, num_prompts, seed=0, max_len=200):
    """`num_prompts` prompts cut from the corpus, 1 ... max_len tokens, short ones more often."""
    rng = random.Random(seed)
    ids = tokenizer.encode(CORPUS.read_text())
    prompts = []
    for index in range(num_prompts):
        length = (1, 2, 15, 16, 17, 48, 49, max_len)[index] if index < 8 else int(max_len ** rng.random()) + 1
        start = rng.randrange(len(ids) - length)
        prompts.append(tuple(ids[start : start + length]))
    return prompts


def requests_for(prompts, *, sampled, num_drafts, max_tokens=16, tag="r", deadline_s=1e12):
    """One request per prompt; sampled ones differ in temperature, top-k, top-p and seed."""
    requests = []
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        if sampled:
            sampling = SamplingParams(
                max_tokens=max_tokens,
                temperature=(0.5, 0.8, 1.0, 1.3)[index % 4],
                top_k=(0, 20, 0, 5)[index % 4],
                top_p=(1.0, 0.9, 0.8, 1.0)[(index // 4) % 4],
                seed=1000 + index,
            )
        requests.append(
            GenerationRequest(
                key=AttemptKey(f"{tag}{index}", 1),
                prompt_token_ids=prompt,
                sampling=sampling,
                deadline_s=deadline_s,
                num_draft_tokens=num_drafts,
            )
        )
    return requests
