"""Loads a `Model` from a Hugging Face directory. Checks everything that headers can tell before it allocates memory."""

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from baton.core.errors import ModelUnsupported
from baton.core.numerics import KVDtype, Numerics, Quantization
from baton.kernels.delta_net.sizes import unfit_delta_sizes
from baton.kernels.implementation import Implementation
from baton.kernels.mla.sizes import unfit_latent_sizes
from baton.kernels.ops import TRITON_DTYPES, has_triton_form, unfit_sizes
from baton.model.checkpoint.fp8_scheme import invariant_refusal, kv_refusal, made_refusal
from baton.model.checkpoint.fp8_tensors import GEMM_DTYPES, NO_FLOAT8
from baton.model.checkpoint.mtp_fit import require_copies, require_mtp
from baton.model.checkpoint.published_names import by_published_names
from baton.model.checkpoint.random_weights import RandomTensor, random_identity, random_tensors
from baton.model.checkpoint.tensor_reader import TensorReader
from baton.model.checkpoint.tied_head import head_note, with_stored_head
from baton.model.checkpoint.weights import Cut, StoredTensor, read_headers
from baton.model.config import ModelConfig
from baton.model.draft_head import normalise_d2t, spaced_d2t
from baton.model.draft_names import D2T
from baton.model.eagle_config import EAGLE_D2T, EagleConfig, by_one_name, naming_the_drafter
from baton.model.layers import WeightSource
from baton.model.model import Model
from baton.model.parallel import Alone, Communicator, ShardPlan
from baton.model.tensor_spec import TensorSpec, check_tensors, tensor_spec
from baton.model.tp_fit import require_cut, require_cut_float8

log = logging.getLogger(__name__)


