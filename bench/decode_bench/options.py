"""Options of `baton bench decode`, checked before anything is measured."""

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from baton.bench.model_shapes import full_name
from baton.core.config import SchedulingName
from baton.core.errors import ConfigInvalid
from baton.core.numerics import KVDtype, Numerics, Quantization
from baton.core.requests.sampling import MAX_TEMPERATURE
from baton.core.verification import VerificationConfig
from baton.kernels.implementation import Implementation
from baton.kvcache.pool import TORCH_DTYPES

SCHEDULINGS: tuple[SchedulingName, ...] = ("sync", "async")
VERIFICATIONS = ("synthetic", "coupled")
DRAFTERS = ("mtp", "eagle3")
BLOCK_SIZE = 16
MAX_BATCH = 1024
MAX_DRAFTS = 8
WARM_STEPS = 4
_GRAPHS = {"auto": (False, True), "on": (True,), "off": (False,)}
_DTYPES = ("float64", "float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """Options of one run.

    Attributes:
        shape: name of a model's shape (`bench.model_shapes`).
        layers: number of layers, fewer than the shape has; None: all.
        dtype: dtype of weights, and of KV unless `kv_dtype` says otherwise.
        device: device of the steps.
        numerics: numerics of the model.
        quantization: quantization of its weights.
        kv_dtype: dtype of its KV.
        implementation: implementation of its operations.
        schedulings: subset of SCHEDULINGS.
        drafts: numbers of drafts per step.
        batches: numbers of sequences.
        graphs: whether steps are replayed from CUDA graphs: without, with, or each in turn.
        prompt_len: positions that exist before the first step.
        chunk_len: prompt tokens per prefill step.
        steps: steps measured in each round of each cell.
        rounds: how often everything is measured.
        verification: "synthetic", or "coupled", which accepts nothing with random weights.
        rates: for synthetic: acceptance probability of each draft if all before it were accepted; the last applies to
            all further ones.
        drafter: "mtp": the shape's MTP head; "eagle3": a layer of its own, with a head of 32,000 tokens.
        fake_balance: whether a fixed pattern, not the router, selects experts, with equally many tokens for each.
        expert_parallel: whether a group's ranks hold whole experts.
        temperature: temperature of every sequence; 0 is greedy.
        seed: seed of weights, tokens, block ids and the order of cells.
    """

    shape: str
    layers: int | None = None
    dtype: torch.dtype
    device: torch.device
    numerics: Numerics = Numerics.DEFAULT
    quantization: Quantization = Quantization.NONE
    kv_dtype: KVDtype = KVDtype.AUTO
    implementation: Implementation = Implementation.AUTO
    schedulings: tuple[SchedulingName, ...] = SCHEDULINGS
    drafts: tuple[int, ...] = (0, 1)
    batches: tuple[int, ...] = (1, 16, 64)
    graphs: tuple[bool, ...] = (False,)
    prompt_len: int = 1024
    chunk_len: int = 2048
    steps: int = 32
    rounds: int = 5
    verification: str = "synthetic"
    rates: tuple[float, ...] = (0.8,)
    drafter: str = "mtp"
    fake_balance: bool = False
    expert_parallel: bool = False
    temperature: float = 0.0
    seed: int = 0

    @property
    def capacity_len(self) -> int:
        """Positions that one sequence may occupy, whatever is accepted."""
        return self.prompt_len + 1 + (max(self.drafts) + 1) * (WARM_STEPS + self.steps + 1)

    @property
    def verification_config(self) -> VerificationConfig:
        """Verification of all steps."""
        if self.verification == "synthetic":
            rates = (*self.rates, *self.rates[-1:] * MAX_DRAFTS)[: max(self.drafts)]
            return VerificationConfig.synthetic(*itertools.accumulate(rates, operator.mul))
        return VerificationConfig()


def read_options(
    *,
    shape: str,
    dtype: str,
    device: str,
    layers: int | None = None,
    numerics: str = "default",
    quantization: str = "none",
    kv_dtype: str = "auto",
    kernels: str = "auto",
    scheduling: str = "sync,async",
    mtp: str = "0,1",
    batch: str = "1,16,64",
    cuda_graphs: str = "auto",
    prompt_len: int = 1024,
    chunk_len: int = 2048,
    steps: int = 32,
    rounds: int = 5,
    verification: str = "synthetic",
    rate: str = "0.8",
    drafter: str = "mtp",
    fake_balance: bool = False,
    expert_parallel: bool = False,
    temperature: float = 0.0,
    seed: int = 0,
) -> DecodeOptions:
    """Check the command line; device and dtype are already resolved.

    Raises:
        ConfigInvalid: a name or a value does not exist.
    """
    names = {"dtype": dtype, "numerics": numerics, "quantization": quantization, "kernels": kernels}
    names |= {"kv-cache-dtype": kv_dtype, "verification": verification, "cuda-graphs": cuda_graphs, "drafter": drafter}
    _require_known(names, scheduling.split(","), device)
    counts = {
        "layers": layers,
        "prompt-len": prompt_len,
        "max-num-batched-tokens": chunk_len,
        "steps": steps,
        "rounds": rounds,
    }
    for key, value in counts.items():
        if value is not None and value < 1:
            raise ConfigInvalid(f"--{key} {value}: it starts at 1", keys=[key])
    if not 0.0 <= temperature <= MAX_TEMPERATURE:
        raise ConfigInvalid(f"--temperature {temperature:g}: from 0 to {MAX_TEMPERATURE:g}", keys=["temperature"])
    return DecodeOptions(
        shape=full_name(shape),
        layers=layers,
        dtype=TORCH_DTYPES[dtype],
        device=torch.device(device),
        numerics=Numerics(numerics),
        quantization=Quantization(quantization),
        kv_dtype=KVDtype(kv_dtype),
        implementation=Implementation(kernels),
        schedulings=tuple(name for name in SCHEDULINGS if name in scheduling.split(",")),
        drafts=_numbers("num-speculative-tokens", mtp, 0, MAX_DRAFTS),
        batches=_numbers("batch", batch, 1, MAX_BATCH),
        graphs=_GRAPHS[cuda_graphs] if device == "cuda" else (False,),
        prompt_len=prompt_len,
        chunk_len=chunk_len,
        steps=steps,
        rounds=rounds,
        verification=verification,
        rates=_chances(rate),
        drafter=drafter,
        fake_balance=fake_balance,
        expert_parallel=expert_parallel,
        temperature=temperature,
        seed=seed,
    )


def _require_known(names: Mapping[str, str], schedulings: Sequence[str], device: str) -> None:
    known = {
        "dtype": _DTYPES,
        "numerics": [mode.value for mode in Numerics],
        "quantization": [kind.value for kind in Quantization],
        "kv-cache-dtype": [kind.value for kind in KVDtype],
        "kernels": [kind.value for kind in Implementation],
        "verification": VERIFICATIONS,
        "drafter": DRAFTERS,
        "cuda-graphs": tuple(_GRAPHS),
    }
    for name, value in names.items():
        _one_of(name, value, known[name])
    if device not in ("cpu", "cuda"):
        raise ConfigInvalid(f"--device {device}: there are auto, cpu, cuda", keys=["device"])
    if names["kernels"] == "triton" and device == "cpu":
        raise ConfigInvalid("--kernels triton: they need a GPU", keys=["kernels"])
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigInvalid("--device cuda: torch finds no GPU here", keys=["device"])
    for name in schedulings:
        _one_of("scheduling", name, SCHEDULINGS)


def _one_of(key: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ConfigInvalid(f"--{key} {name}: there are {', '.join(known)}", keys=[key])


def _chances(text: str) -> tuple[float, ...]:
    """Parse probabilities such as `0.75,0.6,0.5`."""
    try:
        chances = tuple(map(float, text.split(",")))
    except ValueError:
        chances = (-1.0,)
    if not all(0.0 <= chance <= 1.0 for chance in chances):
        raise ConfigInvalid(f"--rate {text}: chances from 0 to 1, with commas", keys=["rate"])
    return chances


def _numbers(key: str, text: str, least: int, most: int) -> tuple[int, ...]:
    """Parse numbers such as `1,16,64`, each once, in order."""
    numbers: list[int] = []
    for part in text.split(","):
        if not (part.isascii() and part.isdecimal() and least <= int(part[:9]) <= most):
            raise ConfigInvalid(f"--{key} {text}: numbers from {least} to {most}, with commas", keys=[key])
        numbers.append(int(part))
    return tuple(sorted(set(numbers)))
