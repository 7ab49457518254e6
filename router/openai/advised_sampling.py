"""Sampling values that a model's makers advise, for requests that name none."""

import json
from pathlib import Path
from typing import Any, Final

from baton.core.errors import InvalidSampling, ModelFileDamaged
from baton.core.requests.sampling import SamplingParams

_DEFAULTS: Final = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}


def advised_sampling(directory: Path) -> dict[str, Any]:
    """What a model's generation_config.json advises, as vLLM does by default; but for what `unused_advice` names.

    Raises:
        ModelFileDamaged: the file is there and cannot be read as what it should be.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        values = {name: kind(found[name]) for name, kind in _DEFAULTS.items() if found.get(name) is not None}
        if values.get("top_k") == -1:  # vLLM's other way of saying: all
            values["top_k"] = 0
        if values.get("top_p") == 0:
            del values["top_p"]
        SamplingParams(**values).validate(vocab_size=0)  # else each request that names none would be refused for it
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, InvalidSampling) as error:
        raise ModelFileDamaged(f"{path} holds no usable sampling values: {error}", path=str(path)) from error
    return values


def unused_advice(directory: Path) -> str | None:
    """What generation_config.json advises and is not used, in a sentence: a `top_p` of 0, which no request may have.

    vLLM takes it, and then refuses every request that names none.

    Raises:
        ModelFileDamaged: as `advised_sampling`.
    """
    used = advised_sampling(directory)
    path = directory / "generation_config.json"
    if not path.is_file() or "top_p" in used or json.loads(path.read_text(encoding="utf-8")).get("top_p") is None:
        return None
    return f"{path.name} advises top_p = 0, which keeps no token: it is not used"
