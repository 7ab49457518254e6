"""How many answers the router holds at once. Requests beyond are refused at once, never queued here."""

from collections.abc import Iterator
from contextlib import contextmanager

from baton.core.errors import Overloaded

RETRY_AFTER_S = 1.0


class Admission:
    """Counts answers in flight against a limit."""

    def __init__(self, limit: int) -> None:
        assert limit >= 1
        self.limit = limit
        self.num_in_flight = 0

    @contextmanager
    def slot(self, num_answers: int = 1) -> Iterator[None]:
        """Hold a place for each of a request's answers.

        Raises:
            Overloaded: there are not so many; try again after `retry_after_s`.
        """
        if self.num_in_flight + num_answers > self.limit:
            message = f"{self.num_in_flight} requests are in flight, the limit; try again in {RETRY_AFTER_S:g} s"
            raise Overloaded(message, limit=self.limit, retry_after_s=RETRY_AFTER_S)
        self.num_in_flight += num_answers
        try:
            yield
        finally:
            self.num_in_flight -= num_answers
