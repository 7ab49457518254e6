"""Whether a checkpoint's MTP head can draft: read off its config, before anything is loaded; without torch."""

from pathlib import Path

from baton.core.errors import ModelTensorMissing, ModelUnsupported
from baton.model.config import ModelConfig


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
