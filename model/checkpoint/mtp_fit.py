"""Whether a checkpoint's MTP head can draft: from its config and headers, before anything is loaded; without torch."""

from collections.abc import Mapping
from pathlib import Path

from baton.core.errors import ModelTensorMissing, ModelUnsupported
from baton.model.checkpoint.published_names import by_published_names
from baton.model.checkpoint.weights import StoredTensor, are_alike, read_headers
from baton.model.config import ModelConfig
from baton.model.tensor_spec import TensorSpec


def stores_mtp(path: Path) -> bool:
    """Whether any tensor of the MTP layers that config.json names is stored.

    transformers drops them when it saves a model, but leaves config.json as it was. An incomplete head counts as
    stored.

    Raises:
        Exception: as `ModelConfig.from_directory`, `read_headers` and `by_published_names`.
    """
    config = ModelConfig.from_directory(path, made_weights="not asked for")
    return any(name.startswith(config.mtp_names.prefixes) for name in by_published_names(config, read_headers(path)))


def require_mtp(config: ModelConfig, path: Path) -> None:
    """Check that there is one MTP layer to draft with.

    Raises:
        ModelTensorMissing: there is none.
        ModelUnsupported: there are several.
    """
    if config.num_mtp_layers == 0:
        message = (
            f"{path} has no MTP head to draft with; --speculative-method ngram drafts without one, none not at all"
        )
        raise ModelTensorMissing(message, path=str(path), tensors=[])
    if config.num_mtp_layers > 1:
        message = f"{path} has {config.num_mtp_layers} MTP layers; this version drafts with one"
        message += "; --speculative-method none would serve it"
        raise ModelUnsupported(message, option="mtp_num_hidden_layers", value=config.num_mtp_layers)


def require_copies(spec: TensorSpec, stored: Mapping[str, StoredTensor]) -> str | None:
    """Check, by samples of their bytes, that the head's copies of trunk tensors are the trunk's, which it drafts with.

    A float8 copy of a tensor that is not float8 (GLM-4.5-FP8 quantizes the head's LM head, not the trunk's) cannot be
    compared. It passes: the trunk verifies every draft, so using its own LM head instead changes no token.

    Returns:
        A sentence about what was not compared.

    Raises:
        ModelUnsupported: the head has an embedding or an LM head of its own.
    """
    rounded = []
    for name, original in spec.mtp.copies.items():
        if name not in spec.optional or name not in stored:
            continue
        trunk = stored[original if original in stored else "model.embed_tokens.weight"]
        if stored[name].is_float8 and not trunk.is_float8:
            rounded.append(name)
        elif not are_alike(stored[name], trunk):
            message = f"{name} is not the trunk's, and an MTP head with its own is not implemented"
            message += "; --speculative-method none would serve the model without it"
            raise ModelUnsupported(message, option=name, value=list(stored[name].shape))
    if not rounded:
        return None
    return f"{' and '.join(rounded)} is the trunk's in float8: the MTP head drafts with the trunk's own"
