"""Which kernels the warm-up would compile, and which steps would compile after it: a process of its own, as JSON lines.

    python -P -m baton.tests.engine.kernel_launches 6 dense moe    # six rounds of random steps of each

Models are small ones of the CPU whose kernels Triton finds and binds as on a Hopper GPU, but compiles to nothing; each
kernel that it would compile is noted. Numbers are zeros; which kernels are launched does not depend on them.
"""

import gc
import json
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton.core.kv_dtype import KVDtype
from baton.core.numerics import Numerics
from baton.core.quantization import Quantization
from baton.core.sampling import SamplingParams
from baton.core.verification import VerificationConfig, VerificationMode
from baton.engine import kernel_warm_up, slots
from baton.engine.decode import DecodeRunner
from baton.engine.pass_warm_up import Reach
from baton.engine.passes import ignore_layer
from baton.engine.prefill import PrefillChunk, PrefillRunner, SequenceStart
from baton.kernels import (
    attention_prefill_hopper_triton,
    fused_copy_triton,
    gemm_fp8_hopper_triton,
    gemm_fp8_plan,
    kv_widen,
)
from baton.kernels.fused_copy import RunningCopies
from baton.kernels.gemm_fp8_plan import Plan
from baton.kernels.implementation import Implementation
from baton.kernels.launcher import Launcher
from baton.kernels.tuning import find
from baton.kvcache.allocator import BlockTable
from baton.kvcache.pool import KVPool
from baton.model.loader import load_model
from baton.scripts.model_shape import write_shape
from baton.tests.engine.kernel_asked import ASKED

