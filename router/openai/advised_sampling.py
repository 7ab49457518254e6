"""Reads the sampling values that a model's makers recommend, for requests that set none."""

import json
from pathlib import Path
from typing import Any, Final

from baton.core.errors import InvalidSampling, ModelFileDamaged
from baton.core.requests.sampling import SamplingParams

_DEFAULTS: Final = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}


def advised_sampling(directory: Path) -> dict[str, Any]:
    """Read the values that generation_config.json recommends, as vLLM does, except those that `unused_advice` reports.

    Raises:
        ModelFileDamaged: the file exists but has no usable values.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        values = {name: kind(found[name]) for name, kind in _DEFAULTS.items() if found.get(name) is not None}
        if values.get("top_k") == -1:  # vLLM's other spelling of "all tokens"
            values["top_k"] = 0
        if values.get("top_p") == 0:
            del values["top_p"]
        SamplingParams(**values).validate(vocab_size=0)  # else every request that sets no values would be refused
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, InvalidSampling) as error:
        raise ModelFileDamaged(f"{path} holds no usable sampling values: {error}", path=str(path)) from error
    return values


def unused_advice(directory: Path) -> str | None:
    """Describe what generation_config.json recommends but is not used: a `top_p` of 0, which no request may have.

    vLLM uses it, and then refuses every request that sets no `top_p`.

    Raises:
        ModelFileDamaged: as in `advised_sampling`.
    """
    used = advised_sampling(directory)
    path = directory / "generation_config.json"
    if not path.is_file() or "top_p" in used or json.loads(path.read_text(encoding="utf-8")).get("top_p") is None:
        return None
    return f"{path.name} advises top_p = 0, which keeps no token: it is not used"
