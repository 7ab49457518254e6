"""A grammar as the `llguidance` library reads it, and the library's matchers with their limits.

Both the worker and the process that tries grammars first (`grammar_trial`) come here, so it imports little. Everything
that the library raises while it converts or compiles becomes `InvalidGrammar` here.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from baton.core.errors import InvalidGrammar
from baton.core.requests.answer_structure import LIBRARY_KEY, STRUCTURE, AnswerStructure
from baton.engine.grammar.structure import structure_text
from baton.engine.grammar.unique_items import without_unique_items

MAX_MESSAGE_LEN: Final = 300
MAX_WRITTEN_LEN: Final = 1 << 20  # sixteen times the largest grammar that may be sent
# Where bytes are forced the library would allow one way to cut them into tokens, by what it was asked before. Without
# that, a mask holds every token that fits, and depends on the text alone.
OPTIONS: Final = '%llguidance {"no_forcing": true}'
JSON_OPTIONS: Final[dict[str, Any]] = {
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
# White space is none by default: a model may write nothing else. Where it is wanted, it is bounded for the same reason.
COMPACT: Final[dict[str, Any]] = {"whitespace_flexible": False}
SPACED: Final[dict[str, Any]] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
GBNF_SIGN: Final = "::="  # without it a grammar is Lark


def library_text(kind: str, text: str, *, is_compact: bool = True) -> str:
    """A specification in the library's own words.

    Raises:
        InvalidGrammar: it cannot be said in them, or would take too many: listed arrays (`unique_items`)
            and definitions that each parameter of a tool brings along may grow to hundreds of times what was asked.
    """
    written = _written(kind, text, is_compact=is_compact)
    if len(written) > MAX_WRITTEN_LEN:
        why = f"{len(written)} characters once it is written out; at most {MAX_WRITTEN_LEN} of them"
        raise refusal(kind, why)
    return written


def _written(kind: str, text: str, *, is_compact: bool) -> str:
    try:
        match kind:
            case "json_schema":
                return _schema_rule(json.loads(text), is_compact=is_compact)
            case "json_object":
                return _schema_rule({"type": "object"}, is_compact=is_compact)
            case "regex":
                from llguidance import LLMatcher

                rule = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
                return f"{rule}\n{OPTIONS}"
            case _ if kind == STRUCTURE:

                def part(kind: str, text: str) -> str:
                    return library_text(kind, text, is_compact=is_compact)

                return structure_text(AnswerStructure.from_json(text), part, OPTIONS)
            case _:
                return f"{_from_gbnf(text) if GBNF_SIGN in text else text}\n{OPTIONS}"
    except (ValueError, RecursionError) as error:
        raise refusal(kind, str(error)) from error


def new_matcher(tokens: Any, kind: str, text: str, limits: Mapping[str, Any]) -> Any:
    """The library's matcher of what `library_text` returned, before the first token.

    Raises:
        InvalidGrammar: it does not compile within the limits.
    """
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokens, text, log_level=0, limits=LLParserLimits(**limits))
    if matcher.is_error():
        raise refusal(kind, matcher.get_error())
    return matcher


def failed_matcher(tokens: Any) -> Any:
    """A matcher that takes nothing, at no cost."""
    from llguidance import LLMatcher

    return LLMatcher(tokens, "", log_level=0)


def new_tokens(tokenizer_json: str, vocab_size: int, eos_token_id: int) -> Any:
    """A tokenizer as the library wants it.

    Raises:
        InvalidGrammar: the library does not know what its tokens spell.
    """
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos_token_id)
    except ValueError as error:
        message = f"answers of this model cannot follow a grammar: its tokenizer is unknown: {error}"
        raise InvalidGrammar(message[:MAX_MESSAGE_LEN]) from error


def refusal(kind: str, why: str) -> InvalidGrammar:
    """The error that says why a specification is none."""
    return InvalidGrammar(f"{kind}: {why}"[:MAX_MESSAGE_LEN], kind=kind)


def _from_gbnf(text: str) -> str:
    """An EBNF (GBNF) grammar as Lark.

    Raises:
        InvalidGrammar: it is none. The converter raises bare `Exception` for a rule that is missing or defined twice,
            so that any exception of its own is taken for a refusal.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        result: str = gbnf_to_lark(text)
    except Exception as error:
        raise refusal("grammar", str(error) or type(error).__name__) from error
    return result


def _schema_rule(schema: Any, *, is_compact: bool) -> str:
    """A grammar of one rule, the schema's."""
    keywords = {} if schema is True else without_unique_items(schema)
    options = JSON_OPTIONS | (COMPACT if is_compact else SPACED)
    return f"start: %json {json.dumps(keywords | {LIBRARY_KEY: options})}\n{OPTIONS}"
