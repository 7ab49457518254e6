"""Messages and checks that both clients share; it has no connection of its own."""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from baton.core.clock import MAX_TIMEOUT_S
from baton.core.errors import (
    BatonError,
    ConfigInvalid,
    ConflictingOptions,
    EmptyPrompt,
    InvalidRequest,
    InvalidText,
    ProtocolError,
    Retry,
)
from baton.core.requests.sampling import MAX_CHOICES, SamplingParams
from baton.proto import inference_pb2, wire
from baton.proto.secure_channel import is_refused_certificate

SPREAD: Final = 0.25  # a pause that the server asked for is prolonged by at most this fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often to retry a call, and with which pauses.

    A call with all its pauses never takes longer than the client's `timeout_s`.

    Attributes:
        max_attempts: attempts at one call, including the first; ConfigInvalid unless positive.
        first_delay_s: maximum first pause; it doubles each time. ConfigInvalid unless positive and finite.
        max_delay_s: maximum pause, unless the server asks for a longer one. ConfigInvalid unless positive and finite.
    """

    max_attempts: int = 4
    first_delay_s: float = 0.2
    max_delay_s: float = 5.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigInvalid(f"max_attempts: {self.max_attempts} is not positive", keys=["max_attempts"])
        for name in ("first_delay_s", "max_delay_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigInvalid(f"{name}: {value} is not positive and finite", keys=[name])


NO_RETRY: Final = RetryPolicy(max_attempts=1)


class CallAttempts:
    """The attempts at one call.

    Args:
        policy: how often to retry, and the pauses.
        timeout_s: time limit for all attempts together.
        now_s: the clock.
        draw: returns a random number in [0, 1).
    """

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_s: float,
        now_s: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._policy = policy
        self._now_s = now_s
        self._draw = draw
        self._deadline_s = now_s() + timeout_s
        self._num_failed = 0

    @property
    def left_s(self) -> float:
        """Time that the next attempt may take."""
        return max(self._deadline_s - self._now_s(), 0.0)

    def pause_s(self, error: BatonError) -> float:
        """Return how long to wait before the next attempt.

        Raises:
            BatonError: `error`, if there is no next attempt.
        """
        self._num_failed += 1
        if error.retry is Retry.NEVER or self._num_failed >= self._policy.max_attempts:
            raise error
        asked_s = error.fields.get("retry_after_s")
        if isinstance(asked_s, int | float) and 0 <= asked_s < math.inf:
            delay_s = asked_s * (1 + SPREAD * self._draw())
        else:
            doubled_s = self._policy.first_delay_s * 2.0 ** min(self._num_failed - 1, 60)
            delay_s = min(doubled_s, self._policy.max_delay_s) * (1 + self._draw()) / 2
        if delay_s >= self.left_s:
            raise error
        return delay_s


Sampling = SamplingParams | inference_pb2.Sampling
OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A client that retries after a router's restart finds it soon: no pause between connection attempts grows beyond
    # two seconds.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


def generate_request(
    prompt: str | None,
    token_ids: Sequence[int] | None,
    sampling: Sampling | None,
    model: str,
    tenant: str = "",
    *,
    split_only: bool = False,
) -> inference_pb2.GenerateRequest:
    """Build the message for one answer. Without `sampling` the server's defaults apply, including a fresh seed.

    Raises:
        ConflictingOptions: both a text and token ids were given.
        EmptyPrompt: neither was given.
        InvalidText: a text, the model's or the tenant's name is not Unicode text.
        InvalidRequest: a value cannot be carried by the message.
    """
    if prompt is not None and token_ids is not None:
        raise ConflictingOptions("give a text or token ids, not both")
    message = inference_pb2.GenerateRequest(
        model=checked_text(model, "model"), tenant=checked_text(tenant, "tenant"), split_only=split_only
    )
    if isinstance(sampling, SamplingParams):
        sampling = wire.sampling_to_proto(sampling)
    if sampling is not None:
        message.sampling.CopyFrom(sampling)
    if prompt is not None:
        message.text = checked_text(prompt)
    elif token_ids is not None:
        try:
            message.token_ids.ids.extend(token_ids)
        except ValueError as error:
            raise InvalidRequest(f"a token id is out of range: {error}", field="token_ids") from error
        message.token_ids.SetInParent()
    else:
        raise EmptyPrompt("give a text or token ids")
    return message


def checked_text(text: str, name: str = "the text") -> str:
    """Return the text itself.

    Raises:
        InvalidText: it has lone surrogates, so it is not Unicode text.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidText(f"{name} is not valid UTF-8 at character {error.start}", at=error.start) from error
    return text


def checked_timeout_s(timeout_s: float) -> float:
    """Return the time limit, cut to what a message can carry.

    Raises:
        ConfigInvalid: it is not a positive, finite number.
    """
    if not 0 < timeout_s < float("inf"):
        raise ConfigInvalid(f"timeout: {timeout_s} s is not positive and finite", keys=["timeout"])
    return min(timeout_s, MAX_TIMEOUT_S)


def pause_after(attempts: CallAttempts, failed: BatonError, cause: grpc.RpcError) -> float:
    """Return the seconds to wait before the next attempt at a call that failed before anything arrived.

    Raises:
        BatonError: the failure, if there is no next attempt. A refused certificate is not retried.
    """
    if is_refused_certificate(cause):
        raise failed from cause
    try:
        return attempts.pause_s(failed)
    except BatonError as final:
        raise final from cause


class ChunkCheck:
    """Checks that no answer of a stream has a gap or a repetition, and that each has an end; records what has arrived.

    Args:
        num_choices: number of answers that were requested.
    """

    def __init__(self, num_choices: int = 1) -> None:
        num_choices = min(max(num_choices, 1), MAX_CHOICES)  # the server refuses other numbers
        self._token_ids: list[list[int]] = [[] for _ in range(num_choices)]
        self._texts = [""] * num_choices
        self._unfinished = set(range(num_choices))
        self._has_any = False

    @property
    def has_any(self) -> bool:
        """Whether a chunk has been passed on."""
        return self._has_any

    def take(self, chunk: inference_pb2.GenerateChunk) -> inference_pb2.GenerateChunk:
        """Return the chunk, after checking that it is the next one of its answer.

        Raises:
            ProtocolError: a token was lost or repeated, or the answer was not requested.
        """
        choice = chunk.choice
        if choice >= len(self._token_ids):
            raise ProtocolError(f"answer {choice} of {len(self._token_ids)}", choice=choice)
        if chunk.index != len(self._token_ids[choice]):
            raise ProtocolError(f"expected token {len(self._token_ids[choice])}, got {chunk.index}", index=chunk.index)
        self._has_any = True
        self._token_ids[choice] += chunk.token_ids
        self._texts[choice] += chunk.text
        if chunk.HasField("finish"):
            self._unfinished.discard(choice)
        return chunk

    def end(self) -> None:
        """Check that every answer was complete when the stream ended without an error.

        Raises:
            ProtocolError: an answer has no last chunk.
        """
        if self._unfinished:
            raise ProtocolError("the stream ended without a finish", num_tokens=sum(map(len, self._token_ids)))

    def with_received(self, error: BatonError) -> BatonError:
        """Return the error, with what has arrived in its field `received`.

        Its entries are, by answer: token ids, text, and whether the answer ended.
        """
        if self._has_any:
            pairs = zip(self._token_ids, self._texts, strict=True)
            error.fields["received"] = [
                {"choice": choice, "token_ids": token_ids, "text": text, "finished": choice not in self._unfinished}
                for choice, (token_ids, text) in enumerate(pairs)
            ]
        return error
