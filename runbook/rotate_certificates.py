#!/usr/bin/env -S python3 -P
"""Put new certificates, or another authority, into the files a deployment reads, and see its ports show them."""

import argparse
import hashlib
import os
import ssl
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from baton.cluster.access import current_access
from baton.cluster.doctor.wires import PairPath, wires
from baton.core.errors import ConfigInvalid, PreconditionUnmet, StepFailed
from baton.core.tls_files import TlsFiles, end_of_certificate_s, read_tls
from baton.proto import admin_pb2
from baton.runbook.common import workers
from baton.runbook.common.canary import CanaryRuns
from baton.runbook.common.command import Runbook, main, positive
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Action, Check, Step, Verification, require

DAY_S = 86_400.0
SUFFIX = ".before"


def ports(address: str, status: admin_pb2.StatusReply, ca_file: str = "") -> list[PairPath]:
    """What every TLS port of a deployment shows now; with `ca_file`, whether that is trusted."""
    return [wire for wire in wires(address, status, ca_file) if wire.fingerprint]


def fingerprint_of(path: str, content: bytes | None = None) -> str:
    """SHA-256 of a file's first certificate, as `baton doctor` shows it.

    Args:
        path: of the file.
        content: what was read from it, if it was.

    Raises:
        ConfigInvalid: there is none.
    """
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    try:
        text = (Path(path).read_bytes() if content is None else content).decode("ascii")
        body = text[text.index(begin) : text.index(end) + len(end)]
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(body)).hexdigest()
    except (OSError, ValueError) as error:
        raise ConfigInvalid(f"{path} holds no certificate: {error}", keys=["cert_file"]) from error


def pair_fits(cert_file: str, key_file: str) -> None:
    """Check that a certificate and a key are of each other.

    Raises:
        PreconditionUnmet: they are not, or cannot be read.
    """
    try:
        read_tls(TlsFiles(cert_file=cert_file, key_file=key_file), version=1)
    except ConfigInvalid as error:
        raise PreconditionUnmet(error.message) from error


def days_left(cert_file: str) -> float:
    """Until a certificate ends; negative when it has.

    Raises:
        PreconditionUnmet: it cannot be read.
    """
    try:
        return (end_of_certificate_s(cert_file) - time.time()) / DAY_S
    except ConfigInvalid as error:
        raise PreconditionUnmet(error.message) from error


