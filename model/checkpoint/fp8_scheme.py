"""Reads how a checkpoint's weights are float8: `quantization_config` in the published forms.

There are four writers: "fp8" (Qwen3-FP8, DeepSeek; AutoFP8, which scales whole tensors), "compressed-tensors"
(llm-compressor), "modelopt" (also separately in hf_quant_config.json) and "fbgemm_fp8" (Meta's Llama 3.1 405B). This
module reads how weights are scaled, and whether activations are quantized too. It does not read which modules are
float8: their tensors say that (`fp8_tensors`), so lists of excluded modules need not be interpreted. Every key that is
not known to have no effect is rejected by name.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from baton.core.errors import ModelFileDamaged, ModelMissing, ModelUnsupported
from baton.core.numerics import KVDtype
from baton.kvcache.layout import WORD_BYTES

BLOCK_LEN = 128  # of the float8 kernels, in both dimensions
MODELOPT_FILE = "hf_quant_config.json"
_BLOCK = [BLOCK_LEN, BLOCK_LEN]
_PACKED = {
    "pack-quantized": "INT4 or INT8", "int-quantized": "INT4 or INT8", "nvfp4-pack-quantized": "NVFP4",
    "mxfp4-pack-quantized": "MXFP4", "mxfp6-pack-quantized": "MXFP6", "mxfp8-quantized": "MXFP8",
}  # fmt: skip
_SERVED = "this version serves unquantized and float8 checkpoints"


class ScaleKind(StrEnum):
    """What one scale of a weight covers."""

    BLOCK = "block of 128 x 128"
    TENSOR = "tensor"
    CHANNEL = "channel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Scheme:
    """How a checkpoint's float8 weights are to be read.

    Attributes:
        method: its `quant_method`.
        kinds: which scales weights may have; one, unless groups of modules differ.
        suffix: replaces "weight" in a scale's name.
        quantizes_inputs: activations are float8, too; else only weights are, and they are dequantized as they are read.
        is_static: scales of activations were published. Not used: they are computed dynamically here.
        ue8m0: activations get scales that are powers of two, as those of its weights are (DeepSeek-V3.1).
    """

    method: str
    kinds: tuple[ScaleKind, ...]
    suffix: str = "weight_scale"
    quantizes_inputs: bool = True
    is_static: bool = False
    ue8m0: bool = False

    @property
    def may_stay_float8(self) -> bool:
        """Whether any of its weights could be used as stored."""
        return self.quantizes_inputs and self.kinds != (ScaleKind.CHANNEL,)

    def __str__(self) -> str:
        return f"float8 with a scale for each {' or '.join(self.kinds)} ({self.method})"


def read_scheme(values: dict[str, Any], path: Path) -> Fp8Scheme | None:
    """The scheme of a directory, from its config.json; None if its weights are not quantized.

    Raises:
        ModelFileDamaged: hf_quant_config.json is not JSON.
        ModelMissing: it cannot be read.
        ModelUnsupported: it is another kind of quantization, or holds a key or value that is not implemented.
    """
    found = values.get("quantization_config") or values.get("compression_config") or _modelopt_file(path)
    if not found:
        return None
    if not isinstance(found, dict):
        raise _refusal(f"{path}: quantization_config is no mapping", found)
    method = found.get("quant_method") or ("modelopt" if "quantization" in found or "quant_algo" in found else None)
    readers: dict[Any, Callable[[dict[str, Any], Path], Fp8Scheme | None]] = {
        "fp8": _fp8,
        "compressed-tensors": _compressed_tensors,
        "modelopt": _modelopt,
        "fbgemm_fp8": _fbgemm,
    }
    if method not in readers:
        raise _refusal(f"{path} holds {_other_kind(method, found)}; {_SERVED}", method)
    return readers[method](found, path)


def invariant_refusal() -> ModelUnsupported:
    """The error for float8 GEMMs in invariant numerics where no implementation computes them."""
    message = "a float8 checkpoint goes with no --batch-invariant, or with --kernels triton on one rank"
    return ModelUnsupported(message, option="numerics", value="invariant")


def made_refusal(dtype: str, *, is_ordered: bool) -> ModelUnsupported | None:
    """Why weights cannot be quantized to float8 at load; None if they can.

    Args:
        dtype: the model's dtype, by torch's name.
        is_ordered: GEMMs satisfy the numerics; in invariant numerics, they do not if ranks share them.
    """
    problem = "" if is_ordered else "no --batch-invariant, or with --kernels triton on one rank"
    problem = problem if dtype == "bfloat16" else f"--dtype bfloat16, not {dtype}"
    if not problem:
        return None
    return ModelUnsupported(f"--quantization fp8 goes with {problem}", option="quantization", value="fp8")


def kv_refusal(kv_dtype: KVDtype, head_dim: int, *, is_latent: bool = False) -> ModelUnsupported | None:
    """Why KV cannot be narrower than the model's dtype; None if it can be, or is not. `is_latent`: KV is latents."""
    if kv_dtype is not KVDtype.AUTO and is_latent:
        message = f"--kv-cache-dtype {kv_dtype.value} is not implemented for attention over latents"
        return ModelUnsupported(message, option="kv_dtype", value=kv_dtype.value)
    if kv_dtype is KVDtype.AUTO or head_dim % WORD_BYTES == 0:
        return None
    message = f"--kv-cache-dtype {kv_dtype.value} moves {WORD_BYTES} elements at once; heads have {head_dim}"
    return ModelUnsupported(message, option="kv_dtype", value=kv_dtype.value)


