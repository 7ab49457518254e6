"""Changes of a prefix cache as messages: names of one length, end to end."""

from baton.core.block_change import BlockChange
from baton.core.block_hash import HASH_BYTES
from baton.core.errors import MalformedMessage
from baton.proto import worker_pb2


def change_to_proto(change: BlockChange) -> worker_pb2.PrefixChange:
    """A change as a message; all its names have HASH_BYTES bytes."""
    assert all(len(name) == HASH_BYTES for name in (*change.stored[:1], *change.removed[:1]))
    return worker_pb2.PrefixChange(
        after=change.after,
        version=change.version,
        part=change.part,
        cleared=change.cleared,
        stored=b"".join(change.stored),
        removed=b"".join(change.removed),
        name_bytes=HASH_BYTES,
    )


def change_from_proto(message: worker_pb2.PrefixChange) -> BlockChange:
    """The change in a message.

    Raises:
        MalformedMessage: names of another length than this build makes, or half a name.
    """
    if message.name_bytes != HASH_BYTES:
        raise MalformedMessage(f"names of {message.name_bytes} bytes, not {HASH_BYTES}", field="name_bytes")
    return BlockChange(
        after=message.after,
        version=message.version,
        part=message.part,
        cleared=message.cleared,
        stored=_names(message.stored, "stored"),
        removed=_names(message.removed, "removed"),
    )


def _names(packed: bytes, field: str) -> tuple[bytes, ...]:
    if len(packed) % HASH_BYTES:
        raise MalformedMessage(f"{field} has {len(packed)} bytes, no multiple of {HASH_BYTES}", field=field)
    return tuple(packed[first : first + HASH_BYTES] for first in range(0, len(packed), HASH_BYTES))
