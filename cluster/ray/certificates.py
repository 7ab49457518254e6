"""Certificates for Ray's ports, which keep strangers from code that Ray runs before it checks a token.

With `RAY_USE_TLS=1` every gRPC server of Ray shows a certificate and requires one of the same authority from callers. A
private Ray has one certificate, made at each start. A cluster has an authority beside its token, from which every host
gets its own certificate before it starts Ray:

    python -m baton.cluster.ray.certificates make DIR            ray_token, ray_ca.pem and ray_ca.key, once
    python -m baton.cluster.ray.certificates issue DIR INTO      cert.pem, key.pem and ca.pem of this host
"""

import argparse
import datetime
import ipaddress
import os
import secrets
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from baton.core.errors import BatonError, ConfigInvalid

VALID_DAYS: Final = 3650  # longer than any Ray runs, because Ray does not reload its files
CLOCK_SKEW: Final = datetime.timedelta(days=1)
TOKEN_FILE, CA_FILE, CA_KEY_FILE = "ray_token", "ray_ca.pem", "ray_ca.key"
TLS_VARIABLES: Final = ("RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
EXIT_PRECONDITION: Final = 3


def private_settings(folder: Path, address: str) -> dict[str, str]:
    """Make the one certificate of a private Ray; only this account can read its key, and no authority remains.

    Returns:
        Environment variables that point Ray to it.
    """
    folder.mkdir(mode=0o700)
    key = _new_key()
    certificate = _signed(_subject(), key, None, key, [address])
    _write(folder / "key.pem", _pem_of(key))
    _write(folder / "cert.pem", certificate.public_bytes(serialization.Encoding.PEM))
    return settings_of(folder / "cert.pem", folder / "key.pem", folder / "cert.pem")


def settings_of(cert: Path, key: Path, ca: Path) -> dict[str, str]:
    """Return environment variables that point Ray to these files."""
    return dict(zip(TLS_VARIABLES, ("1", str(cert), str(key), str(ca)), strict=True))


def make(folder: Path) -> None:
    """Make the secrets of a cluster: its token and its authority.

    Raises:
        ConfigInvalid: the folder already has some; they are never replaced.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (TOKEN_FILE, CA_FILE, CA_KEY_FILE):
        if (folder / name).exists():
            raise ConfigInvalid(f"{folder / name} exists, and is not replaced: the hosts have copies of it")
    key = _new_key()
    authority = _signed(_subject(), key, None, key, [])
    _write(folder / TOKEN_FILE, secrets.token_hex(32).encode())
    _write(folder / CA_KEY_FILE, _pem_of(key))
    _write(folder / CA_FILE, authority.public_bytes(serialization.Encoding.PEM))


def issue(folder: Path, into: Path, addresses: Iterable[str] = ()) -> None:
    """Make the certificate of this host, for all its addresses and names; it replaces an earlier one.

    Args:
        folder: folder that `make` filled.
        into: folder for the files.
        addresses: further addresses, if others reach this host by some that it does not see.

    Raises:
        ConfigInvalid: there is no such authority, or it cannot be read.
    """
    try:
        authority = x509.load_pem_x509_certificate((folder / CA_FILE).read_bytes())
        ca_key = serialization.load_pem_private_key((folder / CA_KEY_FILE).read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        # Only the type of a library error, whose message may quote the file.
        why = error if isinstance(error, OSError) else type(error).__name__
        raise ConfigInvalid(f"{folder} has no authority for Ray's certificates ({why}): make one") from error
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey) or ca_key.public_key() != authority.public_key():
        raise ConfigInvalid(f"{folder / CA_KEY_FILE} is not the key of {folder / CA_FILE}")
    into.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = _new_key()
    certificate = _signed(_subject(), key, authority, ca_key, [*own_addresses(), *addresses])
    _write(into / "key.pem", _pem_of(key))
    _write(into / "cert.pem", certificate.public_bytes(serialization.Encoding.PEM))
    _write(into / "ca.pem", authority.public_bytes(serialization.Encoding.PEM))


def own_addresses() -> list[str]:
    """Return names and addresses of this host."""
    found = ["localhost", socket.gethostname()]
    for addresses in psutil.net_if_addrs().values():
        inet = (socket.AF_INET, socket.AF_INET6)
        found += [each.address.partition("%")[0] for each in addresses if each.family in inet]
    return list(dict.fromkeys(found))


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _subject() -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"baton ray {secrets.token_hex(8)}")])


def _signed(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate | None,
    ca_key: ec.EllipticCurvePrivateKey,
    addresses: Iterable[str],
) -> x509.Certificate:
    """Sign a certificate; without an authority it is self-signed."""
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if authority is None else authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
    )
    names = [_name(address) for address in addresses]
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(ca_key, hashes.SHA256())


def _name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically, readable by this account only."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(beside, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(data)
    beside.replace(path)


def main() -> int:
    """Make a cluster's secrets, or issue a certificate."""
    parser = argparse.ArgumentParser(prog="python -m baton.cluster.ray.certificates")
    steps = parser.add_subparsers(required=True, dest="step")
    steps.add_parser("make", help="the token and the authority of a cluster").add_argument("folder", type=Path)
    host = steps.add_parser("issue", help="the certificate of this host")
    host.add_argument("folder", type=Path, help="what `make` filled")
    host.add_argument("into", type=Path, help="where cert.pem, key.pem and ca.pem go")
    host.add_argument("--address", action="append", default=[], help="one more address or name of this host")
    options = parser.parse_args()
    try:
        if options.step == "make":
            make(options.folder)
        else:
            issue(options.folder, options.into, options.address)
    except (BatonError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_PRECONDITION
    return 0


if __name__ == "__main__":
    sys.exit(main())
