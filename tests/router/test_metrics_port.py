"""The metrics' port: plain, or with certificates that are asked for and followed; slow callers keep nobody waiting."""

import socket
import ssl
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from baton.core.errors import ConfigInvalid, PortInUse
from baton.core.tls_files import TlsFiles
from baton.router.access.metrics_port import serve_metrics
from baton.tests.router.certificates import Authority

pytestmark = pytest.mark.fast


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    Counter("answers", "some", registry=registry).inc(42)
    return registry


def scrape(port, authority=None, own=None):
    context, scheme = None, "http"
    if authority is not None:
        context, scheme = ssl.create_default_context(cafile=str(authority.file)), "https"
        if own is not None:
            context.load_cert_chain(own.cert_file, own.key_file)
    with urllib.request.urlopen(f"{scheme}://127.0.0.1:{port}/metrics", timeout=5, context=context) as reply:
        return reply.read().decode()


@pytest.mark.long
def test_in_clear(registry, capfd):
    port, close = serve_metrics("127.0.0.1", 0, registry)
    assert "answers_total 42.0" in scrape(port)
    with pytest.raises(PortInUse):
        serve_metrics("127.0.0.1", port, registry)
    close()
    with pytest.raises(OSError):
        scrape(port)
    assert capfd.readouterr().err == ""


@pytest.mark.long
def test_with_certificates(registry, tmp_path, capfd):
    authority, other = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    port, close = serve_metrics("127.0.0.1", 0, registry, authority.files("router"))
    with socket.create_connection(("127.0.0.1", port)):  # begins a handshake and never goes on
        for _ in range(2):
            assert "answers_total 42.0" in scrape(port, authority, authority.issue("prometheus"))
        for own in (None, other.issue("stranger")):
            with pytest.raises(OSError):
                scrape(port, authority, own)
        with pytest.raises(OSError):
            scrape(port)
    close()
    assert capfd.readouterr().err == ""


def test_certificates_that_cannot_be_used(registry):
    with pytest.raises(ConfigInvalid):
        serve_metrics("127.0.0.1", 0, registry, TlsFiles(cert_file="missing", key_file="missing"))
