"""How many answers the router holds at once, if that is limited. Requests beyond are refused at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from baton.core.errors import Overloaded

RETRY_AFTER_S = 1.0


class Admission:
    """Counts answers in flight against a limit; None: there is none, the queue's own rules bound them."""

    def __init__(self, limit: int | None) -> None:
        assert limit is None or limit >= 1
        self.limit = self.default = limit
        self.num_in_flight = 0

    @contextmanager
    def slot(self, num_answers: int = 1) -> Iterator[None]:
        """Hold a place for each of a request's answers.

        Raises:
            Overloaded: there are not so many; try again after `retry_after_s`.
        """
        if self.limit is not None and self.num_in_flight + num_answers > self.limit:
            message = f"{self.num_in_flight} requests are in flight, the limit; try again in {RETRY_AFTER_S:g} s"
            raise Overloaded(message, limit=self.limit, retry_after_s=RETRY_AFTER_S)
        self.num_in_flight += num_answers
        try:
            yield
        finally:
            self.num_in_flight -= num_answers
