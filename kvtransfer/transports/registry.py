"""Makes the control channels that `core.kv_transports` declares. Data paths: `sender/data_path.py`."""

from baton.core.config import KVTransferConfig
from baton.core.kv_transports import CONTROL_CHANNELS, control_channel, load
from baton.kvtransfer.protocol.transport import Transport


def bind_address(kind: str, host: str, port: int = 0) -> str:
    """Where a control channel of that name is to listen; port 0 takes a free one."""
    return f"{CONTROL_CHANNELS[kind].scheme}://{host}:{port}"


def connecting_transport(config: KVTransferConfig) -> Transport:
    """The side where pushes start.

    Raises:
        ConfigInvalid: keys or certificates cannot be used.
    """
    return _make(control_channel(config.transport).name, None, config)


def listening_transport(kind: str, bind: str, config: KVTransferConfig) -> Transport:
    """The side where incoming transfers are.

    Args:
        kind: name of the control channel.
        bind: see `bind_address`.
        config: of the worker.

    Raises:
        PortInUse: the address cannot be bound.
        ConfigInvalid: keys or certificates cannot be used.
    """
    return _make(kind, bind, config)


def _make(kind: str, bind: str | None, config: KVTransferConfig) -> Transport:
    # Only one of the libraries is wanted, and gRPC takes its time.
    transport: Transport = load(CONTROL_CHANNELS[kind].made_by)(bind, config)
    return transport
