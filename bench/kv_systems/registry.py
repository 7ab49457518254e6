"""Lists the systems, whether each can run here, and how its two sides are made."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.bench.kv_systems.faces import OnDone, Receiver, Sender, TransferCell
from baton.bench.kv_systems.nixl_tcp import UCX_OPTIONS
from baton.core.kv_transports import KV_TRANSPORTS


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSystem:
    """One row of the comparison.

    Attributes:
        name: name in rows and on the command line.
        module: module of this package with `receiver` and `sender`.
        receiver: class name.
        sender: class name.
        needs: package that must be importable.
        digests: choices of an end-to-end digest; (None,) if there is no such choice.
        one_process: whether both sides are in one process.
        takes_faults: whether frames can be damaged and dropped on purpose.
        environment: environment of its processes; for Baton's own, that of workers.
    """

    name: str
    module: str
    receiver: str
    sender: str
    needs: str = "numpy"
    digests: tuple[bool | None, ...] = (None,)
    one_process: bool = False
    takes_faults: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def problem(self) -> str:
        """Reason why it cannot run here; empty if it can."""
        if importlib.util.find_spec(self.needs) is None:
            return f"{self.name} needs the package {self.needs}, which is not importable"
        return ""

    def make_receiver(self, cell: TransferCell, on_done: OnDone) -> Receiver:
        """Make the decode side."""
        make: Callable[[TransferCell, OnDone], Receiver] = getattr(self._load(), self.receiver)
        return make(cell, on_done)

    def make_sender(self, cell: TransferCell) -> Sender:
        """Make the prefill side."""
        make: Callable[[TransferCell], Sender] = getattr(self._load(), self.sender)
        return make(cell)

    def _load(self) -> object:
        return importlib.import_module(f"baton.bench.kv_systems.{self.module}")


_PEERS = (
    KVSystem(name="memcpy", module="memcpy", receiver="MemcpyReceiver", sender="MemcpySender", one_process=True),
    KVSystem(name="grpc-plain", module="grpc_plain", receiver="GrpcPlainReceiver", sender="GrpcPlainSender"),
    KVSystem(name="nixl-tcp", module="nixl_tcp", receiver="NixlTcpReceiver", sender="NixlTcpSender", needs="nixl"),
    KVSystem(
        name="mooncake-tcp",
        module="mooncake_tcp",
        receiver="MooncakeTcpReceiver",
        sender="MooncakeTcpSender",
        needs="mooncake",
    ),
)
_ENVIRONMENTS = {"nixl": UCX_OPTIONS}  # on this host alone: the KV receiver process inherits it
_OWN = tuple(
    KVSystem(
        name=name,
        module="own",
        receiver="OwnReceiver",
        sender="OwnSender",
        needs=declared.package or "numpy",
        digests=(False, True),
        takes_faults=True,
        environment={**declared.sender_environment, **_ENVIRONMENTS.get(name, {})},
    )
    for name, declared in KV_TRANSPORTS.items()
    if declared.memory != "GPU"  # its pools are in host memory
)
SYSTEMS = {system.name: system for system in (*_OWN, *_PEERS)}
