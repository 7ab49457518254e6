"""Certificates for tests: an authority, and files that may be replaced while they are in use."""

import datetime
import os
import subprocess

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

    def issue(self, name="server", *, days=None, names=NAMES, roles=()):
        """A certificate, in files that are replaced if they are there. `days`: until it expires; negative is past."""
        if roles:
            return self._issue_by_openssl(name, names, roles, days or 2)
        until = None
        if days is not None:
            until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        made = self.ca.issue_cert(*names, not_after=until)
        files = TlsFiles(cert_file=str(self.folder / f"{name}.crt"), key_file=str(self.folder / f"{name}.key"))
        replace(files.key_file, made.private_key_pem.bytes())
        replace(files.cert_file, b"".join(part.bytes() for part in made.cert_chain_pems))
        return files

    def _issue_by_openssl(self, name, names, roles, days):
        """As docs/security-setup.md does it: trustme knows no names that are URIs."""
        key = self.folder / "ca.key"
        key.write_bytes(self.ca.private_key_pem.bytes())
        alternatives = [f"{'IP' if at[0].isdigit() else 'DNS'}:{at}" for at in names]
        alternatives += [f"URI:baton://role/{role}" for role in roles]
        lines = f"subjectAltName = {', '.join(alternatives)}\nextendedKeyUsage = serverAuth, clientAuth\n"
        (self.folder / "names").write_text(lines)
        new = "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj".split()
        sign = f"x509 -req -extfile names -days {days} -CAcreateserial -CAkey ca.key".split()
        for command in (
            [*new, f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr"],
            [*sign, "-CA", self.file.name, "-in", f"{name}.csr", "-out", f"{name}.crt"],
        ):
            subprocess.run(["openssl", *command], cwd=self.folder, check=True, capture_output=True)
        return TlsFiles(cert_file=str(self.folder / f"{name}.crt"), key_file=str(self.folder / f"{name}.key"))

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
