"""Which transport carries the control channel: gRPC if the operator asks for it, else ZMQ. Lanes are another matter."""

from baton.core.config import KVTransferConfig
from baton.kvtransfer.transport import Transport


def control_channel(config: KVTransferConfig) -> str:
    """The kind: "zmq" or "grpc"."""
    return "grpc" if config.transport == "grpc" else "zmq"


def bind_address(kind: str, host: str, port: int = 0) -> str:
    """Where a transport of that kind is to listen; port 0 takes a free one."""
    scheme = "grpc" if kind == "grpc" else "tcp"
    return f"{scheme}://{host}:{port}"


def connecting_transport(config: KVTransferConfig) -> Transport:
    """The side where pushes start.

    Raises:
        ConfigInvalid: keys or certificates cannot be used.
    """
    return _make(control_channel(config), None, config)


def listening_transport(kind: str, bind: str, config: KVTransferConfig) -> Transport:
    """The side where landings are.

    Raises:
        PortInUse: the address cannot be bound.
        ConfigInvalid: keys or certificates cannot be used.
    """
    return _make(kind, bind, config)


def _make(kind: str, bind: str | None, config: KVTransferConfig) -> Transport:
    # Only one of the two libraries is wanted, and gRPC takes its time.
    if kind == "grpc":
        from baton.kvtransfer.over_grpc import GrpcTransport

        return GrpcTransport(bind, config)
    assert kind == "zmq", kind
    from baton.kvtransfer.over_zmq import ZmqTransport

    return ZmqTransport(bind, config)
