"""Slow, plain restatements of what the engine computes, written without it: Python integers, lists and math."""

import math

from baton.tests.engine.toy import NUM_LAYERS, PRIME


def philox(counter, key):
    """Philox4x32-10, after the paper's listing."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 % 2**32, (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def gumbel_noise(seed, position, vocab_size, choice=0, purpose=0):
    words = []
    for block in range(math.ceil(vocab_size / 4)):
        words += philox((block, position, choice, purpose), (seed % 2**32, seed >> 32))
    return [-math.log(-math.log((word + 0.5) / 2**32)) for word in words[:vocab_size]]


def processed(logits, params):
    """(token id, logit) of every token that temperature, top-k and top-p leave over."""
    scaled = [logit / params.temperature for logit in logits]
    ranked = sorted(range(len(logits)), key=lambda token: (-scaled[token], token))
    if params.top_k:
        ranked = ranked[: params.top_k]
    if params.top_p < 1:
        weights = [math.exp(scaled[token] - scaled[ranked[0]]) for token in ranked]
        total, reached, count = sum(weights), 0.0, 0
        for weight in weights:
            count += 1
            reached += weight
            if reached / total >= params.top_p:
                break
        ranked = ranked[:count]
    return [(token, scaled[token]) for token in sorted(ranked)]


def choose(logits, params, position):
    if params.greedy:
        return max(range(len(logits)), key=lambda token: (logits[token], -token))
    noise = gumbel_noise(params.seed, position, len(logits))
    return max(processed(logits, params), key=lambda item: (item[1] + noise[item[0]], -item[0]))[0]


def toy_logits(model, token_ids):
    """The toy's logits after `token_ids`, everything computed from scratch and nothing stored."""
    mixes = [(token * 7919 + 13) % PRIME for token in token_ids]
    for layer in range(NUM_LAYERS):
        seen = [
            sum((mix * (head + 3)) % PRIME * (head + 2) for head in range(2))
            + sum((mix * (head + 11) + layer) % PRIME * (head + 5) for head in range(2))
            for mix in mixes
        ]
        weights = [(at * 29 + 5) % 97 + 1 for at in range(len(mixes))]
        mixes = [
            (mix * 3 + sum(seen[at] * weights[at] for at in range(row + 1))) % PRIME for row, mix in enumerate(mixes)
        ]
    token, mix = token_ids[-1], mixes[-1]
    logits = []
    for candidate in range(model.config.vocab_size):
        habit = ((token + 1) * (candidate + 3) * 8191 % 257) / 257
        surprise = ((mix + 1) * (candidate + 1) * 40_503 % 251) / 251
        logits.append(model.sharpness * (habit + model.surprise * surprise * (surprise > 0.9)))
    return logits


def generate(model, prompt, params, eos_token_ids=()):
    """One token at a time."""
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + params.max_tokens:
        token = choose(toy_logits(model, token_ids), params, len(token_ids))
        token_ids.append(token)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        if token in stops:
            break
    return token_ids[len(prompt) :]
