"""Determines what a model directory would run as, or why it cannot be served, from its files' headers.

No tensor is read and torch is not imported, so that a refusal takes a second and not a deployment's start. The loader
makes the same checks when it loads; both use the same functions, so that they agree.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.cluster.resolve import (
    BUNDLED_DRAFTERS,
    BUNDLED_MODELS,
    ModelDirectory,
    find_drafter,
    find_model,
    has_gpu,
    num_drafts,
    resolve_dtype,
    served_names,
    uses_head,
)
from baton.core.config import CPU_NUM_SEQS, ServeConfig
from baton.core.errors import BatonError, ConfigInvalid, ModelMissing, ModelUnsupported
from baton.core.numerics import Numerics
from baton.kvcache.layout import ITEM_BYTES, NO_PREFIX_CACHE, KVLayout

if TYPE_CHECKING:
    from baton.model.checkpoint.fp8_tensors import Fp8Tensors
    from baton.model.checkpoint.weights import StoredTensor
    from baton.model.config import ModelConfig
    from baton.model.eagle_config import EagleConfig
    from baton.model.tensor_spec import TensorSpec

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_GIB = 1 << 30
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # what a clone without Git LFS has in place of large files


@dataclass(kw_only=True)
class Judgement:
    """Findings on a model.

    Attributes:
        model: model as the operator wrote it.
        errors: reasons why it cannot be served; empty if it can.
        notes: useful information, a sentence each.
        facts: what it would run as, as far as it could be read.
    """

    model: str
    errors: list[BatonError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def require_servable(config: ServeConfig) -> Judgement:
    """Judge a deployment's model, and raise if it cannot be served.

    Raises:
        BatonError: the first reason why it cannot be served.
    """
    judgement = judge(config)
    if judgement.errors:
        raise judgement.errors[0]
    return judgement


def judge(config: ServeConfig) -> Judgement:
    """Find everything that is wrong with a model, and what it would run as."""
    found = Judgement(model=config.model)
    try:
        refuse_other_kinds(config.model)
        model = find_model(config.model, is_dummy=config.is_dummy)
    except BatonError as error:
        found.errors.append(error)
        return found
    found.facts |= {"path": str(model.path), "names": list(served_names(config, model))}
    try:
        _judge_files(config, model, found)
    except BatonError as error:
        found.errors.append(error)
    for check in (_judge_tokenizer, _judge_template, _judge_advice, _judge_adapter):
        _collect(found, check, config, model)
    return found


def refuse_other_kinds(model: str, *, flag: str = "--model") -> None:
    """Refuse what is not a servable checkpoint: hub ids, GGUF, adapters, pickles. `flag` names the option in messages.

    Raises:
        ModelMissing: it is a hub id, and no directory has that name; or Git fetched pointers in place of its files.
        ModelUnsupported: it is another kind of file or directory.
    """
    if model in BUNDLED_MODELS:
        return
    try:
        path = Path(model).expanduser()
        if path.is_file():
            _refuse_file(path, flag)
        if not path.is_dir():
            if _HUB_ID.fullmatch(model):
                local = model.rpartition("/")[2]
                message = f"{model} is no directory here; if it is a Hugging Face hub id, fetch it first: "
                raise ModelMissing(
                    f"{message}`hf download {model} --local-dir {local}`, then {flag} {local}", path=model
                )
            return
        names = {entry.name for entry in path.iterdir()}
    except (OSError, ValueError, RuntimeError):
        return  # find_model says what is wrong with it
    _refuse_directory(path, names)


def _refuse_file(path: Path, flag: str) -> None:
    if path.suffix == ".gguf":
        raise _unsupported(f"{path} is a GGUF file; this version serves directories of safetensors", "gguf")
    message = f"{path} is a file; {flag} takes the directory that holds config.json and the .safetensors files"
    raise ModelMissing(message, path=str(path))


def _refuse_directory(path: Path, names: set[str]) -> None:
    weights = {name for name in names if name.endswith(".safetensors")} - {"adapter_model.safetensors"}
    has_weights = bool(weights)
    pointers = sorted(name for name in weights | (names & {"tokenizer.json"}) if _is_lfs_pointer(path / name))
    if pointers:
        message = f"{path / pointers[0]} is a pointer of Git LFS, not the file; `git lfs pull` in {path} fetches it"
        raise ModelMissing(message, path=str(path), missing=pointers)
    if has_weights and all(name.startswith("consolidated") for name in weights):
        message = f"{path} holds weights in Mistral's own form ({min(weights)}); this version serves that of "
        message += "transformers, config.json and model*.safetensors, which most repositories hold beside it"
        raise _unsupported(message, "consolidated")
    if "adapter_config.json" in names and not ("config.json" in names and has_weights):
        message = f"{path} is a LoRA adapter, not a model; merge it into its base model and serve the result"
        raise _unsupported(message, "adapter")
    if has_weights:
        return
    if any(name.endswith(".gguf") for name in names):
        raise _unsupported(f"{path} holds GGUF files; this version serves directories of safetensors", "gguf")
    if any(re.fullmatch(r"pytorch_model.*\.bin|.*\.pth?", name) for name in names):
        message = f"{path} holds PyTorch pickles (.bin), which run code as they load; convert them to safetensors"
        raise _unsupported(message, "pickle")


def _is_lfs_pointer(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return stream.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return False  # what reads it says what is wrong with it


def _unsupported(message: str, kind: str) -> ModelUnsupported:
    return ModelUnsupported(message, option="format", value=kind)


def _judge_drafter(config: ServeConfig, target: "ModelConfig") -> "EagleConfig":
    from baton.model.checkpoint.weights import read_headers
    from baton.model.eagle_config import EagleConfig, by_one_name, naming_the_drafter
    from baton.model.tensor_spec import check_tensors

    if config.draft_path not in BUNDLED_DRAFTERS:
        refuse_other_kinds(config.draft_path, flag="--draft-model")
    path = find_drafter(config.draft_path)
    made = "dummy" if config.is_dummy else None
    drafter = EagleConfig.from_directory(path, target, made_weights=made)
    if not config.is_dummy:
        with naming_the_drafter():
            headers = by_one_name(read_headers(path))
            check_tensors(drafter.tensors(headers), headers)
    for size in dict.fromkeys((config.tp_prefill, config.tp_decode)):
        drafter.require_cut(size, config.numerics)
    return drafter


def _judge_files(config: ServeConfig, model: ModelDirectory, found: Judgement) -> None:
    from baton.model.checkpoint.mtp_fit import require_mtp
    from baton.model.config import ModelConfig
    from baton.model.tensor_spec import tensor_spec
    from baton.model.tp_fit import require_cut

    sizes = ModelConfig.from_directory(model.path, made_weights="dummy")
    drafts = num_drafts(config, model)
    reads_mtp = drafts > 0 and uses_head(config, model) and not config.draft_path
    device = "cuda" if config.device == "cuda" or (config.device == "auto" and has_gpu()) else "cpu"
    dtype = resolve_dtype(config.dtype, device)
    found.facts |= {"architecture": sizes.architecture, "dtype": dtype, "device": device}
    found.facts |= {"max_model_len": config.max_model_len or sizes.max_model_len, "num_speculative_tokens": drafts}
    found.facts["drafter"] = _drafter(config, model, sizes) if drafts else None
    drafter = None
    if config.draft_path and drafts:
        try:
            drafter = _judge_drafter(config, sizes)
        except BatonError as error:
            found.errors.append(error)
    elif drafts == 0:
        found.notes.append(_why_no_drafts(sizes.num_mtp_layers, model.num_mtp_layers))
    if reads_mtp and not (config.is_dummy and sizes.num_mtp_layers == 0):
        _collect(found, require_mtp, sizes, model.path)
    if config.max_model_len is not None and config.max_model_len > sizes.max_model_len:
        message = f"max_model_len: {config.max_model_len} exceeds the model's own {sizes.max_model_len}"
        found.errors.append(ConfigInvalid(message, keys=["max_model_len"]))
    _collect(found, sizes.require_full_attention, config.max_model_len)
    held: dict[str, Any] = {
        "expert_parallel": config.enable_expert_parallel,
        "num_redundant_experts": config.redundant_experts,
    }
    cuts = [] if config.prefill == 0 and config.enable_dp_attention else [(config.tp_prefill, False)]
    for size, dp_attention in dict.fromkeys((*cuts, (config.tp_decode, config.enable_dp_attention))):
        cut = partial(require_cut, dp_attention=dp_attention, **held)
        _collect(found, cut, sizes, size, config.numerics)
    held["dp_attention"] = config.enable_dp_attention
    _judge_quantization(config, sizes, dtype, device, found)
    sizes, headers = (sizes, None) if found.errors or config.is_dummy else _judge_headers(sizes, model, found)
    spec = tensor_spec(sizes, with_mtp=reads_mtp, **held)
    is_made = config.quantization.value == "fp8" if sizes.fp8 is None else sizes.fp8.may_stay_float8
    float8: Collection[str] = spec.required if is_made and dtype == "bfloat16" else ()  # also with random weights
    if headers is not None:
        stored = _judge_tensors(config, sizes, headers, spec, dtype, found)
        float8 = stored if sizes.fp8 is not None else float8
    num_layers = sizes.num_layers + reads_mtp
    _judge_pool(config, sizes, drafter, num_layers, drafts, dtype, device, found)
    item_bytes = ITEM_BYTES[dtype]
    num_elements = sum(prod(shape) for shape in spec.required.values())
    num_float8 = sum(prod(shape) for name, shape in spec.required.items() if name in float8)
    weight_bytes = num_float8 + (num_elements - num_float8) * item_bytes
    if drafter is not None:
        weight_bytes += sum(prod(shape) for shape in drafter.tensors().required.values()) * item_bytes
    found.facts |= {
        "num_parameters": num_elements,
        "weight_gib": round(weight_bytes / _GIB, 3),
        "tp_prefill": config.tp_prefill,
        "tp_decode": config.tp_decode,
        **held,
    }


def _why_no_drafts(num_named: int, num_stored: int) -> str:
    """Explain it by the MTP layers that config.json names, and those that the weights contain."""
    if num_named == 0:
        return "the checkpoint has no MTP head: it is served without drafts"
    if num_stored == 0:
        message = "no tensor of its MTP head is stored, which transformers drops when it saves a model"
        return f"{message}: it is served without drafts"
    return f"its {num_named} MTP layers are not used: no drafts are made"


def _drafter(config: ServeConfig, model: ModelDirectory, sizes: "ModelConfig") -> str:
    looked_up = "n-grams of the text so far"
    if config.speculative_method == "auto":
        by_head = f"{_head(config, sizes)}, by " if uses_head(config, model) else ""
        return f"{by_head}{looked_up}, or none, as measured"
    return looked_up if config.lookup() is not None else _head(config, sizes)


def _head(config: ServeConfig, sizes: "ModelConfig") -> str:
    if config.draft_path:
        return f"EAGLE-3 drafter {config.draft_path}"
    return "MTP head" if sizes.draft_vocab_size is None else f"MTP head over {sizes.draft_vocab_size} tokens"


def _judge_pool(
    config: ServeConfig,
    sizes: "ModelConfig",
    drafter: "EagleConfig | None",
    num_layers: int,
    drafts: int,
    dtype: str,
    device: str,
    found: Judgement,
) -> None:
    """Determine how much KV a worker has; on a GPU that depends on what weights leave, which workers log at start.

    Where it is known, a size that no worker could start with is an error here, as it is there (`worker.loading`).
    """
    from baton.model.checkpoint.fp8_scheme import kv_refusal

    kv_dtype = config.kv_cache_dtype.of(dtype)
    for head_dim in {sizes.head_dim} if drafter is None else {sizes.head_dim, drafter.sizes.head_dim}:
        refusal = kv_refusal(config.kv_cache_dtype, head_dim, is_latent=sizes.latent is not None)
        found.errors += [] if refusal is None else [refusal]
    more = () if drafter is None else (drafter.kv_layer(kv_dtype),)
    layers = (*sizes.kv_layers(num_layers, kv_dtype, dtype), *more)
    layout = KVLayout(model_hash="", layers=layers, block_size=config.block_size)
    found.facts |= {"kv_bytes_per_token": layout.bytes_per_position, "kv_tokens": None}
    found.facts |= {"state_bytes_per_sequence": layout.bytes_per_state_slot, "state_checkpoints": None}
    found.facts["state_checkpoint_interval"] = config.state_checkpoint_interval
    _collect(found, layout.require_state, config.state_checkpoint_interval)
    if device != "cpu":
        _collect(found, _judge_kernels, sizes, config.numerics)
        return
    num_slots = (
        layout.num_state_slots(config.max_num_seqs or CPU_NUM_SEQS) + layout.has_state
    )  # one is the scratch slot
    room_bytes = (config.kv_memory_mib << 20) - num_slots * layout.bytes_per_state_slot
    num_checkpoints = layout.num_checkpoints(room_bytes) if config.prefix_cache else 0
    found.facts["state_checkpoints"] = num_checkpoints
    if layout.has_state and config.prefix_cache and not num_checkpoints:
        found.notes.append(NO_PREFIX_CACHE)
    room_bytes -= num_checkpoints * layout.bytes_per_state_slot
    num_blocks = room_bytes // layout.bytes_per_block - 1  # one is the null block
    if num_blocks < 1:
        message = f"the memory for KV holds no block of {layout.bytes_per_block} bytes; raise kv_memory_mib"
        found.errors.append(ConfigInvalid(message, keys=["kv_memory_mib"]))
        return
    found.facts["kv_tokens"] = kv_tokens = num_blocks * config.block_size
    wanted, fits = found.facts["max_model_len"], kv_tokens - drafts
    holds = f"the KV pool holds {kv_tokens} positions, drafts among them"
    if fits < wanted and config.max_model_len is not None:
        message = f"max_model_len {wanted}: {holds}; lower it, or raise kv_memory_mib"
        found.errors.append(ConfigInvalid(message, keys=["max_model_len", "kv_memory_mib"]))
    elif fits < wanted:
        found.facts["max_model_len"] = fits
        found.notes.append(f"max_model_len {fits}, not the model's: {holds}")


def _judge_headers(
    sizes: "ModelConfig", model: ModelDirectory, found: Judgement
) -> "tuple[ModelConfig, Mapping[str, StoredTensor]]":
    """Read the files' headers; return them, and the sizes with the LM head that the files contain."""
    from baton.model.checkpoint.published_names import by_published_names
    from baton.model.checkpoint.tied_head import head_note, with_stored_head
    from baton.model.checkpoint.weights import read_headers

    headers = by_published_names(sizes, read_headers(model.path))
    served = with_stored_head(sizes, headers)
    _collect(found, head_note, sizes, served)
    return served, headers


