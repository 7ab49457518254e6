"""Train the EAGLE-3 drafter of the tiny model, on the corpus and the split that the model was trained on.

`python scripts/train_tiny_eagle.py --tiny assets/tiny --out assets/tiny-eagle3` reproduces the shipped directory. The
trunk is frozen; the drafter learns to foresee the trunk's own predictions in a chain of its own outputs, as in the
paper ("training-time test"). Its head has the tokens that are commonest in the training text, with the trunk's rows.
"""

import argparse
import json
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import tiny_corpus  # type: ignore[import-not-found]
import tiny_model  # type: ignore[import-not-found]
import torch
from safetensors.torch import save_file
from tiny_model import Keys, Norm, Tiny, TinyShape, linear, rope_tables, rotate
from tiny_optimiser import Optimiser  # type: ignore[import-not-found]
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

AUX_LAYERS = (1, 2, 4)  # whose inputs are joined
DEPTH_WEIGHTS = (1.0, 0.8, 0.6)
LAYER = "midlayer"


@dataclass(frozen=True)
class EagleTrainingPlan:
    """How to train; every field is a flag."""

    tiny: Path = Path("assets/tiny")
    out: Path = Path("assets/tiny-eagle3")
    corpus: Path = field(default_factory=lambda: Path(sysconfig.get_path("stdlib")))
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    seed: int = 0
    steps: int = 2000
    batch: int = 8
    length: int = 2048
    rate: float = 3e-3
    decay: float = 0.1
    hard: float = 0.5
    columns: int = 1024
    width: int = 320


class Drafter(nn.Module):
    """One Llama layer whose attention reads an embedding beside a hidden state."""

    def __init__(self, shape: TinyShape, width: int, head: Tensor) -> None:
        super().__init__()
        hidden, inner, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.shape = shape
        self.fc = nn.Linear(len(AUX_LAYERS) * hidden, hidden, bias=False)
        self.hidden_norm, self.input_layernorm = Norm(hidden, shape.eps), Norm(hidden, shape.eps)
        self.post_attention_layernorm, self.norm = Norm(hidden, shape.eps), Norm(hidden, shape.eps)
        self.q_proj = nn.Linear(2 * hidden, inner, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv, bias=False)
        self.o_proj = nn.Linear(inner, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)
        self.register_buffer("head", head)
        nn.init.zeros_(self.o_proj.weight)
        nn.init.zeros_(self.down_proj.weight)

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, past: Keys | None, mask: Tensor | None
    ) -> tuple[Tensor, Keys]:
        """Return the entries [batch, time, hidden] before the norm, and all keys and values."""
        pair = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        rope = rope_tables(self.shape, positions)

        def heads(layer: nn.Linear) -> Tensor:
            joined: Tensor = linear(pair, layer.weight).unflatten(-1, (-1, self.shape.head_dim))
            return joined

        query = rotate(heads(self.q_proj), rope).transpose(1, 2)
        key, value = rotate(heads(self.k_proj), rope).transpose(1, 2), heads(self.v_proj).transpose(1, 2)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        copies = self.shape.heads // self.shape.kv_heads
        mixed = functional.scaled_dot_product_attention(
            query, key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1),
            attn_mask=mask, is_causal=mask is None,
        )  # fmt: skip
        x = hidden + linear(mixed.transpose(1, 2).flatten(2), self.o_proj.weight)
        inner = self.post_attention_layernorm(x)
        inner = functional.silu(linear(inner, self.gate_proj.weight)) * linear(inner, self.up_proj.weight)
        return x + linear(inner, self.down_proj.weight), (key, value)

    def logits(self, entries: Tensor) -> Tensor:
        """Return scores over the columns."""
        scores: Tensor = linear(self.norm(entries), self.get_buffer("head"))
        return scores


