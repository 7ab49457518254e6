"""What both ends of the hand-off over gRPC agree on: the method, the channel's limits and times, and its keys."""

import grpc

from baton.core.config import KVTransferConfig
from baton.core.errors import ConfigInvalid
from baton.core.tls_files import TlsFiles, TlsWatch
from baton.kvtransfer.transports.over_grpc_packet import PART_BYTES
from baton.proto.secure_channel import SecureChannels, server_credentials

SERVICE, NAME = "baton.v1.KvTransfer", "Exchange"
METHOD = f"/{SERVICE}/{NAME}"
SCHEME = "grpc://"
NAME_KEY = "baton-peer"  # metadata: the name under which a connection's owner is known
PASS_KEY = "baton-pass"  # metadata: `proof.connection_pass`
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
        ("grpc.http2.max_ping_strikes", 0),
    ]


def client_channels(config: KVTransferConfig) -> SecureChannels:
    """Opens channels, encrypted if certificates are named; those that are opened later follow the files.

    Raises:
        ConfigInvalid: the files do not go together, or cannot be read.
    """
    files = tls_files(config)
    if files.is_on and not files.ca_file:
        raise ConfigInvalid("tls_cert_file without tls_ca_file: peers' certificates could not be checked")
    return SecureChannels(files)


def listener_credentials(config: KVTransferConfig) -> grpc.ServerCredentials | None:
    """None if nothing is to be encrypted. They follow the files; with a CA, clients must present a certificate of it.

    Raises:
        ConfigInvalid: the files do not go together, or cannot be read.
    """
    files = tls_files(config)
    return server_credentials(TlsWatch(files)) if files.is_on else None


def tls_files(config: KVTransferConfig) -> TlsFiles:
    """Those of the hand-off."""
    return TlsFiles(
        cert_file=config.tls_cert_file,
        key_file=config.tls_key_file,
        ca_file=config.tls_ca_file,
        server_name=config.tls_server_name,
    )
