"""Makes the model, tokenizer and KV pool of one worker from a `WorkerConfig`; the same steps for both roles."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from baton.core.config import CPU_NUM_SEQS, WorkerConfig
from baton.core.errors import ConfigInvalid
from baton.core.numerics import Numerics
from baton.core.requests.tokenizer import Tokenizer
from baton.core.requests.validate import RequestLimits
from baton.core.start_phase import KV_POOL, WEIGHTS, OnPhase, no_phase
from baton.engine.chunk_budget import MIN_LEN
from baton.engine.grammar.grammar import GrammarCompiler
from baton.engine.graphs.kernel_warm_up import Reach
from baton.engine.speculation.token_history import history_bytes
from baton.engine.tp.expert_exchange import exchange_bytes
from baton.kernels.compiles import COMPILES
from baton.kernels.implementation import Implementation
from baton.kernels.kv import dequantize as kv_dequantize
from baton.kernels.mla import prefill as mla_prefill
from baton.kernels.moe import gemm as moe_gemm
from baton.kernels.moe import summands
from baton.kernels.selftest import check_invariance
from baton.kvcache.geometry import PoolGeometry
from baton.kvcache.layout import KVLayout
from baton.kvcache.pool import TORCH_DTYPES, KVPool, num_blocks_for_memory
from baton.model.checkpoint.random_weights import RANDOM_SEED
from baton.model.loader import load_model
from baton.model.model import Model
from baton.model.parallel import Alone, Communicator

CONTEXT_BYTES = 1 << 30  # per process: the CUDA context, libraries' workspaces, loaded kernels, captured graphs
_ACTIVATION_BYTES = 2  # per element; kernels compute bfloat16
_LOGIT_COPIES = 4  # in float32: as computed, penalized, sorted, and their probabilities


def step_bytes(*, num_tokens: int, num_rows: int, hidden_size: int, inner_size: int, vocab_size: int) -> int:
    """Return the bytes that the largest step needs besides weights and KV.

    Args:
        num_tokens: tokens of the largest step.
        num_rows: rows whose logits are computed together.
        hidden_size: hidden size of the model.
        inner_size: the widest activation inside a layer, per token.
        vocab_size: vocabulary size of the model.
    """
    activations = num_tokens * (6 * hidden_size + 3 * inner_size) * _ACTIVATION_BYTES
    return activations + num_rows * vocab_size * 4 * _LOGIT_COPIES


def kv_bytes(*, total: int, free: int, share: float, own: int, steps: int) -> int:
    """Return the bytes for the KV pool of one process; 0 if none are left.

    Args:
        total: bytes of the GPU's memory.
        free: bytes of it that are free now.
        share: fraction of `total` that this process may use in all.
        own: bytes that it already uses.
        steps: bytes that its largest step will need.
    """
    return max(0, min(int(total * share) - own, free) - steps)


CPU_NUM_TOKENS = 256
GPU_NUM_SEQS = 256  # a decode step of this size is bound by reading KV, no longer by reading weights
GPU_NUM_TOKENS = 4096  # measured: 8B prompts beside 64 streams; first token and tok/s as with 2048 or better
# If these would give an expert fewer rows than `EXPERT_ROWS`, a step takes twice as many, because it reads each
# expert's weights once: 12 layers of a 35B model with 8 of 256 experts compute 8,192 tokens in 36 ms that way, and in
# 40 ms in two steps.
MOE_GPU_NUM_TOKENS = 8192
EXPERT_ROWS = 256
MIN_GPU_NUM_SEQS = 8
MIN_MODEL_LEN = 2  # a prompt token, and a token that follows
TYPICAL_LEN = 1024  # positions that a sequence is expected to hold
_LOGIT_SHARE = 0.1  # maximum fraction of a worker's memory for the logits of a step
_LOGIT_BYTES = 16  # float32: as computed, penalized, sorted, and their probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The device that a worker computes on.

    Attributes:
        kind: `cpu` or `cuda`.
        num_bytes: this worker's part of a GPU's memory; 0 on a CPU.
    """

    kind: str
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The chosen sizes of steps, and why they were chosen.

    Attributes:
        max_num_seqs: maximum number of concurrent sequences.
        max_num_batched_tokens: prompt tokens of a prefill step.
        max_model_len: positions of a sequence; 0 before there is a pool.
        why: one sentence for each; `worker.loading` adds one for the KV pool.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int = 0
    why: tuple[str, ...]

    def fitted(self, *, asked_seqs: int, kind: str, pool_len: int, max_model_len: int) -> "StepSizes":
        """Limit the sequences to what a GPU's pool holds at a typical length; a configured number is kept.

        Args:
            asked_seqs: number configured by the operator; 0: none.
            kind: kind of the device.
            pool_len: positions of the pool.
            max_model_len: positions of a sequence.
        """
        if asked_seqs or kind != "cuda":
            return self
        length = min(max_model_len, TYPICAL_LEN)
        held = max(MIN_GPU_NUM_SEQS, pool_len // length // 8 * 8)
        if held >= self.max_num_seqs:
            return self
        why = f"max_num_seqs {held}: the KV pool holds {pool_len} positions, {length} for each"
        return replace(self, max_num_seqs=held, why=(why, *self.why[1:]))


def choose(
    *,
    asked_seqs: int,
    asked_tokens: int,
    device: DeviceFacts,
    vocab_size: int,
    num_rows_per_seq: int,
    expert_share: float = 1.0,
) -> StepSizes:
    """Choose the sizes of steps before there is a pool; `StepSizes.fitted` adapts them to it.

    Args:
        asked_seqs: max_num_seqs configured by the operator; 0: none.
        asked_tokens: max_num_batched_tokens configured by the operator; 0: none.
        device: device of the worker.
        vocab_size: vocabulary size of the model.
        num_rows_per_seq: rows of each sequence whose logits a step computes.
        expert_share: average fraction of a step's rows for each expert of an MoE layer.
    """
    seqs, why_seqs = _num_seqs(asked_seqs, device, vocab_size * num_rows_per_seq * _LOGIT_BYTES)
    tokens, why_tokens = _num_tokens(asked_tokens, device, expert_share)
    return StepSizes(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        why=(f"max_num_seqs {seqs}: {why_seqs}", f"max_num_batched_tokens {tokens}: {why_tokens}"),
    )


def _num_seqs(asked: int, device: DeviceFacts, logit_bytes: int) -> tuple[int, str]:
    if asked:
        return asked, "asked for"
    if device.kind != "cuda":
        return CPU_NUM_SEQS, "the default of a CPU"
    fitting = int(device.num_bytes * _LOGIT_SHARE) // logit_bytes // 8 * 8
    if fitting >= GPU_NUM_SEQS:
        return GPU_NUM_SEQS, "the default of a GPU"
    seqs = max(MIN_GPU_NUM_SEQS, fitting)
    return seqs, f"logits of a step may take {_LOGIT_SHARE:.0%} of {device.num_bytes / (1 << 30):.1f} GiB"


def _num_tokens(asked: int, device: DeviceFacts, expert_share: float) -> tuple[int, str]:
    if asked:
        return asked, "asked for"
    if device.kind != "cuda":
        return CPU_NUM_TOKENS, "the default of a CPU"
    if GPU_NUM_TOKENS * expert_share >= EXPERT_ROWS:
        return GPU_NUM_TOKENS, "the default of a GPU"
    rows = int(GPU_NUM_TOKENS * expert_share)
    return MOE_GPU_NUM_TOKENS, f"of {GPU_NUM_TOKENS}, the default of a GPU, an expert would have {rows}"


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWorker:
    """What a worker computes with."""

    model: Model
    tokenizer: Tokenizer
    layout: KVLayout
    pool: KVPool
    grammars: GrammarCompiler
    sizes: StepSizes

    def applied(self, config: WorkerConfig) -> WorkerConfig:
        """Return the configuration with the chosen sizes of steps."""
        sizes = self.sizes
        return replace(
            config,
            max_num_seqs=sizes.max_num_seqs,
            chunk_len=sizes.max_num_batched_tokens,
            max_model_len=sizes.max_model_len,
        )


def load_worker(
    config: WorkerConfig,
    on_phase: OnPhase = no_phase,
    pool_memory: Callable[[PoolGeometry], memoryview] | None = None,
    communicator: Communicator | None = None,
) -> LoadedWorker:
    """Load the model and size the pool from the available memory; with a communicator, as one rank of a group.

    Args:
        config: what to load.
        on_phase: called with the tensors loaded and all tensors, and before the pool is made.
        pool_memory: returns the memory for a pool on a CPU, to share it; None: the pool allocates its own.
        communicator: connects the worker's ranks; all of them load at the same time, and have pools of the same length.

    Raises:
        StartupError: the model directory is unusable or cannot be split over that many ranks, or the numerics mode does
            not hold on this machine.
        ConfigInvalid: the pool would not hold a block, there is no memory for it, or torch finds no usable GPU.
    """
    torch.set_num_threads(config.num_threads)
    device = _usable(torch.device(config.device))
    if device.type == "cuda":
        COMPILES.listen()
    path = Path(config.model_path)
    is_random = config.weights == "random"
    group = communicator or Alone()
    model = load_model(
        path,
        dtype=TORCH_DTYPES[config.dtype],
        device=device,
        numerics=config.numerics,
        with_mtp=config.num_draft_tokens > 0 and config.has_head and not config.draft_path,
        draft_path=Path(config.draft_path) if config.draft_path and config.num_draft_tokens else None,
        on_progress=partial(on_phase, WEIGHTS),
        random_seed=RANDOM_SEED if is_random else None,
        communicator=group,
        expert_parallel=config.enable_expert_parallel,
        num_redundant_experts=config.redundant_experts,
        dp_attention=config.enable_dp_attention,
        quantization=config.quantization,
        kv_dtype=config.kv_dtype,
        implementation=Implementation(config.kernels),
    )
    model.config.require_full_attention(config.max_model_len)
    if is_random and not (path / "tokenizer.json").exists():
        tokenizer = Tokenizer.byte_level(path, model.config.vocab_size)
    else:
        tokenizer = Tokenizer.from_directory(path)
    if config.numerics is Numerics.INVARIANT:
        _check_invariance(model, config, group)
    on_phase(KV_POOL, 0, 0)
    layout = model.kv_layout(config.block_size)
    layout.require_state(config.state_checkpoint_interval)
    sizes = _sizes(config, model)
    pool_sizes = _pool_sizes(config, model, layout, group, sizes)
    num_blocks, num_state_slots, num_checkpoints = pool_sizes
    memory_key = _memory_key(device)
    if num_blocks < 1:
        raise ConfigInvalid(
            f"the memory for KV holds no block of {layout.bytes_per_block} bytes; raise {memory_key}",
            keys=[memory_key],
        )
    try:
        is_shared = pool_memory is not None and device.type == "cpu"
        geometry = PoolGeometry(layout, num_blocks, group.rank, group.size, num_state_slots=num_state_slots)
        memory = pool_memory(geometry) if pool_memory is not None and is_shared else None
        pool = KVPool(
            layout,
            num_blocks,
            device,
            rank=group.rank,
            size=group.size,
            num_state_slots=num_state_slots,
            num_checkpoints=num_checkpoints,
            memory=memory,
        )
    except RuntimeError as error:  # raised by torch's allocators
        mib = num_blocks * layout.bytes_per_block >> 20
        raise ConfigInvalid(
            f"{memory_key}: a KV pool of {mib} MiB does not fit into memory; lower it", keys=[memory_key]
        ) from error
    grammars = GrammarCompiler(tokenizer, model.config.vocab_size, is_compact=not config.json_whitespace)
    grammars.prepare()
    sizes = _fitted(sizes, config, device, pool_sizes)
    sizes = replace(sizes, why=(*sizes.why, group.how)) if group.how else sizes
    return LoadedWorker(model=model, tokenizer=tokenizer, layout=layout, pool=pool, grammars=grammars, sizes=sizes)


def _memory_key(device: torch.device) -> str:
    return "gpu_memory_utilization" if device.type == "cuda" else "kv_memory_mib"


class PoolSizes(NamedTuple):
    """Sizes of one rank's pool, without scratch; checkpoints are included in the state slots."""

    num_blocks: int
    num_state_slots: int
    num_checkpoints: int


def _fitted(sizes: StepSizes, config: WorkerConfig, device: torch.device, pool: PoolSizes) -> StepSizes:
    """Fit the sizes to the actual pool, and add and log a sentence about it.

    Raises:
        ConfigInvalid: the pool does not hold one sequence of the configured length.
    """
    pool_len = pool.num_blocks * config.block_size
    memory_key = _memory_key(device)
    length = min(config.max_model_len, pool_len - config.num_draft_tokens)
    sizes = replace(sizes, max_model_len=length)
    if length < config.max_model_len:
        holds = f"the KV pool holds {pool_len} positions, drafts among them"
        if config.is_model_len_asked or length < MIN_MODEL_LEN:
            message = f"max_model_len {config.max_model_len}: {holds}; lower it, or raise {memory_key}"
            raise ConfigInvalid(message, keys=["max_model_len", memory_key])
        sizes = replace(sizes, why=(*sizes.why, f"max_model_len {length}, not the model's: {holds}"))
    sizes = sizes.fitted(asked_seqs=config.max_num_seqs, kind=device.type, pool_len=pool_len, max_model_len=length)
    why = f"kv_memory_mib {config.kv_memory_mib}"
    if device.type == "cuda":
        used = torch.cuda.memory_reserved(device) / (1 << 30)
        why = f"{config.gpu_memory_utilization:g} of the GPU is this worker's, and {used:.1f} GiB of it in use with KV"
    kept = f", {pool.num_checkpoints} checkpoints of state" if pool.num_checkpoints else ""
    if kept and config.state_checkpoint_interval:
        num_tokens = pool.num_checkpoints * config.state_checkpoint_interval
        kept += f", which prompts of {num_tokens} tokens together leave at one every {config.state_checkpoint_interval}"
    sizes = replace(sizes, why=(*sizes.why, f"KV pool of {pool.num_blocks} blocks, {pool_len} positions{kept}: {why}"))
    log.info("%s", "; ".join(sizes.why))
    return sizes


def _sizes(config: WorkerConfig, model: Model) -> StepSizes:
    """Choose the sizes of steps, as far as they are known without a pool."""
    device = DeviceFacts(kind=model.device.type)
    if device.kind == "cuda":
        _, total_bytes = torch.cuda.mem_get_info(model.device)
        device = replace(device, num_bytes=int(total_bytes * config.gpu_memory_utilization))
    return choose(
        asked_seqs=config.max_num_seqs,
        asked_tokens=config.chunk_len,
        device=device,
        vocab_size=model.config.vocab_size,
        num_rows_per_seq=config.num_draft_tokens + 1,
        expert_share=model.config.num_experts_per_token / model.config.num_experts if model.config.num_experts else 1.0,
    )


def _usable(device: torch.device) -> torch.device:
    """Return the device with its index, which threads that select it need.

    Raises:
        ConfigInvalid: it is a GPU, and torch finds none.
    """
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ConfigInvalid("device: cuda is asked for, and torch finds no GPU here", keys=["device"])
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _check_invariance(model: Model, config: WorkerConfig, group: Communicator) -> None:
    """Check what will serve: GEMMs of these shapes, and attention with as many query heads per KV head."""
    heads, kv_heads = model.config.num_heads, model.config.num_kv_heads
    delta = model.config.delta_net
    check_invariance(
        model.linear_shapes(),
        model.dtype,
        model.device,
        num_ranks=group.size,
        attention=(2 * heads // kv_heads, 2, model.config.head_dim),
        implementation=model.implementation,
        quantization=config.quantization,
        delta_net=None if delta is None else (delta.key_dim, delta.value_dim, delta.num_values),
    )


def request_limits(model: Model, *, max_model_len: int, num_draft_tokens: int) -> RequestLimits:
    """Return the model's limits on one request; each role sets its own pool's capacity."""
    max_model_len = min(max_model_len, model.config.max_model_len)
    return RequestLimits(
        max_model_len=max_model_len,
        vocab_size=model.config.vocab_size,
        num_draft_tokens=num_draft_tokens,
        prefill_capacity_len=max_model_len,
        decode_capacity_len=max_model_len + num_draft_tokens,
    )


def reach_of(config: WorkerConfig, model: Model) -> Reach:
    """Return which steps a worker with this configuration may be asked for."""
    context_len = min(config.max_model_len + config.num_draft_tokens, model.config.max_model_len)
    num_rows = config.max_num_seqs * (config.num_draft_tokens + 1)  # rows that decode in one step
    num_tokens = max(min(config.chunk_len, config.max_num_seqs * context_len), num_rows + MIN_LEN)
    return Reach(num_tokens=num_tokens, num_sequences=config.max_num_seqs, context_len=context_len)


def num_state_slots_of(layout: KVLayout, max_num_seqs: int) -> int:
    """Return a pool's state slots: for sequences in steps, and as many that are received, pushed or wait."""
    return layout.num_state_slots(max_num_seqs)


def _pool_sizes(
    config: WorkerConfig, model: Model, layout: KVLayout, group: Communicator, step: StepSizes
) -> PoolSizes:
    """Return sizes that every rank has memory for. CPU ranks share the worker's memory; each GPU has its own."""
    device = model.device
    num_state_slots = num_state_slots_of(layout, step.max_num_seqs)
    has_checkpoints = layout.has_state and config.prefix_cache
    if device.type != "cuda":
        memory_bytes = config.kv_memory_mib << 20
        room = memory_bytes - (num_state_slots + 1) * layout.bytes_per_state_slot
        num_checkpoints = layout.num_checkpoints(room) if has_checkpoints else 0
        num_state_slots += num_checkpoints
        return PoolSizes(num_blocks_for_memory(layout, memory_bytes, num_state_slots), num_state_slots, num_checkpoints)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    least = PoolGeometry(layout, 1, group.rank, group.size, num_state_slots=num_state_slots)
    block_bytes = sum(layer.block_bytes for layer in least.layers if not layer.blocks_per_slot)
    sizes = model.config
    steps = step_bytes(
        num_tokens=step.max_num_batched_tokens,
        num_rows=step.max_num_seqs * (config.num_draft_tokens + 1),
        hidden_size=sizes.hidden_size,
        inner_size=max(
            sizes.intermediate_size,
            sizes.moe_intermediate_size * sizes.num_experts_per_token,
            sizes.shared_expert_size,
        ),
        vocab_size=sizes.vocab_size,
    )
    if model.implementation is Implementation.TRITON and model.numerics is Numerics.DEFAULT:
        kv_dtype = TORCH_DTYPES[layout.dtype]  # twice: a layer's memory, and what torch keeps of another size
        steps += 2 * max(
            kv_dequantize.most_bytes(kv_dtype, device.index, head_dim, layout.block_size)
            for head_dim in {layer.row_len for layer in layout.layers}
        )
        if sizes.latent is not None:
            dims = sizes.latent.latent_dim, sizes.latent.rope_dim, sizes.latent.nope_dim, sizes.latent.value_dim
            num_heads = sizes.num_heads // (group.size if model.deal is None else 1)
            steps += mla_prefill.most_bytes(step.max_num_batched_tokens, num_heads, dims)
    if model.implementation is Implementation.TRITON and sizes.num_experts:
        of_layer = sizes.num_experts, sizes.hidden_size, sizes.moe_intermediate_size
        num_tokens, num_chosen = step.max_num_batched_tokens, sizes.num_experts_per_token
        expert_bytes = moe_gemm.most_bytes(num_tokens, num_chosen, of_layer)
        # In steps of few tokens a shared expert is one expert and one choice more, and parts outlive their layer.
        few, num_shared = min(num_tokens, summands.MAX_TOKENS), int(sizes.shared_expert_size > 0)
        stacked = sizes.num_experts + num_shared, *of_layer[1:]
        expert_bytes = max(expert_bytes, 2 * moe_gemm.most_bytes(few, num_chosen + num_shared, stacked))
        steps += expert_bytes
    steps += exchange_bytes(model)
    if config.lookup is not None and config.num_draft_tokens:
        steps += history_bytes(step.max_num_seqs, sizes.max_model_len)
    own = torch.cuda.memory_reserved(device) + CONTEXT_BYTES
    share = config.gpu_memory_utilization
    room = kv_bytes(total=total_bytes, free=free_bytes, share=share, own=own, steps=steps)
    room -= least.num_bytes
    slot_bytes = sum(layer.blocks_per_slot * layer.block_bytes for layer in least.layers)
    num_checkpoints = layout.num_checkpoints(room, slot_bytes) if has_checkpoints else 0
    num_blocks = (room - num_checkpoints * slot_bytes) // block_bytes + 1
    of_ranks = [json.loads(data) for data in group.gather_bytes(json.dumps([num_blocks, num_checkpoints]).encode())]
    num_blocks, num_checkpoints = (min(sizes) for sizes in zip(*of_ranks, strict=True))
    return PoolSizes(num_blocks, num_state_slots + num_checkpoints, num_checkpoints)
