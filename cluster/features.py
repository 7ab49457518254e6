"""The documented options whose features are not in this version, and the one sentence that refuses each.

When a feature is built its row goes away; nothing else in the code knows that it was missing.
"""

from baton.core.config import ServeConfig
from baton.core.errors import FeatureNotBuilt

COMMANDS = {
    "top": "`baton top` comes in a later version; `baton status` shows the same counts once.",
    "plan": "`baton plan` comes in a later version; choose --prefill and --decode by hand.",
}


def missing_features(config: ServeConfig) -> list[tuple[str, str]]:
    """(key, sentence) for every option of `config` that is not built."""
    missing = []
    if config.http_port is not None:
        missing.append(("http_port", "--http-port comes in a later version; gRPC is served on --grpc-port."))
    return missing


def refuse_missing_features(config: ServeConfig) -> None:
    """Check that everything asked for is built.

    Raises:
        FeatureNotBuilt: one sentence for each option that is not.
    """
    missing = missing_features(config)
    if missing:
        raise FeatureNotBuilt(" ".join(sentence for _, sentence in missing), keys=[key for key, _ in missing])


def refuse_device(config: ServeConfig, device: str) -> None:
    """Refuse what is not built on a kind of device.

    Raises:
        FeatureNotBuilt: `--tp-decode` above 1 on GPUs: a landing writes into one GPU's memory.
    """
    if config.tp_decode > 1 and device != "cpu":
        message = "--tp-decode above 1 comes in a later version on GPUs; a decode worker of one GPU is built."
        raise FeatureNotBuilt(message, keys=["tp_decode"])


def refuse_command(name: str) -> None:
    """Refuse a command of a later version.

    Raises:
        FeatureNotBuilt: always.
    """
    raise FeatureNotBuilt(COMMANDS[name], command=name)
