"""What became of one request, as a client process saw it."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Record:
    """One request. Times are seconds of the host's monotonic clock.

    Attributes:
        due_s: when it was due; in a closed loop when its client was free for it.
        sent_s: when the client began to send it.
        prompt_len: tokens that were sent.
        output_len: tokens that were asked for.
        tenant: whose it was.
        steady: whether it is of a steady stream.
        is_open: whether it had a due time of its own (open loop).
        chunk_times_s: when each chunk with tokens arrived; the first is the first token.
        end_s: when the answer, or the error, was complete.
        prompt_tokens: by `usage`; None: the server did not say.
        completion_tokens: by `usage`.
        cached_tokens: of the prompt, by `usage`.
        status: of HTTP; 0: there was none.
        error: kind of the failure; "" without one.
        detail: what the server or the client's library said of it.
        cancelled: the client went away as planned.
    """

    due_s: float
    sent_s: float
    prompt_len: int
    output_len: int
    tenant: str = ""
    steady: bool = False
    is_open: bool = False
    chunk_times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    status: int = 0
    error: str = ""
    detail: str = ""
    cancelled: bool = False

    @property
    def is_ok(self) -> bool:
        """Whether the whole answer came."""
        return not self.error and not self.cancelled

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer; where the server did not count them, chunks."""
        return len(self.chunk_times_s) if self.completion_tokens is None else self.completion_tokens
