"""The options of `baton generate` that say what an answer must be."""

from pathlib import Path

from baton.core.errors import ConflictingOptions, InvalidGrammar
from baton.core.requests.grammar_check import JSON_OBJECT
from baton.core.requests.sampling import GrammarSpec


def read_grammar(
    *, json_schema: Path | None, regex: str | None, grammar: Path | None, json_object: bool
) -> GrammarSpec | None:
    """What the answer must be, if any of the options says so.

    Raises:
        ConflictingOptions: more than one does.
        InvalidGrammar: a file cannot be read, or is not UTF-8.
    """
    given = {"json_schema": json_schema, "regex": regex, "grammar": grammar, JSON_OBJECT: json_object or None}
    given = {kind: value for kind, value in given.items() if value is not None}
    if len(given) > 1:
        names = ", ".join(f"--{kind.replace('_', '-')}" for kind in given)
        raise ConflictingOptions(f"{names}: an answer has one form; give one of them")
    for kind, value in given.items():
        if not isinstance(value, Path):
            return GrammarSpec(kind, value if isinstance(value, str) else "")
        try:
            return GrammarSpec(kind, value.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidGrammar(f"--{kind.replace('_', '-')}: cannot read {value}: {error}", kind=kind) from error
    return None
