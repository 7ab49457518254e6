"""Special tokens that a model directory names besides tokenizer.json: their names, and tokens to read as one.

They are read as transformers 5 reads them: from tokenizer_config.json, and first from special_tokens_map.json if the
former is from the time when both were written (without `added_tokens_decoder`).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from baton.core.errors import ModelFileDamaged

SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "pad_token", "unk_token")
_NAMED: Final = (*SPECIAL_TOKENS, "sep_token", "cls_token", "mask_token")
_LISTS: Final = ("additional_special_tokens", "extra_special_tokens")
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; {} if there is no file.

    Raises:
        ModelFileDamaged: the file holds something else.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileDamaged(f"{path} is not a JSON object: {error}", path=str(path)) from error
    if not isinstance(found, dict):
        raise ModelFileDamaged(f"{path} is not a JSON object", path=str(path))
    return found


def special_tokens(directory: Path) -> dict[str, str]:
    """Texts of the named tokens among `SPECIAL_TOKENS`; a file gives each as a text, or as an object with one.

    Raises:
        ModelFileDamaged: a file is not a JSON object.
    """
    config = _named(directory)
    texts = {name: _text(config.get(name)) for name in SPECIAL_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def add_tokens(fast: Tokenizer, directory: Path, vocab_size: int | None) -> None:
    """Make the tokenizer read as one token each token that the files name and tokenizer.json lacks.

    Tokens are left out if they would get another id than the files say, or an id for which the model has no embedding.
    So is a new EOS or similar token, which no training text of the model contained.

    Args:
        fast: the tokenizer, changed in place.
        directory: the model's directory.
        vocab_size: the model's number of tokens; None: no limit.

    Raises:
        ModelFileDamaged: a file is not a JSON object, or `added_tokens_decoder` does not map ids to tokens.
    """
    held = fast.get_added_tokens_decoder()
    known = {token.content for token in held.values()}
    next_id = max(fast.get_vocab_size(with_added_tokens=False), 1 + max(held, default=-1))  # as the library assigns ids
    added = []
    for wanted_id, token in _tokens(directory, fast):
        text, token_id = token.content, fast.token_to_id(token.content)
        token_id = next_id if token_id is None else token_id
        is_refused = wanted_id not in (None, token_id) or (vocab_size is not None and token_id >= vocab_size)
        if not text or text in known or is_refused:
            continue
        known.add(text)
        added.append(token)
        next_id = max(next_id, 1 + token_id)
    if added:
        fast.add_tokens(added)


def _tokens(directory: Path, fast: Tokenizer) -> Iterator[tuple[int | None, AddedToken]]:
    """Yield all named tokens, with their id if there is one, in the order in which they get new ids."""
    config = _named(directory)
    try:
        by_id = {int(token_id): token for token_id, token in (config.get("added_tokens_decoder") or {}).items()}
        for token_id in sorted(by_id):
            yield token_id, _token(by_id[token_id], is_special=False)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        path = directory / "tokenizer_config.json"
        raise ModelFileDamaged(f"{path} holds no usable added_tokens_decoder: {error!r}", path=str(path)) from error
    found = (config.get(name) for name in _LISTS)
    lists = [list(one.values()) if isinstance(one, dict) else one for one in found if isinstance(one, dict | list)]
    known = [token for token in map(config.get, _NAMED) if fast.token_to_id(_text(token) or "") is not None]
    for token in [*known, *(token for tokens in lists for token in tokens)]:
        if _text(token) is not None:
            yield None, _token(token, is_special=True)


def _token(token: Any, *, is_special: bool) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=is_special)
    flags = {flag: bool(token[flag]) for flag in _FLAGS if flag in token}
    return AddedToken(str(token["content"]), **flags | ({"special": True} if is_special else {}))


def _text(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _named(directory: Path) -> dict[str, Any]:
    config = read_json(directory / "tokenizer_config.json")
    return config if "added_tokens_decoder" in config else config | read_json(directory / "special_tokens_map.json")