def _judge_tensors(
    config: ServeConfig,
    sizes: "ModelConfig",
    headers: "Mapping[str, StoredTensor]",
    spec: "TensorSpec",
    dtype: str,
    found: Judgement,
) -> Collection[str]:
    """Compare the files' headers with what the model needs; return the names of weights that stay float8."""
    from baton.model.checkpoint.mtp_fit import require_copies
    from baton.model.tensor_spec import check_tensors
    from baton.model.tp_fit import require_cut_float8

    float8 = check_tensors(spec, headers, sizes.fp8)
    _collect(found, require_copies, spec, headers)
    for size in dict.fromkeys((config.tp_prefill, config.tp_decode)):
        _collect(found, require_cut_float8, spec, float8, size)
    num_float16 = sum(headers[name].dtype_name == "F16" for name in spec.required)
    if num_float16 and dtype == "bfloat16":
        found.notes.append(f"{num_float16} float16 weights are rounded to bfloat16, which has 3 bits less")
    return () if sizes.fp8 is None else _judge_float8(config, sizes, float8, spec, dtype, found)


def _judge_float8(
    config: ServeConfig, sizes: "ModelConfig", float8: "Fp8Tensors", spec: "TensorSpec", dtype: str, found: Judgement
) -> Collection[str]:
    """Return the float8 weights that stay float8 at every rank; add a note about the others."""
    from baton.model.checkpoint.fp8_fit import dequantized_weights

    kept = {name for name in float8.scales if name in spec.required}
    num_float8 = len(kept)
    for size in dict.fromkeys((config.tp_prefill, config.tp_decode)):
        whys = dequantized_weights(sizes, float8, spec, dtype, size)
        kept -= set(whys)
        if whys:
            at = f" on {size} ranks" if config.tp_prefill != config.tp_decode else ""
            counts = ", ".join(f"{count} because {why}" for why, count in Counter(whys.values()).most_common())
            found.notes.append(f"{len(whys)} of {num_float8} float8 weights are computed as {dtype}{at}: {counts}")
    return kept


