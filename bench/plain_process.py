"""Processes of a bench that are modules of Baton: started, heard, ended. Each dies with its parent."""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from baton.core.errors import WorkerStartFailed
from baton.core.inside import ENVIRONMENT, DeploymentSecret

START_LIMIT_S = 60.0
STOP_LIMIT_S = 5.0


class PlainProcess:
    """`python -m MODULE`; it ends when its stdin closes.

    Args:
        module: to be run.
        *arguments: of its command line.
        err: where its stderr goes.
    """

    def __init__(self, module: str, *arguments: object, err: Path) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment[ENVIRONMENT] = DeploymentSecret.of_process().text
        command = [sys.executable, "-P", "-m", module, *map(str, arguments)]
        self._module, self._err = module, err
        with err.open("ab") as stderr:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=environment
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def first_line(self) -> dict[str, Any]:
        """What it says once it serves.

        Raises:
            WorkerStartFailed: it ended, or said nothing in time.
        """
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline_s:
            if select.select([self._process.stdout], [], [], 0.1)[0]:
                line = self._process.stdout.readline()
                if not line:
                    break
                said: dict[str, Any] = json.loads(line)
                return said
        last = self._err.read_text(errors="replace")[-500:]
        raise WorkerStartFailed(f"{self._module} did not start: {last}", worker_id=self._module)

    def end(self) -> None:
        """Ask, then kill."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
