"""Formats tokens in reports: names, bytes and log-probabilities."""

from typing import Any, Final

from baton.core.requests.tokenizer import Tokenizer, TokenStream
from baton.proto import inference_pb2

LOWEST_LOGPROB: Final = -9999.0  # for a token that cannot be sampled (vLLM's value); JSON has no infinity


class TokenNames:
    """Names of one model's tokens.

    Args:
        tokenizer: the model's tokenizer.
        as_ids: use names of the form `token_id:N`, which are unique.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def stream(self, *, skip_special_tokens: bool = True) -> TokenStream:
        """Make a detokenizer for one answer."""
        return self._tokenizer.stream(skip_special_tokens=skip_special_tokens)

    def name(self, token_id: int) -> str:
        """The text of a token; an incomplete character is shown as U+FFFD."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def report(self, report: inference_pb2.TokenLogprobs, num_top: int) -> dict[str, Any]:
        """Build a chat's entry for one token, with its `num_top` likeliest alternatives."""
        top = zip(report.top_token_ids[:num_top], report.top_logprobs[:num_top], strict=True)
        entry = self._entry(report.token_id, report.logprob)
        return entry | {"top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in top]}

    def by_name(self, report: inference_pb2.TokenLogprobs) -> dict[str, float]:
        """Build a completion's entry: log-probabilities by name, the sampled token first, then the likeliest ones.

        Tokens that are parts of characters share the name U+FFFD, which has the value of the likeliest. So a token that
        was not the likeliest never looks as if it were: clients compare its value with the entry's largest.
        """
        found = {self.name(report.token_id): finite(report.logprob)}
        for token_id, logprob in zip(report.top_token_ids, report.top_logprobs, strict=True):
            name = self.name(token_id)
            found[name] = max(found.get(name, LOWEST_LOGPROB), finite(logprob))
        return found

    def by_id(self, report: inference_pb2.TokenLogprobs) -> dict[str, dict[str, Any]]:
        """Build an entry of vLLM's `prompt_logprobs`: by token id, each with its rank and text."""
        pairs = enumerate(zip(report.top_token_ids, report.top_logprobs, strict=True), 1)
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in pairs]
        if report.token_id not in report.top_token_ids:
            ranked.insert(0, (report.token_id, report.logprob, report.rank))
        return {
            str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": self.name(token_id)}
            for token_id, logprob, rank in ranked
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": self.name(token_id), "logprob": finite(logprob), "bytes": list(data)}


def finite(logprob: float) -> float:
    """Clamp a log-probability to what JSON can carry."""
    return max(logprob, LOWEST_LOGPROB)
