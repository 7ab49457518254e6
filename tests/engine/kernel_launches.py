"""Which kernels the warm-up would compile, and which steps would compile after it: a process of its own, as JSON lines.

    python -P -m baton.tests.engine.kernel_launches 6 dense moe    # six rounds of random steps of each
    python -P -m baton.tests.engine.kernel_launches 0 +dense       # and what would be compiled ahead

Models are small ones of the CPU whose kernels Triton finds and binds as on a Hopper GPU, but compiles to nothing; each
kernel that it would compile is noted. Numbers are zeros; which kernels are launched does not depend on them.
"""

import gc
import inspect
import json
import random
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton.core.numerics import KVDtype, Numerics, Quantization
from baton.core.requests.sampling import SamplingParams
from baton.core.verification import VerificationConfig, VerificationMode
from baton.engine.graphs import kernel_warm_up
from baton.engine.graphs.kernel_warm_up import Reach
from baton.engine.step import slots
from baton.engine.step.plan import Chunk, Release, Resume
from baton.engine.step.runner import Runner
from baton.kernels import fused_copy_triton
from baton.kernels.attention import prefill_hopper_triton as attention_prefill_hopper_triton
from baton.kernels.dry_run import forms_of
from baton.kernels.fused_copy import RunningCopies
from baton.kernels.gemm import fp8_hopper_triton as gemm_fp8_hopper_triton
from baton.kernels.gemm import fp8_plan as gemm_fp8_plan
from baton.kernels.gemm.fp8_plan import GemmPlan
from baton.kernels.gemm.fp8_weight import Fp8Weight
from baton.kernels.implementation import Implementation
from baton.kernels.kv import dequantize as kv_dequantize
from baton.kernels.launcher import Launcher
from baton.kernels.moe.gemm import Fp8ExpertWeights
from baton.kernels.tuning import find
from baton.kvcache.allocator import BlockTable
from baton.kvcache.pool import KVPool
from baton.model.loader import load_model
from baton.model.parallel import Alone
from baton.scripts.model_shape import write_shape
from baton.tests.engine.driver import Driver
from baton.tests.engine.kernel_asked import ASKED
from baton.tests.kernels.sass import all_variants

CPU = torch.device("cpu")


class Last(Alone):
    """The second of two ranks, as it is where the first one says the same."""

    rank, size = 1, 2

    def all_gather(self, x):
        return x.expand(2, *x.shape)

    def gather_bytes(self, data):
        return [data, data]


