"""What both clients say and check; no connection of its own."""

from collections.abc import Sequence

import grpc

from baton.client.retries import CallAttempts
from baton.core.clock import MAX_TIMEOUT_S
from baton.core.errors import (
    BatonError,
    ConfigInvalid,
    ConflictingOptions,
    EmptyPrompt,
    InvalidRequest,
    InvalidText,
    ProtocolError,
)
from baton.core.requests.sampling import MAX_CHOICES, SamplingParams
from baton.proto import inference_pb2, wire
from baton.proto.secure_channel import is_refused_certificate

Sampling = SamplingParams | inference_pb2.Sampling
OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # Who asks again after a router's restart finds it: no pause between two tries to connect grows beyond two seconds.
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
    """The message for one answer. Without `sampling` the server's defaults hold, a fresh seed among them.

    Raises:
        ConflictingOptions: both a text and token ids.
        EmptyPrompt: neither.
        InvalidText: a text, the model's or the tenant's name is not Unicode text.
        InvalidRequest: a value that no message can carry.
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
    """The text itself.

    Raises:
        InvalidText: it holds lone surrogates, so it is no Unicode text.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidText(f"{name} is not valid UTF-8 at character {error.start}", at=error.start) from error
    return text


def checked_timeout_s(timeout_s: float) -> float:
    """The time limit, cut to what a message can carry.

    Raises:
        ConfigInvalid: it is not a positive, finite number.
    """
    if not 0 < timeout_s < float("inf"):
        raise ConfigInvalid(f"timeout: {timeout_s} s is not positive and finite", keys=["timeout"])
    return min(timeout_s, MAX_TIMEOUT_S)


def pause_after(attempts: CallAttempts, failed: BatonError, cause: grpc.RpcError) -> float:
    """Seconds to wait before the next attempt at a call that has failed before anything arrived.

    Raises:
        BatonError: the failure, if there is no next one; a certificate that is not accepted will not be the next time.
    """
    if is_refused_certificate(cause):
        raise failed from cause
    try:
        return attempts.pause_s(failed)
    except BatonError as final:
        raise final from cause


class ChunkCheck:
    """Checks that no answer of a stream has a gap or a repetition, and that each has an end; knows what has arrived.

    Args:
        num_choices: answers that were asked for.
    """

    def __init__(self, num_choices: int = 1) -> None:
        num_choices = min(max(num_choices, 1), MAX_CHOICES)  # the server refuses others
        self._token_ids: list[list[int]] = [[] for _ in range(num_choices)]
        self._texts = [""] * num_choices
        self._unfinished = set(range(num_choices))
        self._has_any = False

    @property
    def has_any(self) -> bool:
        """Whether a chunk has been passed on."""
        return self._has_any

    def take(self, chunk: inference_pb2.GenerateChunk) -> inference_pb2.GenerateChunk:
        """The chunk, if it is its answer's next.

        Raises:
            ProtocolError: a token was lost or repeated on the way, or the answer is none of those asked for.
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
        """The stream ended without an error.

        Raises:
            ProtocolError: an answer's last chunk was not its last.
        """
        if self._unfinished:
            raise ProtocolError("the stream ended without a finish", num_tokens=sum(map(len, self._token_ids)))

    def with_received(self, error: BatonError) -> BatonError:
        """The error, with what has arrived in its field `received`: token ids, text and whether it ended, by answer."""
        if self._has_any:
            pairs = zip(self._token_ids, self._texts, strict=True)
            error.fields["received"] = [
                {"choice": choice, "token_ids": token_ids, "text": text, "finished": choice not in self._unfinished}
                for choice, (token_ids, text) in enumerate(pairs)
            ]
        return error
