"""A router as it is deployed, a plain process, in front of echo workers, each in a process of its own."""

import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import grpc

from baton.bench.processes import PlainProcess
from baton.core.errors import WorkerStartFailed
from baton.proto import admin_pb2, admin_pb2_grpc

READY_LIMIT_S: Final = 60.0
LOOK_S: Final = 0.1
MODEL: Final = "echo"


class EchoFleet:
    """Context manager; the processes end with the block.

    Args:
        model_path: model whose tokenizer and length the router uses.
        num_prefill: number of prefill workers.
        num_decode: number of decode workers.
        prefill: further arguments of their command line.
        decode: likewise.
        router: further arguments of the router's command line.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        prefill: tuple[object, ...] = (),
        decode: tuple[object, ...] = (),
        router: tuple[object, ...] = (),
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._model_path = model_path
        self._numbers = {"prefill": num_prefill, "decode": num_decode}
        self._arguments = {"prefill": prefill, "decode": decode}
        self._router_arguments = router
        self.address = ""
        self.router_pid = 0
        self.worker_pids: list[int] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self, stack: contextlib.ExitStack) -> None:
        err = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "err"
        command = (
            *("--port", 0, "--model-name", MODEL, "--model-path", self._model_path, "--load-format", "dummy"),
            *("--request-timeout-s", 600, "--exit-with-parent"),
        )
        router = stack.enter_context(PlainProcess("baton.router", *command, *self._router_arguments, err=err))
        self.address = f"127.0.0.1:{router.first_line()['grpc_port']}"
        self.router_pid = router.pid
        workers = []
        for role, number in self._numbers.items():
            for at in range(number):
                about = ("--role", role, "--worker-id", f"{role}-{at}", "--router", self.address, "--model-name", MODEL)
                worker = PlainProcess("baton.bench.router_bench.echo_worker", *about, *self._arguments[role], err=err)
                workers.append(stack.enter_context(worker))
        for worker in workers:
            worker.first_line()
        self.worker_pids = [worker.pid for worker in workers]
        self._wait(len(workers))

    def _wait(self, num_workers: int) -> None:
        with grpc.insecure_channel(self.address) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)

            def is_ready() -> bool:
                status = admin.Status(admin_pb2.StatusRequest(), timeout=5.0)
                return bool(sum(worker.alive for worker in status.workers) == num_workers)

            wait_until(is_ready, "a worker did not report in time")


def wait_until(is_true: Callable[[], bool], problem: str, limit_s: float = READY_LIMIT_S) -> None:
    """Poll until a condition is true.

    Raises:
        WorkerStartFailed: it was not true in time.
    """
    deadline_s = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() >= deadline_s:
            raise WorkerStartFailed(problem, timed_out=True)
        time.sleep(LOOK_S)
