"""The demo: serve the bundled model with split prefill and decode, stream three completions, compare with one process.

It succeeds only if every token is identical, most of the long prompt's KV had arrived before its prefill ended, nothing
is held afterwards, and every process ended.
"""

import time
from dataclasses import dataclass
from typing import Any

from baton.cluster.admin import fetch_inventory, held_resources
from baton.cluster.commands.completion import Completion, CompletionArguments, Interrupted, complete_remotely
from baton.cluster.commands.reference import ReferenceProcess
from baton.cluster.commands.serve import terminable
from baton.cluster.deployment import Deployment
from baton.cluster.outcome import ExitCode, Output, format_table, next_step
from baton.cluster.resolve import resolve_device
from baton.cluster.start_progress import show_progress
from baton.core.config import ServeConfig
from baton.core.errors import BatonError

SHORT = '''def fibonacci(n):
    """Return the first n Fibonacci numbers as a list."""
    result = []
    a, b = 0, 1
'''

CLASS = '''import threading


class BoundedCounter:
    """A counter that several threads may use, and that never goes above its limit."""

    def __init__(self, limit):
        self.limit = limit
        self.value = 0
        self._lock = threading.Lock()

    def increment(self):
        """Add one; return False if the limit was reached."""
        with self._lock:
'''

LONG = '''"""A small inventory of parts: read from CSV, kept in memory, written back as JSON.

The inventory knows parts by their number. It refuses negative quantities, and it never writes a file half way:
a new file is written beside the old one and then renamed.
"""

import csv
import json
import logging
import os
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field


logger = logging.getLogger(__name__)


class InventoryError(Exception):
    """Base class of the errors in this module."""


class UnknownPart(InventoryError):
    """There is no part with this number."""

    def __init__(self, number):
        super().__init__("unknown part: %s" % number)
        self.number = number


class NotEnough(InventoryError):
    """Fewer pieces are in stock than were asked for."""

    def __init__(self, number, wanted, found):
        super().__init__("wanted %d of part %s, found %d" % (wanted, number, found))
        self.number = number
        self.wanted = wanted
        self.found = found


@dataclass
class Part:
    """One kind of part, and how many pieces of it are in stock."""

    number: str
    name: str
    quantity: int = 0
    price: float = 0.0
    tags: list = field(default_factory=list)

    def __post_init__(self):
        if self.quantity < 0:
            raise ValueError("quantity must not be negative")
        if self.price < 0:
            raise ValueError("price must not be negative")

    @property
    def value(self):
        """What all pieces in stock are worth."""
        return self.quantity * self.price

    def to_dict(self):
        """Return the part as a dictionary that json can write."""
        return {
            "number": self.number,
            "name": self.name,
            "quantity": self.quantity,
            "price": self.price,
            "tags": list(self.tags),
        }

    @classmethod
    def from_dict(cls, data):
        """Create a part from what to_dict returned."""
        return cls(
            number=data["number"],
            name=data["name"],
            quantity=int(data.get("quantity", 0)),
            price=float(data.get("price", 0.0)),
            tags=list(data.get("tags", [])),
        )


class Inventory:
    """All parts, by number."""

    def __init__(self, parts=()):
        self._parts = {}
        self._by_tag = defaultdict(set)
        for part in parts:
            self.add(part)

    def __len__(self):
        return len(self._parts)

    def __iter__(self):
        return iter(sorted(self._parts.values(), key=lambda part: part.number))

    def __contains__(self, number):
        return number in self._parts

    def add(self, part):
        """Add a part, or replace the one with the same number."""
        old = self._parts.get(part.number)
        if old is not None:
            for tag in old.tags:
                self._by_tag[tag].discard(part.number)
        self._parts[part.number] = part
        for tag in part.tags:
            self._by_tag[tag].add(part.number)

    def get(self, number):
        """Return the part with this number."""
        try:
            return self._parts[number]
        except KeyError:
            raise UnknownPart(number) from None

    def take(self, number, count):
        """Take pieces out of stock."""
        part = self.get(number)
        if part.quantity < count:
            raise NotEnough(number, count, part.quantity)
        part.quantity -= count
        logger.info("took %d of %s", count, number)
        return part.quantity

    def put(self, number, count):
        """Put pieces into stock."""
'''