def _modelopt_file(path: Path) -> Any:
    """ModelOpt's own file, beside a config.json that need not mention it."""
    file = path / MODELOPT_FILE
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelMissing(f"cannot read {file}: {error.strerror}", path=str(file)) from error
    except (ValueError, RecursionError) as error:
        raise ModelFileDamaged(f"{file} is not JSON: {error}", path=str(file)) from error


def _other_kind(method: Any, found: dict[str, Any]) -> str:
    """Description of the weights of a method that is not implemented."""
    name = str(method)[:80]
    match name:
        case "awq" | "gptq" | "auto-round" | "intel/auto-round":
            return f"INT{found.get('bits', found.get('w_bit', 4))} weights, quantized by {name!r}"
        case "bitsandbytes":
            kind = str(found.get("bnb_4bit_quant_type", "fp4")).upper() if found.get("load_in_4bit") else "INT8"
            return f"{kind} weights, quantized by {name!r}"
    return f"weights quantized by {name!r} (quantization_config)"


def _fp8(found: dict[str, Any], path: Path) -> Fp8Scheme:
    """The scheme of Qwen3-FP8, DeepSeek-V3 and AutoFP8."""
    where = f"{path}: quantization_config"
    _known(
        found, where, "activation_scheme", "fmt", "weight_block_size", "scale_fmt", "dequantize", "modules_to_convert",
        "expert_dtype",
    )  # fmt: skip
    _one_of(found, "activation_scheme", (None, "dynamic", "static"), where)
    _one_of(found, "fmt", (None, "e4m3", "float8_e4m3fn"), where)
    _one_of(found, "weight_block_size", (None, _BLOCK), where)
    _one_of(found, "scale_fmt", (None, "float", "ue8m0"), where)
    _one_of(found, "dequantize", (None, False), where)
    _one_of(found, "modules_to_convert", (None, []), where)
    _one_of(found, "expert_dtype", (None, "fp8"), where)
    is_block = found.get("weight_block_size") is not None
    return Fp8Scheme(
        method="fp8",
        kinds=(ScaleKind.BLOCK if is_block else ScaleKind.TENSOR,),
        suffix="weight_scale_inv" if is_block else "weight_scale",
        is_static=found.get("activation_scheme") == "static",
        ue8m0=found.get("scale_fmt") == "ue8m0",
    )


def _fbgemm(found: dict[str, Any], path: Path) -> Fp8Scheme:
    """The scheme of Meta's Llama-3.1-405B-FP8: a scale for each row of a weight.

    `activation_scale_ub` bounds the scales of activations, which clips outliers. It is ignored: weights with a scale
    per channel are dequantized, and activations are then not quantized.
    """
    _known(found, f"{path}: quantization_config", "activation_scale_ub")
    return Fp8Scheme(method="fbgemm_fp8", kinds=(ScaleKind.CHANNEL,))


def _compressed_tensors(found: dict[str, Any], path: Path) -> Fp8Scheme | None:
    """The scheme of llm-compressor: "float-quantized" (earlier "naive-quantized"); None: KV alone is quantized."""
    where = f"{path}: quantization_config"
    layout = found.get("format")
    for packed in (one for one in _formats(found) if one in _PACKED):
        raise _refusal(f"{path} holds {_PACKED[packed]} weights (compressed-tensors, {packed}); {_SERVED}", packed)
    _known(found, where, "format", "config_groups", "sparsity_config", "transform_config")
    kv_alone = layout == "dense" and not found.get("config_groups")
    _one_of(found, "format", ("dense",) if kv_alone else ("float-quantized", "naive-quantized"), where)
    sparsity = found.get("sparsity_config")
    if not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):  # weights that are stored in full
        _one_of(found, "sparsity_config", (None, {}), where)
    _one_of(found, "transform_config", (None, {}), where)
    kv_scheme = found.get("kv_cache_scheme")
    if isinstance(kv_scheme, dict):
        _one_of(kv_scheme, "strategy", (None, "tensor"), f"{where}.kv_cache_scheme")
    return None if kv_alone else _scheme_of_groups(found, where, "compressed-tensors")


def _formats(found: dict[str, Any]) -> list[str]:
    """The format of all weights and, as "mixed-precision" names none, of each group."""
    groups = found.get("config_groups")
    each = groups.values() if isinstance(groups, dict) else ()
    formats = [found.get("format"), *(group.get("format") for group in each if isinstance(group, dict))]
    return [one for one in formats if isinstance(one, str)]


