"""Declares the KV transports, each once; everything that names a transport derives from this table.

The table gives the values of `--transport`, the checks of keys and certificates, the data paths that HELLO names and
that a decode worker serves, `baton doctor`, `baton bench kv`, the table in docs/flags.md, and the tests that hold for
every transport. A new transport needs its own file, a declaration here, and an extra for its package if it has one.

A *data path* is how payloads travel, by its name in the protocol; several transports may use one data path with
different control channels. On a one-sided data path the prefill worker writes into the decode worker's pool, so only
the prefill worker knows when writing has ended; on a two-sided one the decode worker writes what arrives. This module
imports no library: code is referenced by name, and loaded where it is used.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

INLINE: Final = "inline"  # payloads in messages of the control channel
RAW: Final = "raw"  # payloads over separate sockets
AUTO: Final = "auto"  # the best data path that each pair of workers proves to work

# For processes that copy KV blocks into other pools, set at their start. Copies of at least this size bypass the cache,
# because they are not read there. By default glibc does that only for copies as large as the last-level cache; for 64
# KiB blocks at random places it is 1.2 to 1.4 times as fast (`docs/log.md`). Other C libraries and processors ignore
# it.
PAST_CACHE_BYTES: Final = 32 << 10
COPY_ENVIRONMENT: Final = {"GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={PAST_CACHE_BYTES}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlChannel:
    """Carries the messages of a hand-off.

    Attributes:
        name: its name in `Listen`.
        scheme: scheme of its addresses.
        made_by: "module:class", called with the address to listen at, or None, and a `KVTransferConfig`.
        encrypted_by: the configuration keys that encrypt it.
    """

    name: str
    scheme: str
    made_by: str
    encrypted_by: Literal["curve", "tls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransport:
    """One value of `--transport`.

    Attributes:
        name: the value that an operator gives.
        text: how payloads travel, for the docs.
        data_path: the data path of its payloads.
        order: data paths that a worker with this transport may take, best first; empty: its own data path only.
        control: name of its control channel.
        is_auto: whether `auto` may take its data path.
        is_one_sided: whether the prefill worker writes the decode worker's pool.
        is_same_host: whether it, being one-sided, reaches only processes of its host.
        memory: memory that pools must be in; empty: any.
        has_owners: whether it, being one-sided, writes only the pool of the rank that owns a sequence.
        is_clear: whether payloads are unencrypted on a wire even if the control channel is encrypted.
        sender: for a one-sided data path, "module:function" that makes the `DataPathOpener` of a `SenderSide`.
        receiver: for a one-sided data path, "module:function" that makes the `ServedDataPath` of a `ReceiverSide`. Its
            module is loaded in the KV receiver process, which imports no torch.
        package: package that both need beyond Baton's own dependencies, and name of the extra.
        problem_here: returns why this machine cannot use it; empty if it can.
        sender_environment: environment of processes whose threads write into the peer's pool.
    """

    name: str
    text: str
    data_path: str
    order: tuple[str, ...] = ()
    control: str = "zmq"
    is_auto: bool = False
    is_one_sided: bool = False
    is_same_host: bool = False
    memory: Literal["", "host", "GPU"] = ""
    has_owners: bool = False
    is_clear: bool = False
    sender: str = ""
    receiver: str = ""
    package: str = ""
    problem_here: Callable[[], str] = str
    sender_environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def problem(self) -> str:
        """Why this machine cannot use the transport; empty if it can."""
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"install baton-pd[{self.package}]"
        return self.problem_here()


def _no_gpu() -> str:
    return "" if any(Path("/dev").glob("nvidia[0-9]*")) else "no GPU"


def _no_shared_memory(directory: str = "/dev/shm") -> str:
    return "" if os.access(directory, os.W_OK) else f"{directory} is not writable"


CONTROL_CHANNELS: Final = {
    channel.name: channel
    for channel in (
        ControlChannel(
            name="zmq", scheme="tcp", made_by="baton.kvtransfer.transports.over_zmq:ZmqTransport", encrypted_by="curve"
        ),
        ControlChannel(
            name="grpc",
            scheme="grpc",
            made_by="baton.kvtransfer.transports.over_grpc:GrpcTransport",
            encrypted_by="tls",
        ),
    )
}

KV_TRANSPORTS: Final = {
    transport.name: transport
    for transport in (  # best first
        KVTransport(
            name="nvlink",
            text="one kernel per layer writes into D's GPU pool through CUDA IPC; GPUs of one host",
            data_path="nvlink",
            is_auto=True,
            is_one_sided=True,
            is_same_host=True,
            memory="GPU",
            sender="baton.kvtransfer.transports.nvlink:sender_data_path",
            receiver="baton.kvtransfer.transports.nvlink_offer:receiver_data_path",
            problem_here=_no_gpu,
        ),
        KVTransport(
            name="shm",
            text="writer threads copy into D's pool in shared memory; CPUs of one host",
            data_path="shm",
            is_auto=True,
            is_one_sided=True,
            is_same_host=True,
            memory="host",
            has_owners=True,
            sender="baton.kvtransfer.transports.shm:sender_data_path",
            receiver="baton.kvtransfer.transports.shm:receiver_data_path",
            problem_here=_no_shared_memory,
            sender_environment=COPY_ENVIRONMENT,
        ),
        KVTransport(
            name="nixl",
            text="NIXL writes into D's pool over UCX (RDMA or TCP); the extra `baton-pd[nixl]`",
            data_path="nixl",
            is_one_sided=True,
            memory="host",
            is_clear=True,
            sender="baton.kvtransfer.transports.nixl:sender_data_path",
            receiver="baton.kvtransfer.transports.nixl:receiver_data_path",
            package="nixl",
        ),
        KVTransport(
            name="tcp",
            text="TCP sockets from pool to pool; falls back to `zmq` where sockets are unavailable",
            data_path=RAW,
            order=(RAW, INLINE),
            is_auto=True,
        ),
        KVTransport(name="zmq", text="in ZMQ messages", data_path=INLINE, is_auto=True),
        KVTransport(name="grpc", text="in messages of a gRPC stream (HTTP/2, TLS)", data_path=INLINE, control="grpc"),
    )
}

_AUTO_ORDER: Final = tuple(transport.data_path for transport in KV_TRANSPORTS.values() if transport.is_auto)
_ONE_SIDED: Final = {transport.data_path: transport for transport in KV_TRANSPORTS.values() if transport.is_one_sided}

TRANSPORT_NAMES: Final = (AUTO, *KV_TRANSPORTS)  # values of --transport


def data_path_order(transport: str) -> tuple[str, ...]:
    """Data paths that a worker with this transport (or "auto") may take, best first."""
    if transport == AUTO:
        return _AUTO_ORDER
    declared = KV_TRANSPORTS[transport]
    return declared.order or (declared.data_path,)


def one_sided_data_paths(transport: str) -> tuple[KVTransport, ...]:
    """The transports of its one-sided data paths, on which the prefill worker writes the pool."""
    return tuple(one_sided(data_path) for data_path in data_path_order(transport) if is_one_sided(data_path))


def one_sided(data_path: str) -> KVTransport:
    """The transport of a one-sided data path."""
    return _ONE_SIDED[data_path]


def control_channel(transport: str) -> ControlChannel:
    """The control channel of a transport."""
    return CONTROL_CHANNELS["zmq" if transport == AUTO else KV_TRANSPORTS[transport].control]


def is_one_sided(data_path: str) -> bool:
    """Whether the sender writes the receiver's pool on this data path; accepts any text, as peers send it."""
    return data_path in _ONE_SIDED


def is_same_host(data_path: str) -> bool:
    """Whether the data path reaches only processes of its host; accepts any text, as peers send it."""
    return data_path in _ONE_SIDED and _ONE_SIDED[data_path].is_same_host


def sender_environment(transport: str) -> dict[str, str]:
    """Environment of prefill workers with this transport."""
    environment: dict[str, str] = {}
    for declared in one_sided_data_paths(transport):
        environment |= declared.sender_environment
    return environment


def load(place: str) -> Any:
    """Import and return the object that "module:name" names."""
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)
