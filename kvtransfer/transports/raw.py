"""The raw data path: TCP connections beside the control channel that carry only frames, from pool to pool.

A connection begins with a preface (`protocol.preface`), in which both sides prove the deployment's secret and the
connecting side names its control channel. After that only frames follow, header and payload, one after the other; the
receiver never writes again. There is no encryption: where the control channel is encrypted, this data path is refused.
"""

import socket

from baton.core.config import KVTransferConfig


def tune_socket(connection: socket.socket, config: KVTransferConfig) -> None:
    """Send small messages at once, and detect a peer that is gone within a few leases."""
    lease_s = max(1, round(config.lease_s))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, lease_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, lease_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4 * lease_s * 1000)


def parse_place(address: str, control_address: str) -> tuple[int, str, int]:
    """Parse an offer's address into family, host and port; its host is the control channel's if it names none.

    Raises:
        ValueError: the address is not `HOST:PORT` with a numeric host.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"no port in {address[:100]!r}")
    host = host.strip("[]")
    if host in ("", "*", "0.0.0.0", "::"):
        host = control_address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError as error:
        raise ValueError(f"no numeric address in {address[:100]!r}") from error
    return found[0][0], host, int(port)
