"""The documented options whose features are not in this version, and the one sentence that refuses each.

When a feature is built its row goes away; nothing else in the code knows that it was missing.
"""

from baton.core.config import ServeConfig
from baton.core.errors import FeatureNotBuilt

COMMANDS = {
    "top": "`baton top` comes in a later version; `baton status` shows the same counts once.",
    "plan": "`baton plan` comes in a later version; choose --prefill and --decode by hand.",
}
_TP = "--{} above 1 comes in a later version; one device per worker is built."


def missing_features(config: ServeConfig) -> list[tuple[str, str]]:
    """(key, sentence) for every option of `config` that is not built."""
    missing = []
    if config.tp_prefill > 1:
        missing.append(("tp_prefill", _TP.format("tp-prefill")))
    if config.tp_decode > 1:
        missing.append(("tp_decode", _TP.format("tp-decode")))
    if config.mtp == "auto":
        missing.append(("mtp", "--mtp auto comes in a later version; a number from 0 to 4 is built."))
    if config.scheduling == "async":
        missing.append(("scheduling", "--scheduling async comes in a later version; sync is built."))
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


def refuse_command(name: str) -> None:
    """Refuse a command of a later version.

    Raises:
        FeatureNotBuilt: always.
    """
    raise FeatureNotBuilt(COMMANDS[name], command=name)