CPU = torch.device("cpu")
NUM_BLOCKS = 64
CONTEXT_LEN = 8192
CHUNK_LEN = 1536
MAX_NUM_SEQS = 6
SIZES = {
    "num_hidden_layers": 1, "vocab_size": 1024, "eos_token_id": 500, "hidden_size": 256, "intermediate_size": 256,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 16_384,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
FP8 = {"quantization": Quantization.FP8}
FP8_KV = {"kv_dtype": KVDtype.FP8}
REJECTION = VerificationConfig(mode=VerificationMode.REJECTION)
# Shape, changes to it, how it is loaded, drafts, how they are verified.
MODELS = {
    "dense": ("qwen3-8b", {}, FP8 | FP8_KV, 2, None),
    "moe": ("qwen3-30b-a3b", EXPERTS, FP8, 1, REJECTION),
    "bf16": ("qwen3-8b", {}, {}, 0, None),
    "moe bf16": ("qwen3-30b-a3b", EXPERTS, FP8_KV, 1, None),
    "wide": ("qwen3-8b", {"head_dim": 256, "num_attention_heads": 16}, FP8, 3, REJECTION),
    "seven": ("qwen3-8b", {"num_attention_heads": 14}, FP8_KV, 1, None),
    "five": ("qwen3-8b", {"num_attention_heads": 5, "num_key_value_heads": 1}, {}, 2, None),
    "odd": ("qwen3-8b", {"vocab_size": 1001}, FP8, 1, None),
    "not warmed": ("qwen3-8b", {}, FP8, 1, None),
    "ordered": ("qwen3-8b", {}, {"numerics": Numerics.INVARIANT}, 1, None),
}

noted: list[str] = []
touched: set[JITFunction] = set()


class _Hopper:
    """A driver of a GPU that is not there."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return device

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def _compile_nothing(self, key, signature, device, *others, **named):
    kernel = object.__new__(CompiledKernel)
    kernel.module, kernel.function, kernel.packed_metadata = object(), 0, ()
    kernel.name, kernel.src = "nothing", None
    kernel._run = lambda *arguments: None
    self.device_caches[device][0][key] = kernel
    noted.append(self.fn.__name__)
    touched.add(self)
    return kernel


def forget():
    """What other models had compiled."""
    for kernel in touched:
        kernel.device_caches.clear()
    touched.clear()
    for found in gc.get_objects():
        if type(found) is Launcher:
            found._forms.clear()


def _copy(pairs, device):
    """`fused_copy` as on a GPU, and done: what follows reads what was placed."""
    fused_copy_triton.launch(torch.zeros(len(pairs), 3, dtype=torch.int64), 8)
    for target, source in pairs:
        target.copy_(source)
    return RunningCopies((), (), None)


def _row_with_workers(table, shape, size, device_index):
    """For the products that give as much as they take, which no table has, and at most 128 rows."""
    outputs, inputs = shape.split("x")
    if outputs != inputs or size > gemm_fp8_plan.FEW_ROWS:
        return find(table, shape, size, device_index)
    if size <= 16:
        return Plan(stages=20, workers=2, splits=2).row()
    return Plan(swap=False, BM=64, BN=32 if size <= 64 else 64, stages=8, workers=2).row()


def stub():
    """Nothing is compiled; what would be written by kernels is zeros."""
    driver.set_active(_Hopper())
    JITFunction._do_compile = _compile_nothing
    torch.empty = lambda *sizes, pin_memory=False, **options: torch.zeros(*sizes, **options)
    torch.empty_like = lambda x, **options: torch.zeros_like(x, **options)
    torch.Tensor.new_empty = lambda x, *sizes, **options: x.new_zeros(*sizes, **options)
    attention_prefill_hopper_triton._multiprocessors = lambda index: 132
    slots.fused_copy = kernel_warm_up.fused_copy = _copy
    kv_widen.MAX_BYTES = 16 << 20  # two contexts, so that there are steps with more
    gemm_fp8_hopper_triton._is_hopper = lambda index: True
    gemm_fp8_plan.find = _row_with_workers
    kernel_warm_up.is_compiled = lambda model: True
    kernel_warm_up.is_needed = lambda model: model.choosing is not None


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


class Server:
    """Random steps of one model."""

    def __init__(self, model, num_drafts, verification, seed):
        self.random = random.Random(seed)
        self.pool = KVPool(model.kv_layout(16), NUM_BLOCKS, CPU)
        self.prefill = PrefillRunner(model, self.pool)
        self.decode = DecodeRunner(model, self.pool, MAX_NUM_SEQS, num_drafts, verification=verification)
        self.hidden_D = torch.zeros(model.config.hidden_size, dtype=model.dtype)

    def table(self, length):
        return BlockTable(tuple(self.random.randrange(NUM_BLOCKS) for _ in range(-(-length // 16))), 16)

    def params(self):
        return SamplingParams(**self.random.choice(ASKED), max_tokens=64)

    def prompts(self):
        left, chunks, draw = CHUNK_LEN, [], self.random
        for _ in range(draw.randint(1, MAX_NUM_SEQS)):
            length = min(left, draw.choice([draw.randint(1, 4), draw.randint(1, 64), draw.randint(1, CHUNK_LEN)]))
            if not length:
                break
            left -= length
            start = draw.choice([0, 0, draw.randint(0, CONTEXT_LEN - CHUNK_LEN), 512, 1024, 4096])
            end = start + length
            chunks.append(
                PrefillChunk(
                    prompt_token_ids=(1,) * (end + draw.choice([0, 0, 5])),
                    start=start,
                    length=length,
                    table=self.table(end),
                    sampling=self.params(),
                    draft_cap=2,
                )
            )
        self.prefill.draft(self.prefill.forward(chunks, ignore_layer), ignore_layer)

    def steps(self):
        draw, runner = self.random, self.decode
        slots = range(draw.randint(1, MAX_NUM_SEQS))
        for slot in slots:
            length = draw.choice([draw.randint(1, 100), draw.randint(1, CONTEXT_LEN - 100)])
            start = SequenceStart(first_token=3, draft_token=4, hidden_D=self.hidden_D, prompt_len=length)
            table = self.table(length + 64)
            runner.admit(
                slot, start, length, self.params(), table, runner.num_draft_tokens, prompt_token_ids=(1,) * length
            )
        for num_drafts in range(runner.num_draft_tokens, -1, -1):
            runner.set_num_drafts(num_drafts)
            runner.step(slots)
            runner.step(slots[: draw.randint(1, len(slots))])
        runner.drain()
        for slot in slots:
            runner.release(slot)


def run(name, num_rounds):
    """Kernels of the warm-up, and of the steps after it."""
    shape, sizes, options, num_drafts, verification = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        server = Server(load(shape, sizes, options, folder), num_drafts, verification, seed=name)
    reach = Reach(num_tokens=CHUNK_LEN, num_sequences=MAX_NUM_SEQS, context_len=CONTEXT_LEN)
    forget()
    noted.clear()
    if name != "not warmed":
        server.prefill.warm_up(reach)
        server.decode.warm_up(reach)
    warm = Counter(noted)
    noted.clear()
    for _ in range(num_rounds):
        for _ in range(4):
            server.prompts()
        for _ in range(3):
            server.steps()
    server.decode.close()
    return {"model": name, "warm": warm, "late": Counter(noted)}


def main(names, num_rounds):
    """One line for each model."""
    torch.set_num_threads(1)
    stub()
    for name in names or MODELS:
        print(json.dumps(run(name, num_rounds)), flush=True)


if __name__ == "__main__":
    main(sys.argv[2:], int(sys.argv[1]))