NUM_BLOCKS = 64
NUM_CHECKPOINTS = 1
SIZES = {
    "num_hidden_layers": 1, "vocab_size": 1024, "eos_token_id": 500, "hidden_size": 256, "intermediate_size": 256,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 16_384,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
SPARSE = EXPERTS | {"num_experts": 64, "num_experts_per_tok": 2}  # 3,072 tokens until each has rows for Hopper's form
SHARED = EXPERTS | {"shared_expert_intermediate_size": 384}
HYBRID = EXPERTS | {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 256,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 128,
}  # fmt: skip
LATENT = {
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 128,
    "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 128,
}  # fmt: skip
PAIRS = {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 2048}
FP8 = {"quantization": Quantization.FP8}
FP8_KV = {"kv_dtype": KVDtype.FP8}
REJECTION = VerificationConfig(mode=VerificationMode.REJECTION)
INVARIANT = {"numerics": Numerics.INVARIANT}
HELD = {"communicator": Last(), "expert_parallel": True}
# Shape, changes to it, how it is loaded, drafts, how they are verified.
MODELS = {
    "dense": ("qwen3-8b", {"num_hidden_layers": 3}, FP8 | FP8_KV, 2, None),
    "moe": ("qwen3-30b-a3b", EXPERTS | {"num_hidden_layers": 2}, FP8, 1, REJECTION),
    "bf16": ("qwen3-8b", {}, {}, 0, None),
    "moe short": ("qwen3-30b-a3b", SPARSE, FP8, 1, None),
    "moe bf16": ("qwen3-30b-a3b", EXPERTS, FP8_KV, 1, None),
    "wide": ("qwen3-8b", {"head_dim": 256, "num_attention_heads": 16}, FP8, 3, REJECTION),
    "seven": ("qwen3-8b", {"num_attention_heads": 14}, FP8_KV, 1, None),
    "pairs": ("qwen3-0.6b", PAIRS, FP8 | FP8_KV, 2, None),
    "five": ("qwen3-8b", {"num_attention_heads": 5, "num_key_value_heads": 1}, {}, 2, None),
    "odd": ("qwen3-8b", {"vocab_size": 1001}, FP8, 1, None),
    "hybrid": ("qwen3.5-35b-a3b", HYBRID, {}, 2, None),
    "hybrid float8": ("qwen3.5-35b-a3b", HYBRID, FP8, 1, None),
    "latent": ("deepseek-v3", LATENT, {}, 2, None),
    "latent float8": ("deepseek-v3", LATENT, FP8, 1, None),
    "latent short": ("deepseek-v3", LATENT, {}, 1, None),
    "latent rounded": ("deepseek-v3", LATENT, FP8, 1, None),
    "not warmed": ("qwen3-8b", {}, FP8, 1, None),
    "ordered": ("qwen3-8b", {"vocab_size": 40_000}, INVARIANT, 1, None),  # of a head unlike any other GEMM
    "held": ("qwen3-30b-a3b", EXPERTS, HELD, 1, None),
    "held float8": ("qwen3-30b-a3b", EXPERTS, FP8 | HELD, 1, None),
    "ordered pruned": ("qwen3-8b", {"draft_vocab_size": 300}, INVARIANT | FP8, 2, REJECTION),
    "ordered moe": ("qwen3-30b-a3b", EXPERTS, INVARIANT | FP8, 1, None),
    "shared": ("qwen1.5-moe-a2.7b", SHARED, FP8, 1, None),
    "ordered shared": ("qwen1.5-moe-a2.7b", SHARED, INVARIANT, 1, None),
    "ordered alone": ("qwen3-8b", {"intermediate_size": 1280}, INVARIANT, 1, None),
    "tied": ("qwen3-8b", {"tie_word_embeddings": True, "vocab_size": 999}, FP8_KV, 1, REJECTION),
    "pruned": ("qwen3-8b", {"draft_vocab_size": 300}, FP8, 2, REJECTION),
    "small heads": ("qwen3-8b", {"head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 3}, FP8_KV, 1, None),
    "no groups": ("qwen3-8b", {"hidden_size": 200, "num_attention_heads": 3, "num_key_value_heads": 3}, {}, 4, None),
}
ROUNDED = {"latent rounded"}  # whose checkpoints ask for scales that are powers of two
# What a worker is asked for, where it is not the above.
LIMITS = {
    "ordered alone": {"seqs": 1, "chunk_len": 256},
    "latent short": {"chunk_len": 256},
    "moe short": {"context_len": 1024, "chunk_len": 4096},  # prompts that only together have many rows
    "tied": {"block_size": 64, "chunk_len": 333, "context_len": 3001},
    "pruned": {"block_size": 32, "seqs": 33},
    "pairs": {"context_len": 2048, "chunk_len": 512},
    "small heads": {"chunk_len": 17, "context_len": 80, "seqs": 2},
}

noted: list[str] = []
touched: set[JITFunction] = set()
forms: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of a worker."""

    context_len: int = 8192
    chunk_len: int = 1536
    seqs: int = 6
    block_size: int = 16


class _Hopper:
    """A driver of a GPU that is not there."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return device

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def _compile_nothing(self, key, signature, device, constants, options, attributes, warmup):
    hook, target = knobs.runtime.jit_cache_hook, driver.active.get_current_target()
    of_version = (target,) if "target" in inspect.signature(self._call_hook).parameters else ()
    if self._call_hook(hook, key, signature, *of_version, device, constants, options, [attributes], warmup):
        return None
    kernel = object.__new__(CompiledKernel)
    kernel.module, kernel.function, kernel.packed_metadata = object(), 0, ()
    kernel.name, kernel.src = "nothing", None
    kernel._run = lambda *arguments: None
    self.device_caches[device][0][key] = kernel
    noted.append(self.fn.__name__)
    declared = {param.name: constants[(param.num,)] for param in self.params if param.is_constexpr}
    forms[_name(self)].add(form_of(declared))
    touched.add(self)
    return kernel


def form_of(constants):
    """Which code a kernel's constants choose, but for its sizes: of each number whether it is 0.

    EARLY (`kernels.dependent_launch`) and PTX are the device's choice.
    """
    return tuple(f"{name}={_kind(value)}" for name, value in sorted(constants.items()) if name not in ("EARLY", "PTX"))


def _name(kernel):
    return f"{kernel.fn.__module__.removeprefix('baton.kernels.')} {kernel.fn.__name__}"


def _kind(value):
    if isinstance(value, int) and not isinstance(value, bool):
        return "some" if value else "0"
    return str(value)


def unnamed():
    """Of each kernel that was launched: forms that no variant has, and choices that none has, whatever the others."""
    known = defaultdict(set)
    for variant in all_variants():
        declared = {param.name for param in variant.kernel.params if param.is_constexpr}
        known[_name(variant.kernel)].add(form_of({n: v for n, v in variant.constants.items() if n in declared}))
    wholes = {name: sorted(found - known[name]) for name, found in forms.items()}
    choices = {name: sorted(set().union(*found).difference(*known[name])) for name, found in forms.items()}
    return {"forms": wholes, "choices": choices}


def forget():
    """What other models had compiled."""
    for kernel in touched:
        kernel.device_caches.clear()
    touched.clear()
    for found in gc.get_objects():
        if type(found) is Launcher:
            found._forms.clear()


def round_scales():
    """As if all float8 weights came from a checkpoint that asks for it."""
    for found in gc.get_objects():
        if type(found) in (Fp8Weight, Fp8ExpertWeights):
            object.__setattr__(found, "ue8m0", True)


def _copy(pairs, device):
    """`fused_copy` as on a GPU, and done: what follows reads what was placed."""
    fused_copy_triton.launch(torch.zeros(len(pairs), 3, dtype=torch.int64), 8)
    for target, source in pairs:
        target.copy_(source)
    return RunningCopies((), (), None)


def _row_with_workers(table, shape, size, device_index):
    """For the GEMMs that give as much as they take, which no table has, and at most 128 rows."""
    outputs, inputs = shape.split("x")
    if outputs != inputs or size > gemm_fp8_plan.FEW_ROWS:
        return find(table, shape, size, device_index)
    if size <= 16:
        return GemmPlan(stages=20, workers=2, splits=2).row()
    return GemmPlan(swap=False, BM=64, BN=32 if size <= 64 else 64, stages=8, workers=2).row()


def stub():
    """Nothing is compiled; what would be written by kernels is zeros, and so are GEMMs of torch."""
    assert not knobs.runtime.interpret, "nothing is compiled with TRITON_INTERPRET=1"
    driver.set_active(_Hopper())
    JITFunction._do_compile = _compile_nothing
    torch.empty = lambda *sizes, pin_memory=False, **options: torch.zeros(*sizes, **options)
    torch.empty_like = lambda x, **options: torch.zeros_like(x, **options)
    torch.Tensor.new_empty = lambda x, *sizes, **options: x.new_zeros(*sizes, **options)
    functional.linear = lambda x, weight, bias=None: x.new_zeros(*x.shape[:-1], len(weight))
    torch.mm = lambda left, right: left.new_zeros(len(left), right.shape[1])
    attention_prefill_hopper_triton.num_multiprocessors = lambda index: 132
    slots.fused_copy = kernel_warm_up.fused_copy = _copy
    kv_dequantize.MAX_BYTES = 16 << 20  # two contexts, so that there are steps with more
    gemm_fp8_hopper_triton._is_hopper = lambda index: True
    gemm_fp8_plan.find = _row_with_workers
    kernel_warm_up.is_compiled = lambda model: True
    kernel_warm_up.is_needed = lambda model: model.sampling_implementation is not None


def load(shape, sizes, options, folder):
    model = load_model(
        write_shape(shape, Path(folder), **{**SIZES, **sizes}),
        dtype=torch.bfloat16,
        device=CPU,
        with_mtp=True,
        random_seed=3,
        implementation=Implementation.TRITON,
        **{"numerics": Numerics.DEFAULT, **options},
    )
    model.around = Implementation.TRITON
    return model


class Server(Driver):
    """Random steps of one model: of prompts, of sequences that decode, and of both."""

    def __init__(self, model, num_drafts, verification, seed, limits, communicator):
        self.random = random.Random(seed)
        self.limits = limits
        layout = model.kv_layout(limits.block_size)
        self.has_state = layout.has_state
        num_state_slots = limits.seqs + NUM_CHECKPOINTS if self.has_state else 0
        num_checkpoints = NUM_CHECKPOINTS if self.has_state else 0
        shares = {} if communicator is None else {"rank": communicator.rank, "size": communicator.size}
        states = {"num_state_slots": num_state_slots, "num_checkpoints": num_checkpoints}
        pool = KVPool(layout, NUM_BLOCKS, CPU, **shares, **states)
        options = {"num_draft_tokens": num_drafts, "verification": verification, "communicator": communicator}
        super().__init__(Runner(model, pool, max_num_seqs=limits.seqs, **options), pool)
        self.hidden = bytes(model.config.hidden_size * model.dtype.itemsize)

    def put(self, slot, length, **options):
        """A sequence of so many tokens; its blocks may be others', too."""
        size = self.limits.block_size
        capacity = min(length + 64, self.limits.context_len)
        blocks = tuple(self.random.randrange(NUM_BLOCKS) for _ in range(-(-capacity // size)))
        table = BlockTable(blocks, size, slot if self.has_state else None)
        params = SamplingParams(**self.random.choice(ASKED), max_tokens=64)
        self.place(slot, (1,) * length, params, table=table, **options)

    def release(self, slot):
        """Its blocks are nobody's own."""
        self.runner.execute(Release(slot))

    def chunks(self, slots, most):
        """One of each, of at most so many tokens together."""
        draw, context_len, chunks = self.random, self.limits.context_len, []
        left, most = most, min(most, context_len)
        for slot in slots:
            lengths = [draw.randint(1, 4), draw.randint(1, 64), draw.randint(1, most)]
            length = min(left, most if left > context_len else draw.choice(lengths))
            if not length:
                break
            left -= length
            start = draw.choice([0, 0, draw.randint(0, context_len - most), 512, 1024, 4096])
            start = min(start, context_len - length)
            rest = min(draw.choice([0, 0, 5]), context_len - start - length)
            self.put(slot, start + length + rest, draft_cap=2)
            chunks.append(Chunk(slot=slot, start=start, length=length, **self.copies(start, length)))
        return chunks

    def copies(self, start, length):
        """A checkpoint that a chunk begins with, and one that it leaves."""
        checkpoint, draw = self.limits.seqs, self.random
        begins, keeps = self.has_state and start > 0 and draw.random() < 0.5, self.has_state and draw.random() < 0.5
        ends = [end for end in range(start + 1, start + length + 1) if end % self.limits.block_size == 0]
        keep_in = ((draw.choice(ends), checkpoint),) if keeps and ends else ()
        return {"begin_with": checkpoint if begins else None, "keep_in": keep_in}

    def prompts(self):
        chunks = self.chunks(range(self.random.randint(1, self.limits.seqs)), self.limits.chunk_len)
        self.step(chunks=chunks)
        for chunk in chunks:
            self.release(chunk.slot)

    def steps(self):
        draw, k = self.random, self.runner.num_draft_tokens
        slots, room = range(draw.randint(1, self.limits.seqs)), 64
        for slot in slots:
            most = self.limits.context_len - room
            length = draw.choice([draw.randint(1, min(most, 100)), draw.randint(1, most)])
            self.put(slot, length + 1, num_output=1, resume=Resume(4 if k else None, self.hidden if k else b""))
        for num_drafts in range(k, -1, -1):
            self.step(slots, num_drafts=num_drafts)
            self.step(slots[: draw.randint(1, len(slots))], num_drafts=num_drafts)
            self.step(slots[:1], num_drafts=num_drafts)  # for which there are forms of their own
            self.step(slots[:2], num_drafts=num_drafts)
            free = range(len(slots), self.limits.seqs)
            left = self.limits.chunk_len - len(slots) * (num_drafts + 1)
            if free and left > 0:
                chunks = self.chunks(free[: draw.randint(1, len(free))], left)
                self.step(slots, num_drafts=num_drafts, chunks=chunks)
                for chunk in chunks:
                    self.release(chunk.slot)
        self.runner.drain()
        for slot in slots:
            self.release(slot)


def run(name, num_rounds, is_ahead):
    """Kernels that are compiled ahead of the warm-up, those of the warm-up, and of the steps after it."""
    shape, sizes, options, num_drafts, verification = MODELS[name]
    limits = Limits(**LIMITS.get(name, {}))
    with tempfile.TemporaryDirectory() as folder:
        model = load(shape, sizes, options, folder)
    if name in ROUNDED:
        round_scales()
    server = Server(model, num_drafts, verification, name, limits, options.get("communicator"))
    reach = Reach(num_tokens=limits.chunk_len, num_sequences=limits.seqs, context_len=limits.context_len)
    forget()
    noted.clear()
    ahead = []
    if is_ahead:
        ahead = forms_of(lambda: server.runner.warm_up(reach))
        assert not noted, "a dry run compiles nothing"
    if name != "not warmed":
        server.runner.warm_up(reach)
    warm = Counter(noted)
    noted.clear()
    for _ in range(num_rounds):
        for _ in range(4):
            server.prompts()
        for _ in range(3):
            server.steps()
    server.runner.close()
    ahead = Counter(form.name for form in ahead)
    return {"model": name, "ahead": ahead, "warm": warm, "late": Counter(noted), "unnamed": unnamed()}


def main(names, num_rounds):
    """One line for each model; for all of them, and what is compiled ahead, if none is named."""
    torch.set_num_threads(1)
    stub()
    for name in names or [name if name == "not warmed" else f"+{name}" for name in MODELS]:
        print(json.dumps(run(name.removeprefix("+"), num_rounds, name[0] == "+")), flush=True)


if __name__ == "__main__":
    main(sys.argv[2:], int(sys.argv[1]))