@torch.inference_mode()
def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    numerics: Numerics,
    with_mtp: bool,
    on_progress: Callable[[int, int], None] | None = None,
    random_seed: int | None = None,
    communicator: Communicator | None = None,
    cut_vocab: bool = True,
    expert_parallel: bool = False,
    num_redundant_experts: int | None = None,
    dp_attention: bool = False,
    quantization: Quantization = Quantization.NONE,
    kv_dtype: KVDtype = KVDtype.AUTO,
    implementation: Implementation = Implementation.AUTO,
    draft_path: Path | None = None,
) -> Model:
    """Load config and weights, converted to `dtype`; `on_progress(done, total)` counts tensors.

    - `random_seed`: the directory needs only config.json; weights are drawn on the device, including those of an MTP
      head if `with_mtp`, whether or not the model was published with one.
    - `communicator`: only its rank's part of the weights is read, and the model computes together with the other
      ranks'; its logits are then those of the rank's tokens only, unless `cut_vocab` is False.
    - `expert_parallel`: ranks hold different experts, whole, instead of a part of each; a single rank holds all.
    - `num_redundant_experts`: experts may move between slots, of which there are this many more than experts.
    - `dp_attention`: ranks attend for different sequences, with whole weights, instead of with a part of the heads for
      all.
    - `quantization`: GEMM weights are quantized as they are read; the KV then counts as another model's, as with
      another `kv_dtype`. Weights that are already float8 are used as stored, whatever `quantization` says; those that
      cannot be are dequantized, and that is logged.
    - `implementation`: what computes the model; AUTO decides by device, dtype and numerics.
    - `draft_path`: directory of an EAGLE-3 drafter, whose weights stay in `dtype`; `with_mtp` must then be False.

    Raises:
        ModelMissing: the directory, or a file it must hold, is not there.
        ModelFileDamaged: a file is truncated or not what its name says, was changed while it was read, or holds a NaN
            or an infinity.
        ModelUnsupported: config.json asks for something that is not implemented, or a draft head's table is invalid.
        ModelTensorMissing: tensors are missing, including those of a requested MTP head.
        ModelTensorUnexpected: the checkpoint holds tensors the architecture has no place for, or one twice.
        ModelTensorMisshapen: a tensor's shape or dtype is not the one config.json implies.
    """
    is_random = random_seed is not None
    made_weights = random_identity(device, random_seed) if random_seed is not None else None
    config = ModelConfig.from_directory(path, made_weights=made_weights)
    if with_mtp and not (is_random and config.num_mtp_layers == 0):
        require_mtp(config, path)
    group = communicator or Alone()
    if config.fp8 is not None:
        quantization = _stand_in(config, dtype, numerics) if is_random else Quantization.NONE
    eagle = None
    if draft_path is not None:
        assert not with_mtp and not dp_attention, "a drafter attends over heads"
        eagle = EagleConfig.from_directory(draft_path, config, made_weights=made_weights)
        eagle.require_cut(group.size, numerics)
        config = _renamed(config, f"drafted for by {eagle.sizes.model_hash}")
    head_dims = {config.head_dim} if eagle is None else {config.head_dim, eagle.sizes.head_dim}
    unfit = _unfit(config, head_dims, numerics, group, kv_dtype, implementation)
    implementation, why_no_triton = _form(implementation, unfit, device, dtype)
    is_ordered = implementation is Implementation.TRITON and numerics is Numerics.INVARIANT
    for head_dim in head_dims:
        refusal = kv_refusal(kv_dtype, head_dim, is_latent=config.latent is not None)
        if refusal is not None:
            raise refusal
    config = _identified(config, quantization, kv_dtype, dtype, numerics, num_ranks=group.size, is_ordered=is_ordered)
    held: dict[str, Any] = {
        "expert_parallel": expert_parallel,
        "num_redundant_experts": num_redundant_experts,
        "dp_attention": dp_attention,
    }
    config, headers = (config, {}) if is_random else _with_headers(config, path, is_told=group.rank == 0)
    spec = tensor_spec(config, with_mtp=with_mtp, **held)
    stored: Mapping[str, StoredTensor | RandomTensor] = headers
    float8, d2t_C = NO_FLOAT8, None
    if random_seed is not None:
        stored = random_tensors(spec.weights, dtype, device, random_seed)
        if D2T in spec.tables:
            d2t_C = spaced_d2t(spec.tables[D2T][0], config.vocab_size)
    else:
        float8 = check_tensors(spec, headers, config.fp8)
        _note(require_copies(spec, headers), group)
        require_cut(config, group.size, numerics, **held)
        require_cut_float8(spec, float8, group.size)
        if D2T in spec.tables:
            d2t_C = normalise_d2t(headers[D2T].read_index(), config.vocab_size, config.d2t_form)
    plan = ShardPlan(config, group, numerics, cut_vocab=cut_vocab, **held)
    with TensorReader(device) as reader:
        source = WeightSource(
            stored,
            reader,
            dtype,
            device,
            sum(weight.is_held(group.rank, group.size) for weight in spec.weights.values()),
            on_progress,
            plan.cut,
            quantization,
            kv_dtype,
            config.fp8,
            float8,
            plan.held,
        )
        drafter = None
        if draft_path is not None and eagle is not None:
            drafter, d2t_C = _drafter(draft_path, eagle, source, group, random_seed)
        model = Model(
            source,
            config,
            numerics,
            with_mtp=with_mtp,
            eagle=drafter,
            inner=plan.inner,
            d2t_C=None if d2t_C is None else d2t_C.to(device),
            vocab=plan.vocab,
            deal=plan.deal,
            implementation=implementation,
            why_no_triton=why_no_triton,
        )
        reader.require_sound()
    assert source.num_done == source.num_total
    if group.rank == 0:
        _tell(source, spec)
    return model