def _modelopt(found: dict[str, Any], path: Path) -> Fp8Scheme | None:
    """ModelOpt's scheme, flat as in config.json or under "quantization" as in its file; None: KV alone is quantized."""
    where = f"{path}: quantization_config"
    inner = found.get("quantization", found)
    if not isinstance(inner, dict):
        raise _refusal(f"{where}: quantization is no mapping", inner)
    algorithm = inner.get("quant_algo")
    strategies = {"FP8": ScaleKind.TENSOR, "FP8_PER_CHANNEL_PER_TOKEN": ScaleKind.CHANNEL}
    if algorithm is None:
        return None
    if algorithm not in strategies:
        served = f"this version serves {' and '.join(strategies)}"
        raise _refusal(f"{path} holds weights of quant_algo {algorithm!r} (ModelOpt); {served}", algorithm)
    _known(inner, where, "quant_algo", "kv_cache_quant_algo", "config_groups", "quantization")
    if inner.get("config_groups"):
        kinds = (strategies[algorithm],)
        groups = _scheme_of_groups(inner, where, "modelopt", strategy=kinds[0].value)
        return Fp8Scheme(method="modelopt", kinds=kinds, is_static=groups.is_static)
    return Fp8Scheme(method="modelopt", kinds=(strategies[algorithm],), is_static=algorithm == "FP8")


def _scheme_of_groups(found: dict[str, Any], where: str, method: str, strategy: str | None = None) -> Fp8Scheme:
    """The scheme that groups of modules agree on; `strategy` is that of weights if groups do not name it."""
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _refusal(f"{where}: config_groups = {groups!r} names no group", groups)
    read = [_group(group, f"{where}.config_groups.{name}", strategy) for name, group in groups.items()]
    quantizes_inputs = {inputs is not None for _, inputs in read}
    if len(quantizes_inputs) > 1:
        raise _refusal(f"{where}: some config_groups quantize activations and some do not", list(groups))
    return Fp8Scheme(
        method=method,
        kinds=tuple(dict.fromkeys(kind for kind, _ in read)),
        quantizes_inputs=quantizes_inputs == {True},
        is_static=any(inputs == "static" for _, inputs in read),
    )


def _group(group: Any, where: str, strategy: str | None) -> tuple[ScaleKind, str | None]:
    """A group's kind of scale, and whether scales of activations are static or dynamic; None if not quantized."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise _refusal(f"{where}.weights = {weights!r} is no mapping", weights)
    _one_of(group, "output_activations", (None,), where)
    _one_of(group, "format", (None, "float-quantized", "naive-quantized"), where)
    _one_of(weights, "num_bits", (8,), f"{where}.weights")
    _one_of(weights, "type", ("float",), f"{where}.weights")
    _one_of(weights, "symmetric", (None, True), f"{where}.weights")
    _one_of(weights, "dynamic", (None, False), f"{where}.weights")
    kinds = {"block": ScaleKind.BLOCK, "tensor": ScaleKind.TENSOR, "channel": ScaleKind.CHANNEL}
    if strategy is None:
        _one_of(weights, "strategy", tuple(kinds), f"{where}.weights")
        kind = kinds[weights["strategy"]]
    else:
        kind = ScaleKind(strategy)
    if kind is ScaleKind.BLOCK:
        _one_of(weights, "block_structure", (_BLOCK, f"{BLOCK_LEN}x{BLOCK_LEN}"), f"{where}.weights")
    inputs = group.get("input_activations")
    if inputs is None:
        return kind, None
    if not isinstance(inputs, dict):
        raise _refusal(f"{where}.input_activations = {inputs!r} is no mapping", inputs)
    _one_of(inputs, "num_bits", (8,), f"{where}.input_activations")
    _one_of(inputs, "type", ("float",), f"{where}.input_activations")
    _one_of(inputs, "symmetric", (None, True), f"{where}.input_activations")
    return kind, "dynamic" if inputs.get("dynamic") else "static"


# The writer; excluded modules, which are stored unquantized; scales of KV, which --kv-cache-dtype fp8 enables.
_CHANGES_NOTHING = {
    "quant_method", "producer", "provider", "version", "quantization_status", "global_compression_ratio",
    "modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "kv_cache_scheme",
}  # fmt: skip


def _known(found: dict[str, Any], where: str, *keys: str) -> None:
    for key in sorted(set(found) - _CHANGES_NOTHING - set(keys), key=str):
        if found[key] not in (None, {}, []):
            raise _refusal(f"{where}.{key} = {found[key]!r} is not implemented", key)


def _one_of(found: dict[str, Any], key: str, values: tuple[Any, ...], where: str) -> None:
    value = found.get(key)
    if value not in values:
        known = " or ".join(repr(one) for one in values if one is not None)
        raise _refusal(f"{where}.{key} = {value!r} is not implemented" + (f"; {known} is" if known else ""), key)


def _refusal(message: str, value: Any) -> ModelUnsupported:
    return ModelUnsupported(message, option="quantization_config", value=value)
