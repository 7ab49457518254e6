"""Certificates in files: what is taken, what is not, and what a server of Python's shows after a change."""

import os
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest

from baton.core.errors import ConfigInvalid
from baton.core.tls_files import TlsFiles, TlsWatch, end_of_certificate_s, read_tls, server_context
from baton.tests.router.certificates import Authority, replace

pytestmark = pytest.mark.fast


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_changes_are_taken_once_and_only_whole(authority, caplog):
    clock, told = Clock(), []
    files = authority.files("a")
    watch = TlsWatch(files, now_s=clock, check_s=1.0, on_reload=told.append)
    first = watch.current()
    assert (first.version, watch.current()) == (1, first)
    authority.issue("a")
    assert watch.current() is first  # not looked at again so soon
    clock.now += 1.0
    second = watch.current()
    assert second.version == 2 and second.chain != first.chain and told == [True]
    other = authority.issue("b")
    os.replace(other.key_file, files.key_file)  # of another certificate: half of a change
    for _ in range(3):
        clock.now += 1.0
        assert watch.current() is second
    assert told == [True, False] and caplog.text.count("are not taken") == 1
    os.replace(other.cert_file, files.cert_file)
    clock.now += 1.0
    assert watch.current().version == 3 and told == [True, False, True]
    os.unlink(files.cert_file)
    clock.now += 1.0
    assert watch.current().version == 3 and told[-1] is False
    assert (watch.num_reloads, watch.num_refused) == (2, 2)


def test_a_change_to_a_certificate_that_has_expired_is_not_taken(authority, caplog):
    clock, told = Clock(), []
    watch = TlsWatch(authority.files("a"), now_s=clock, check_s=1.0, on_reload=told.append)
    first = watch.current()
    authority.issue("a", days=-1)
    for _ in range(2):
        clock.now += 1.0
        assert watch.current() is first
    assert told == [False] and caplog.text.count("the certificate has expired") == 1
    authority.issue("a", days=1)
    clock.now += 1.0
    assert watch.current().version == 2 and told == [False, True]


def test_a_certificate_ends_when_its_authority_says(authority):
    week_s = 7 * 86_400
    assert end_of_certificate_s(authority.issue("a", days=7).cert_file) == pytest.approx(time.time() + week_s, abs=60)
    none = str(authority.folder / "none")
    replace(none, b"")
    with pytest.raises(ConfigInvalid, match="holds no certificate"):
        end_of_certificate_s(none)


@pytest.mark.parametrize(
    "change",
    [
        {"cert_file": ""},
        {"key_file": ""},
        {"key_file": "missing"},
        {"ca_file": "missing"},
        {"ca_file": "junk"},
        {"cert_file": "junk"},
        {"key_file": "junk"},
        {"key_file": "encrypted"},
    ],
)
def test_what_does_not_go_together_is_refused_without_a_word_of_it(authority, change, monkeypatch):
    monkeypatch.chdir(authority.folder)
    files = authority.files("a")
    replace("junk", b"-----BEGIN PRIVATE KEY-----\nsecret stuff\n-----END PRIVATE KEY-----\n")
    from cryptography.hazmat.primitives import serialization as forms

    key = forms.load_pem_private_key(Path(files.key_file).read_bytes(), None)
    locked = forms.BestAvailableEncryption(b"secret stuff")
    replace("encrypted", key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, locked))
    values = {"cert_file": files.cert_file, "key_file": files.key_file, "ca_file": files.ca_file} | change
    with pytest.raises(ConfigInvalid, match="tls_") as error:
        read_tls(TlsFiles(**values))
    assert "secret stuff" not in error.value.to_wire()


def test_keys_are_in_no_repr(authority):
    assert "PRIVATE" not in repr(TlsWatch(authority.files("a")).current())


class Echo:
    """Serves one line a connection with Python's TLS."""

    def __init__(self, context):
        self.socket = context.wrap_socket(
            socket.create_server(("127.0.0.1", 0)), server_side=True, do_handshake_on_connect=False
        )
        self.port = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.do_handshake()
                    connection.sendall(b"hello\n")
                    connection.unwrap()
                except OSError:
                    pass

    def close(self):
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.thread.join(5)


def ask(port, ca_file, own=None):
    context = ssl.create_default_context(cafile=str(ca_file))
    if own is not None:
        context.load_cert_chain(own.cert_file, own.key_file)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
            return connection.recv(16)


def test_a_server_of_pythons_follows_the_files(tmp_path):
    before, after = Authority(tmp_path / "before"), Authority(tmp_path / "after")
    clock = Clock()
    files = before.files("server")
    client = before.issue("client")
    echo = Echo(server_context(TlsWatch(files, now_s=clock)))
    try:
        assert ask(echo.port, before.file, client) == b"hello\n"
        with pytest.raises(OSError):
            ask(echo.port, before.file)  # no certificate
        with pytest.raises(OSError):
            ask(echo.port, before.file, after.issue("client"))
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(echo.port, after.file, client)
        before.ca = after.ca
        before.issue("server")
        replace(before.file, after.ca.cert_pem.bytes())
        clock.now += 1.0
        assert ask(echo.port, after.file, after.issue("client")) == b"hello\n"
        with pytest.raises(OSError):
            ask(echo.port, after.file, client)  # of the authority before
    finally:
        echo.close()
