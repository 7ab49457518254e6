"""The corpus of the tiny model: a source tree, its split by file, its tokenizer.

Splitting by file (never by position inside one) is what keeps the held-out figures honest:
neighbouring lines of one module are far more alike than two modules are.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END, TURN_START, TURN_END)
SKIPPED_FOLDERS = frozenset({"site-packages", "encodings", "pydoc_data", "__pycache__"})
# Written by the build of one interpreter: they differ from machine to machine.
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
# A word takes one leading mark (`.append`, `_name`, `(self`), a run of marks its line's end.
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Document:
    """One source file: its path under the corpus root and its text."""

    path: str
    text: str

    @property
    def size(self) -> int:
        """Length in UTF-8 bytes."""
        return len(self.text.encode())


@dataclass(frozen=True)
class Corpus:
    """Training and held-out files, disjoint, and a fingerprint of both."""

    train: list[Document]
    held_out: list[Document]
    fingerprint: str


def read_documents(root: Path) -> Iterator[Document]:
    """Yield the tree's distinct UTF-8 sources in path order."""
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS.intersection(parts) or parts[0].startswith(SKIPPED_PREFIXES):
            continue
        data = path.read_bytes()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            continue  # deliberate in the test suites: sources in other encodings
        digest = hashlib.sha256(data).digest()
        if text and digest not in seen:
            seen.add(digest)
            yield Document("/".join(parts), text)


def split(documents: Sequence[Document], seed: int, share: float = 0.035, cap: int = 1_200_000) -> Corpus:
    """Hold out a random `share` of the files, at most `cap` bytes of them."""
    digest = hashlib.sha256()
    for document in documents:
        content = hashlib.sha256(document.text.encode()).hexdigest()
        digest.update(f"{content}  {document.path}\n".encode())
    order = list(documents)
    random.Random(seed).shuffle(order)
    held_out: list[Document] = []
    room = cap
    for document in order[: max(1, round(share * len(order)))]:
        if document.size <= room:
            held_out.append(document)
            room -= document.size
    names = {document.path for document in held_out}
    train = [document for document in documents if document.path not in names]
    held_out.sort(key=lambda document: document.path)
    return Corpus(train, held_out, digest.hexdigest())


def shared_share(corpus: Corpus, lines: int = 5) -> float:
    """Share of held-out bytes inside runs of `lines` lines that training holds verbatim.

    Deduplication only drops identical files; this says how much near-duplicates leak.
    """

    def runs(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
        rows = text.splitlines(keepends=True)
        for start in range(len(rows) - lines + 1):
            yield start, tuple(rows[start : start + lines])

    known = {hash(run) for document in corpus.train for _, run in runs(document.text)}
    shared = 0
    for document in corpus.held_out:
        rows = document.text.splitlines(keepends=True)
        covered: set[int] = set()
        for start, run in runs(document.text):
            if hash(run) in known:
                covered.update(range(start, start + lines))
        shared += sum(len(rows[row].encode()) for row in covered)
    return shared / sum(document.size for document in corpus.held_out)


def train_tokenizer(documents: Sequence[Document], vocab: int) -> Tokenizer:
    """Fit a byte-level BPE that reproduces any text byte for byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[np.ndarray]:
    """Encode each file, without separators; check that each decodes to itself."""
    texts = [document.text for document in documents]
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    ids = [encoding.ids for encoding in encodings]
    for document, decoded in zip(documents, tokenizer.decode_batch(ids, skip_special_tokens=False), strict=True):
        if decoded != document.text:
            raise ValueError(f"{document.path} does not survive the tokenizer")
    return [np.asarray(row, dtype=np.int32) for row in ids]


def save_tokenizer(tokenizer: Tokenizer, out: Path, max_positions: int) -> None:
    """Write tokenizer.json and the configuration that makes `AutoTokenizer` take it as it is."""
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "eos_token": END,
        "pad_token": END,
        "additional_special_tokens": [TURN_START, TURN_END],
        "chat_template": CHAT,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


class Stream:
    """Endless batches of windows cut from the files in a new order every epoch.

    A window is one token longer than a sequence. Each file follows an end token, so the model
    learns both how files begin and how they end.
    """

    def __init__(self, files: Sequence[np.ndarray], end: int, length: int, seed: int) -> None:
        self._files = [np.concatenate([[end], row]).astype(np.int32) for row in files]
        self._length = length
        self._random = np.random.default_rng(seed)

    def epoch(self) -> np.ndarray:
        """Return one epoch's windows, cut at a random phase."""
        order = self._random.permutation(len(self._files))
        line = np.concatenate([self._files[index] for index in order])
        phase = int(self._random.integers(self._length))
        line = np.roll(line, -phase)
        count = (len(line) - 1) // self._length
        if count < 1:
            raise ValueError("the corpus is shorter than one window")
        starts = np.arange(count)[:, None] * self._length
        windows: np.ndarray = line[starts + np.arange(self._length + 1)]
        self._random.shuffle(windows)
        return windows

    def batches(self, size: int) -> Iterator[np.ndarray]:
        """Yield [size, length + 1] windows for ever."""
        pool = np.empty((0, self._length + 1), dtype=np.int32)
        while True:
            while len(pool) < size:
                pool = np.concatenate([pool, self.epoch()])
            yield pool[:size]
            pool = pool[size:]