@torch.no_grad()
def observe(trunk: Tiny, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the joined inputs of the tapped layers and the trunk's scores of the next token."""
    rope = rope_tables(trunk.shape, torch.arange(tokens.shape[1], device=tokens.device))
    x, aux = trunk.embed(tokens), []
    for index, layer in enumerate(trunk.model.layers):
        if index in AUX_LAYERS:
            aux.append(x)
        x, _, _ = layer(x, rope)
    return torch.cat(aux, -1), trunk.logits(trunk.model.norm(x)).float()


def chained(drafter: Drafter, trunk: Tiny, tokens: Tensor, columns: Tensor, hard: float) -> tuple[Tensor, list[Tensor]]:
    """Unroll the drafter over every position at once; return the loss and agreement per depth.

    Chain i reads, at depth d, token i + d at position i + d - 1 and its own output one depth before; its attention sees
    the first-depth entries up to i and its own later ones.
    """
    aux, scores = observe(trunk, tokens)
    span = tokens.shape[1]
    places = torch.arange(span, device=tokens.device)
    causal = torch.ones(span, span, dtype=torch.bool, device=tokens.device).tril()
    own = torch.eye(span, dtype=torch.bool, device=tokens.device)
    state, keys = linear(aux, drafter.fc.weight), None
    total, agreements = torch.zeros((), device=tokens.device), []
    for depth, share in enumerate(DEPTH_WEIGHTS, 1):
        mask = torch.cat([causal] + [own] * (depth - 1), 1) if depth > 1 else None
        embedded = trunk.embed(tokens.roll(-depth, 1))
        state, keys = drafter(embedded, state, places + depth - 1, keys, mask)
        taught = scores.roll(-depth, 1)
        logs, odds = drafter.logits(state).float().log_softmax(-1), taught[..., columns].softmax(-1)
        choice, among = taught.argmax(-1), taught[..., columns].argmax(-1)
        loss = -(odds * logs).sum(-1) - hard * logs.gather(-1, among[..., None])[..., 0]
        valid = (places < span - depth).float()
        count = valid.sum() * len(tokens)
        total = total + share * (loss * valid).sum() / (count * (1 + hard))
        same = (columns[logs.argmax(-1)] == choice).float()
        agreements.append((same * valid).sum().detach() / count)
    return total, agreements


def commonest(files: Sequence[np.ndarray], vocab: int, count: int) -> Tensor:
    """Return the tokens that come most often, ascending; special ones among them."""
    often = np.bincount(np.concatenate(list(files)), minlength=vocab)
    often[: len(tiny_corpus.SPECIALS)] = often.max() + 1
    return torch.from_numpy(np.sort(np.argsort(-often, kind="stable")[:count]))


def export(drafter: Drafter, columns: Tensor, plan: EagleTrainingPlan, end: int) -> None:
    """Write it as its kind is published."""
    shape, tensors = drafter.shape, {}
    for name, weight in drafter.named_parameters():
        part = name.removesuffix(".weight")
        if part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            name = f"{LAYER}.self_attn.{name}"
        elif part.endswith("_proj"):
            name = f"{LAYER}.mlp.{name}"
        elif part not in ("fc", "norm"):
            name = f"{LAYER}.{name}"
        tensors[name] = weight.detach().to("cpu", torch.bfloat16).contiguous()
    tensors["lm_head.weight"] = drafter.get_buffer("head").to("cpu", torch.bfloat16).contiguous()
    tensors["d2t"] = columns.cpu() - torch.arange(len(columns))
    tensors["t2d"] = torch.isin(torch.arange(shape.vocab), columns.cpu())
    save_file(tensors, plan.out / "model.safetensors", metadata={"format": "pt"})
    (plan.out / "model.safetensors").chmod(0o644)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": shape.vocab,
        "draft_vocab_size": len(columns), "hidden_size": shape.hidden, "intermediate_size": plan.width,
        "num_hidden_layers": 1, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "hidden_act": "silu", "rms_norm_eps": shape.eps, "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_positions, "attention_bias": False, "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS), "bos_token_id": end, "eos_token_id": end,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (plan.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def train(plan: EagleTrainingPlan) -> None:
    """Make the whole directory."""
    torch.manual_seed(plan.seed)
    plan.out.mkdir(parents=True, exist_ok=True)
    corpus = tiny_corpus.split(list(tiny_corpus.read_documents(plan.corpus)), 0)
    tokenizer = Tokenizer.from_file(str(plan.tiny / "tokenizer.json"))
    files, held_out = (tiny_corpus.encode(tokenizer, part) for part in (corpus.train, corpus.held_out))
    dtype = torch.bfloat16 if plan.device.startswith("cuda") else torch.float32
    trunk = tiny_model.reload(Tiny(TinyShape(), dtype).to(plan.device), plan.tiny).requires_grad_(False)
    columns = commonest(files, trunk.shape.vocab, plan.columns).to(plan.device)
    rows = trunk.model.embed_tokens.weight[columns].detach()
    drafter = Drafter(trunk.shape, plan.width, rows).to(plan.device)
    optimiser = Optimiser(drafter, plan.rate, plan.decay, plan.steps)
    batches = tiny_corpus.Stream(files, 0, plan.length, plan.seed + 1).batches(plan.batch)
    start = time.perf_counter()
    for step in range(plan.steps):
        tokens = torch.from_numpy(next(batches)).to(plan.device, torch.long)[:, :-1]
        loss, agreements = chained(drafter, trunk, tokens, columns, plan.hard)
        loss.backward()
        optimiser.step(step)
        if (step + 1) % 100 == 0:
            same = [round(float(value), 3) for value in agreements]
            print(f"step {step + 1}: loss {float(loss.detach()):.4f}, same {same}", flush=True)
    seconds = time.perf_counter() - start
    export(drafter, columns, plan, 0)
    with torch.no_grad():
        found = [
            chained(drafter, trunk, torch.from_numpy(row[None, :-1]).to(plan.device, torch.long), columns, 0.0)[1]
            for row in tiny_corpus.Stream(held_out, 0, plan.length, plan.seed).epoch()
        ]
    report = {
        "same_choice_on_held_out_text_by_depth": torch.tensor(found).mean(0).mul(1e4).round().div(1e4).tolist(),
        "corpus": corpus.fingerprint,
        "plan": {key: value for key, value in asdict(plan).items() if key not in ("tiny", "out", "corpus", "device")},
        "seconds": round(seconds, 1),
        "torch": torch.__version__,
        "hardware": torch.cuda.get_device_name() if plan.device.startswith("cuda") else "CPU",
    }
    (plan.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report), flush=True)


def main() -> None:
    """Read every field of the plan from a flag of its name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    plan = EagleTrainingPlan()
    for item in fields(plan):
        value = getattr(plan, item.name)
        parser.add_argument("--" + item.name.replace("_", "-"), type=type(value), default=value, metavar=str(value))
    torch.set_float32_matmul_precision("high")
    train(EagleTrainingPlan(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