def _judge_quantization(config: ServeConfig, sizes: "ModelConfig", dtype: str, device: str, found: Judgement) -> None:
    """Determine how weights are quantized, and where the computation differs from the checkpoint's scheme."""
    from baton.model.checkpoint.fp8_scheme import invariant_refusal, made_refusal
    from baton.model.checkpoint.fp8_tensors import GEMM_DTYPES

    scheme, asked = sizes.fp8, config.quantization.value
    found.facts["weights"] = str(scheme) if scheme else None if asked == "none" else f"{asked}, made at load"
    has_order = config.tp_prefill == config.tp_decode == 1 and (device == "cuda" or config.kernels == "triton")
    is_ordered = config.numerics is not Numerics.INVARIANT or has_order
    if scheme is None and asked != "none":
        refusal = made_refusal(dtype, is_ordered=is_ordered)
        found.errors += [] if refusal is None else [refusal]
    if scheme is not None and scheme.method == "fbgemm_fp8":
        found.notes.append("its activation_scale_ub is not used: activations are not quantized, and none is clipped")
    if scheme is None or not scheme.may_stay_float8 or dtype not in GEMM_DTYPES:
        return
    if scheme.is_static:
        found.notes.append("its input_scale is not used: 128 activations are scaled together, as they come")
    if not is_ordered:
        found.errors.append(invariant_refusal())


