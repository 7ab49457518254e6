"""Describes the one model that a router serves: names, tokenizer and vocabulary size, but no weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.core.errors import ModelFileDamaged, ModelMissing
from baton.core.requests.special_tokens import special_tokens
from baton.core.requests.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the router must know about a model.

    Attributes:
        name: the model's name to clients.
        tokenizer: the model's tokenizer.
        vocab_size: number of rows of the embedding; at least the tokenizer's number of tokens.
        aliases: other names that clients may use.
        source: (directory, weights) from which it was read, so that another process can read it too.
        tokenizer_config: contents of tokenizer_config.json, empty if there is none, with the texts of special tokens.
    """

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    aliases: tuple[str, ...] = ()
    source: tuple[str, str] | None = None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that clients may use; answers carry the first."""
        return (self.name, *self.aliases)

    @classmethod
    def from_directory(cls, name: str, directory: Path, *, weights: str = "checkpoint") -> "ServedModel":
        """Read tokenizer and config of a Hugging Face model directory.

        With random weights the tokenizer may be missing.

        Raises:
            ModelMissing: a required file does not exist.
            ModelFileDamaged: a file cannot be read in its expected format.
        """
        path = directory / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            vocab_size = int((config.get("text_config") or config)["vocab_size"])
        except FileNotFoundError as error:
            raise ModelMissing(f"{path} does not exist", path=str(path)) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelFileDamaged(f"{path} names no vocab_size: {error!r}", path=str(path)) from error
        source, about = (str(directory), weights), _tokenizer_config(directory)
        if weights == "random" and not (directory / "tokenizer.json").exists():
            tokenizer = Tokenizer.byte_level(directory, vocab_size)
        else:
            tokenizer = Tokenizer.from_directory(directory)
        return cls(name, tokenizer, vocab_size, source=source, tokenizer_config=about)


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, and the texts of special tokens wherever they are named."""
    path = directory / "tokenizer_config.json"
    config = {}
    if path.is_file():
        try:
            # no NaN in JSON output
            config = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
        except (OSError, ValueError, RecursionError) as error:
            raise ModelFileDamaged(f"{path} is not a JSON object: {error}", path=str(path)) from error
        if not isinstance(config, dict):
            raise ModelFileDamaged(f"{path} is not a JSON object", path=str(path))
    return config | special_tokens(directory)
