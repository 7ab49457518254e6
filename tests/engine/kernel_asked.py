"""Parameters of requests that between them ask for every kernel that chooses tokens, but those of grammars."""

from typing import Any

ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"temperature": 1.0, "logit_bias": ((3, 2.0), (5, -4.0)), "logprobs": 3},
    {"temperature": 0.9, "bad_words": ((11,), (3, 4)), "top_p": 0.95},
    {"temperature": 1.1, "allowed_token_ids": tuple(range(40, 90)), "logprobs": 0},
    {"temperature": 0.0, "logprobs": 20, "prompt_logprobs": 5},
    {"temperature": 0.0, "min_tokens": 3},
    {"temperature": 1.0, "top_a": 0.3, "top_p": 0.9},
    {"temperature": 1.0, "presence_penalty": 0.5, "logit_bias": ((3, 2.0),)},
]
