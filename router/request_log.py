"""What the router's log says of requests: those that failed; with --log-requests, of every one that was admitted.

Ids, counts and times are logged, never what was asked or answered.

So are requests that were refused for want of room before a worker was asked: under overload they would be most lines.
"""

import logging

from baton.core.errors import BatonError, Overloaded, RequestCancelled
from baton.core.requests.request import AttemptKey
from baton.core.telemetry.logs import shown

log = logging.getLogger(__name__)


def log_request(shown_id: str, tenant: str, times: str, error: BaseException | None) -> None:
    """One line for a request that ended, well or not.

    Args:
        shown_id: its name to the client.
        tenant: who asked; empty if nobody said.
        times: counts and times, as `StreamStats.line` writes them.
        error: None if it ended well.
    """
    how = "ok" if error is None else type(error).__name__
    log.info("request %r%s: %s, %s", shown_id, f" of {tenant!r}" if tenant else "", how, times)


def log_end(key: AttemptKey, shown_id: str, error: BaseException | None, *, was_sent: bool) -> None:
    """One line for a request that ended by an error of ours; clients that go away are none.

    Args:
        key: of its first attempt.
        shown_id: its name to the client.
        error: None if it ended well.
        was_sent: whether any worker was asked.
    """
    if isinstance(error, Overloaded) and not was_sent:
        return
    if isinstance(error, BatonError) and not isinstance(error, RequestCancelled):
        log.warning("request %s failed at the workers as %s: %s", shown_id, key, shown(error))
    elif error is not None:
        log.debug("request %s, at the workers %s, was given up by its client", shown_id, key)
