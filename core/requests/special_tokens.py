"""What a model directory says of its special tokens beside tokenizer.json."""

import json
from pathlib import Path
from typing import Any, Final

from baton.core.errors import ModelFileDamaged

SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "pad_token", "unk_token")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; {} if there is no file.

    Raises:
        ModelFileDamaged: it holds something else.
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
    """Texts of `SPECIAL_TOKENS`, of those that tokenizer_config.json names; each a text there, or an object with one.

    Raises:
        ModelFileDamaged: the file is no JSON object.
    """
    config = read_json(directory / "tokenizer_config.json")
    found = {name: config.get(name) for name in SPECIAL_TOKENS}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
