"""What is reported of a token's log-probability, as every room passes it on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One chosen (or prompt) token, judged by the model's raw logits: before penalties, masks and temperature.

    Attributes:
        token_id: the token.
        logprob: its log-probability; always finite.
        rank: 1 + the number of tokens that are likelier.
        top: (token id, log-probability) of the likeliest tokens, the likeliest first, equals by id; the token itself
            is among them only if it is one of them.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
