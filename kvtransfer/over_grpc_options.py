"""What both ends of the hand-off over gRPC agree on: the method, the channel's limits and times, and its keys."""

from pathlib import Path

import grpc

from baton.core.config import KVTransferConfig
from baton.core.errors import ConfigInvalid
from baton.kvtransfer.over_grpc_packet import PART_BYTES

SERVICE, NAME = "baton.v1.KvTransfer", "Exchange"
METHOD = f"/{SERVICE}/{NAME}"
SCHEME = "grpc://"
NAME_KEY = "baton-peer"  # metadata: the name under which a connection's owner is known
KIND_KEY, BULK = "baton-stream", "bulk"  # metadata of a stream on which nothing is answered
MAX_NAME_LEN = 64
MAX_STREAMS = 256  # two for each peer
MAX_QUEUED = 4096  # messages that wait to be sent to a peer
MAX_MESSAGE_BYTES = PART_BYTES + (64 << 10)  # controls fit, too (messages.MAX_STATE_BYTES)
LOOKAHEAD_BYTES = 4 << 20  # that a stream may send before anybody asked for it

Options = list[tuple[str, int | str]]


def channel_options(config: KVTransferConfig) -> Options:
    """For either end: no message beyond the bound, no compression, and a dead connection is noticed by pings."""
    lease_ms = max(1000, int(config.lease_s * 1e3))
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.http2.max_frame_size", PART_BYTES),  # fewer and larger pieces to put together
        ("grpc.http2.write_buffer_size", PART_BYTES),
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        ("grpc.keepalive_time_ms", lease_ms),
        ("grpc.keepalive_timeout_ms", lease_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", lease_ms // 2),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", lease_ms // 2),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def client_credentials(config: KVTransferConfig) -> grpc.ChannelCredentials | None:
    """None if nothing is to be encrypted.

    Raises:
        ConfigInvalid: the files do not go together, or cannot be read.
    """
    if not config.tls_ca_file and not config.tls_cert_file:
        return None
    if not config.tls_ca_file:
        raise ConfigInvalid("tls_cert_file without tls_ca_file: peers' certificates could not be checked")
    key, chain = _key_pair(config)
    return grpc.ssl_channel_credentials(_read(config.tls_ca_file, "tls_ca_file"), key, chain)


def server_credentials(config: KVTransferConfig) -> grpc.ServerCredentials | None:
    """None if nothing is to be encrypted. With a CA, clients must present a certificate of it.

    Raises:
        ConfigInvalid: the files do not go together, or cannot be read.
    """
    if not config.tls_ca_file and not config.tls_cert_file:
        return None
    key, chain = _key_pair(config)
    if key is None or chain is None:
        raise ConfigInvalid("tls_ca_file without tls_cert_file: a decode worker needs a certificate")
    ca = _read(config.tls_ca_file, "tls_ca_file") if config.tls_ca_file else None
    return grpc.ssl_server_credentials([(key, chain)], ca, require_client_auth=ca is not None)


def _key_pair(config: KVTransferConfig) -> tuple[bytes | None, bytes | None]:
    if bool(config.tls_key_file) != bool(config.tls_cert_file):
        raise ConfigInvalid("tls_cert_file and tls_key_file go together")
    if not config.tls_key_file:
        return None, None
    return _read(config.tls_key_file, "tls_key_file"), _read(config.tls_cert_file, "tls_cert_file")


def _read(path: str, name: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigInvalid(f"{name} {path}: {error.strerror}", keys=[name]) from error
