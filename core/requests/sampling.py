"""Sampling parameters that a request may set, and the check of their values.

This module owns names, defaults and ranges. It refuses invalid values with a typed error before anything is allocated;
the sampler itself (`engine.sampling.sampler`) never validates. Names and meanings are those of the OpenAI API and vLLM.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from baton.core.errors import InvalidSampling
from baton.core.requests.answer_structure import check_grammar

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LEN = 256
MAX_STOP_TOKEN_IDS = 128
MAX_TEMPERATURE = 100.0
SEED_LIMIT = 1 << 63
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_ADDED_PENALTY = 2.0
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LEN = 32
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_LOGPROBS = 20
MAX_CHOICES = 16


@dataclass(frozen=True, slots=True)
class NumberRange:
    """A range from `low` (exclusive if `above_low`) to `high`; NaN is in no range."""

    low: float
    high: float = math.inf
    above_low: bool = False

    def __contains__(self, value: float) -> bool:
        is_high_enough = value > self.low if self.above_low else value >= self.low
        return is_high_enough and value <= self.high and math.isfinite(value)

    def __str__(self) -> str:
        if self.above_low:
            return f"above {self.low:g} and at most {self.high:g}"
        if self.high == math.inf:
            return f"at least {self.low:g}"
        return f"between {self.low:g} and {self.high:g}"


# Range of every numeric parameter, used by `SamplingParams.validate` and the HTTP schema.
RANGES: Final[Mapping[str, NumberRange]] = {
    "max_tokens": NumberRange(1),
    "temperature": NumberRange(0, MAX_TEMPERATURE),
    "top_k": NumberRange(0),
    "top_p": NumberRange(0, 1, above_low=True),
    "min_p": NumberRange(0, 1),
    "seed": NumberRange(0, SEED_LIMIT - 1),
    "min_tokens": NumberRange(0),
    "repetition_penalty": NumberRange(0.01, 100),  # beyond this a float32 logit may overflow
    "presence_penalty": NumberRange(-MAX_ADDED_PENALTY, MAX_ADDED_PENALTY),
    "frequency_penalty": NumberRange(-MAX_ADDED_PENALTY, MAX_ADDED_PENALTY),
    "logprobs": NumberRange(0, MAX_LOGPROBS),
    "prompt_logprobs": NumberRange(0, MAX_LOGPROBS),
    "n": NumberRange(1, MAX_CHOICES),
}


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """The grammar that the answer must match, as the client wrote it.

    Attributes:
        kind: "json_schema", "regex", "grammar" (Lark-like, or EBNF with `::=`) or "json_object" (any JSON object).
        text: the schema, regex or grammar; empty for "json_object".
    """

    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample tokens and when to stop.

    The logits of a position are changed in this order: grammar, `allowed_token_ids`, `min_tokens`, `bad_words` (each
    removes tokens; one that would leave none is ignored there), `logit_bias`, repetition, frequency and presence
    penalty, temperature, min-p, top-k, top-p. Drafts before the position count as generated tokens.

    Attributes:
        max_tokens: maximum number of generated tokens, >= 1.
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this, in (0, 1].
        min_p: keep tokens at least this likely relative to the likeliest, in [0, 1].
        seed: 63-bit key of every random draw of this request; equal seeds give equal tokens.
        stop: generation ends when one of these strings is complete in the text, which ends before it. The first
            complete one counts (`core.requests.answer_text`).
        stop_token_ids: generation ends with any of these tokens (emitted, like EOS; its text is left out).
        ignore_eos: whether generation continues past the model's end-of-sequence token.
        min_tokens: before this many tokens, EOS and stop tokens cannot be sampled, and no stop string ends.
        logit_bias: (token id, number added to its logit), each token once.
        repetition_penalty: logits of tokens in the prompt or generated before are divided by it if positive, else
            multiplied; 1 is off.
        presence_penalty: subtracted from the logits of tokens generated before, in [-2, 2].
        frequency_penalty: subtracted once for each time the token was generated, in [-2, 2].
        bad_words: token sequences whose last token is never generated after all those before it.
        allowed_token_ids: only these can be sampled; None allows all.
        logprobs: report each sampled token's log-probability and rank, and this many of the likeliest tokens (0 ... 20)
            with theirs, all from the model's raw logits; None reports nothing.
        prompt_logprobs: the same for every prompt token except the first, which nothing precedes.
        n: number of answers, each with its own random draws.
        grammar: only texts that match it are generated; None leaves the text free.
        include_stop_str_in_output: whether the text includes the stop string, or the stop token's text, that ended it.
        skip_special_tokens: whether special tokens are left out of the text.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    grammar: GrammarSpec | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on how often tokens came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def as_data(self) -> dict[str, Any]:
        """Return the values by name, JSON-able."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "SamplingParams":
        """Rebuild the parameters from `as_data`, after a round trip through JSON."""
        grammar = data.get("grammar")
        values = {name: _frozen(value) for name, value in data.items() if name != "grammar"}
        return cls(**values, grammar=None if grammar is None else GrammarSpec(**grammar))

    def validate(self, vocab_size: int) -> None:
        """Check every value against its range.

        Raises:
            InvalidSampling: a value is NaN, negative or out of range; the error names the field.
            InvalidGrammar: the grammar is invalid, as far as can be seen without compiling it.
        """
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            _require(value is None or value in allowed, name, value, f"must be {allowed}")
        self._validate_stops(vocab_size)
        self._validate_biases(vocab_size)
        self._validate_masks(vocab_size)
        if self.grammar is not None:
            # A grammar ends with EOS; text after it would have no grammar.
            _require(not self.ignore_eos, "ignore_eos", True, "cannot go with a grammar, which ends at EOS")
            check_grammar(self.grammar.kind, self.grammar.text)

    def validate_lengths(self) -> None:
        """Check the values that depend on `max_tokens`, if the others were checked with a different one.

        Raises:
            InvalidSampling: `max_tokens` or `min_tokens` is out of range.
        """
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "must be at least 1")
        why = f"must be between 0 and max_tokens, {self.max_tokens}"
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, why)

    def _validate_stops(self, vocab_size: int) -> None:
        num_stop = len(self.stop)
        _require(num_stop <= MAX_STOP_STRINGS, "stop", num_stop, f"at most {MAX_STOP_STRINGS}")
        for text in self.stop:
            _require(text != "", "stop", text, "an empty stop string would end every request")
            limit = f"at most {MAX_STOP_STRING_LEN} characters"
            _require(len(text) <= MAX_STOP_STRING_LEN, "stop", len(text), limit)
        num_ids = len(self.stop_token_ids)
        _require(num_ids <= MAX_STOP_TOKEN_IDS, "stop_token_ids", num_ids, "too many")
        _require_tokens("stop_token_ids", self.stop_token_ids, vocab_size)
        self.validate_lengths()

    def _validate_biases(self, vocab_size: int) -> None:
        num_biases = len(self.logit_bias)
        _require(num_biases <= MAX_LOGIT_BIASES, "logit_bias", num_biases, f"at most {MAX_LOGIT_BIASES} tokens")
        ids = [token for token, _ in self.logit_bias]
        _require_tokens("logit_bias", ids, vocab_size)
        _require(len(set(ids)) == num_biases, "logit_bias", num_biases, "a token is named twice")
        allowed = NumberRange(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        for _, bias in self.logit_bias:
            _require(bias in allowed, "logit_bias", bias, f"must be {allowed}")

    def _validate_masks(self, vocab_size: int) -> None:
        num_words = len(self.bad_words)
        _require(num_words <= MAX_BAD_WORDS, "bad_words", num_words, f"at most {MAX_BAD_WORDS} sequences")
        for word in self.bad_words:
            fits = 1 <= len(word) <= MAX_BAD_WORD_LEN
            _require(fits, "bad_words", len(word), f"a sequence has 1 to {MAX_BAD_WORD_LEN} tokens")
            _require_tokens("bad_words", word, vocab_size)
        if self.allowed_token_ids is not None:
            num_ids = len(self.allowed_token_ids)
            why = f"1 to {MAX_ALLOWED_TOKEN_IDS} tokens, or none given at all"
            _require(1 <= num_ids <= MAX_ALLOWED_TOKEN_IDS, "allowed_token_ids", num_ids, why)
            _require_tokens("allowed_token_ids", self.allowed_token_ids, vocab_size)


# Parameters that are one number or boolean; messages, HTTP and `baton generate` use these names for them.
_COMPOUND: Final = ("stop", "stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids", "grammar")
SCALAR_FIELDS: Final = tuple(field.name for field in fields(SamplingParams) if field.name not in _COMPOUND)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


def _require_tokens(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        _require(0 <= token < vocab_size, field, token, f"not a token of this model, which has {vocab_size}")


def _require(holds: bool, field: str, value: object, why: str) -> None:
    if not holds:
        shown = repr(value)[:80]
        raise InvalidSampling(f"{field} = {shown}: {why}", field=field, value=shown)
