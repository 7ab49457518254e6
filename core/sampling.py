"""What a request may ask of the sampler, and the check that it asks nothing impossible.

This module owns the names, defaults and ranges. It refuses bad values with a typed error before anything is
allocated; the sampler itself (engine.sampler) never validates.
"""

import math
from dataclasses import dataclass

from baton.core.errors import InvalidSampling
from baton.core.grammar_check import check_grammar

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LEN = 256
MAX_STOP_TOKEN_IDS = 128
MAX_TEMPERATURE = 100.0
SEED_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the answer must be, as the client wrote it.

    Attributes:
        kind: "json_schema", "regex", "grammar" (Lark-like, or EBNF with `::=`) or "json_object" (any JSON object).
        text: the schema, regex or grammar; empty for "json_object".
    """

    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Attributes:
        max_tokens: at most this many tokens are generated, >= 1.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this, in (0, 1].
        seed: 63-bit key of every draw of this request; equal seeds give equal tokens.
        stop: generation ends before the first of these strings appears in the text.
        stop_token_ids: generation ends with any of these tokens (emitted, like EOS).
        ignore_eos: the model's end-of-sequence token does not end generation.
        grammar: only texts that match it are generated; None leaves the text free.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: GrammarSpec | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def validate(self, vocab_size: int) -> None:
        """Check every value against its range.

        Raises:
            InvalidSampling: a value is NaN, negative or out of range; the field is named.
            InvalidGrammar: the grammar is none, as far as can be seen without compiling it.
        """
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "must be at least 1")
        finite = math.isfinite(self.temperature)
        _require(
            finite and 0.0 <= self.temperature <= MAX_TEMPERATURE,
            "temperature",
            self.temperature,
            f"must be between 0 and {MAX_TEMPERATURE:g}",
        )
        _require(self.top_k >= 0, "top_k", self.top_k, "must be 0 (off) or positive")
        _require(
            math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0,
            "top_p",
            self.top_p,
            "must be above 0 and at most 1",
        )
        _require(0 <= self.seed < SEED_LIMIT, "seed", self.seed, "must be in [0, 2^63)")
        self._validate_stops(vocab_size)
        if self.grammar is not None:
            # A grammar ends with EOS; what would follow it has no grammar.
            _require(not self.ignore_eos, "ignore_eos", True, "cannot go with a grammar, which ends at EOS")
            check_grammar(self.grammar.kind, self.grammar.text)

    def _validate_stops(self, vocab_size: int) -> None:
        num_stop = len(self.stop)
        _require(num_stop <= MAX_STOP_STRINGS, "stop", num_stop, f"at most {MAX_STOP_STRINGS}")
        for text in self.stop:
            _require(text != "", "stop", text, "an empty stop string would end every request")
            limit = f"at most {MAX_STOP_STRING_LEN} characters"
            _require(len(text) <= MAX_STOP_STRING_LEN, "stop", len(text), limit)
        num_ids = len(self.stop_token_ids)
        _require(num_ids <= MAX_STOP_TOKEN_IDS, "stop_token_ids", num_ids, "too many")
        for token in self.stop_token_ids:
            _require(0 <= token < vocab_size, "stop_token_ids", token, "not a token of this model")


def _require(holds: bool, field: str, value: object, why: str) -> None:
    if not holds:
        shown = repr(value)[:80]
        raise InvalidSampling(f"{field} = {shown}: {why}", field=field, value=shown)
