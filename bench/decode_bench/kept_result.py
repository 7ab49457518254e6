"""Calls whose results stay until they are called again, so that no two sets of buffers are written to one place.

A result that is dropped at once leaves its memory to the next call's, which then writes to what is in the cache still:
faster than memory is, and nothing that a decode step could do. No judgement, no times here.
"""

from collections.abc import Callable

from baton.bench.kernel_bench.case import Call


def kept(function: Callable[[], object]) -> Call:
    """The function, as a call that keeps its last result."""
    results: list[object] = [None]

    def call() -> None:
        results[0] = function()

    return call
