"""Grammars over tokens: which tokens may come next, for an answer that must match a schema, a regex or a grammar.

Pure host code over the `llguidance` library (Earley parser over lexemes of derivative automata, built while they are
used), which is imported with the first request that needs it. `GrammarCompiler` is one model's; `GrammarState` follows
one sequence and looks ahead along its drafts. Bounds on size, time and memory are below; whoever exceeds them gets
`InvalidGrammar`, while compiling or later.

Legend: K drafts, Q = K + 1 rows, V vocabulary, W = ceil(V / 32) words of a row's bitmask. Token t is allowed if bit
t % 32 of word t // 32 is set.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from baton.core.errors import InvalidGrammar
from baton.core.grammar_check import check_grammar
from baton.core.sampling import GrammarSpec
from baton.core.tokenizer import Tokenizer

MAX_COMPILED: Final = 64  # grammars that a compiler keeps
# What the library may spend: before the first token, and for each mask.
LIMITS: Final = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 250_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
# White space in JSON is optional and bounded: without a bound a model may write nothing else.
JSON_OPTIONS: Final = {
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
ALL_BITS: Final = -1
MAX_MESSAGE_LEN: Final = 300


@dataclass(frozen=True, slots=True)
class Lookahead:
    """What may follow the accepted tokens and each prefix of the drafts.

    Attributes:
        masks_QW: int32; row j is for the accepted tokens followed by drafts[:j].
        num_valid: drafts that the grammar allows, 0 ... K. Rows after row `num_valid` follow a text that cannot be;
            they allow everything, and nothing that comes of them may be emitted.
    """

    masks_QW: np.ndarray
    num_valid: int


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that was found good; sequences start from copies of its matcher.

    Attributes:
        matcher: the library's, before the first token. Never moved; copying it is safe from any thread.
        eos_token_ids: any of them ends the text.
        vocab_size: V.
        rolls_back: whether the library can take back tokens of this grammar exactly.
    """

    matcher: Any
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    rolls_back: bool


