"""Frames of `RunAll` and `AttendAll`: what many streams say at the same time, in one message. Pure.

Most of what decode workers say is a token: those travel side by side in packed fields, which cost both ends a small
part of what a message each would.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from baton.core.errors import BatonError, MalformedMessage, ProtocolError, from_wire
from baton.proto import worker_pb2
from baton.proto.wire import bounded_wire

MAX_ITEMS: Final = 4096  # of a frame,
MAX_FRAME_BYTES: Final = 1 << 20  # which stays far below what gRPC lets pass, unless it is a single item


@dataclass(frozen=True, slots=True)
class End:
    """A stream ends; with an error if it did not end well."""

    error: BatonError | None = None


@dataclass(slots=True)  # not frozen, which would make each three times as dear
class StreamTokens:
    """Tokens of a stream, and nothing else to say of them."""

    index: int
    token_ids: list[int]


DecodeSaid = worker_pb2.DecodeEvent | StreamTokens | End
PrefillSaid = worker_pb2.PrefillEvent | End


def decode_frame(items: Sequence[tuple[int, DecodeSaid]]) -> worker_pb2.DecodeFrame:
    """What streams say, each's in order, as one frame."""
    frame = worker_pb2.DecodeFrame()
    streams: list[int] = []
    indices: list[int] = []
    lens: list[int] = []
    token_ids: list[int] = []
    with_items: set[int] = set()  # what such a stream says goes behind its items
    for stream, said in items:
        if isinstance(said, End):
            with_items.add(stream)
            frame.items.add(stream=stream).end.CopyFrom(_end_to_proto(said))
            continue
        if stream not in with_items:
            tokens = said if isinstance(said, StreamTokens) else _plain(said)
            if tokens is not None:
                streams.append(stream)
                indices.append(tokens.index)
                lens.append(len(tokens.token_ids))
                token_ids += tokens.token_ids
                continue
        with_items.add(stream)
        frame.items.add(stream=stream).event.CopyFrom(_event(said))
    frame.streams.extend(streams)
    frame.indices.extend(indices)
    frame.token_ids.extend(token_ids)
    if len(token_ids) != len(streams) or 0 in lens:
        frame.lens.extend(lens)
    return frame


def prefill_frame(items: Sequence[tuple[int, PrefillSaid]]) -> worker_pb2.PrefillFrame:
    """Likewise."""
    frame = worker_pb2.PrefillFrame()
    for stream, said in items:
        item = frame.items.add(stream=stream)
        if isinstance(said, End):
            item.end.CopyFrom(_end_to_proto(said))
        else:
            item.event.CopyFrom(said)
    return frame


def read_decode_frame(frame: worker_pb2.DecodeFrame) -> Iterator[tuple[int, DecodeSaid]]:
    """What streams say, each's in order.

    Raises:
        ProtocolError: its packed fields do not fit together.
    """
    token_ids = list(frame.token_ids)
    streams, indices, lens = frame.streams, frame.indices, frame.lens
    if len(streams) != len(indices) or (len(lens) or len(streams)) != len(streams):
        raise ProtocolError(f"a frame of {len(streams)} streams with {len(indices)} indices and {len(lens)} lengths")
    if (sum(lens) if lens else len(streams)) != len(token_ids):
        raise ProtocolError(f"a frame of {len(streams)} streams has {len(token_ids)} tokens, not as many as it says")
    if lens:
        at = 0
        for stream, index, num in zip(streams, indices, lens, strict=True):
            yield stream, StreamTokens(index, token_ids[at : at + num])
            at += num
    else:
        for stream, index, token_id in zip(streams, indices, token_ids, strict=True):
            yield stream, StreamTokens(index, [token_id])
    yield from _read_items(frame)


def read_prefill_frame(frame: worker_pb2.PrefillFrame) -> Iterator[tuple[int, PrefillSaid]]:
    """Likewise."""
    for item in frame.items:
        if item.HasField("event"):
            yield item.stream, item.event
        if item.HasField("end"):
            yield item.stream, _end_from_proto(item.end)


def _read_items(frame: worker_pb2.DecodeFrame) -> Iterator[tuple[int, DecodeSaid]]:
    for item in frame.items:
        if item.HasField("event"):
            yield item.stream, item.event
        if item.HasField("end"):
            yield item.stream, _end_from_proto(item.end)


def _plain(event: worker_pb2.DecodeEvent) -> StreamTokens | None:
    if not event.HasField("tokens"):
        return None
    tokens = event.tokens
    if tokens.finish_reason or tokens.HasField("start") or tokens.HasField("stats") or tokens.logprobs:
        return None
    return StreamTokens(tokens.index, list(tokens.token_ids))


def _event(said: worker_pb2.DecodeEvent | StreamTokens) -> worker_pb2.DecodeEvent:
    if not isinstance(said, StreamTokens):
        return said
    event = worker_pb2.DecodeEvent()
    event.tokens.index = said.index
    event.tokens.token_ids.extend(said.token_ids)
    return event


def _end_to_proto(end: End) -> worker_pb2.StreamEnd:
    return worker_pb2.StreamEnd(error="" if end.error is None else bounded_wire(end.error))


def _end_from_proto(end: worker_pb2.StreamEnd) -> End:
    if not end.error:
        return End()
    try:
        return End(from_wire(end.error))
    except MalformedMessage as malformed:
        return End(malformed)
