"""Train a tiny model with an MTP head, of one of three families, on the standard library's sources.

`python scripts/train_tiny.py --out assets/tiny` reproduces the shipped directory of Qwen3-MoE's family; `--family
hybrid` and `--family mla` make those of Qwen3.5-MoE's and DeepSeek-V3's. The trunk is trained first and its best
held-out checkpoint kept; the MTP head then learns, with the trunk frozen, to foresee the trunk's own predictions, since
agreement with them is what acceptance is. `--trunk-seconds` and `--head-seconds` bind either by time instead of steps.
"""

import argparse
import copy
import functools
import json
import math
import platform
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import tiny_card  # type: ignore[import-not-found]
import tiny_corpus  # type: ignore[import-not-found]
import tiny_eval  # type: ignore[import-not-found]
import tiny_hybrid  # type: ignore[import-not-found]
import tiny_mla  # type: ignore[import-not-found]
import tiny_model  # type: ignore[import-not-found]
import torch
from tiny_model import Tiny, TinyShape
from tiny_optimiser import Optimiser  # type: ignore[import-not-found]
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

BALANCE = 0.01  # weight of the load-balancing loss
DEPTH_WEIGHTS = (1.0, 0.8, 0.6)  # of the chained drafts' losses
SAMPLE = 'import os\n\n\ndef count_lines(path):\n    """Return the number of lines in a file."""\n'


@dataclass(frozen=True)
class TrainingPlan:
    """How to train; every field is a flag."""

    family: str = "moe"
    out: Path = Path("assets/tiny")
    corpus: Path = field(default_factory=lambda: Path(sysconfig.get_path("stdlib")))
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    seed: int = 0
    split_seed: int = 0
    steps: int = 7000
    head_steps: int = 2500
    trunk_seconds: float = 0.0  # if not 0, they bind in place of `steps`, compilation included
    head_seconds: float = 0.0
    batch: int = 16
    head_batch: int = 8
    length: int = 2048
    rate: float = 6e-3
    head_rate: float = 3e-3
    decay: float = 0.1
    dropout: float = 0.1
    joint: float = 0.3
    hard: float = 0.5
    eval_every: int = 500
    prompts: int = 64
    fresh: int = 128
    compile: int = int(torch.cuda.is_available())


FAMILIES = {
    "moe": (TinyShape, Tiny, TrainingPlan()),
    "hybrid": (
        tiny_hybrid.HybridShape,
        tiny_hybrid.TinyHybrid,
        TrainingPlan(
            family="hybrid", out=Path("assets/tiny-hybrid"), trunk_seconds=190.0, head_seconds=70.0, eval_every=1000
        ),
    ),
    "mla": (
        tiny_mla.MlaShape,
        tiny_mla.TinyMla,
        TrainingPlan(
            family="mla", out=Path("assets/tiny-mla"), trunk_seconds=190.0, head_seconds=70.0, eval_every=1000
        ),
    ),
}

# What the figures depend on, and what is true of any machine.
TOLD = {item.name for item in fields(TrainingPlan)} - {"out", "corpus", "device"}


def device_batches(plan: TrainingPlan, files: Sequence[np.ndarray], size: int, seed: int) -> Iterator[Tensor]:
    """Yield batches of windows on the device; documents are separated by token 0, the end."""
    for windows in tiny_corpus.Stream(files, 0, plan.length, seed).batches(size):
        yield torch.from_numpy(windows).to(plan.device, torch.long)


def next_token_loss(hidden: Tensor, weight: Tensor, goals: Tensor) -> Tensor:
    """Return the mean cross entropy of the next tokens."""
    scores = tiny_model.linear(hidden, weight).float()
    return functional.cross_entropy(scores.flatten(0, 1), goals.flatten())