def _judge_tokenizer(config: ServeConfig, model: ModelDirectory) -> str | None:
    from baton.core.requests.tokenizer import Tokenizer

    if config.is_dummy and not (model.path / "tokenizer.json").exists():
        return None
    if Tokenizer.from_directory(model.path).eos_token_ids:
        return None
    return "no file names an EOS token of the model: answers end at max_tokens, stop strings and stop_token_ids alone"


def _judge_kernels(sizes: "ModelConfig", numerics: Numerics) -> str | None:
    """Whether layers besides attention over K and V have sizes or numerics without a kernel."""
    from baton.kernels.delta_net.sizes import unfit_delta_sizes
    from baton.kernels.mla.sizes import unfit_latent_sizes

    delta, latent, unfit = sizes.delta_net, sizes.latent, ""
    if delta is not None:
        unfit = unfit_delta_sizes(delta.key_dim, delta.value_dim)
    if latent is not None:
        unfit = unfit_latent_sizes(latent.latent_dim, latent.rope_dim, latent.nope_dim, latent.value_dim)
        if numerics is Numerics.INVARIANT:
            unfit = "attention over latents in invariant numerics"
    return f"no kernel is made for {unfit}: torch computes the model, which is slow" if unfit else None


def _judge_template(config: ServeConfig, model: ModelDirectory) -> str | None:
    from baton.router.openai.chat_template import ChatTemplate

    if ChatTemplate.load(model.path, config.chat_template) is None:
        return "it has no chat template: HTTP serves completions, and chats with --chat-template"
    return None


def _judge_advice(config: ServeConfig, model: ModelDirectory) -> str | None:
    from baton.router.openai.advised_sampling import unused_advice

    return unused_advice(model.path)


def _judge_adapter(config: ServeConfig, model: ModelDirectory) -> str | None:
    """Note an adapter beside whole weights; an adapter alone is refused (`refuse_other_kinds`)."""
    if not (model.path / "adapter_config.json").is_file():
        return None
    return "the LoRA adapter beside its weights (adapter_config.json) is not applied: the weights are served alone"


def _collect(found: Judgement, check: Callable[..., str | None], *arguments: Any) -> None:
    """Run one check; keep its error, or add its result as a note."""
    try:
        note = check(*arguments)
    except BatonError as error:
        found.errors.append(error)
        return
    if note:
        found.notes.append(note)
