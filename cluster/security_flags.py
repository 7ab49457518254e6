"""Flags of a client's certificates and key, added to the signatures of the commands that call a deployment.

Nothing heavy is imported before a command runs: `--help` is to be quick. Secrets come by file or environment only; on
a command line everybody who lists processes would see them.
"""

import functools
import os
from typing import Any

from baton.cluster.cli_types import Command, extended, option, parameter

KEY_VARIABLE = "BATON_API_KEY"
_ACCESS = {
    "tls_ca_file": "who signed the deployment's certificate; the connection is then encrypted",
    "tls_cert_file": "own certificate, where the deployment asks for one",
    "tls_key_file": "private key of --tls-cert-file",
    "tls_server_name": "the name in the deployment's certificate, if it is not the address",
    "api_key_file": f"file with an API key; or set {KEY_VARIABLE}",
}


def with_access(command: Command) -> Command:
    """Add certificates and key of a client, or take them from `BATON_...`; what the command opens has them."""

    @functools.wraps(command)
    def reach(**values: Any) -> int:
        from baton.client.access import Access
        from baton.cluster.access import using
        from baton.cluster.outcome import Output
        from baton.core.errors import BatonError

        given = {name: values.pop(name) or "" for name in _ACCESS}
        try:
            access = Access.of(given, os.environ.get(KEY_VARIABLE, ""))
        except BatonError as error:
            return Output(bool(values.get("json"))).fail(error)
        with using(access):
            return command(**values)

    flags = [
        parameter(name, str, option(text, panel="Access", variable=f"BATON_{name.upper()}"))
        for name, text in _ACCESS.items()
    ]
    return extended(reach, flags)
