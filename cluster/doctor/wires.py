"""Finds out which connections of a deployment are encrypted by probing the ports, whatever the configuration says.

Each port is contacted as its clients would: with a TLS handshake or, for ZMQ, by its greeting. To learn whether a port
asks for a certificate, the probe connects without one. It sends nothing that a service would act on.
"""

import hashlib
import ipaddress
import socket
import ssl
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from baton.cluster.outcome import format_table
from baton.core.kv_transports import CONTROL_CHANNELS
from baton.core.tls_files import TlsFiles
from baton.proto import admin_pb2, worker_pb2
from baton.proto.roles import roles_in

NOT_MET = "not connected: nothing was pushed between the two lately"
NO_DATA_PATH = "no data path works"


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The KV path of one pair of workers.

    Attributes:
        data_path: data path in use; empty if none works, or the two have not met.
        has_met: whether they are connected; a prefill worker forgets a decode worker that it has not used for a few
            leases.
        why: reason why there is no data path, or no better one.
        gbps: measured; None if it was not.
        round_trip_ms: measured; None if it was not.
    """

    prefill: str
    decode: str
    data_path: str
    has_met: bool
    why: str
    gbps: float | None
    round_trip_ms: float | None
    transfers: int
    bytes: int

    @property
    def is_broken(self) -> bool:
        """Whether the two have met, and nothing can be pushed."""
        return self.has_met and not self.data_path

    def cell(self) -> str:
        """Cell of the table."""
        if not self.has_met:
            return "-"
        rate = "" if self.gbps is None else f" {self.gbps:.3g} GB/s"
        latency = "" if self.round_trip_ms is None else f" {self.round_trip_ms:.2f} ms"
        return (self.data_path or "NONE") + rate + latency


def paths(status: admin_pb2.StatusReply) -> list[Path]:
    """List every pair of a live prefill worker and a live decode worker."""
    live = [worker.state for worker in status.workers if worker.alive]
    return [
        _path(prefill, decode)
        for prefill in live
        if prefill.role == "prefill"
        for decode in live
        if decode.role == "decode"
    ]


def _path(prefill: worker_pb2.WorkerState, decode: worker_pb2.WorkerState) -> Path:
    found = next((path for path in prefill.inventory.transfer.paths if path.kv_address == decode.kv_address), None)
    path = found or worker_pb2.KvPath()
    why = path.why if found is not None else NOT_MET
    return Path(
        prefill=prefill.worker_id,
        decode=decode.worker_id,
        data_path=path.data_path,
        has_met=found is not None,
        why=why or ("" if path.data_path else NO_DATA_PATH),
        gbps=path.gbps or None,
        round_trip_ms=path.round_trip_ms or None,
        transfers=path.transfers,
        bytes=path.bytes,
    )


def paths_data(found: list[Path]) -> list[dict[str, Any]]:
    """Build the `--json` form."""
    return [asdict(path) for path in found]


def format_paths(found: list[Path]) -> str:
    """Format a matrix with a line per prefill worker, followed by the reasons why pairs have no better data path."""
    if not found:
        return "no pair of a live prefill and a live decode worker"
    decodes = list(dict.fromkeys(path.decode for path in found))
    cells = {(path.prefill, path.decode): path.cell() for path in found}
    rows = [
        (prefill, *(cells[prefill, decode] for decode in decodes))
        for prefill in dict.fromkeys(path.prefill for path in found)
    ]
    lines = [format_table(("KV path", *decodes), rows)]
    lines += [f"{path.prefill} to {path.decode}: {path.why}" for path in found if path.why]
    return "\n".join(lines)


TIMEOUT_S = 2.0
GRACE_S = 0.3  # a server that wants a certificate would have refused within this time
_ASKS_NONE = "asks for no certificate"
_GREETING_BYTES = 64
_MECHANISM = slice(12, 32)
_IN_CLEAR = {b"NULL": "in clear, takes any peer", b"PLAIN": "in clear, asks for the deployment's secret"}
_ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x00"  # signature and version
_H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")


@dataclass(frozen=True, slots=True)
class PairPath:
    """Result of probing one port.

    Attributes:
        name: owner of the port.
        address: HOST:PORT.
        is_encrypted: whether it is encrypted; None if there was no answer.
        detail: protocol and authentication, in words.
        fingerprint: SHA-256 of the certificate that was shown, in hex; empty if there is none.
        expires_s: Unix time when the certificate expires, if it could be checked.
        problem: problem with the certificate; empty if there is none, or nothing to check it with.
        roles: roles that the certificate names; None if it could not be checked.
    """

    name: str
    address: str
    is_encrypted: bool | None
    detail: str
    fingerprint: str = ""
    expires_s: float | None = None
    problem: str = ""
    roles: tuple[str, ...] | None = None


def wires(address: str, status: admin_pb2.StatusReply, ca_file: str = "") -> Iterator[PairPath]:
    """Probe the port that returned `status`, and those of every live worker.

    KV that stays on its host uses no network, and what one-sided data paths use between hosts cannot be probed here.

    Args:
        address: address of that port.
        status: status of the deployment.
        ca_file: CA file to check certificates with; names in them are not checked.
    """
    yield probe_tls("router", address, ca_file)
    for worker in status.workers:
        if worker.alive:
            name = worker.state.worker_id
            yield probe_tls(name, worker.state.address, ca_file)
            scheme, _, place = worker.state.kv_address.partition("://")
            for channel in CONTROL_CHANNELS.values():
                if channel.scheme == scheme:
                    kv = f"KV to {name}"
                    yield probe_tls(kv, place, ca_file) if channel.encrypted_by == "tls" else probe_zmq(kv, place)


def probe_tls(name: str, address: str, ca_file: str = "") -> PairPath:
    """Find out whether and how a gRPC port is encrypted, and until when its certificate is valid."""
    context = _context(ssl.CERT_NONE)  # the first handshake asks for the protocol, not for the identity
    try:
        with _connect(address) as plain:
            try:
                with context.wrap_socket(plain) as connection:
                    certificate = connection.getpeercert(binary_form=True) or b""
                    detail = f"{connection.version() or 'TLS'}, {_asks_for_certificate(connection)}"
            except ssl.SSLError as error:
                if "CERTIFICATE" in str(error).upper():
                    return PairPath(name, address, True, "TLS, asks for certificates")
                return _probe_plain(name, address)
        expires_s, problem, roles = _check(address, ca_file) if ca_file else (None, "", None)
        if expires_s is not None:
            detail += f", certificate until {datetime.fromtimestamp(expires_s, UTC):%Y-%m-%d %H:%M} UTC"
        detail += f"; {problem}" if problem else ""
        if roles is not None:
            detail += f", of {', '.join(roles)}" if roles else ", names no role"
        return PairPath(name, address, True, detail, hashlib.sha256(certificate).hexdigest(), expires_s, problem, roles)
    except ConnectionResetError:
        return PairPath(name, address, False, "in clear, or no gRPC")
    except (OSError, ValueError) as error:
        return PairPath(name, address, None, f"does not answer from here: {error}")


@dataclass(frozen=True, slots=True)
class TlsRefusal:
    """Why the two ends of a TLS connection do not meet.

    Attributes:
        why: the reason, in words.
        step: what the operator should do.
    """

    why: str
    step: str


def why_refused(address: str, tls: TlsFiles) -> TlsRefusal | None:
    """Find out by handshakes why a gRPC port and a client with these files do not meet; None if it is not TLS.

    Args:
        address: HOST:PORT.
        tls: the client's files, with a CA.
    """
    name = tls.server_name or address.rpartition(":")[0].strip("[]")
    try:
        return _misnamed(address, tls.ca_file, name) or _unaccepted(address, tls)
    except ssl.SSLCertVerificationError as error:
        why = f"the certificate of {address} is not one of {tls.ca_file}: {error.verify_message}"
        return TlsRefusal(why, "give the CA of that deployment with --tls-ca-file")
    except ssl.SSLError:
        why = f"{address} does not speak TLS"
        return TlsRefusal(why, "give the address of a port that does, or leave the --tls options out")
    except (OSError, ValueError):
        return None


def _misnamed(address: str, ca_file: str, name: str) -> TlsRefusal | None:
    """The refusal of a certificate of the right CA that lacks the expected name.

    Raises:
        ssl.SSLError: another refusal, or no TLS.
        OSError: there is no connection.
    """
    context = _context(ssl.CERT_REQUIRED, ca_file)
    with _connect(address) as plain, context.wrap_socket(plain) as connection:
        found: Any = connection.getpeercert()
    context.check_hostname = True
    try:
        with _connect(address) as plain, context.wrap_socket(plain, server_hostname=name):
            return None
    except ssl.SSLCertVerificationError:
        names = [str(value) for kind, value in found.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    why = f"the certificate of {address} names {', '.join(names) or 'no host'}, not {name}"
    step = f"make a certificate that names {name} (docs/security-setup.md)"
    return TlsRefusal(why, f"give --tls-server-name {names[0]}, or {step}" if names else step)


def _unaccepted(address: str, tls: TlsFiles) -> TlsRefusal | None:
    """The refusal of a client without a certificate, or with one that the port does not take; see `_misnamed`."""
    context = _context(ssl.CERT_REQUIRED, tls.ca_file)
    if tls.cert_file:
        context.load_cert_chain(tls.cert_file, tls.key_file)
    with _connect(address) as plain, context.wrap_socket(plain) as connection:
        if _asks_for_certificate(connection) == _ASKS_NONE:
            return None
    if tls.cert_file:
        why = f"{address} does not accept the certificate {tls.cert_file}"
        return TlsRefusal(why, "give one of the CA that this port requires (docs/security-setup.md)")
    return TlsRefusal(f"{address} asks for a certificate", "give --tls-cert-file and --tls-key-file")


def probe_zmq(name: str, address: str) -> PairPath:
    """Find out from its greeting whether a ZMQ port uses CURVE (ZMTP 3: bytes 12 to 32 name the mechanism)."""
    try:
        with _connect(address) as connection:
            connection.sendall(_ZMTP)  # without a mechanism, which the peer would refuse before its own has been read
            greeting = b""
            while len(greeting) < _GREETING_BYTES and (more := connection.recv(_GREETING_BYTES - len(greeting))):
                greeting += more
    except (OSError, ValueError) as error:
        return PairPath(name, address, None, f"does not answer from here: {error}")
    mechanism = greeting[_MECHANISM].rstrip(b"\0")
    if mechanism == b"CURVE":
        return PairPath(name, address, True, "CURVE, admits holders of the deployment's key")
    return PairPath(name, address, False, _IN_CLEAR.get(mechanism, "speaks no ZMTP 3"))


def is_loopback(address: str) -> bool:
    """Return whether nothing sent to this address leaves this host."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _context(verify: ssl.VerifyMode, ca_file: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file)
    context.check_hostname = False
    context.verify_mode = verify
    context.set_alpn_protocols(["h2"])
    return context