@naming_the_drafter()
def _drafter(
    path: Path,
    config: EagleConfig,
    beside: WeightSource,
    group: Communicator,
    random_seed: int | None,
) -> tuple[tuple[WeightSource, EagleConfig], torch.Tensor]:
    """This rank's part of a drafter's weights, and the token of each column of its head."""
    spec, d2t_C = config.tensors(), torch.arange(config.draft_vocab_size)
    stored: Mapping[str, StoredTensor | RandomTensor]
    if random_seed is not None:
        stored = random_tensors(spec.weights, beside.dtype, beside.device, random_seed)
        d2t_C = spaced_d2t(config.draft_vocab_size, config.sizes.vocab_size)
    else:
        headers = by_one_name(read_headers(path))
        stored, spec = headers, config.tensors(headers)
        check_tensors(spec, headers)
        if EAGLE_D2T in spec.tables:
            form = config.sizes.d2t_form or ("offset" if config.has_table else None)  # with all tokens, either form
            d2t_C = normalise_d2t(headers[EAGLE_D2T].read_index(), config.sizes.vocab_size, form, name=EAGLE_D2T)

    def cut(name: str) -> Cut | None:
        return spec.weights[name].cut(group.rank, group.size) if name in spec.weights else None

    source = WeightSource(
        stored, beside.reader, beside.dtype, beside.device, len(spec.weights), None, cut, kv_dtype=beside.kv_dtype
    )
    return (source, config), d2t_C


def _with_headers(config: ModelConfig, path: Path, *, is_told: bool) -> tuple[ModelConfig, dict[str, StoredTensor]]:
    """The config, untied if an LM head other than the embedding is stored; and the checkpoint's tensors."""
    headers = by_published_names(config, read_headers(path))
    found = with_stored_head(config, headers)
    note = head_note(config, found)
    if note and is_told:
        log.warning("%s", note)
    return found, headers


def _stand_in(config: ModelConfig, dtype: torch.dtype, numerics: Numerics) -> Quantization:
    """The quantization with which random weights replace a checkpoint's float8 weights."""
    assert config.fp8 is not None
    is_float8 = config.fp8.may_stay_float8 and dtype is torch.bfloat16 and numerics is Numerics.DEFAULT
    return Quantization.FP8 if is_float8 else Quantization.NONE


def _note(sentence: str | None, group: Communicator) -> None:
    if sentence and group.rank == 0:
        log.info("%s", sentence)


def _tell(source: WeightSource, spec: TensorSpec) -> None:
    """Log which weights are not computed with as they are stored, one line per kind."""
    if source.num_dequantized:
        whys = ", ".join(f"{count} because {why}" for why, count in source.num_dequantized.most_common())
        num_float8 = source.num_dequantized.total() + source.num_kept
        message = "%d of %d float8 weights are computed as %s, with twice the memory or more: %s"
        log.warning(message, source.num_dequantized.total(), num_float8, _named(source.dtype), whys)
    num_float16 = sum(source.stored[name].dtype is torch.float16 for name in spec.required)
    if num_float16 and source.dtype is torch.bfloat16:
        log.warning("%d float16 weights are rounded to bfloat16, which has 3 bits less", num_float16)


def _identified(
    config: ModelConfig,
    quantization: Quantization,
    kv_dtype: KVDtype,
    dtype: torch.dtype,
    numerics: Numerics,
    *,
    num_ranks: int,
    is_ordered: bool,
) -> ModelConfig:
    """The config with a different identity for each way of computing that produces different KV.

    `is_ordered`: it is computed by the kernels of invariant numerics.
    """
    holds = numerics is Numerics.DEFAULT or (is_ordered and num_ranks == 1)
    if config.fp8 is not None and config.fp8.may_stay_float8 and _named(dtype) in GEMM_DTYPES and not holds:
        raise invariant_refusal()
    config = _quantized(config, quantization, dtype, is_ordered=holds)
    config = _with_kv(config, kv_dtype, dtype)
    return _renamed(config, "by ordered kernels") if is_ordered else config  # their bits differ from the reference's


