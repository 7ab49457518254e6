"""The one model a router speaks for: its name, its tokenizer and the size of its vocabulary; no weights."""

import json
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import ModelFileDamaged, ModelMissing
from baton.core.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the router must know of a model.

    Attributes:
        name: what clients call it.
        tokenizer: its tokenizer.
        vocab_size: rows of its embedding; at least as many as the tokenizer has tokens.
    """

    name: str
    tokenizer: Tokenizer
    vocab_size: int

    @classmethod
    def from_directory(cls, name: str, directory: Path) -> "ServedModel":
        """Read tokenizer and config of a Hugging Face model directory.

        Raises:
            ModelMissing: a required file does not exist.
            ModelFileDamaged: a file cannot be read as what it should be.
        """
        tokenizer = Tokenizer.from_directory(directory)
        path = directory / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            vocab_size = int((config.get("text_config") or config)["vocab_size"])
        except FileNotFoundError as error:
            raise ModelMissing(f"{path} does not exist", path=str(path)) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelFileDamaged(f"{path} names no vocab_size: {error!r}", path=str(path)) from error
        return cls(name, tokenizer, vocab_size)
