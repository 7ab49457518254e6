"""Makes the control channels that `core.kv_transports` declares. `sender/data_path.py` makes data paths."""

from baton.core.config import KVTransferConfig
from baton.core.kv_transports import CONTROL_CHANNELS, control_channel, load
from baton.kvtransfer.protocol.transport import Transport


def bind_address(kind: str, host: str, port: int = 0) -> str:
    """Return where a control channel of this kind listens; port 0 takes a free one."""
    return f"{CONTROL_CHANNELS[kind].scheme}://{host}:{port}"


def connecting_transport(config: KVTransferConfig) -> Transport:
    """Make the prefill worker's side of the control channel, which connects.

    Raises:
        ConfigInvalid: keys or certificates cannot be used.
    """
    return _make(control_channel(config.transport).name, None, config)


def listening_transport(kind: str, bind: str, config: KVTransferConfig) -> Transport:
    """Make the decode worker's side of the control channel, which listens.

    Args:
        kind: name of the control channel.
        bind: address; see `bind_address`.
        config: the worker's configuration.

    Raises:
        PortInUse: the address cannot be bound.
        ConfigInvalid: keys or certificates cannot be used.
    """
    return _make(kind, bind, config)


def _make(kind: str, bind: str | None, config: KVTransferConfig) -> Transport:
    # Only one of the libraries is needed, and gRPC is slow to import.
    transport: Transport = load(CONTROL_CHANNELS[kind].made_by)(bind, config)
    return transport
