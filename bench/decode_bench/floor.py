"""The least time that a decode step can take on a device: the bytes it must read, at the measured copy rate.

Weights are counted once for every pass that needs them (caches are smaller), the KV of each sequence once for each
pass, its state once, activations not at all. Of experts, those that uniform routing is expected to touch are counted,
or those that balanced routing touches.
"""

import math
import time
from collections.abc import Sequence
from statistics import median

import torch

from baton.core.numerics import Quantization
from baton.kvcache.layout import KVLayout
from baton.model.config import ModelConfig
from baton.model.eagle_config import EagleConfig
from baton.model.tensor_spec import tensor_spec

_COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
_NUM_COPIES = 7
_FP8_BYTES = 1 + 4 / (128 * 128)  # bytes of one element, including its share of the scales


def copy_gbps(device: torch.device) -> float:
    """Bytes read and written per nanosecond by a plain copy within the device's memory: a median."""
    num_bytes = _COPY_BYTES[device.type]
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates: list[float] = []
    for _ in range(_NUM_COPIES):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(torch.cuda.current_stream(device))
            target.copy_(source)
            end.record(torch.cuda.current_stream(device))
            torch.cuda.synchronize(device)
            took_s = float(begin.elapsed_time(end)) / 1e3
        else:
            begin_s = time.perf_counter()
            target.copy_(source)
            took_s = time.perf_counter() - begin_s
        rates.append(2 * num_bytes / took_s / 1e9)
    return median(rates)


def weight_bytes(name: str, shape: Sequence[int], dtype: torch.dtype, quantization: Quantization) -> float:
    """Bytes of a checkpoint's tensor once it is loaded, including its scales."""
    is_quantized = quantization is Quantization.FP8 and name.endswith("_proj.weight")
    return math.prod(shape) * (_FP8_BYTES if is_quantized else dtype.itemsize)


def step_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    num_drafts: int,
    batch: int,
    context_len: float,
    num_ranks: int = 1,
    quantization: Quantization = Quantization.NONE,
    layout: KVLayout,
    drafter: EagleConfig | None = None,
    is_balanced: bool = False,
) -> float:
    """Bytes that one step must read, at each rank of a group.

    Args:
        config: configuration of the model.
        dtype: dtype of the weights.
        num_drafts: K; the drafter runs K - 1 times to draft and once over what was accepted.
        batch: number of sequences.
        context_len: mean positions of a sequence.
        num_ranks: ranks that share everything except rows of the embedding, which are negligible.
        quantization: quantization of the GEMMs' weights.
        layout: layout of the pool. All of a state that a step may read is counted, once.
        drafter: EAGLE-3 drafter, used instead of the MTP head.
        is_balanced: whether no expert is selected again before all are.
    """
    trunk = mtp = head = 0.0
    for name, shape in tensor_spec(config, with_mtp=num_drafts > 0 and drafter is None).required.items():
        size = weight_bytes(name, shape, dtype, quantization)
        if ".experts." in name:
            rows = batch if name.startswith(config.mtp_names.prefixes) and num_drafts > 1 else batch * (num_drafts + 1)
            size *= _share_of_experts(config, rows, is_balanced)
        if name == "model.embed_tokens.weight":
            head += size if config.tie_word_embeddings else 0.0
        elif name == "lm_head.weight":
            head += size
        elif name.startswith(config.mtp_names.prefixes):
            mtp += size
        else:
            trunk += size
    if drafter is not None:
        mtp = sum(math.prod(shape) for shape in drafter.tensors().required.values()) * dtype.itemsize
    has_own_head = drafter is not None or config.draft_vocab_size is not None
    num_head_passes = 1 + (0 if has_own_head else num_drafts)
    weights = (trunk + num_drafts * mtp + num_head_passes * head) / num_ranks
    return weights + _kept_bytes(layout, num_drafts, batch, context_len, num_ranks)


def _kept_bytes(layout: KVLayout, num_drafts: int, batch: int, context_len: float, num_ranks: int) -> float:
    """Bytes of the pool that a step reads."""
    rows = [index for index, layer in enumerate(layout.layers) if not layer.is_state]
    total = 0.0
    for index, layer in enumerate(layout.layers):
        one = layer.slot_bytes if layer.is_state else context_len * layer.num_heads * layer.head_bytes
        num_passes = num_drafts if layout.has_mtp and index == rows[-1] else 1
        total += num_passes * one / (1 if layer.whole else num_ranks)
    return batch * total


def _share_of_experts(config: ModelConfig, num_rows: int, is_balanced: bool) -> float:
    """Share of the experts that at least one of `num_rows` rows is routed to."""
    share = config.num_experts_per_token / config.num_experts  # share for one row
    return min(1.0, num_rows * share) if is_balanced else 1.0 - (1.0 - share) ** num_rows
