"""Certificates for tests: an authority, and files that may be replaced while they are in use."""

import datetime
import os

import trustme

from baton.core.tls_files import TlsFiles

NAMES = ("localhost", "127.0.0.1")


class Authority:
    """A CA in a folder."""

    def __init__(self, folder, name="ca"):
        folder.mkdir(exist_ok=True, parents=True)
        self.folder = folder
        self.ca = trustme.CA()
        self.file = folder / f"{name}.pem"
        replace(self.file, self.ca.cert_pem.bytes())

    def issue(self, name="server", *, days=None, names=NAMES):
        """A certificate, in files that are replaced if they are there. `days`: until it expires; negative is past."""
        until = None
        if days is not None:
            until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        made = self.ca.issue_cert(*names, not_after=until)
        files = TlsFiles(cert_file=str(self.folder / f"{name}.crt"), key_file=str(self.folder / f"{name}.key"))
        replace(files.key_file, made.private_key_pem.bytes())
        replace(files.cert_file, b"".join(part.bytes() for part in made.cert_chain_pems))
        return files

    def files(self, name="server", ca=None, **issued):
        """A certificate, and a CA to check others with (this one if none is given)."""
        own = self.issue(name, **issued)
        return TlsFiles(cert_file=own.cert_file, key_file=own.key_file, ca_file=str((ca or self).file))


def replace(path, data):
    """As careful operators do."""
    temporary = f"{path}.new"
    with open(temporary, "wb") as file:
        file.write(data)
    os.replace(temporary, path)
