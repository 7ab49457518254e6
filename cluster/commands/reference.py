"""Completions by one plain process, for comparison: reads one JSON object on stdin, writes one on stdout.

Input: `{"config": {ServeConfig keys}, "requests": [{CompletionArguments fields}, ...]}`; output: `{"completions":
[...]}`.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from baton.cluster.commands.completion import CompletionArguments
from baton.core.config import ServeConfig
from baton.core.errors import BatonError


class ReferenceProcess:
    """The reference process, which computes while its parent does other work."""

    def __init__(self, config: ServeConfig, requests: Sequence[CompletionArguments]) -> None:
        question = {"config": config.model_dump(mode="json"), "requests": [asdict(asked) for asked in requests]}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "baton.cluster.commands.reference"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question))
        self._process.stdin.flush()

    def completions(self, timeout_s: float) -> list[dict[str, Any]]:
        """Wait for the completions.

        Raises:
            BatonError: the process failed, or took too long.
        """
        try:
            out, err = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            self.close()
            raise BatonError(f"the reference took longer than {timeout_s:.0f} s") from error
        if self._process.returncode != 0:
            raise BatonError(f"the reference failed: {err.strip()[-500:]}")
        return list(json.loads(out)["completions"])

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def main() -> None:
    """Compute the requests on stdin."""
    from baton.cluster.commands.local import LocalCompleter

    question = json.load(sys.stdin)
    completer = LocalCompleter(ServeConfig.from_mapping(question["config"]))
    completions = []
    for values in question["requests"]:
        asked = CompletionArguments(**(values | {"stop": tuple(values["stop"])}))
        completions.append(completer.complete(asked, lambda text: None).as_data())
    json.dump({"completions": completions}, sys.stdout)


if __name__ == "__main__":
    main()