def is_trusted(cert_file: str, key_file: str, ca_file: str, names: list[str]) -> None:
    """Check in a handshake without a network that those who trust `ca_file` take a certificate.

    Args:
        cert_file: of the server.
        key_file: and its private key.
        ca_file: of the client.
        names: that must be in it.

    Raises:
        PreconditionUnmet: they do not.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for name in names or [""]:
        try:
            server.load_cert_chain(cert_file, key_file)
            client = ssl.create_default_context(cafile=ca_file)
            client.check_hostname = bool(name)
            _shake_hands(client, server, name or None)
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", "") or error.reason
            raise PreconditionUnmet(f"{cert_file} is not trusted with {ca_file}: {why}") from error
        except OSError as error:
            raise PreconditionUnmet(f"{cert_file}, {ca_file}: {error}") from error


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, name: str | None) -> None:
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue


class Replacement:
    """New content for a file, and the way back; the old content is kept beside it until the new one is proven.

    Args:
        path: the file.
        source: holds what is to be in it; may be the file that the old content is kept in.
    """

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source = path, source
        self._backup = f"{path}{SUFFIX}"
        self._new: bytes | None = None
        self._held: dict[str, bytes] = {}  # before `do`, by path

    def content(self) -> bytes:
        """What is to be in it: read once, before anything is written, for `do` may write over the source.

        Raises:
            PreconditionUnmet: it cannot be read.
        """
        if self._new is None:
            self._new = _content_of(self.source)
        return self._new

    def is_done(self) -> bool:
        """It holds that already."""
        return _content_of(self.path) == self.content()

    def do(self) -> str:
        """Write beside, then rename."""
        new, old = self.content(), _content_of(self.path)
        try:
            if os.path.exists(self._backup):
                self._held[self._backup] = _content_of(self._backup)
            self._put(self._backup, old)
            self._held[self.path] = old
            self._put(self.path, new)
        except OSError as error:
            raise StepFailed(f"{self.path} cannot be replaced: {error.strerror}", path=self.path) from error
        return f"the old one is {self._backup}"

    def undo(self) -> str:
        """What was in it before, and in the file beside it if there was one."""
        try:
            for path in (self.path, self._backup):
                if path in self._held:
                    self._put(path, self._held[path])
        except OSError as error:
            raise StepFailed(f"{self.path} cannot be put back: {error.strerror}", path=self.path) from error
        return f"{self.path} holds what it held"

    def _put(self, path: str, content: bytes) -> None:
        """With the mode and the owner of the file that is replaced: all of it may be a private key."""
        temporary = Path(f"{path}.{os.getpid()}.new")
        status = os.stat(self.path)
        try:
            with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(content)
            os.chmod(temporary, status.st_mode & 0o777)
            if os.geteuid() == 0:
                os.chown(temporary, status.st_uid, status.st_gid)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _content_of(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise PreconditionUnmet(f"{path} cannot be read: {error.strerror}", path=path) from error


SHOWN_S = 30.0  # files are looked at twice a second, on a machine that has time
FLAGS = ("cert_file", "key_file", "ca_file")


def _options(parser: argparse.ArgumentParser) -> None:
    for name, what in (
        ("cert", "certificate that this host's ports show"),
        ("key", "its private key"),
        ("ca", "who signed certificates"),
    ):
        parser.add_argument(f"--{name}-file", default="", help=f"in use: {what}")
        parser.add_argument(f"--new-{name}-file", default="", help="what is to be in it")
    parser.add_argument("--min-days", type=positive, default=7.0, help="that new certificates must last  [7]")


class _Rotation:
    """What one run knows."""

    def __init__(self, site: Site, options: argparse.Namespace) -> None:
        given = {name: (getattr(options, name), getattr(options, f"new_{name}")) for name in FLAGS}
        halves = [name for name, (old, new) in given.items() if bool(old) != bool(new)]
        if halves:
            raise ConfigInvalid(f"give both --{halves[0].replace('_', '-')} and --new-{halves[0].replace('_', '-')}")
        self._has_pair, self._has_ca = bool(given["cert_file"][0]), bool(given["ca_file"][0])
        if self._has_pair != bool(given["key_file"][0]):
            raise ConfigInvalid("a certificate and its key are replaced together: give all four files")
        if not self._has_pair and not self._has_ca:
            raise ConfigInvalid("give --cert-file and --key-file, or --ca-file, and what is to be in them")
        self._site = site
        order = ("ca_file", "key_file", "cert_file")  # until both are there, the pair before stays in use
        self._files = {name: Replacement(*given[name]) for name in order if given[name][0]}
        self._cert, self._key, self._ca = (given[name] for name in ("cert_file", "key_file", "ca_file"))
        self._min_days: float = options.min_days
        self._canaries = CanaryRuns(site)
        self._before = fingerprint_of(self._cert[0]) if self._has_pair else ""
        self._own: list[str] = []  # addresses that show what is replaced

    def steps(self) -> Sequence[Step]:
        """Look at the new files and at the ports, replace, look again."""
        pair = Check(
            name="the new certificate is good",
            look=self._look_at_pair,
            next="have it issued anew, by an authority that the deployment trusts, for this host's names",
        )
        trust = Check(
            name="the new authorities are those of every port",
            look=lambda: self._look_at_trust(self._ca[1]),
            next="put old and new authority into one file everywhere; take the old one out after all certificates",
        )
        trusted = Verification(name="every port is trusted", look=lambda: self._look_at_trust(self._ca[0]))
        shown = Verification(
            name="this host's ports show the new certificate",
            look=self._wait_shown,
            next="the old files are back; the router's and the workers' logs say why the new ones were not taken",
        )
        return [
            Check(name="the new files can be read", look=self._read, next="correct the path that is named"),
            *([pair] if self._has_pair else []),
            *([trust] if self._has_ca else []),
            *([Check(name="ports show the old certificate", look=self._look_at_ports)] if self._has_pair else []),
            workers.expect(self._canaries),
            *(self._replace(file) for file in self._files.values()),
            *([shown] if self._has_pair else []),
            *([trusted] if self._has_ca else []),
            Verification(
                name="canaries get the tokens expected",
                look=self._ask,
                next="the old files are back; see `baton doctor --address` for what each port shows",
            ),
        ]

    def _replace(self, file: Replacement) -> Action:
        return Action(
            name=f"replace {file.path}",
            do=file.do,
            undo=file.undo,
            is_done=file.is_done,
            next="the file must be writable, and its folder",
        )

    def _read(self) -> str:
        for file in self._files.values():
            file.content()
        return f"{len(self._files)} files"

    def _fingerprint(self) -> str:
        """Of the new certificate."""
        file = self._files["cert_file"]
        return fingerprint_of(file.source, file.content())

    def _look_at_pair(self) -> str:
        pair_fits(self._cert[1], self._key[1])
        left_days = days_left(self._cert[1])
        message = f"{self._cert[1]} ends in {left_days:.1f} days, --min-days is {self._min_days:g}"
        require(left_days >= self._min_days, message, days=round(left_days, 1))
        ca_file = self._ca[1] or current_access().tls.ca_file
        names = [current_access().tls.server_name] if current_access().tls.server_name else []
        is_trusted(self._cert[1], self._key[1], ca_file, names)
        return f"ends in {left_days:.0f} days, fingerprint {self._fingerprint()[:16]}"

    def _look_at_trust(self, ca_file: str) -> str:
        found = ports(self._site.address, self._site.status(), ca_file)
        bad = [f"{port.name} ({port.address})" for port in found if port.problem]
        require(not bad, f"not trusted with {ca_file}: {', '.join(bad)}", ports=bad)
        return f"{len(found)} ports"

    def _look_at_ports(self) -> str:
        new = self._fingerprint()
        found = ports(self._site.address, self._site.status())
        self._own = [port.address for port in found if port.fingerprint in (self._before, new)]
        others = {port.name: port.fingerprint for port in found if port.address not in self._own and port.fingerprint}
        self._site.found |= {"fingerprint": new, "ports": self._own, "other_certificates": others}
        require(bool(self._own), f"no port shows the certificate in {self._cert[0]}", fingerprint=self._before)
        return f"{len(self._own)} ports; {len(others)} show other certificates"

    def _wait_shown(self) -> str:
        new = self._fingerprint()

        def look() -> bool | None:
            shown = {port.address: port.fingerprint for port in ports(self._site.address, self._site.status())}
            return True if all(shown.get(address, new) == new for address in self._own) else None

        self._site.wait(look, f"every port that showed the old certificate shows {new[:16]}", within_s=SHOWN_S)
        return f"{len(self._own)} ports show {new[:16]}"

    def _ask(self) -> str:
        num = len(self._canaries.round())
        if not num:
            raise StepFailed("no canary was sent")
        return f"{num} canaries with the tokens expected"


RUNBOOK = Runbook(
    name="rotate-certificates",
    about=__doc__ or "",
    steps=lambda site, options: _Rotation(site, options).steps(),
    options=_options,
)

if __name__ == "__main__":
    sys.exit(main(RUNBOOK))
