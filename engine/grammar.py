"""Grammars over tokens: which tokens may come next, for an answer that must match a schema, a regex or a grammar.

Pure host code over the `llguidance` library (Earley parser over lexemes of derivative automata, built while they are
used), which is imported with the first request that needs it. `GrammarCompiler` is one model's; `GrammarState` follows
one sequence and looks ahead along its drafts. Bounds on size, time and memory are below; whoever exceeds them gets
`InvalidGrammar`, while compiling or later.

Legend: K drafts, Q = K + 1 rows, V vocabulary, W = ceil(V / 32) words of a row's bitmask. Token t is allowed if bit
t % 32 of word t // 32 is set.
"""

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from baton.core.errors import InvalidGrammar
from baton.core.grammar_check import LIBRARY_KEY, check_grammar
from baton.core.sampling import GrammarSpec
from baton.core.tokenizer import Tokenizer

MAX_COMPILED: Final = 32  # grammars that a compiler keeps
MAX_RENEWALS: Final = 4  # times that one sequence may compile its grammar again, when a budget is spent
# What the library may spend: before the first token, and for each mask.
LIMITS: Final[dict[str, Any]] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 10_000,
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
WORD_BITS: Final = 32
# Where bytes are forced the library would allow one way to cut them into tokens, by what it was asked before. Without
# that, a mask holds every token that fits, and depends on the text alone.
OPTIONS: Final = '%llguidance {"no_forcing": true}'
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


class CompiledGrammar:
    """A grammar that was found good; sequences start from copies of its matcher. Any thread.

    Copies share the automata that the library builds while they are used, with one budget. `fresh` begins anew.

    Attributes:
        eos_token_ids: any of them ends the text.
        vocab_size: V.
        rolls_back: whether the library can take back tokens of this grammar exactly.
        is_spent: a copy failed, perhaps because the shared budget is spent: new sequences should not start from it.
    """

    def __init__(
        self, build: Callable[[], Any], *, eos_token_ids: tuple[int, ...], vocab_size: int, rolls_back: bool
    ) -> None:
        self._build = build
        self._matcher = build()
        self.eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size
        self.rolls_back = rolls_back
        self.is_spent = False

    def copy(self) -> Any:
        """A matcher before the first token."""
        return self._matcher.deep_copy()

    def fresh(self) -> Any:
        """The same, with a budget of its own, for a sequence whose copy failed."""
        self.is_spent = True
        return self._build()


