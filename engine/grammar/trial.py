"""Compiles grammars in a separate process first, which can be stopped, because a compilation has no bound of its own.

`GrammarTrial` is the worker's side. Its process holds the tokenizer and forks a child for each grammar. The child
converts and compiles the grammar and computes the first mask, within `TRIAL_CPU_S` of CPU time, `TRIAL_WALL_S` of wall
time and `TRIAL_BYTES` of memory; the kernel ends a child that exceeds them. The worker compiles again what passes,
which takes no longer. The process ends when its standard input closes, so at the latest with the worker.
"""

import contextlib
import fcntl
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from concurrent.futures import Future
from typing import IO, Any, Final, NoReturn

from baton.core.errors import BatonError, InvalidGrammar, WorkerStartFailed
from baton.core.requests.answer_structure import STRUCTURE
from baton.engine.grammar.text import library_text, new_matcher, new_tokens, parts_of, refusal

MODULE: Final = "baton.engine.grammar.trial"
TRIAL_CPU_S: Final = 0.8
TRIAL_WALL_S: Final = 20  # enough for a busy machine
TRIAL_BYTES: Final = 1 << 30  # beyond what the process already uses
NICENESS: Final = 5  # steps come first; a higher value could exceed `TRIAL_WALL_S` on a busy machine
START_WALL_S: Final = 60.0
_PIECE_BYTES: Final = 1 << 16


class GrammarTrial:
    """Tries grammars for one tokenizer. Any thread; the process starts with the first grammar.

    Args:
        setup: arguments of `new_tokens`.
    """

    def __init__(self, setup: tuple[str, int, int]) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()

    def text_of(self, kind: str, text: str, limits: dict[str, Any], *, is_compact: bool) -> str:
        """The library's text of a grammar that compiles within the limits.

        Raises:
            InvalidGrammar: it does not compile, or not within the limits.
            WorkerStartFailed: the process cannot be started, has ended, or does not answer.
        """
        job = {"kind": kind, "text": text, "limits": limits, "is_compact": is_compact}
        try:
            answer = self._ask(job).result(START_WALL_S + TRIAL_WALL_S)
        except TimeoutError as error:
            raise WorkerStartFailed("the process that tries grammars does not answer") from error
        if "error" in answer:
            raise InvalidGrammar(answer["error"], kind=kind)
        if "text" not in answer:
            raise refusal(kind, f"compiling it takes more than {TRIAL_CPU_S:g} s, or too much memory")
        result: str = answer["text"]
        return result

    def _ask(self, job: dict[str, Any]) -> Future[dict[str, Any]]:
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._waiting = {}  # requests to an earlier process are failed by its reader
                self._process = self._start()
            number = next(self._numbers)
            self._waiting[number] = answer
            assert self._process.stdin is not None
            line = json.dumps(job | {"number": number}).encode() + b"\n"
            with contextlib.suppress(BrokenPipeError):  # the reader fails the waiting requests
                self._process.stdin.write(line)
                self._process.stdin.flush()
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(self._setup).encode() + b"\n")
        reader = threading.Thread(target=_read, args=(process, self._waiting), name="grammar-trial", daemon=True)
        reader.start()
        weakref.finalize(self, _close, process)
        return process


def _read(process: subprocess.Popen[bytes], waiting: dict[int, Future[dict[str, Any]]]) -> None:
    """Deliver answers to the waiting futures, until the process ends."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            answer = json.loads(line)
            found = waiting.pop(answer["number"], None)
            if found is not None:
                found.set_result(answer)
    process.wait()
    for number in tuple(waiting):
        found = waiting.pop(number, None)
        if found is not None:
            found.set_exception(WorkerStartFailed("the process that tries grammars has ended"))


def _close(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()


def main() -> None:
    """Run the trial process: fork a child for each line, until the standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    source, results = sys.stdin.buffer, sys.stdout.fileno()
    setup = json.loads(source.readline())
    tokens: Any = None
    why = ""
    try:
        tokens = new_tokens(*setup)
    except InvalidGrammar as error:
        why = error.message
    with tempfile.TemporaryFile() as lock:
        while line := source.readline():
            job = json.loads(line)
            if tokens is None:
                _tell(results, lock, {"number": job["number"], "error": why})
            elif os.fork() == 0:
                _supervise(tokens, job, results, lock)


def _supervise(tokens: Any, job: dict[str, Any], results: int, lock: IO[bytes]) -> NoReturn:
    """Fork the child that does the work, and report its outcome, also if it was killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    read_end, write_end = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(read_end)
        _work(tokens, job, write_end)
    os.close(write_end)
    said = b""
    while piece := os.read(read_end, _PIECE_BYTES):
        said += piece
    _, status = os.waitpid(worker, 0)
    answer = json.loads(said) if status == 0 else {}
    _tell(results, lock, answer | {"number": job["number"]})
    os._exit(0)


def _work(tokens: Any, job: dict[str, Any], output: int) -> NoReturn:
    """Try one grammar. An exceeded limit ends this process by a signal, or by a failed allocation."""
    status = 1
    try:
        os.nice(NICENESS)
        signal.setitimer(signal.ITIMER_PROF, TRIAL_CPU_S)
        signal.setitimer(signal.ITIMER_REAL, TRIAL_WALL_S)
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + TRIAL_BYTES, used + TRIAL_BYTES))
        os.close(sys.stderr.fileno())  # a failed allocation prints there
        answer = json.dumps(_tried(tokens, job)).encode()
        while answer:
            answer = answer[os.write(output, answer) :]
        status = 0
    finally:
        os._exit(status)


def _tried(tokens: Any, job: dict[str, Any]) -> dict[str, str]:
    kind = job["kind"]
    try:
        text = library_text(kind, job["text"], is_compact=job["is_compact"])
        matcher = new_matcher(tokens, kind, text, job["limits"])
        matcher.compute_bitmask()
        if matcher.is_error():
            return {"error": refusal(kind, matcher.get_error()).message}
        # The first mask of a whole answer does not cover its parts. For a part that refers to itself, the library may
        # find only now that it matches nothing, and would otherwise report that in the middle of the answer.
        for part in parts_of(text) if kind == STRUCTURE else ():
            if '"$ref"' not in part:
                continue
            matcher = new_matcher(tokens, kind, part, job["limits"])
            matcher.compute_bitmask()
            if matcher.is_error():
                return {"error": refusal(kind, matcher.get_error()).message}
    except BatonError as error:
        return {"error": error.message}
    except MemoryError:
        raise  # a limit, which gets no message
    except Exception as error:  # noqa: BLE001  the child's boundary: without a message it would look like a limit
        return {"error": refusal(kind, f"it cannot be read ({type(error).__name__}: {error})").message}
    return {"text": text}


def _tell(results: int, lock: IO[bytes], answer: dict[str, Any]) -> None:
    """Write one whole line; a lock keeps it apart from those of other children."""
    line = json.dumps(answer).encode() + b"\n"
    fcntl.lockf(lock, fcntl.LOCK_EX)
    try:
        with contextlib.suppress(BrokenPipeError):  # the worker is gone
            while line:
                line = line[os.write(results, line) :]
    finally:
        fcntl.lockf(lock, fcntl.LOCK_UN)


if __name__ == "__main__":
    main()
