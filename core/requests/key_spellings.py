"""Other spellings of `ServeConfig`'s keys: vLLM's, if they mean the same, and former names."""

import json
import re
from typing import Any

from baton.core.errors import ConfigInvalid

RENAMED = {
    "chunk_len": "max_num_batched_tokens",
    "gpu_memory_share": "gpu_memory_utilization",
    "mtp": "num_speculative_tokens",
    "weights": "load_format",
    "kv_dtype": "kv_cache_dtype",
    "host_kv_gib": "kv_offloading_size",
    "numerics": "batch_invariant",
}


def expanded(values: dict[str, Any]) -> dict[str, Any]:
    """Replace vLLM's spellings by the keys they stand for."""
    values = dict(values)
    size = values.get("tensor_parallel_size")
    if size is not None:
        values = {"tp_prefill": size, "tp_decode": size} | values
    if values.get("kv_cache_dtype") == "fp8_e4m3":
        values["kv_cache_dtype"] = "fp8"
    if isinstance(values.get("served_model_name"), str):
        values["served_model_name"] = (values["served_model_name"],)
    if values.get("speculative_config"):
        given = _speculative(values["speculative_config"])
        for key, value in given.items():
            if values.get(key) not in (None, value):
                message = f"speculative_config: it says {key} = {value}, and {key} is {values[key]}"
                raise ConfigInvalid(message, keys=["speculative_config", key])
        values |= given | {"speculative_config": ""}
    return values


_METHODS = {
    "mtp": ("num_speculative_tokens",),
    "eagle3": ("model", "num_speculative_tokens"),
    "ngram": ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
}


def _speculative(given: Any) -> dict[str, Any]:
    """Translate vLLM's `--speculative-config` into keys of `ServeConfig`; a JSON object, or a mapping in a file."""
    keys = ["speculative_config"]
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ConfigInvalid(f"speculative_config: not JSON: {error}", keys=keys) from error
    if not isinstance(given, dict):
        raise ConfigInvalid("speculative_config: not a JSON object", keys=keys)
    method = str(given.get("method", "mtp"))
    if re.fullmatch(r"[a-z0-9_]{1,40}_mtp", method):  # deepseek_mtp and the like mean the same
        method = "mtp"
    if method not in _METHODS:
        raise ConfigInvalid(
            f"speculative_config: method {method[:80]!r}; this version drafts by {', '.join(_METHODS)}", keys=keys
        )
    known = {"method", *_METHODS[method]}
    unknown = sorted(set(map(str, given)) - known)
    if unknown:
        message = f"speculative_config: {', '.join(unknown)[:200]}: no key of {method}, which reads"
        raise ConfigInvalid(f"{message} {', '.join(sorted(known))}", keys=keys)
    known_values = {key: value for key, value in given.items() if key in _METHODS[method]}
    if "model" in known_values:
        known_values["draft_model"] = known_values.pop("model")
    return {"speculative_method": method} | known_values