class GrammarState:
    """Where one sequence is in its grammar. Not thread-safe.

    After an error (`error` is set) the state allows everything and accepts nothing: its sequence must be ended.

    Attributes:
        error: why the sequence cannot go on: a limit was reached, or a token came that the grammar forbids, which
            happens only where the request's other constraints left none that it allows.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._accepted: list[int] = []
        self._has_ended = False
        self.error: InvalidGrammar | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and EOS was accepted."""
        return self._has_ended

    def accept(self, token_ids: Iterable[int]) -> int:
        """Move on by emitted tokens, up to the EOS that ends the text.

        Returns:
            How many belong to the text, EOS included; those after it, or after an error, do not.
        """
        num_accepted = 0
        for token_id in token_ids:
            if self._has_ended or self.error is not None:
                break
            if token_id in self._grammar.eos_token_ids:
                if not self._matcher.is_accepting():
                    self._fail(f"token {token_id} ends the text where the grammar does not")
                    break
                self._has_ended = True
            elif self._matcher.try_consume_tokens([token_id]) != 1:
                self._fail(self._matcher.get_error() or f"no token it allows was left, and {token_id} it forbids")
                break
            else:
                self._accepted.append(token_id)
            num_accepted += 1
        return num_accepted

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """`look(drafts).masks_QW`."""
        return self.look(drafts).masks_QW

    def num_valid(self, drafts: Sequence[int]) -> int:
        """How many of the drafts the grammar allows, without the cost of masks."""
        return self._walk(drafts, None)

    def look(self, drafts: Sequence[int]) -> Lookahead:
        """The masks of all rows; the state stays where it is."""
        masks_QW = np.full((len(drafts) + 1, -(-self._grammar.vocab_size // 32)), ALL_BITS, dtype=np.int32)
        return Lookahead(masks_QW, self._walk(drafts, masks_QW))

    def _walk(self, drafts: Sequence[int], masks_QW: np.ndarray | None) -> int:
        """Go along the drafts, fill the rows that can be reached, and come back."""
        if self._has_ended or self.error is not None:
            return 0
        matcher = self._matcher if self._grammar.rolls_back else self._matcher.deep_copy()
        num_consumed = num_valid = 0
        for row, draft in enumerate([*drafts, None]):
            may_end = matcher.is_accepting()
            if masks_QW is not None and not self._fill(matcher, masks_QW[row], may_end=may_end):
                break
            if draft is None:
                break
            if draft in self._grammar.eos_token_ids:
                num_valid += may_end  # nothing can follow: the walk ends here either way
                break
            if not 0 <= draft < self._grammar.vocab_size or matcher.try_consume_tokens([draft]) != 1:
                break
            num_consumed += 1
            num_valid += 1
        self._come_back(matcher, num_consumed)
        return num_valid

    def _fill(self, matcher: Any, mask_W: np.ndarray, *, may_end: bool) -> bool:
        """Write one row; False, and the row left as it is, if the library gave up."""
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        if matcher.is_error():
            return False
        mask_W[:] = words[: len(mask_W)]
        for token_id in self._grammar.eos_token_ids:
            bit = np.uint32(1) << np.uint32(token_id % 32)
            word = mask_W[token_id // 32 : token_id // 32 + 1].view(np.uint32)
            word[0] = word[0] | bit if may_end else word[0] & ~bit
        return True

    def _come_back(self, matcher: Any, num_consumed: int) -> None:
        if matcher is not self._matcher:
            return  # a copy: it is dropped
        if not matcher.is_error() and (num_consumed == 0 or matcher.rollback(num_consumed)):
            return
        # The library never leaves an error; what the drafts led to is forgotten by starting over.
        self._matcher = self._grammar.matcher.deep_copy()
        if self._matcher.try_consume_tokens(self._accepted) != len(self._accepted):
            self._fail(self._matcher.get_error())

    def _fail(self, why: str) -> None:
        self.error = InvalidGrammar(f"the grammar cannot be followed any further: {why}"[:MAX_MESSAGE_LEN])


class GrammarCompiler:
    """Compiles grammars for one model and keeps the last `MAX_COMPILED`. Any thread.

    Args:
        tokenizer: of the model.
        vocab_size: columns of the model's logits; more or fewer than the tokenizer has tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(token_id for token_id in tokenizer.eos_token_ids if token_id < vocab_size)
        self._lock = threading.Lock()
        self._library_tokenizer: Any = None
        self._compiled: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """The grammar, compiled now or before.

        Raises:
            InvalidGrammar: it is malformed, too complex, or matches no text of this model's tokens.
        """
        with self._lock:
            found = self._compiled.get(spec)
            if found is not None:
                self._compiled.move_to_end(spec)
                return found
        compiled = self._compile(spec)
        with self._lock:
            self._compiled[spec] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def start(self, spec: GrammarSpec, token_ids: Iterable[int] = ()) -> GrammarState:
        """The state of a sequence that has these tokens already.

        Raises:
            InvalidGrammar: as `compile`.
        """
        state = GrammarState(self.compile(spec))
        state.accept(token_ids)
        return state

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        check_grammar(spec.kind, spec.text)
        if not self._eos_token_ids:
            raise InvalidGrammar("this model names no end-of-sequence token, so no answer can be complete")
        import llguidance

        matcher = llguidance.LLMatcher(
            self._tokens(), _library_text(spec), log_level=0, limits=llguidance.LLParserLimits(**LIMITS)
        )
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidGrammar(f"{spec.kind}: {matcher.get_error()}"[:MAX_MESSAGE_LEN], kind=spec.kind)
        compiled = CompiledGrammar(
            matcher=matcher,
            eos_token_ids=self._eos_token_ids,
            vocab_size=self._vocab_size,
            # The library takes back as many bytes as tokens spell; tokens named by number or name spell none.
            rolls_back=spec.kind != "grammar" or "<" not in spec.text,
        )
        if not GrammarState(compiled).masks([]).any():
            raise InvalidGrammar(f"{spec.kind}: no text matches it", kind=spec.kind)
        return compiled

    def _tokens(self) -> Any:
        """The tokenizer as the library wants it, built once."""
        with self._lock:
            if self._library_tokenizer is None:
                import llguidance

                self._library_tokenizer = llguidance.LLTokenizer(
                    self._tokenizer.to_json(),
                    n_vocab=max(self._vocab_size, self._tokenizer.vocab_size),
                    eos_token=self._eos_token_ids[0],
                )
            return self._library_tokenizer


def check_compiles(spec: GrammarSpec | None, grammars: GrammarCompiler | None) -> None:
    """Check that a request's grammar, if it has one, can be followed here.

    Raises:
        InvalidGrammar: it does not compile, or nothing here compiles grammars.
    """
    if spec is None:
        return
    if grammars is None:
        raise InvalidGrammar("this worker follows no grammars", kind=spec.kind)
    grammars.compile(spec)


def _library_text(spec: GrammarSpec) -> str:
    """A specification as the library's own.

    Raises:
        InvalidGrammar: it cannot be written as one.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        match spec.kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(spec.text, overrides=JSON_OPTIONS)
            case "json_object":
                return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=JSON_OPTIONS)
            case "regex":
                return LLMatcher.grammar_from_regex(spec.text)
            case _:
                return LLMatcher.grammar_from_lark(any_to_lark(spec.text))
    except ValueError as error:
        raise InvalidGrammar(f"{spec.kind}: {error}"[:MAX_MESSAGE_LEN], kind=spec.kind) from error
