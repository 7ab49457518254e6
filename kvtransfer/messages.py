"""Small translations between protobuf control messages and Baton's own types, shared by both sides."""

from google.protobuf.message import DecodeError

from baton.core.errors import MalformedMessage
from baton.core.request import AttemptKey
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.frame import VERSION, Bytes
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
# What a peer may make this side keep. A record of it fits the landing's rings (landing.MIN_RING_BYTES) many times.
MAX_REQUEST_ID_BYTES = 512  # every id the router lets in: 128 characters
MAX_TEXT_BYTES = 1024
MAX_STATE_BYTES = 256 << 10
MAX_DRAFT_TOKENS = 16
_TEXTS = {"abort": "reason", "deny": "detail", "hello_reply": "refused"}
_FIELDS = {field.message_type.name: field.name for field in kv_pb2.Control.DESCRIPTOR.fields if field.message_type}


def control_of(message: Message) -> kv_pb2.Control:
    """The Control that carries `message`."""
    control = kv_pb2.Control()
    getattr(control, _FIELDS[message.DESCRIPTOR.name]).CopyFrom(message)
    return control


def parse_control(data: Bytes) -> kv_pb2.Control:
    """The Control that `data` holds; explanations in it are shortened.

    Raises:
        MalformedMessage: it holds none, an empty one, or one with an id or a state beyond the limits.
    """
    try:
        control = kv_pb2.Control.FromString(bytes(data))
    except DecodeError as error:
        raise MalformedMessage(f"not a Control: {error}") from error
    if control.WhichOneof("message") is None:
        raise MalformedMessage("a Control without a message")
    _bound(control)
    return control


def shorten(text: str) -> str:
    """`text`, or as much of it as an explanation may have."""
    return text if len(text) * 4 <= MAX_TEXT_BYTES else text.encode()[:MAX_TEXT_BYTES].decode(errors="ignore")


def request_id_problem(request_id: str) -> str:
    """Why this cannot be the id of a request; empty if it can."""
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


def attempt_of(attempt: kv_pb2.Attempt) -> AttemptKey:
    """The identity in a message.

    Raises:
        MalformedMessage: it names no request.
    """
    if not attempt.request_id:
        raise MalformedMessage("an attempt without a request id")
    return AttemptKey(attempt.request_id, attempt.attempt)


def wire_attempt(attempt: AttemptKey) -> kv_pb2.Attempt:
    """The message for an identity."""
    return kv_pb2.Attempt(request_id=attempt.request_id, attempt=attempt.attempt)


def layout_message(layout: KVLayout) -> kv_pb2.Layout:
    """What HELLO says about a pool."""
    return kv_pb2.Layout(
        model_hash=layout.model_hash,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,
        hash=layout.hash,
    )


def hello_problem(version: int, theirs: kv_pb2.Layout, ours: KVLayout) -> str:
    """Why two peers must not talk; empty if they may."""
    if version != VERSION:
        return f"KVP version {version}, here {VERSION}"
    if theirs.hash == ours.hash:
        return ""
    mine = layout_message(ours)
    fields = ("model_hash", "num_layers", "num_kv_heads", "head_dim", "dtype")
    differ = [
        f"{name} {getattr(theirs, name)!r} here {getattr(mine, name)!r}"
        for name in fields
        if getattr(theirs, name) != getattr(mine, name)
    ]
    return shorten("KV layouts differ: " + ("; ".join(differ) or "layout hash"))