def _quantized(config: ModelConfig, quantization: Quantization, dtype: torch.dtype, *, is_ordered: bool) -> ModelConfig:
    """The config with a different identity, because its KV differs from the unquantized model's."""
    if quantization is Quantization.NONE:
        return config
    refusal = made_refusal(_named(dtype), is_ordered=is_ordered)
    if refusal is not None:
        raise refusal
    return _renamed(config, quantization.value)


def _with_kv(config: ModelConfig, kv_dtype: KVDtype, dtype: torch.dtype) -> ModelConfig:
    """The config with a different identity if KV is narrower than `dtype`, which the pool's dtype does not tell."""
    if kv_dtype is KVDtype.AUTO:
        return config
    return _renamed(config, f"KV {kv_dtype.value} of {_named(dtype)}")


def _renamed(config: ModelConfig, how: str) -> ModelConfig:
    """The config with a different identity, so that no KV is shared between the two ways of computing."""
    identity = f"{config.model_hash} {how}"
    return replace(config, model_hash=hashlib.sha256(identity.encode()).hexdigest()[: len(config.model_hash)])


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unfit(
    config: ModelConfig,
    head_dims: Collection[int],
    numerics: Numerics,
    communicator: Communicator,
    kv_dtype: KVDtype,
    asked: Implementation,
) -> str:
    """What the Triton kernels do not support, in words; "" if they support the model."""
    if numerics is Numerics.INVARIANT and config.num_experts:
        # A rank does not sum them by slices. With AUTO, one rank computes them as several would, because the other side
        # of a hand-off may have another number of ranks, and would not match the kernels' bits.
        if communicator.size > 1:
            return f"experts over {communicator.size} ranks in invariant numerics"
        if asked is Implementation.AUTO:
            return "experts in invariant numerics on any number of ranks"
    if numerics is Numerics.INVARIANT and kv_dtype is not KVDtype.AUTO:
        return f"{kv_dtype.value} KV in invariant numerics"
    if config.delta_net is not None and (
        unfit := unfit_delta_sizes(config.delta_net.key_dim, config.delta_net.value_dim)
    ):
        return unfit
    if config.latent is not None:
        latent = config.latent
        if numerics is Numerics.INVARIANT:
            return "attention over latents in invariant numerics"
        sizes = latent.latent_dim, latent.rope_dim, latent.nope_dim, latent.value_dim
        if unfit := unfit_latent_sizes(*sizes):
            return unfit
        head_dims = {*head_dims, latent.value_dim} - {config.head_dim}
    if numerics is Numerics.INVARIANT and config.sigmoid_routing is not None:
        return "routing by sigmoids in invariant numerics"
    counts = config.hidden_size, config.num_experts, config.num_experts_per_token
    return next(filter(None, (unfit_sizes(head_dim, *counts) for head_dim in sorted(head_dims))), "")


def _form(asked: Implementation, unfit: str, device: torch.device, dtype: torch.dtype) -> tuple[Implementation, str]:
    """The implementation: as requested, or as device, dtype and sizes allow; and why it is not Triton.

    Raises:
        ModelUnsupported: Triton was requested, but does not support the model or how it is to be computed.
    """
    if asked is Implementation.REFERENCE:
        return asked, "asked for by --kernels"
    if asked is Implementation.TRITON:
        if dtype not in TRITON_DTYPES:
            unfit = _named(dtype)
        if unfit:
            message = f"--kernels triton computes bfloat16, of sizes it knows, not {unfit}"
            raise ModelUnsupported(message, option="kernels", value=asked.value)
        return asked, ""
    if not has_triton_form(device, dtype):
        whys = [
            (device.type != "cuda", f"device {device.type}"),
            (dtype not in TRITON_DTYPES, f"dtype {_named(dtype)}"),
        ]
        return Implementation.REFERENCE, ", ".join(why for holds, why in whys if holds)
    if unfit:
        log.warning("no Triton kernel is made for %s: the model is computed by torch, which is slow", unfit)
        return Implementation.REFERENCE, f"no kernel is made for {unfit}"
    return Implementation.TRITON, ""
