"""The documented commands whose features are not in this version, and the one sentence that refuses each.

When a feature is built its row goes away; nothing else in the code knows that it was missing.
"""

from baton.core.errors import FeatureNotBuilt

COMMANDS = {
    "plan": "`baton plan` comes in a later version; choose --prefill and --decode by hand.",
}


def refuse_command(name: str) -> None:
    """Refuse a command of a later version.

    Raises:
        FeatureNotBuilt: always.
    """
    raise FeatureNotBuilt(COMMANDS[name], command=name)
