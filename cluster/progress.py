"""What an operator sees while workers start: a bar on a terminal, plain lines elsewhere; always on stderr."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

OnProgress = Callable[[int, int, str], None]


def no_progress(num_done: int, num_total: int, text: str) -> None:
    """Show nothing."""


def _print_line(num_done: int, num_total: int, text: str) -> None:
    print(f"[{num_done}/{num_total}] {text}", file=sys.stderr, flush=True)


@contextmanager
def show_progress(*, as_log: bool = False) -> Iterator[OnProgress]:
    """A callback `(num_done, num_total, text)` that shows how far starting has come, or logs it.

    With the last step the bar is gone, also while the body goes on.
    """
    if as_log:
        yield lambda num_done, num_total, text: log.info("[%d/%d] %s", num_done, num_total, text)
        return
    if not sys.stderr.isatty():
        yield _print_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def update(num_done: int, num_total: int, text: str) -> None:
            progress.update(task, description=text, completed=num_done, total=num_total)
            if num_done >= num_total:  # what follows has the terminal for itself
                progress.stop()

        yield update
