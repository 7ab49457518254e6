"""Every sampling parameter, restated from its definition for one position at a time: Python numbers, lists and sets."""

import math

from baton.tests.engine.reference import gumbel_noise

NEVER = -math.inf


def without(logits, banned):
    """Logits with the banned tokens out, unless that leaves none."""
    left = [NEVER if token in banned else logit for token, logit in enumerate(logits)]
    return logits if all(logit == NEVER for logit in left) else left


def edited(logits, params, prompt, output, eos=()):
    """What masks, bias, penalties and top-a make of raw logits, where `output` has been generated after `prompt`."""
    vocab = range(len(logits))
    if params.allowed_token_ids is not None:
        logits = without(logits, set(vocab) - set(params.allowed_token_ids))
    if len(output) < params.min_tokens:
        logits = without(logits, {*eos, *params.stop_token_ids})
    completed = set()
    for *prefix, last in params.bad_words:
        if not prefix or list(output[-len(prefix) :]) == prefix:
            completed.add(last)
    logits = without(logits, completed)
    bias = dict(params.logit_bias)
    result = []
    for token in vocab:
        logit = logits[token] + bias.get(token, 0.0)
        count = list(output).count(token)
        if count or (token in prompt and params.repetition_penalty != 1):
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * count
        if count:
            logit -= params.presence_penalty
        result.append(logit)
    if params.top_a:
        best = max(result)
        total = sum(math.exp(logit - best) for logit in result)
        bound = params.top_a * (1 / total) ** 2
        result = [logit if math.exp(logit - best) / total >= bound else NEVER for logit in result]
    return result


def kept(logits, params):
    """{token: logit} of what temperature, min-p, top-k and top-p leave of edited logits."""
    best = max(logits)
    scaled = {token: (logit - best) / params.temperature for token, logit in enumerate(logits) if logit != NEVER}
    scaled = {token: logit for token, logit in scaled.items() if math.exp(logit) >= params.min_p}
    ranked = sorted(scaled, key=lambda token: (-scaled[token], token))
    if params.top_k:
        ranked = ranked[: params.top_k]
    if params.top_p < 1:
        total, reached, count = sum(math.exp(scaled[token]) for token in ranked), 0.0, 0
        for token in ranked:
            count += 1
            reached += math.exp(scaled[token])
            if reached / total >= params.top_p:
                break
        ranked = ranked[:count]
    return {token: scaled[token] for token in ranked}


def choose(logits, params, prompt, output, *, choice=0, eos=()):
    """The next token."""
    logits = edited(logits, params, prompt, output, eos)
    if params.temperature == 0:
        return max(range(len(logits)), key=lambda token: (logits[token], -token))
    noise = gumbel_noise(params.seed, len(prompt) + len(output), len(logits), choice=choice)
    left = kept(logits, params)
    return max(left, key=lambda token: (left[token] + noise[token], -token))


def logprobs(logits, token, num_top):
    """(logprob, rank, [(id, logprob), ...]) from raw logits."""
    best = max(logits)
    lse = best + math.log(sum(math.exp(logit - best) for logit in logits))
    ranked = sorted(range(len(logits)), key=lambda other: (-logits[other], other))[:num_top]
    rank = 1 + sum(logit > logits[token] for logit in logits)
    return logits[token] - lse, rank, [(other, logits[other] - lse) for other in ranked]


def generate(logits_after, prompt, params, *, choice=0, eos=()):
    """One token at a time; `logits_after` gives raw logits for a list of tokens."""
    output, reports = [], []
    while len(output) < params.max_tokens:
        logits = logits_after([*prompt, *output])
        token = choose(logits, params, prompt, output, choice=choice, eos=eos)
        reports.append(logprobs(logits, token, params.logprobs or 0))
        output.append(token)
        if token in params.stop_token_ids or (token in eos and not params.ignore_eos):
            break
    return output, reports
