"""Text to tokens and back, incrementally; a thin layer over the `tokenizers` library.

Workers use it for stop strings, the router for everything else. It loads only `tokenizer.json`: transformers (and its
half a gigabyte per process) stays out of the serving path.
"""

import codecs
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Protocol

from tokenizers import Tokenizer as _FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from baton.core.errors import InvalidText, ModelFileDamaged, ModelMissing
from baton.core.requests.special_tokens import add_tokens, read_json, special_tokens

NUM_BYTES = 256
MAX_PENDING: Final = 32  # maximum number of withheld tokens; a character has at most four bytes
MAX_KNOWN: Final = 1 << 18  # maximum number of entries in a tokenizer's tables
REPLACEMENT: Final = "\ufffd"
ENDS_OF_TURNS: Final = ("<|eot_id|>", "<|eom_id|>")


class Tokenizer:
    """One model's tokenizer and its end-of-sequence tokens.

    Attributes:
        eos_token_ids: any of them ends an answer.
        added_tokens: ids by text of tokens that are read as one wherever a text spells them.
        special_tokens: those of `added_tokens` that decoded text leaves out.
    """

    def __init__(self, fast: _FastTokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self._fast = fast
        self.eos_token_ids = eos_token_ids
        self.vocab_size: int = fast.get_vocab_size(with_added_tokens=True)
        self._byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
        added = fast.get_added_tokens_decoder()
        self._added = {token_id: str(token) for token_id, token in added.items()}
        self.added_tokens = {str(token): token_id for token_id, token in added.items()}
        self.special_tokens = {str(token): token_id for token_id, token in added.items() if token.special}
        self._special = frozenset(self.special_tokens.values())
        self._is_of_bytes = isinstance(fast.decoder, decoders.ByteLevel)
        self._bytes = {True: _ByteDecoder(self._shown), False: _ByteDecoder(self._decoded)}  # special ones left out?

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Load `tokenizer.json` and the EOS tokens.

        EOS tokens are those of `generation_config.json` or `config.json`, and the tokenizer's own, as far as the model
        has them: files say -1 for none, and `min_tokens` would write beyond the logits for an id beyond the vocabulary.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelMissing(f"{path} does not exist", path=str(path))
        try:
            fast = _FastTokenizer.from_str(path.read_text(encoding="utf-8"))
        # The library raises bare Exception for every kind of invalid content.
        except Exception as error:
            raise ModelFileDamaged(f"{path} is not a tokenizer: {error}", path=str(path)) from error
        # These are left over from the tokenizer's last training run; transformers applies neither by default.
        fast.no_truncation()
        fast.no_padding()
        vocab_size = _vocab_size(directory)
        add_tokens(fast, directory, vocab_size)
        _add_bos(fast, directory)
        own = fast.token_to_id(special_tokens(directory).get("eos_token", ""))
        return cls(fast, _of_model(_with_own_ends(fast, _eos_token_ids(directory), own), vocab_size))

    @classmethod
    def byte_level(cls, directory: Path, vocab_size: int) -> "Tokenizer":
        """Make a tokenizer for a directory without one: token b < 256 is the byte b, others are shown as `<id>`.

        Raises:
            ModelMissing: the vocabulary is too small for bytes.
            ModelFileDamaged: config.json has no usable EOS.
        """
        if vocab_size < NUM_BYTES:
            message = f"{directory} holds no tokenizer.json, and {vocab_size} tokens are too few for one of bytes"
            raise ModelMissing(message, path=str(directory / "tokenizer.json"))
        vocab = {character: byte for byte, character in enumerate(_byte_characters())}
        vocab |= {f"<{token_id}>": token_id for token_id in range(NUM_BYTES, vocab_size)}
        fast = _FastTokenizer(models.BPE(vocab=vocab, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        return cls(fast, _of_model(_eos_token_ids(directory), vocab_size))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`. Special tokens spelled in the text are read as special tokens.

        So untrusted text may contain those that begin and end a chat's turns.

        Args:
            text: a chat rendered by its template, or a plain prompt.
            add_special_tokens: whether to add what the tokenizer's post-processor adds before and after a text (BOS). A
                text that already begins with it does not get it twice.

        Raises:
            InvalidText: `text` has lone surrogates, so it is not valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidText(f"the prompt is not valid UTF-8 at character {error.start}", at=error.start) from error
        # `encode` would hold the GIL throughout (0.7 s for a megabyte), and stall every stream of the process.
        encoding = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        token_ids = list(encoding.ids)
        if not add_special_tokens:
            return token_ids
        num_before = next((at for at, is_added in enumerate(encoding.special_tokens_mask) if not is_added), 0)
        is_twice = num_before and token_ids[num_before : 2 * num_before] == token_ids[:num_before]
        return token_ids[num_before:] if is_twice else token_ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`, with special tokens left out or shown by their names."""
        # Like `encode`, `decode` would hold the GIL throughout.
        return str(self._fast.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, perhaps part of a character; for a special token, its name.

        A token id beyond the tokenizer (an embedding may have more rows) stands for none.
        """
        if token_id in self._added:
            return self._added[token_id].encode("utf-8")
        piece = self._fast.id_to_token(token_id)
        if piece is None:
            return b""
        try:
            return bytes(self._byte_of[character] for character in piece)
        except KeyError:  # not a byte-level tokenizer
            return str(self._fast.decode([token_id])).encode("utf-8")

    def to_json(self) -> str:
        """Serialize as the content of an equivalent `tokenizer.json`."""
        return str(self._fast.to_str())

    def stream(self, *, skip_special_tokens: bool = True) -> "TokenStream":
        """Make a decoder for one sequence's tokens as they arrive."""
        if self._is_of_bytes:
            return _ByteStream(self._bytes[skip_special_tokens].behind(b""))
        return _LibraryStream(self._fast, skip_special_tokens=skip_special_tokens)

    def _decoded(self, token_id: int) -> bytes:
        """The bytes that a byte-level decoder takes a token for; its UTF-8 if it is not spelled in byte characters."""
        piece = self._fast.id_to_token(token_id)
        if piece is None:
            return b""
        try:
            return bytes([self._byte_of[character] for character in piece])
        except KeyError:
            return piece.encode("utf-8")

    def _shown(self, token_id: int) -> bytes:
        """The bytes of a token, empty for special tokens."""
        return b"" if token_id in self._special else self._decoded(token_id)


class TokenStream(Protocol):
    """Turns tokens into text as soon as the text is certain (a character may span tokens)."""

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token; may be empty."""
        ...

    def flush(self) -> str:
        """Return what is left at the end: bytes that never became a character, as U+FFFD."""
        ...


class _ByteStream:
    """The stream of a byte-level tokenizer: one table lookup per token, whatever its text is.

    A byte that cannot be part of a character becomes U+FFFD at once. What it returns, joined, equals the library's
    decoding of the whole sequence.
    """

    __slots__ = ("_behind",)

    def __init__(self, behind: "_Behind") -> None:
        self._behind = behind

    def push(self, token_id: int) -> str:
        text, self._behind = self._behind[token_id]
        return text

    def flush(self) -> str:
        text = self._behind.begun.decode("utf-8", "replace")
        self._behind = self._behind.decoder.behind(b"")
        return text


class _Behind(dict[int, tuple[str, "_Behind"]]):
    """Maps tokens that follow the start of a character to (text, next state); each entry is computed once."""

    __slots__ = ("begun", "decoder")

    def __init__(self, begun: bytes, decoder: "_ByteDecoder") -> None:
        super().__init__()
        self.begun = begun
        self.decoder = decoder

    def __missing__(self, token_id: int) -> tuple[str, "_Behind"]:
        text, begun = _split(self.begun + self.decoder.bytes_of(token_id))
        found = text, self.decoder.behind(begun)
        if self.decoder.num_known < MAX_KNOWN:
            self.decoder.num_known += 1
            self[token_id] = found
        return found


class _ByteDecoder:
    """The tables of one tokenizer, shared by its streams."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self.bytes_of = bytes_of
        self.num_known = 0
        self._behind: dict[bytes, _Behind] = {}  # by the bytes of a character's start

    def behind(self, begun: bytes) -> _Behind:
        found = self._behind.get(begun)
        if found is None:
            found = self._behind[begun] = _Behind(begun, self)
        return found


class _LibraryStream:
    """The stream of any other tokenizer, whose decoder only the library knows.

    It decodes uncertain tokens together with those before them, since text at the start of a sequence reads
    differently. If more tokens are withheld than a character has bytes, their text is certain: it is broken.
    """

    __slots__ = ("_before", "_fast", "_pending", "_skips")

    def __init__(self, fast: _FastTokenizer, *, skip_special_tokens: bool) -> None:
        self._fast = fast
        self._skips = skip_special_tokens
        self._before: list[int] = []  # tokens of the last text
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._text()
        if not text or text.endswith(REPLACEMENT):
            if len(self._pending) < MAX_PENDING:
                return ""
        self._before, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        text = self._text() if self._pending else ""
        self._pending = []
        return text

    def _text(self) -> str:
        before, text = self._decode(self._before), self._decode(self._before + self._pending)
        # Bytes that break a character may change the text before them, but that was already returned.
        return text[len(before) :] if text.startswith(before) else self._decode(self._pending)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._fast.decode(token_ids, skip_special_tokens=self._skips))


def _split(data: bytes) -> tuple[str, bytes]:
    """Split bytes into certain text, with U+FFFD for invalid bytes, and the bytes of an incomplete character."""
    text, num_used = codecs.utf_8_decode(data, "replace", False)
    rest = data[num_used:]
    if len(rest) == 2 and rest[0] == 0xED and rest[1] >= 0xA0:  # half of a surrogate, which Python waits to complete
        return text + "\ufffd\ufffd", b""
    return text, rest


def _vocab_size(directory: Path) -> int | None:
    """The model's vocabulary size, if config.json has it; errors in that file are reported where the model is read."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config")
        return int((text if isinstance(text, dict) and "vocab_size" in text else config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _eos_token_ids(directory: Path) -> tuple[int, ...]:
    """EOS tokens of the first file that names some; in config.json a multimodal model's are in its `text_config`."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            value, text = config.get("eos_token_id"), config.get("text_config")
            if isinstance(text, dict) and text.get("eos_token_id") is not None:
                value = text["eos_token_id"]
            if value is not None:
                return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ModelFileDamaged(f"{path} holds no usable eos_token_id: {error}", path=str(path)) from error
    return ()


def _of_model(token_ids: tuple[int, ...], vocab_size: int | None) -> tuple[int, ...]:
    """Those of the ids that the model has; without a known size, all that are not negative."""
    return tuple(one for one in token_ids if one >= 0 and (vocab_size is None or one < vocab_size))


def _with_own_ends(fast: _FastTokenizer, eos_token_ids: tuple[int, ...], own: int | None) -> tuple[int, ...]:
    """Add ends that config.json may not list: the tokenizer's own EOS, and Llama 3's ends of a turn or a call."""
    added = fast.get_added_tokens_decoder().items()
    ends = (token_id for token_id, token in added if token.special and str(token) in ENDS_OF_TURNS)
    return tuple(dict.fromkeys((*eos_token_ids, *([] if own is None else [own]), *ends)))


def _add_bos(fast: _FastTokenizer, directory: Path) -> None:
    """Make the tokenizer prepend BOS if tokenizer_config.json sets `add_bos_token` and tokenizer.json does not."""
    adds = read_json(directory / "tokenizer_config.json").get("add_bos_token")
    bos = special_tokens(directory).get("bos_token")
    token_id = fast.token_to_id(bos) if adds is True and bos is not None else None
    if token_id is not None and token_id not in fast.encode("").ids:
        fast.post_processor = TemplateProcessing(single=[bos, "$A"], pair=None, special_tokens=[(bos, token_id)])


def _byte_characters() -> list[str]:
    """The characters by which a byte-level tokenizer spells each byte: itself if visible, else a substitute that is."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    characters, num_hidden = [], 0
    for byte in range(NUM_BYTES):
        characters.append(chr(byte if byte in visible else NUM_BYTES + num_hidden))
        num_hidden += byte not in visible
    return characters