def draft_loss(drafted: Tensor, taught: Tensor, weight: Tensor, valid: Tensor, hard: float) -> tuple[Tensor, Tensor]:
    """Return the drafts' loss against the trunk's predictions, and how often both agree.

    Soft targets carry most information; the trunk's own choice is what greedy decoding compares.
    """
    with torch.no_grad():
        teacher = tiny_model.linear(taught, weight).float()
        choice = teacher.argmax(-1)
        odds = teacher.softmax(-1)
    scores = tiny_model.linear(drafted, weight).float()
    logs = scores.log_softmax(-1)
    soft = -(odds * logs).sum(-1)
    sharp = -logs.gather(-1, choice[..., None])[..., 0]
    same = (scores.argmax(-1) == choice).float()
    count = valid.sum() * len(soft)
    loss = ((soft + hard * sharp) * valid).sum() / (count * (1 + hard))
    return loss, (same * valid).sum() / count


def chained_loss(
    model: Tiny, tokens: Tensor, hard: float, loss_of: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, list[Tensor]]:
    """Unroll the head over every position at once; return the loss and agreement per depth.

    Chain i reads, at depth d, token i + d at position i + d - 1 and the head's output one depth
    before; its attention sees the first-depth entries up to i and its own later ones.
    """
    with torch.no_grad():
        hidden, _ = model(tokens)
    weight = model.model.embed_tokens.weight
    span = tokens.shape[1]
    places = torch.arange(span, device=tokens.device)
    causal = torch.ones(span, span, dtype=torch.bool, device=tokens.device).tril()
    own = torch.eye(span, dtype=torch.bool, device=tokens.device)
    total, agreements = torch.zeros((), device=tokens.device), []
    state, keys = hidden, None
    for depth, share in enumerate(DEPTH_WEIGHTS, 1):
        mask = torch.cat([causal] + [own] * (depth - 1), 1) if depth > 1 else None
        ahead = tokens.roll(-depth, 1)
        state, keys, balance = model.draft(ahead, state, places + depth - 1, keys, mask)
        valid = (places < span - depth).float()
        loss, same = loss_of(state, hidden.roll(-depth, 1), weight, valid, hard)
        total = total + share * loss + BALANCE * balance
        agreements.append(same.detach())
    return total, agreements


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