class GrammarState:
    """Where one sequence is in its grammar. Not thread-safe.

    After an error (`error` is set) the state allows everything and accepts nothing: its sequence must be ended.

    Attributes:
        error: why the sequence cannot go on: a limit was reached, or a token came that the grammar forbids, which
            happens only where the request's other constraints left none that it allows.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.copy()
        self._accepted: list[int] = []
        self._num_renewals = 0
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
                fits = self._has_ended = self._matcher.is_accepting()
            elif fits := self._consumes(token_id):
                self._accepted.append(token_id)
            if not fits:
                self._fail(self._matcher.get_error() or f"it forbids token {token_id}, and nothing else was left")
                break
            num_accepted += 1
        return num_accepted

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """`look(drafts).masks_QW`."""
        return self.look(drafts).masks_QW

    def num_valid(self, drafts: Sequence[int]) -> int:
        """`look(drafts).num_valid`."""
        return self.look(drafts).num_valid

    def look(self, drafts: Sequence[int]) -> Lookahead:
        """What may follow each prefix of the drafts; the state stays where it is."""
        masks_QW = np.empty((len(drafts) + 1, -(-self._grammar.vocab_size // 32)), dtype=np.int32)
        num_rows = 0  # that follow a text which can be
        if self.error is None and not self._has_ended:
            num_rows, failed = self._walk(drafts, masks_QW)
            if failed and self._renews():
                num_rows, failed = self._walk(drafts, masks_QW)
                # What is left is the drafts' doing, if anything is: the grammar goes on without them.
                if failed and num_rows:
                    failed = not self._renews()
            if failed:
                self._fail(self._matcher.get_error())
                num_rows = 0
        masks_QW[num_rows:] = ALL_BITS
        return Lookahead(masks_QW, max(num_rows - 1, 0) + self._ends_with(drafts, num_rows, masks_QW))

    def _walk(self, drafts: Sequence[int], masks_QW: np.ndarray) -> tuple[int, bool]:
        """Fill the rows that can be reached and come back: how many, and whether the library gave up."""
        matcher = self._matcher if self._grammar.rolls_back else self._matcher.deep_copy()
        num_rows = 0
        for row, mask_W in enumerate(masks_QW):
            if row and (drafts[row - 1] in self._grammar.eos_token_ids or not self._takes(matcher, drafts[row - 1])):
                break
            words = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
            may_end = matcher.is_accepting()
            if matcher.is_error():
                return num_rows, True
            mask_W[:] = words[: len(mask_W)]
            self._mark_ends(mask_W, may_end=may_end)
            num_rows += 1
        failed = matcher.is_error()
        if matcher is self._matcher and num_rows > 1 and not failed:
            failed = not matcher.rollback(num_rows - 1)
        return num_rows, failed

    def _takes(self, matcher: Any, token_id: int) -> bool:
        return 0 <= token_id < self._grammar.vocab_size and matcher.try_consume_tokens([token_id]) == 1

    def _mark_ends(self, mask_W: np.ndarray, *, may_end: bool) -> None:
        """EOS is allowed exactly where the text may end, whichever EOS it is and whatever the library thinks of it."""
        bits_W = mask_W.view(np.uint32)
        for token_id in self._grammar.eos_token_ids:
            bit = np.uint32(1 << token_id % WORD_BITS)
            if may_end:
                bits_W[token_id // WORD_BITS] |= bit
            else:
                bits_W[token_id // WORD_BITS] &= ~bit

    def _ends_with(self, drafts: Sequence[int], num_rows: int, masks_QW: np.ndarray) -> int:
        """1 if the draft after the last row that can be reached is an EOS which is allowed there, else 0."""
        if not 0 < num_rows <= len(drafts) or (draft := drafts[num_rows - 1]) not in self._grammar.eos_token_ids:
            return 0
        return int(masks_QW[num_rows - 1, draft // WORD_BITS] >> draft % WORD_BITS & 1)

    def _consumes(self, token_id: int) -> bool:
        if self._takes(self._matcher, token_id):
            return True
        return self._matcher.is_error() and self._renews() and self._takes(self._matcher, token_id)

    def _renews(self) -> bool:
        """Start over with another matcher, as the library never leaves an error; False if that cannot help."""
        copy = self._grammar.copy()
        copy.compute_bitmask()
        if copy.is_error():  # what the copies share is spent
            if self._num_renewals == MAX_RENEWALS:
                return False
            self._num_renewals += 1
            copy = self._grammar.fresh()
        self._matcher = copy
        return bool(copy.try_consume_tokens(self._accepted) == len(self._accepted))

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
            if found is not None and not found.is_spent:
                self._compiled.move_to_end(spec)
                return found
        compiled = self._compile(spec)
        with self._lock:
            self._compiled[spec] = compiled
            self._compiled.move_to_end(spec)
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
        compiled = CompiledGrammar(
            functools.partial(_build, self._tokens(), spec),
            eos_token_ids=self._eos_token_ids,
            vocab_size=self._vocab_size,
            # The library takes back as many bytes as tokens spell; tokens named by number or name spell none.
            rolls_back=spec.kind != "grammar" or "<" not in spec.text,
        )
        state = GrammarState(compiled)
        mask_W = state.masks([])[0]
        if state.error is not None or not mask_W.any():
            why = "no text matches it" if state.error is None else state.error.message
            raise InvalidGrammar(f"{spec.kind}: {why}"[:MAX_MESSAGE_LEN], kind=spec.kind)
        return compiled

    def _tokens(self) -> Any:
        """The tokenizer as the library wants it, built once.

        Raises:
            InvalidGrammar: the library does not know what its tokens spell.
        """
        with self._lock:
            if self._library_tokenizer is None:
                import llguidance

                try:
                    self._library_tokenizer = llguidance.LLTokenizer(
                        self._tokenizer.to_json(),
                        n_vocab=max(self._vocab_size, self._tokenizer.vocab_size),
                        eos_token=self._eos_token_ids[0],
                    )
                except ValueError as error:
                    message = f"answers of this model cannot follow a grammar: its tokenizer is unknown: {error}"
                    raise InvalidGrammar(message[:MAX_MESSAGE_LEN]) from error
            return self._library_tokenizer


def check_compiles(spec: GrammarSpec | None, grammars: GrammarCompiler | None, token_ids: Sequence[int] = ()) -> None:
    """Check that a request's grammar, if it has one, can be followed here, from behind these tokens of its text.

    Raises:
        InvalidGrammar: it does not compile, or nothing here compiles grammars, or the tokens do not fit.
    """
    if spec is None:
        return
    if grammars is None:
        raise InvalidGrammar("this worker follows no grammars", kind=spec.kind)
    state = grammars.start(spec, token_ids) if token_ids else None
    if state is None:
        grammars.compile(spec)
    elif state.error is not None:
        raise state.error


def _build(tokens: Any, spec: GrammarSpec) -> Any:
    """The library's matcher.

    Raises:
        InvalidGrammar: there is none for this specification.
    """
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokens, _library_text(spec), log_level=0, limits=LLParserLimits(**LIMITS))
    if matcher.is_error():
        raise InvalidGrammar(f"{spec.kind}: {matcher.get_error()}"[:MAX_MESSAGE_LEN], kind=spec.kind)
    return matcher


def _library_text(spec: GrammarSpec) -> str:
    """A specification as the library's own.

    Raises:
        InvalidGrammar: it cannot be written as one.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    try:
        match spec.kind:
            case "json_schema":
                return _schema_rule(json.loads(spec.text))
            case "json_object":
                return _schema_rule({"type": "object"})
            case "regex":
                rule = json.loads(LLMatcher.grammar_from_regex(spec.text))["grammars"][0]["lark_grammar"]
                return f"{rule}\n{OPTIONS}"
            case _:
                return f"{any_to_lark(spec.text)}\n{OPTIONS}"
    except (ValueError, GbnfToLarkError, RecursionError) as error:
        raise InvalidGrammar(f"{spec.kind}: {error}"[:MAX_MESSAGE_LEN], kind=spec.kind) from error


def _schema_rule(schema: Any) -> str:
    """A grammar of one rule, the schema's."""
    keywords = {} if schema is True else schema
    return f"start: %json {json.dumps(keywords | {LIBRARY_KEY: JSON_OPTIONS})}\n{OPTIONS}"
