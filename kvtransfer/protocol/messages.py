"""Conversions between protobuf control messages and Baton's own types, shared by both sides."""

import struct
from dataclasses import asdict

from crc32c import crc32c
from google.protobuf.message import DecodeError

from baton.core.errors import MalformedMessage
from baton.core.requests.request import AttemptKey
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.protocol.frame import VERSION, Bytes
from baton.proto import kv_pb2

Message = (
    kv_pb2.Hello
    | kv_pb2.HelloReply
    | kv_pb2.Reserve
    | kv_pb2.Grant
    | kv_pb2.Deny
    | kv_pb2.Commit
    | kv_pb2.CommitAck
    | kv_pb2.CommitNack
    | kv_pb2.Credit
    | kv_pb2.Lease
    | kv_pb2.Abort
    | kv_pb2.AbortAck
    | kv_pb2.Resume
    | kv_pb2.Have
)
# Limits on what a peer can make this side keep. A record of it fits the transfer's rings (link.MIN_RING_BYTES) many
# times.
MAX_REQUEST_ID_BYTES = 512  # every id that the router accepts: 128 characters
MAX_TEXT_BYTES = 1024
MAX_STATE_BYTES = 256 << 10
MAX_DRAFT_TOKENS = 16
MAX_DATA_PATHS = 16
MAX_PROOF_BYTES = 64
MAX_TP_SIZE = 64
DIGEST = "digest"  # the name of the capability
_TAG = bytes([15 << 3 | 5])  # tag of Control.checksum, a fixed32
_CHECKSUM = struct.Struct("<I")
_TEXTS = {"abort": "reason", "deny": "detail", "hello_reply": "refused"}
_FIELDS = {field.message_type.name: field.name for field in kv_pb2.Control.DESCRIPTOR.fields if field.message_type}


def control_of(message: Message) -> kv_pb2.Control:
    """Return the Control that carries `message`."""
    control = kv_pb2.Control()
    getattr(control, _FIELDS[message.DESCRIPTOR.name]).CopyFrom(message)
    return control


def encode_control(control: kv_pb2.Control) -> bytes:
    """Encode a Control for the wire, with its checksum as the last field."""
    assert not control.checksum
    body = control.SerializeToString()
    return body + _TAG + _CHECKSUM.pack(crc32c(body))


def parse_control(data: Bytes) -> kv_pb2.Control:
    """Decode a Control from `encode_control`'s format. Explanatory texts in it are shortened.

    Raises:
        MalformedMessage: `data` is not a Control, is damaged or empty, or holds an id or a state beyond the limits.
    """
    whole = bytes(data)
    body, end = whole[: -1 - _CHECKSUM.size], whole[-1 - _CHECKSUM.size :]
    if end != _TAG + _CHECKSUM.pack(crc32c(body)):
        raise MalformedMessage("not a Control, or a damaged one: its checksum differs")
    try:
        control = kv_pb2.Control.FromString(body)
    except DecodeError as error:
        raise MalformedMessage(f"not a Control: {error}") from error
    if control.WhichOneof("message") is None:
        raise MalformedMessage("a Control without a message")
    _bound(control)
    return control


def shorten(text: str) -> str:
    """Return `text`, cut to the maximum length of an explanatory text."""
    return text if len(text) * 4 <= MAX_TEXT_BYTES else text.encode()[:MAX_TEXT_BYTES].decode(errors="ignore")


def request_id_problem(request_id: str) -> str:
    """Return why this string cannot be a request id; empty if it can."""
    size = len(request_id.encode())
    return (
        "" if 0 < size <= MAX_REQUEST_ID_BYTES else f"a request id of {size} bytes, {MAX_REQUEST_ID_BYTES} are the most"
    )


