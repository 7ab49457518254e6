"""What the tiny model is worth: held-out bits per byte and drafts accepted in greedy decoding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tiny_model import Tiny  # type: ignore[import-not-found]
from torch import Tensor
from torch.nn import functional

IGNORED = -100


def scored_windows(files: Sequence[np.ndarray], end: int, length: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut files into overlapping windows whose targets cover every token once.

    A file starts after an end token and is closed by one. A window after a file's first scores
    only its last `stride` targets, so each of them has at least `length - stride` of context.
    """
    inputs, targets = [], []
    for file in files:
        line = np.concatenate([[end], file, [end]])
        scored = 0
        while scored < len(line) - 1:
            stop = min(len(line) - 1, max(length, scored + stride))
            start = max(0, stop - length)
            row = np.full(length, end, dtype=np.int64)
            goal = np.full(length, IGNORED, dtype=np.int64)
            row[: stop - start] = line[start:stop]
            goal[scored - start : stop - start] = line[scored + 1 : stop + 1]
            inputs.append(row)
            targets.append(goal)
            scored = stop
    return np.stack(inputs), np.stack(targets)


@torch.no_grad()
def held_out_nats(model: Tiny, files: Sequence[np.ndarray], end: int, batch: int = 32) -> tuple[float, int]:
    """Return the files' total negative log likelihood in nats and their token count."""
    model.eval()
    device = model.model.embed_tokens.weight.device
    length = model.shape.max_positions
    inputs, targets = scored_windows(files, end, length, length // 2)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for start in range(0, len(inputs), batch):
        rows = torch.from_numpy(inputs[start : start + batch]).to(device)
        goals = torch.from_numpy(targets[start : start + batch]).to(device)
        scores = model.logits(model(rows)[0]).float().flatten(0, 1)
        nats = functional.cross_entropy(scores, goals.flatten(), ignore_index=IGNORED, reduction="none")
        total += nats.double().sum()
    return float(total), int((targets != IGNORED).sum())


def bits_per_byte(model: Tiny, files: Sequence[np.ndarray], size: int, end: int) -> float:
    """Return held-out bits per UTF-8 byte."""
    return held_out_nats(model, files, end)[0] / math.log(2) / size


def draw_prompts(files: Sequence[np.ndarray], count: int, shortest: int, longest: int, seed: int) -> list[np.ndarray]:
    """Cut prompts of random length at random places of random files, by the files' lengths."""
    random = np.random.default_rng(seed)
    usable = [file for file in files if len(file) > shortest]
    weights = np.array([len(file) for file in usable], dtype=np.float64)
    prompts = []
    for _ in range(count):
        file = usable[int(random.choice(len(usable), p=weights / weights.sum()))]
        size = int(random.integers(shortest, min(longest, len(file)) + 1))
        start = int(random.integers(0, len(file) - size + 1))
        prompts.append(file[start : start + size].astype(np.int64))
    return prompts


@dataclass(frozen=True)
class TinySpeculation:
    """Counts from real greedy speculative decoding at one depth."""

    depth: int
    steps: int
    accepted: list[int]  # how many steps accepted the draft at each depth, the first first
    outputs: list[list[int]]

    def variety(self) -> float:
        """Return the share of distinct 4-grams in a row, averaged: loops make it small."""
        shares = []
        for row in self.outputs:
            grams = list(zip(row, row[1:], row[2:], row[3:], strict=False))
            shares.append(len(set(grams)) / len(grams))
        return sum(shares) / len(shares)

    def figures(self) -> dict[str, object]:
        """Return the rates: of all drafts, per depth among reached drafts, and tokens per step."""
        reached = [self.steps, *self.accepted[:-1]]
        return {
            "acceptance": round(sum(self.accepted) / (self.steps * self.depth), 4),
            "acceptance_by_depth": [
                round(hit / max(1, seen), 4) for hit, seen in zip(self.accepted, reached, strict=True)
            ],
            "tokens_per_step": round(1 + sum(self.accepted) / self.steps, 4),
            "verify_steps": self.steps,
        }


def chain_drafts(model: Tiny, tokens: Tensor, hidden: Tensor, ends: Tensor, depth: int) -> Tensor:
    """Draft `depth` tokens per row after `tokens[row, ends[row]]`, the last committed token.

    Entries before `ends` pair committed tokens with the trunk's hidden states; each later entry
    pairs the draft before it with the head's own output, and sees no other row's padding.
    """
    rows = torch.arange(len(tokens), device=tokens.device)
    places = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    out, keys, _ = model.draft(tokens[:, 1:], hidden[:, :-1], places)
    last = out[rows, ends - 1][:, None]
    real = places[None] < ends[:, None]
    drafts = [model.logits(last).argmax(-1)]
    for step in range(1, depth):
        own = torch.ones(len(rows), step, dtype=torch.bool, device=tokens.device)
        mask = torch.cat([real, own], 1)[:, None, None]
        place = (ends - 1 + step)[:, None]
        last, keys, _ = model.draft(drafts[-1], last, place, keys, mask)
        drafts.append(model.logits(last).argmax(-1))
    return torch.cat(drafts, 1)


@torch.no_grad()
def speculate(model: Tiny, prompts: Sequence[np.ndarray], depth: int, fresh: int) -> TinySpeculation:
    """Decode greedily with `depth` drafts per verify step, recomputing instead of caching.

    End tokens do not stop a row. The prompt's own forward yields the first token and counts as no
    verify step; a row is done once verify steps have brought it to `fresh` tokens or more.
    """
    model.eval()
    device = model.model.embed_tokens.weight.device
    starts = torch.tensor([len(prompt) for prompt in prompts], device=device)
    rows = torch.arange(len(prompts), device=device)
    width = int(starts.max()) + fresh + 2 * depth + 2
    tokens = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.from_numpy(prompt).to(device)
    ends = starts.clone()  # where the last committed token, not yet seen by the trunk, lies
    hidden, _ = model(tokens)
    tokens[rows, ends] = model.logits(hidden[rows, ends - 1]).argmax(-1)
    live = torch.ones(len(prompts), dtype=torch.bool, device=device)
    steps, hits = 0, torch.zeros(depth, dtype=torch.long, device=device)
    offsets = torch.arange(depth + 1, device=device)
    while bool(live.any()):
        drafts = chain_drafts(model, tokens, hidden, ends, depth)
        tokens[rows[:, None], ends[:, None] + 1 + offsets[:-1]] = drafts
        hidden, _ = model(tokens)
        picks = model.logits(hidden[rows[:, None], ends[:, None] + offsets]).argmax(-1)
        right = (picks[:, :-1] == drafts).long().cumprod(1)
        steps += int(live.sum())
        hits += right[live].sum(0)
        count = right.sum(1)
        moved = torch.where(live, ends + 1 + count, ends)
        tokens[rows, moved] = torch.where(live, picks[rows, count], tokens[rows, moved])
        ends = moved
        live = ends - starts + 1 < fresh
    lines = tokens.tolist()
    outputs = [line[a : a + fresh] for line, a in zip(lines, starts.tolist(), strict=True)]
    return TinySpeculation(depth, steps, hits.tolist(), outputs)


@torch.no_grad()
def greedy(model: Tiny, prompt: Sequence[int], fresh: int) -> list[int]:
    """Continue one prompt without drafts: the reference for `speculate`."""
    model.eval()
    line = list(prompt)
    device = model.model.embed_tokens.weight.device
    for _ in range(fresh):
        hidden, _ = model(torch.tensor([line], device=device))
        line.append(int(model.logits(hidden[:, -1]).argmax()))
    return line[len(prompt) :]
