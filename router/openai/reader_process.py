"""Parses bodies that would block the router's event loop: `python -m baton.router.openai.reader_process`.

The process reads frames from stdin, answers each on stdout, and ends when stdin closes. The first frame holds what it
needs to parse bodies. A body that takes more CPU time than `MAX_CPU_S` is refused. Any other failure becomes the answer
to that body, and the process goes on.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import IO, Any, Final, NoReturn

from tokenizers import Tokenizer as _FastTokenizer

from baton.core.errors import InvalidRequest, as_internal
from baton.core.requests.tokenizer import Tokenizer
from baton.core.telemetry.logs import configure_inherited, rotates
from baton.router.openai.chat_template import ChatTemplate
from baton.router.openai.front import Forms
from baton.router.openai.understand import understand
from baton.router.openai.understood import LENGTH_BYTES, ReadingJob, joined, parted
from baton.router.served_model import ServedModel

MAX_CPU_S: Final = 10.0  # per body
MAX_RSS_BYTES: Final = 512 << 20  # a process that has grown to this size is ended after its answer, and replaced
MAX_MORE_BYTES: Final = 1 << 30  # of additional address space, for one body
LAST: Final = b"last"  # prefix of an answer: this process has grown, and should read no more


class _TooLong(BaseException):
    """The CPU limit is exceeded. A BaseException, so that no handler on the way catches it."""


def first_frame(forms: Forms, model: ServedModel) -> bytes:
    """Build the first frame, with what a process needs to know."""
    template = forms.template
    about = {
        "name": forms.name,
        "source": model.source,
        "tokenizer": "" if model.source else model.tokenizer.to_json(),
        "template": None
        if template is None
        else [template.sources, template.special_tokens, template.tool_call_parser],
        "defaults": dict(forms.defaults),
        "marks": dict(forms.marks),
        "hidden": sorted(forms.hidden),
        "log_rotates": rotates(),
    }
    return joined([json.dumps(about).encode("ascii")])


def job_frame(job: ReadingJob, body: bytes) -> bytes:
    """Build the frame of one body."""
    return joined([json.dumps(asdict(job)).encode("ascii"), body])


def forms_of(frame: bytes) -> Forms:
    """Parse the first frame."""
    about = json.loads(parted(frame)[0])
    template = None if about["template"] is None else ChatTemplate(*about["template"])
    return Forms(
        name=about["name"],
        encode=_encoder(about),
        template=template,
        defaults=about["defaults"],
        marks=about["marks"],
        hidden=frozenset(about["hidden"]),
    )


def answer(frame: bytes, forms: Forms) -> list[bytes]:
    """Answer a body: an empty part and the parts of `Understood`, or an error alone."""
    head, body = parted(frame)
    job = ReadingJob(**json.loads(head))
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    try:
        return [b"", *understand(body, forms, job).to_parts()]
    except (_TooLong, MemoryError):
        return [InvalidRequest("the body takes too long, or too much memory, to read").to_wire().encode("ascii")]
    except Exception as error:  # noqa: BLE001  the boundary of a body's processing
        return [as_internal("reading the body", error).to_wire().encode("ascii")]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def main() -> None:
    """Run the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, _stop)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what libraries print must not mix with answers
    first = _frame(source)
    if first is None:
        return
    forms = forms_of(first)
    configure_inherited("body-reader", rotates=json.loads(parted(first)[0])["log_rotates"])
    _limit_memory()
    while (frame := _frame(source)) is not None:
        parts = answer(frame, forms)
        # The process only reports this: the router takes a process that ends by itself for a failed one.
        is_last = _memory_pages()[1] * resource.getpagesize() > MAX_RSS_BYTES
        sink.write(joined([LAST if is_last else b"", *parts]))
        sink.flush()


def _frame(source: IO[bytes]) -> bytes | None:
    head = source.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "little")
    body = source.read(size)
    return body if len(body) == size else None


def _encoder(about: dict[str, Any]) -> Callable[[str], list[int]]:
    @cache  # it is large, and most bodies do not need it
    def tokenizer() -> Tokenizer:
        if about["source"]:
            directory, weights = about["source"]
            return ServedModel.from_directory(about["name"], Path(directory), weights=weights).tokenizer
        return Tokenizer(_FastTokenizer.from_str(about["tokenizer"]), ())

    return lambda text: tokenizer().encode(text)


def _limit_memory() -> None:
    limit = _memory_pages()[0] * resource.getpagesize() + MAX_MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _memory_pages() -> tuple[int, int]:
    """(address space, resident) in pages; `ru_maxrss` would include the process this one was forked from."""
    total, resident, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(total), int(resident)


def _stop(number: int, frame: object) -> NoReturn:
    raise _TooLong


if __name__ == "__main__":
    main()