def _bound(control: kv_pb2.Control) -> None:
    kind = str(control.WhichOneof("message"))
    message = getattr(control, kind)
    if kind in _TEXTS:
        setattr(message, _TEXTS[kind], shorten(getattr(message, _TEXTS[kind])))
    if "attempt" in message.DESCRIPTOR.fields_by_name and message.HasField("attempt"):
        problem = request_id_problem(message.attempt.request_id)
        if problem:
            raise MalformedMessage(problem)
    if kind == "commit":
        size, num_drafts = message.state.ByteSize(), len(message.state.draft_tokens)
        if size > MAX_STATE_BYTES or num_drafts > MAX_DRAFT_TOKENS:
            raise MalformedMessage(f"a COMMIT with a state of {size} bytes and {num_drafts} drafts")
    if kind == "hello":
        texts = (message.host_id, message.incarnation_file, *message.data_paths, *message.capabilities)
        if len(texts) > MAX_DATA_PATHS or any(len(text) > MAX_TEXT_BYTES for text in texts):
            raise MalformedMessage("a HELLO with too many data paths or names that are too long")
        if max(len(message.number), len(message.challenge), len(message.proof)) > MAX_PROOF_BYTES:
            raise MalformedMessage("a HELLO whose proof is too long")


def attempt_of(attempt: kv_pb2.Attempt) -> AttemptKey:
    """Convert an attempt's identity from its wire form.

    Raises:
        MalformedMessage: the message names no request.
    """
    if not attempt.request_id:
        raise MalformedMessage("an attempt without a request id")
    return AttemptKey(attempt.request_id, attempt.attempt)


def wire_attempt(attempt: AttemptKey) -> kv_pb2.Attempt:
    """Convert an attempt's identity to its wire form."""
    return kv_pb2.Attempt(request_id=attempt.request_id, attempt=attempt.attempt)


def layout_message(layout: KVLayout) -> kv_pb2.Layout:
    """Return the description of a pool that HELLO carries."""
    return kv_pb2.Layout(
        model_hash=layout.model_hash,
        block_size=layout.block_size,
        hash=layout.hash,
        has_mtp=layout.has_mtp,
        layers=[kv_pb2.LayerLayout(**asdict(layer)) for layer in layout.layers],
    )


def hello_problem(version: int, theirs: kv_pb2.Layout, ours: KVLayout) -> str:
    """Return why two peers must not exchange KV; empty if they may."""
    if version != VERSION:
        return f"KVP version {version}, here {VERSION}"
    if theirs.hash == ours.hash:
        return ""
    mine = layout_message(ours)
    differ = [
        f"{name} {getattr(theirs, name)!r} here {getattr(mine, name)!r}"
        for name in ("model_hash", "has_mtp")
        if getattr(theirs, name) != getattr(mine, name)
    ]
    if len(theirs.layers) != len(mine.layers):
        differ.append(f"num_layers {len(theirs.layers)} here {len(mine.layers)}")
    for index, (one, other) in enumerate(zip(theirs.layers, mine.layers, strict=False)):
        if one != other:
            fields = [field.name for field in kv_pb2.LayerLayout.DESCRIPTOR.fields]
            pairs = ((name, getattr(one, name), getattr(other, name)) for name in fields)
            said = ", ".join(f"{name} {its!r} here {own!r}" for name, its, own in pairs if its != own)
            differ.append(f"layer {index}: {said}")
            break  # the other layers mostly differ in the same way
    return shorten("KV layouts differ: " + ("; ".join(differ) or "layout hash"))


def ranks_problem(hello: kv_pb2.Hello, layout: KVLayout) -> str:
    """Return why a rank's HELLO is inconsistent; empty if it is not. `layout` is already known to match."""
    rank, size, num_heads = hello.tp_rank, hello.tp_size, layout.layers[0].num_heads
    if not rank < size <= MAX_TP_SIZE:
        return f"tensor parallel rank {rank} of {size}"
    for index, layer in enumerate(layout.layers):
        if not layer.whole and layer.num_heads % size and size % layer.num_heads:
            return f"tensor parallel size {size} does not go with the {layer.num_heads} heads of layer {index}"
    heads = layout.heads_of(0, rank, size)
    if (hello.head_first, hello.head_count) != (heads.first, heads.count):
        theirs = f"{hello.head_count} of {num_heads} heads from {hello.head_first}"
        return f"rank {rank} of {size} holds {theirs}, here {heads.count} from {heads.first}"
    return ""