class Schedule:
    """How much of a phase is left: of its steps, or of its seconds, from the end of the first steps on."""

    SETTLED = 5  # steps that may compile

    def __init__(self, steps: int, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._steps, self._seconds, self._clock = steps, seconds, clock
        self._start = self._mark = clock()

    def left(self, done: int) -> float | None:
        """Return the share that is left after `done` steps, None where steps are counted."""
        if not self._seconds:
            return None
        now = self._clock()
        if done <= self.SETTLED:
            self._mark = now
        end = self._start + self._seconds
        return min(1.0, max(0.0, end - now) / max(1e-9, end - self._mark))

    def is_last(self, done: int) -> bool:
        """Say whether the phase ends once `done` steps are done."""
        left = self.left(done)
        return done >= self._steps if left is None else left <= 0.0


def first_step(
    compute: Callable[[bool], tuple[Tensor, ...]], compiled: bool, to_eager: Callable[[], None]
) -> tuple[bool, tuple[Tensor, ...]]:
    """Compute a loss and its gradients, compiled or, if that fails, eagerly; return whether compiled, and the values.

    Args:
        compute: given whether to compile, returns the loss and what else is to be told.
        compiled: whether to try.
        to_eager: drops what is compiled, and gradients.
    """
    if compiled:
        try:
            found = compute(True)
            found[0].backward()
        except Exception as error:  # noqa: BLE001 - of any of the compiler's parts; told, and only speed is lost
            say(f"compilation failed, going on without: {type(error).__name__}: {str(error)[:2000]}")
            to_eager()
        else:
            return True, found
    found = compute(False)
    found[0].backward()
    return False, found


def to_eager(model: Tiny) -> None:
    """Drop what is compiled, and gradients."""
    model.set_compiled(False)
    model.zero_grad(set_to_none=True)


def train_trunk(
    model: Tiny, plan: TrainingPlan, files: Sequence[np.ndarray], measure: Callable[[bool], float]
) -> dict[str, object]:
    """Train the trunk and leave the checkpoint with the best held-out figure in the model."""
    losses = {
        False: next_token_loss,
        True: torch.compile(next_token_loss, dynamic=False) if plan.compile else next_token_loss,
    }
    optimiser = Optimiser(model if plan.joint else model.model, plan.rate, plan.decay, plan.steps)
    batches = device_batches(plan, files, plan.batch, plan.seed)
    best, best_state, history = math.inf, model.state_dict(), []
    start, mark = time.perf_counter(), time.perf_counter()
    schedule, step, compiled, counted = Schedule(plan.steps, plan.trunk_seconds), 0, bool(plan.compile), 0

    def losses_of(windows: Tensor, compiled: bool) -> tuple[Tensor, Tensor]:
        loss_of = losses[compiled]
        hidden, balance = model(windows[:, :-1])
        loss = loss_of(hidden, model.model.embed_tokens.weight, windows[:, 1:])
        total = loss + BALANCE * balance
        if plan.joint:
            places = torch.arange(plan.length - 1, device=windows.device)
            state, _, balance = model.draft(windows[:, 1:-1], hidden[:, :-1], places)
            ahead = loss_of(state, model.model.embed_tokens.weight, windows[:, 2:])
            total = total + plan.joint * ahead + BALANCE * balance
        return total, loss

    while not schedule.is_last(step):
        model.train()
        windows = next(batches)
        if step == 0:
            compiled, (_, loss) = first_step(
                functools.partial(losses_of, windows), compiled, functools.partial(to_eager, model)
            )
        else:
            total, loss = losses_of(windows, compiled)
            total.backward()
        optimiser.step(step, schedule.left(step))
        model.adjust_routers(model)
        step = done = step + 1
        if done % plan.eval_every == 0 or schedule.is_last(done):
            nats = float(loss.detach())
            speed = (done - counted) * plan.batch * plan.length / (time.perf_counter() - mark)
            bits = measure(compiled)
            history.append({"step": done, "train_nats": round(nats, 4), "held_out": round(bits, 4)})
            say(f"step {done}: loss {nats:.4f}, held-out {bits:.4f} bits/byte, {speed:.0f} tokens/s")
            if bits < best:
                best, best_state = bits, copy.deepcopy(model.state_dict())
            mark, counted = time.perf_counter(), done
    model.load_state_dict(best_state)
    told = {"steps": step} if plan.trunk_seconds else {}
    return {**told, "seconds": round(time.perf_counter() - start, 1), "history": history}


def train_head(model: Tiny, plan: TrainingPlan, files: Sequence[np.ndarray]) -> dict[str, object]:
    """Train the MTP head in a chain, the trunk frozen."""
    losses = {False: draft_loss, True: torch.compile(draft_loss, dynamic=False) if plan.compile else draft_loss}
    model.eval()
    model.model.requires_grad_(False)
    optimiser = Optimiser(model.mtp, plan.head_rate, plan.decay, plan.head_steps)
    batches = device_batches(plan, files, plan.head_batch, plan.seed + 1)
    start, agreements = time.perf_counter(), [torch.zeros(())]
    schedule, step, compiled = Schedule(plan.head_steps, plan.head_seconds), 0, bool(plan.compile)

    def losses_of(tokens: Tensor, compiled: bool) -> tuple[Tensor, ...]:
        loss, same = chained_loss(model, tokens, plan.hard, losses[compiled])
        return loss, *same

    while not schedule.is_last(step):
        tokens = next(batches)[:, :-1]
        if step == 0:
            compiled, (loss, *agreements) = first_step(
                functools.partial(losses_of, tokens), compiled, functools.partial(to_eager, model)
            )
        else:
            loss, *agreements = losses_of(tokens, compiled)
            loss.backward()
        optimiser.step(step, schedule.left(step))
        model.adjust_routers(model.mtp)
        step += 1
        if step % plan.eval_every == 0:
            seconds = time.perf_counter() - start
            speed = step * plan.head_batch * plan.length / seconds
            same = ", ".join(f"{float(value):.3f}" for value in agreements)
            say(f"head step {step}: loss {float(loss.detach()):.4f}, same {same}, {speed:.0f} tokens/s")
    model.model.requires_grad_(True)
    told = {"steps": step} if plan.head_seconds else {}
    return {
        **told,
        "seconds": round(time.perf_counter() - start, 1),
        "agreement_on_training_text": [round(float(value), 4) for value in agreements],
    }


@torch.no_grad()
def measure_drafts(model: Tiny, plan: TrainingPlan, held_out: Sequence[np.ndarray]) -> dict[str, object]:
    """Compare drafts and trunk on held-out text as people wrote it, free of greedy loops.

    Per depth, all drafts before it being right: how often the likeliest tokens agree, and how
    much probability is common to both, which is what lossless sampling at temperature 1 accepts.
    """
    same: list[Tensor] = []
    common: list[Tensor] = []

    def compare(drafted: Tensor, taught: Tensor, weight: Tensor, valid: Tensor, _: float) -> tuple[Tensor, Tensor]:
        first, second = (tiny_model.linear(x, weight).float() for x in (drafted, taught))
        equal = (first.argmax(-1) == second.argmax(-1)).float()
        overlap = torch.minimum(first.softmax(-1), second.softmax(-1)).sum(-1)
        for kept, value in ((same, equal), (common, overlap)):
            kept.append((value * valid).sum() / (valid.sum() * len(value)))
        return kept[-1], kept[-1]

    for windows in tiny_corpus.Stream(held_out, 0, plan.length, plan.seed).epoch():
        tokens = torch.from_numpy(windows[None, :-1]).to(plan.device, torch.long)
        chained_loss(model, tokens, 0.0, compare)
    depths = len(DEPTH_WEIGHTS)
    return {
        "same_choice_by_depth": [round(float(x), 4) for x in torch.stack(same).view(-1, depths).mean(0)],
        "common_probability_by_depth": [round(float(x), 4) for x in torch.stack(common).view(-1, depths).mean(0)],
    }


def measure_speculation(
    model: Tiny, plan: TrainingPlan, held_out: Sequence[np.ndarray], say_tokens: Callable[[list[int]], str]
) -> dict[str, object]:
    """Decode from held-out prompts at one to four drafts; print some texts."""
    longest = min(512, plan.length // 2)
    prompts = tiny_eval.draw_prompts(held_out, plan.prompts, min(64, longest), longest, plan.seed)
    figures: dict[str, object] = {
        "prompts": len(prompts),
        "prompt_tokens": [min(64, longest), longest],
        "new_tokens": plan.fresh,
    }
    outputs: list[list[int]] = []
    for depth in range(1, len(DEPTH_WEIGHTS) + 2):
        result = tiny_eval.speculate(model, prompts, depth, plan.fresh)
        figures[f"k{depth}"] = result.figures()
        figures["distinct_4_grams"] = round(result.variety(), 4)
        say(f"speculation k={depth}: {result.figures()}")
        outputs = result.outputs
    for prompt, output in list(zip(prompts, outputs, strict=True))[:6]:
        say(f"--- prompt\n{say_tokens(prompt[-64:].tolist())}")
        say(f"--- greedy\n{say_tokens(output)}")
    return figures


def environment(plan: TrainingPlan) -> dict[str, object]:
    """Say what the figures were made with."""
    cuda = plan.device.startswith("cuda")
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": torch.cuda.get_device_name() if cuda else "CPU",
    }


def measure_data(corpus: tiny_corpus.Corpus, plan: TrainingPlan) -> dict[str, object]:
    """Say what the model was trained and measured on."""
    return {
        "fingerprint": corpus.fingerprint,
        "split_seed": plan.split_seed,
        "train_files": len(corpus.train),
        "train_bytes": sum(document.size for document in corpus.train),
        "held_out_files": len(corpus.held_out),
        "held_out_bytes": sum(document.size for document in corpus.held_out),
        "held_out_in_shared_5_line_runs": round(tiny_corpus.shared_share(corpus), 4),
    }


def measure(
    model: Tiny, plan: TrainingPlan, tokenizer: Tokenizer, held_out: Sequence[np.ndarray], size: int
) -> dict[str, object]:
    """Measure the exported weights."""
    nats, scored = tiny_eval.held_out_nats(model, held_out, 0)

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=False)

    sample = tiny_eval.greedy(model, [0, *tokenizer.encode(SAMPLE).ids], min(96, plan.length // 2))
    say(f"--- sample\n{SAMPLE}{decode(sample)}")
    counts = {
        "trunk": sum(weight.numel() for weight in model.model.parameters()),
        "mtp": sum(weight.numel() for weight in model.mtp.parameters()),
    }
    return {
        "held_out_bits_per_byte": round(nats / math.log(2) / size, 4),
        "held_out_nats_per_token": round(nats / scored, 4),
        "parameters": {**counts, "total": sum(counts.values())},
        "drafts_on_held_out_text": measure_drafts(model, plan, held_out),
        "speculation": measure_speculation(model, plan, held_out, decode),
        "sample": {"prompt": SAMPLE, "greedy": decode(sample)},
    }


def train(plan: TrainingPlan, shape: TinyShape) -> dict[str, object]:
    """Make the whole directory and return its figures."""
    torch.manual_seed(plan.seed)
    plan.out.mkdir(parents=True, exist_ok=True)
    corpus = tiny_corpus.split(list(tiny_corpus.read_documents(plan.corpus)), plan.split_seed)
    tokenizer = tiny_corpus.train_tokenizer(corpus.train, shape.vocab)
    if tokenizer.get_vocab_size() != shape.vocab:
        raise ValueError(f"the corpus gives only {tokenizer.get_vocab_size()} tokens")
    tiny_corpus.save_tokenizer(tokenizer, plan.out, shape.max_positions)
    files = tiny_corpus.encode(tokenizer, corpus.train)
    held_out = tiny_corpus.encode(tokenizer, corpus.held_out)
    data = measure_data(corpus, plan)
    data |= {"train_tokens": sum(map(len, files)), "held_out_tokens": sum(map(len, held_out))}
    say(json.dumps(data))
    size = sum(document.size for document in corpus.held_out)

    dtype = torch.bfloat16 if plan.device.startswith("cuda") else torch.float32
    model = FAMILIES[plan.family][1](shape, dtype).to(plan.device)
    model.set_dropout(plan.dropout)

    def held_out_bits(compiled: bool) -> float:
        model.set_compiled(False)  # the windows' shape would be compiled for a few batches only
        bits = float(tiny_eval.bits_per_byte(model, held_out, size, 0))
        model.set_compiled(compiled)
        return bits

    model.set_compiled(bool(plan.compile))
    trunk = train_trunk(model, plan, files, held_out_bits)
    tiny_model.export(model, plan.out, 0)  # whatever comes of the head, of which this has a joint one
    head = train_head(model, plan, files)
    tiny_model.export(model, plan.out, 0)
    report: dict[str, object] = {
        "shape": asdict(shape),
        "plan": {key: value for key, value in asdict(plan).items() if key in TOLD},
        "data": data,
        "trunk_training": trunk,
        "head_training": head,
        "environment": environment(plan),
    }
    (plan.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    say(f"weights are written; trained for {trunk['seconds']} s and {head['seconds']} s")
    report = {**measure(tiny_model.reload(model, plan.out), plan, tokenizer, held_out, size), **report}
    (plan.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    (plan.out / "README.md").write_text(tiny_card.render(report))
    say(f"held-out {report['held_out_bits_per_byte']} bits/byte with the exported weights")
    return report


def parse(arguments: Sequence[str] | None = None) -> tuple[TrainingPlan, TinyShape]:
    """Read every field of the plan and of the family's shape from a flag of its name."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--family", choices=FAMILIES, default="moe")
    family = first.parse_known_args(arguments)[0].family
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], parents=[first])
    shape_type, _, plan = FAMILIES[family]
    shape = shape_type()
    for default in (plan, shape):
        for item in fields(default):
            value = getattr(default, item.name)
            if item.name != "family":
                flag = "--" + item.name.replace("_", "-")
                parser.add_argument(flag, type=type(value), default=value, metavar=str(value))
    chosen = vars(parser.parse_args(arguments))
    if not chosen["corpus"].is_dir():
        parser.error(f"argument --corpus: {chosen['corpus']} is no directory")
    plan_values = {item.name: chosen[item.name] for item in fields(plan)}
    return TrainingPlan(**plan_values), shape_type(**{item.name: chosen[item.name] for item in fields(shape)})


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 32  # trunk and head, with and without gradients, long and one shorter
    train(*parse())
