"""Give a checkpoint with an MTP head a draft head over its N most used tokens, which makes drafting cheaper.

    python scripts/prune_draft_vocab.py MODEL OUT --keep 32768 --text corpus/*.txt
    python scripts/prune_draft_vocab.py MODEL OUT --keep 32768 --counts counts.json

Counts are a JSON list (or a mapping from id to count) or a .npy array, or are made by running MODEL's tokenizer over
text. End and special tokens are always kept. The head's rows are lm_head's; what is emitted does not change, only how
much of it is drafted rightly. `--link` refers to MODEL's weight files instead of copying them.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from baton.core.errors import BatonError
from baton.core.requests.tokenizer import Tokenizer
from baton.model.checkpoint.weights import read_headers
from baton.model.config import ModelConfig
from baton.model.draft_names import D2T, DRAFT_HEAD

_HEAD_FILE = "draft_head.safetensors"
_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer", "generation_config", "special_tokens", "added_tokens", "vocab", "merges", "chat")
_COPIED_FILE = "model-00001-of-00001.safetensors"  # `model.safetensors` would hide the index


class Unusable(Exception):
    """What was given cannot be used; the message says why."""


@dataclass(frozen=True)
class Pruned:
    """Which tokens the draft head has, ascending, and the share of all counted ones that they are."""

    token_ids: list[int]
    coverage: float


def read_counts(file: Path, vocab_size: int) -> np.ndarray:
    """Counts by token id, int64 [vocab_size]; ids past the file's end count 0."""
    if file.suffix == ".npy":
        values = np.load(file)
    else:
        values = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(values, dict):
            pairs = {int(token): int(count) for token, count in values.items()}
            if pairs and min(pairs) < 0:
                raise Unusable(f"{file} counts token {min(pairs)}")
            dense = np.zeros(max(pairs, default=-1) + 1, dtype=np.int64)
            dense[list(pairs)] = list(pairs.values())
            values = dense
    counts = np.asarray(values)
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or len(counts) > vocab_size or (counts < 0).any():
        raise Unusable(f"{file} holds no counts of up to {vocab_size} tokens")
    return np.pad(counts.astype(np.int64), (0, vocab_size - len(counts)))


def count_tokens(files: Iterable[Path], tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """How often each token is in the files, int64 [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for file in files:
        token_ids = tokenizer.encode(file.read_text(encoding="utf-8", errors="replace"))
        counts += np.bincount(np.asarray(token_ids, dtype=np.int64), minlength=vocab_size)[:vocab_size]
    return counts


def special_tokens(directory: Path, vocab_size: int) -> set[int]:
    """End tokens, and what the tokenizer calls special."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    marked = {int(item["id"]) for item in tokenizer.get("added_tokens", []) if item.get("special")}
    every = marked | set(Tokenizer.from_directory(directory).eos_token_ids)
    return {token for token in every if token < vocab_size}


def choose_tokens(counts: np.ndarray, keep: int, always: set[int]) -> Pruned:
    """The `keep` tokens counted most, the lower id first among equals, with those that are always kept."""
    if not max(1, len(always)) <= keep <= len(counts):
        raise Unusable(f"--keep {keep} is not in {max(1, len(always))} ... {len(counts)}")
    ranked = [int(token) for token in np.argsort(-counts, kind="stable") if int(token) not in always]
    token_ids = sorted([*always, *ranked[: keep - len(always)]])
    return Pruned(token_ids, float(counts[token_ids].sum() / max(1, counts.sum())))


def write_pruned(model: Path, out: Path, token_ids: list[int], *, link: bool) -> None:
    """Write a checkpoint directory that is `model` with a draft head of these tokens."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config.get("draft_vocab_size") is not None:
        raise Unusable(f"{model} has a pruned draft head already; start from the model it was made of")
    stored = read_headers(model)
    tied = bool(config.get("tie_word_embeddings")) and "lm_head.weight" not in stored  # a stored head is the head
    rows = stored["model.embed_tokens.weight" if tied else "lm_head.weight"].read()[token_ids]
    table = torch.tensor(token_ids, dtype=torch.int64)
    out.mkdir(parents=True, exist_ok=True)
    head = {DRAFT_HEAD: rows.contiguous(), D2T: table - torch.arange(len(table))}
    (out / _HEAD_FILE).write_bytes(save(head, metadata={"format": "pt"}))
    weight_map: dict[str, str] = {name: _HEAD_FILE for name in head}
    places: dict[Path, str] = {}
    for name, tensor in sorted(stored.items()):
        if tensor.file not in places:
            places[tensor.file] = _place_weights(tensor.file, out, link=link)
        weight_map[name] = places[tensor.file]
    size = sum(tensor.end - tensor.start for tensor in stored.values()) + sum(item.nbytes for item in head.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (out / _INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    config |= {"draft_vocab_size": len(token_ids), "d2t_form": "offset"}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in model.iterdir():
        if file.name.startswith(_TOKENIZER_FILES):
            shutil.copyfile(file, out / file.name)


def _place_weights(file: Path, out: Path, *, link: bool) -> str:
    """The name by which `out`'s index calls a weight file of the model, copied there if it is not linked."""
    if link:
        return Path(os.path.relpath(file.resolve(), out.resolve())).as_posix()
    name = _COPIED_FILE if file.name == _SINGLE_FILE else file.name
    shutil.copyfile(file, out / name)
    return name


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="a model directory with an MTP head")
    parser.add_argument("out", type=Path, help="the directory to write")
    parser.add_argument("--keep", type=int, required=True, help="tokens the draft head has")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--counts", type=Path, help="token counts, JSON or .npy")
    source.add_argument("--text", type=Path, nargs="+", help="text files to count tokens in")
    parser.add_argument("--link", action="store_true", help="refer to the model's weight files instead of copying them")
    asked = parser.parse_args(arguments)
    try:
        config = ModelConfig.from_directory(asked.model)
        if config.num_mtp_layers == 0:
            raise Unusable(f"{asked.model} has no MTP head to draft with")
        if asked.counts is not None:
            counts = read_counts(asked.counts, config.vocab_size)
        else:
            counts = count_tokens(asked.text, Tokenizer.from_directory(asked.model), config.vocab_size)
        pruned = choose_tokens(counts, asked.keep, special_tokens(asked.model, config.vocab_size))
        write_pruned(asked.model, asked.out, pruned.token_ids, link=asked.link)
    except (Unusable, BatonError, OSError, ValueError) as error:
        print(f"prune_draft_vocab: {error}", file=sys.stderr)
        return 1
    share = len(pruned.token_ids) / config.vocab_size
    kept = f"{len(pruned.token_ids)} of {config.vocab_size} tokens ({share:.1%})"
    print(f"{asked.out}: {kept} cover {pruned.coverage:.2%} of the {int(counts.sum())} counted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