def _check(address: str, ca_file: str) -> tuple[float | None, str, tuple[str, ...] | None]:
    """Return when the certificate expires, what is wrong with it, and the roles that it names."""
    try:
        with _connect(address) as plain, _context(ssl.CERT_REQUIRED, ca_file).wrap_socket(plain) as connection:
            found: Any = connection.getpeercert()
            names = (str(name).encode() for kind, name in found.get("subjectAltName", ()) if kind == "URI")
            return float(ssl.cert_time_to_seconds(found["notAfter"])), "", tuple(sorted(roles_in(names)))
    except ssl.SSLCertVerificationError as error:
        return None, f"its certificate is not good: {error.verify_message}", None
    except OSError as error:
        return None, f"its certificate could not be checked: {error}", None


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT_S)
    connection.settimeout(TIMEOUT_S)
    return connection


def _asks_for_certificate(connection: ssl.SSLSocket) -> str:
    """Find out after the handshake: with TLS 1.3 it ends before the server sees that there is no certificate."""
    connection.sendall(_H2_PREFACE)
    connection.settimeout(GRACE_S)
    try:
        if connection.recv(1):
            return _ASKS_NONE
    except TimeoutError:
        return _ASKS_NONE
    except OSError:
        pass
    return "asks for certificates"


def _probe_plain(name: str, address: str) -> PairPath:
    with _connect(address) as connection:
        connection.sendall(_H2_PREFACE)
        try:
            answered = bool(connection.recv(1))
        except OSError:
            answered = False
    return PairPath(name, address, False, "in clear" if answered else "in clear, or no gRPC")