REQUEST_TIMEOUT_S = 60.0
REFERENCE_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 4.0  # two leases
LONG_PROMPT_LEN = 512
MIN_LANDED_SHARE = 0.6
CONFIG = {
    "model": "tiny",
    "grpc_port": 0,
    "num_speculative_tokens": 2,
    "batch_invariant": True,
    "dtype": "float32",
    "max_num_batched_tokens": 128,
    "local_prefill": "never",  # the demo shows the hand-off
    "start_timeout_s": 60,
}


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One completion of the demo."""

    title: str
    asked: CompletionArguments


REQUESTS = (
    DemoRequest("function, greedy", CompletionArguments(prompt=SHORT, max_tokens=64, timeout_s=REQUEST_TIMEOUT_S)),
    DemoRequest(
        "class, sampled",
        CompletionArguments(
            prompt=CLASS,
            max_tokens=64,
            temperature=0.8,
            top_p=0.95,
            seed=7,
            timeout_s=REQUEST_TIMEOUT_S,
        ),
    ),
    DemoRequest("module, greedy", CompletionArguments(prompt=LONG, max_tokens=64, timeout_s=REQUEST_TIMEOUT_S)),
)


def demo(output: Output) -> ExitCode:
    """Run the demo; 0 only if everything holds.

    Raises:
        StartupError: the deployment could not start.
    """
    config = ServeConfig.from_mapping(dict(CONFIG))
    start_s = time.monotonic()
    reference: ReferenceProcess | None = None
    try:
        with terminable(), show_progress() as on_progress, Deployment(config, on_progress=on_progress) as deployment:
            up_s = time.monotonic() - start_s
            about = f"batch-invariant, float32, on {resolve_device(config.device)}"
            output.write(f"serving at {deployment.address} after {up_s:.1f} s; {about}\n")
            completions = [_stream(deployment.address, request, output) for request in REQUESTS]
            reference = ReferenceProcess(config, [request.asked for request in REQUESTS])
            held = _wait_idle(deployment.address)
        expected = reference.completions(REFERENCE_TIMEOUT_S)
    except Interrupted as interrupted:
        return _fail(output, interrupted.error)
    finally:
        if reference is not None:
            reference.close()
    return _report(output, completions, expected, held, time.monotonic() - start_s)


def _stream(address: str, request: DemoRequest, output: Output) -> Completion:
    output.write(f"\n--- {request.title}: ...{request.asked.prompt[-120:]}>>>")
    try:
        completion = complete_remotely(address, request.asked, output.write)
    except BatonError as error:
        raise Interrupted(error, "", []) from error
    output.write("<<<\n")
    return completion


def _wait_idle(address: str) -> dict[str, int]:
    deadline_s = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        held = held_resources(fetch_inventory(address))
        if not any(held.values()) or time.monotonic() > deadline_s:
            return held
        time.sleep(0.05)


def _fail(output: Output, error: BatonError) -> ExitCode:
    output.write("\n")
    output.note(f"baton: the demo failed: {type(error).__name__}: {error.message}\nnext: {next_step(error)}")
    output.emit({"ok": False, "error": type(error).__name__, "message": error.message, "exit_code": ExitCode.FAILED})
    return ExitCode.FAILED


def _report(
    output: Output,
    completions: list[Completion],
    expected: list[dict[str, Any]],
    held: dict[str, int],
    total_s: float,
) -> ExitCode:
    same = [
        completion.token_ids == tuple(reference["token_ids"]) and completion.text == reference["text"]
        for completion, reference in zip(completions, expected, strict=True)
    ]
    problems = _problems(completions, same, held)
    header = ("request", "prompt", "ttft ms", "tpot ms", "tokens/step", "accepted", "KV pushed", "landed early", "same")
    rows = [
        (request.title, *_row(completion), "yes" if identical else "NO")
        for request, completion, identical in zip(REQUESTS, completions, same, strict=True)
    ]
    output.write(f"\n{format_table(header, rows)}\n")
    output.write(f"identical to one process: {sum(same)}/{len(same)}\n")
    output.write(f"held afterwards: {held}\n")
    output.write(f"everything ended; {total_s:.1f} s in all\n")
    for problem in problems:
        output.note(f"baton: {problem}")
    code = ExitCode.FAILED if problems else ExitCode.OK
    requests = [item.as_data() | {"identical": ok} for item, ok in zip(completions, same, strict=True)]
    data = {"ok": not problems, "problems": problems, "requests": requests, "held": held, "total_s": total_s}
    output.emit(data)
    return code


def _row(completion: Completion) -> tuple[str, ...]:
    per_step = completion.num_decode_tokens / max(1, completion.num_verify_steps)
    return (
        str(completion.prompt_len),
        f"{completion.ttft_ms:.1f}",
        f"{completion.tpot_ms:.1f}",
        f"{per_step:.2f}",
        f"{completion.num_accepted_tokens}/{completion.num_draft_tokens}",
        f"{completion.kv_bytes_pushed / 1024:.0f} KiB",
        f"{_landed_share(completion):.0%}",
    )


def _landed_share(completion: Completion) -> float:
    return completion.kv_bytes_landed_before_prefill_end / max(1, completion.kv_bytes_pushed)


def _problems(completions: list[Completion], same: list[bool], held: dict[str, int]) -> list[str]:
    problems = [
        f"{request.title}: tokens differ from the one-process reference"
        for request, identical in zip(REQUESTS, same, strict=True)
        if not identical
    ]
    long = [completion for completion in completions if completion.prompt_len >= LONG_PROMPT_LEN]
    if not long:
        problems.append(f"no prompt has {LONG_PROMPT_LEN} tokens or more")
    problems += [
        f"only {_landed_share(completion):.0%} of the long prompt's KV had landed when its prefill ended"
        for completion in long
        if _landed_share(completion) < MIN_LANDED_SHARE
    ]
    if any(held.values()):
        problems.append(f"still held after {IDLE_TIMEOUT_S:.0f} s: {held}")
    return problems
