"""Text to tokens and back, incrementally; a thin face over the `tokenizers` library.

Workers use it for stop strings, the router for everything else. It loads `tokenizer.json` only: transformers (and its
half a gigabyte per process) stays out of the serving path.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer as _FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

from baton.core.errors import InvalidText, ModelFileDamaged, ModelMissing

NUM_BYTES = 256


class Tokenizer:
    """One model's tokenizer and its end-of-sequence tokens."""

    def __init__(self, fast: _FastTokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self._fast = fast
        self.eos_token_ids = eos_token_ids
        self.vocab_size: int = fast.get_vocab_size(with_added_tokens=True)
        self._byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
        self._added = {token_id: str(token) for token_id, token in fast.get_added_tokens_decoder().items()}

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Load `tokenizer.json`, and EOS from `generation_config.json` or `config.json`.

        Raises:
            ModelMissing: there is no tokenizer.json.
            ModelFileDamaged: a file is there and cannot be read as what it should be.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelMissing(f"{path} does not exist", path=str(path))
        try:
            fast = _FastTokenizer.from_str(path.read_text(encoding="utf-8"))
        # The library raises bare Exception for every kind of bad content.
        except Exception as error:
            raise ModelFileDamaged(f"{path} is not a tokenizer: {error}", path=str(path)) from error
        return cls(fast, _eos_token_ids(directory))

    @classmethod
    def byte_level(cls, directory: Path, vocab_size: int) -> "Tokenizer":
        """For a directory without tokenizer.json: token b < 256 is the byte b, others read as `<id>`.

        Raises:
            ModelMissing: the vocabulary is too small for bytes.
            ModelFileDamaged: config.json names no usable EOS.
        """
        if vocab_size < NUM_BYTES:
            message = f"{directory} holds no tokenizer.json, and {vocab_size} tokens are too few for one of bytes"
            raise ModelMissing(message, path=str(directory / "tokenizer.json"))
        vocab = {character: byte for byte, character in enumerate(_byte_characters())}
        vocab |= {f"<{token_id}>": token_id for token_id in range(NUM_BYTES, vocab_size)}
        fast = _FastTokenizer(models.BPE(vocab=vocab, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        return cls(fast, _eos_token_ids(directory))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; no special tokens are added, and special tokens spelled in it are not recognised.

        Raises:
            InvalidText: `text` holds lone surrogates, so it is no Unicode text.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidText(f"the prompt is not valid UTF-8 at character {error.start}", at=error.start) from error
        # `encode` would hold the GIL all along (0.7 s for a megabyte), and with it every stream of the process.
        return list(self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of `token_ids`, special tokens left out."""
        # As `encode`: `decode` would hold the GIL all along.
        return str(self._fast.decode_batch([list(token_ids)], skip_special_tokens=True)[0])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, perhaps a part of a character; of a special token, its name.

        A token id beyond the tokenizer (an embedding may have more rows) stands for none.
        """
        if token_id in self._added:
            return self._added[token_id].encode("utf-8")
        piece = self._fast.id_to_token(token_id)
        if piece is None:
            return b""
        try:
            return bytes(self._byte_of[character] for character in piece)
        except KeyError:  # not a tokenizer of bytes
            return str(self._fast.decode([token_id])).encode("utf-8")

    def to_json(self) -> str:
        """The content of a `tokenizer.json` that says the same."""
        return str(self._fast.to_str())

    def stream(self) -> "TokenStream":
        """A decoder for one sequence's tokens as they come."""
        return TokenStream(self, self._fast)


class TokenStream:
    """Turns tokens into text as soon as the text is certain (a character may span tokens)."""

    __slots__ = ("_decode", "_fast", "_pending", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, fast: _FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._fast = fast
        self._decode = DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; may be empty."""
        self._pending.append(token_id)
        text = self._decode.step(self._fast, token_id)
        if text is None:
            return ""
        self._pending.clear()
        return str(text)

    def flush(self) -> str:
        """What is left at the end: bytes that never became a character, as U+FFFD."""
        text = self._tokenizer.decode(self._pending) if self._pending else ""
        self._pending.clear()
        return text


class StopMatcher:
    """Withholds text that might begin a stop string, and says when one is complete."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take text; return what may be shown. After a match nothing more is returned."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.matched = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        keep = self._longest_partial_match()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """Withheld text that turned out to begin no stop string."""
        shown, self._held = self._held, ""
        return shown

    def _longest_partial_match(self) -> int:
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest


def _eos_token_ids(directory: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if value is not None:
                return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ModelFileDamaged(f"{path} holds no usable eos_token_id: {error}", path=str(path)) from error
    return ()


def _byte_characters() -> list[str]:
    """The character by which a byte-level tokenizer spells each byte: itself if it is visible, else one that is."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    characters, num_hidden = [], 0
    for byte in range(NUM_BYTES):
        characters.append(chr(byte if byte in visible else NUM_BYTES + num_hidden))
        num_hidden += byte not in visible
    return characters
