"""The certificates of Ray's ports: who may read them, whom they let in, and what is refused."""

import socket
import ssl
import subprocess
import sys
import threading

import pytest

from baton.cluster.ray import certificates as ray_certificates
from baton.core.errors import ConfigInvalid

pytestmark = pytest.mark.fast


def server_context(folder):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    context.load_verify_locations(folder / "ca.pem")
    return context


def client_context(folder, *, has_certificate=True):
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if has_certificate:
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


def is_let_in(server, client, name="127.0.0.1"):
    """Whether a byte goes through, both checking the other."""
    here, there = socket.socketpair()

    def serve():
        try:
            with server.wrap_socket(there, server_side=True) as inside:
                inside.sendall(inside.recv(1))
        except OSError:
            pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(here, server_hostname=name) as inside:
            inside.sendall(b"x")
            return inside.recv(1) == b"x"
    except OSError:
        return False
    finally:
        here.close()
        thread.join()


@pytest.fixture
def cluster(tmp_path):
    """Two hosts of a cluster."""
    ray_certificates.make(tmp_path / "secrets")
    for host in ("one", "two"):
        ray_certificates.issue(tmp_path / "secrets", tmp_path / host, ["10.9.8.7", "ray.internal"])
    return tmp_path


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "10.9.8.7", "ray.internal"])
def test_hosts_of_a_cluster_let_each_other_in(cluster, name):
    assert is_let_in(server_context(cluster / "one"), client_context(cluster / "two"), name)


def test_strangers_are_not_let_in(cluster, tmp_path):
    server = server_context(cluster / "one")
    assert not is_let_in(server, client_context(cluster / "two", has_certificate=False))
    assert not is_let_in(server, client_context(cluster / "two"), "10.0.0.1"), "a certificate is for its addresses"
    ray_certificates.make(tmp_path / "others")
    ray_certificates.issue(tmp_path / "others", tmp_path / "three")
    other = client_context(tmp_path / "three")
    other.load_verify_locations(cluster / "one" / "ca.pem")  # it believes us; we do not believe it
    assert not is_let_in(server, other)


def test_a_host_s_certificate_makes_no_others(cluster, tmp_path):
    folder = tmp_path / "host_as_authority"
    folder.mkdir()
    (folder / "ray_ca.pem").write_bytes((cluster / "two" / "cert.pem").read_bytes())
    (folder / "ray_ca.key").write_bytes((cluster / "two" / "key.pem").read_bytes())
    ray_certificates.issue(folder, tmp_path / "forged")
    forged = client_context(tmp_path / "forged")
    forged.load_verify_locations(cluster / "one" / "ca.pem")
    assert not is_let_in(server_context(cluster / "one"), forged)


def test_the_certificate_of_a_private_ray_is_good_for_itself(tmp_path):
    settings = ray_certificates.private_settings(tmp_path / "tls", "127.0.0.1")
    assert set(settings) == set(ray_certificates.TLS_VARIABLES) and settings["RAY_USE_TLS"] == "1"
    (tmp_path / "tls" / "ca.pem").write_bytes((tmp_path / "tls" / "cert.pem").read_bytes())
    server = server_context(tmp_path / "tls")
    assert is_let_in(server, client_context(tmp_path / "tls"))
    assert not is_let_in(server, client_context(tmp_path / "tls", has_certificate=False))


def test_files_are_for_this_account_alone_and_never_replaced(cluster):
    for folder in ("secrets", "one"):
        for path in (cluster / folder, *(cluster / folder).iterdir()):
            assert path.stat().st_mode & 0o077 == 0, path
    before = {path.name: path.read_bytes() for path in (cluster / "secrets").iterdir()}
    assert len(before["ray_token"]) == 64 and len(before) == 3
    with pytest.raises(ConfigInvalid, match="is not replaced"):
        ray_certificates.make(cluster / "secrets")
    assert {path.name: path.read_bytes() for path in (cluster / "secrets").iterdir()} == before


@pytest.mark.parametrize("damage", ["absent", "torn", "of_another"])
def test_an_authority_that_cannot_be_used_is_named(cluster, tmp_path, damage):
    key = cluster / "secrets" / "ray_ca.key"
    if damage == "absent":
        key.unlink()
    elif damage == "torn":
        key.write_bytes(key.read_bytes()[:40])
    else:
        key.write_bytes((cluster / "one" / "key.pem").read_bytes())
    with pytest.raises(ConfigInvalid, match=str(cluster / "secrets")):
        ray_certificates.issue(cluster / "secrets", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_the_command_makes_and_issues_and_says_what_is_wrong(tmp_path):
    command = [sys.executable, "-P", "-m", "baton.cluster.ray.certificates"]
    subprocess.run([*command, "make", tmp_path / "secrets"], check=True)
    subprocess.run([*command, "issue", tmp_path / "secrets", tmp_path / "host"], check=True)
    assert is_let_in(server_context(tmp_path / "host"), client_context(tmp_path / "host"))
    again = subprocess.run([*command, "make", tmp_path / "secrets"], capture_output=True, text=True)
    assert again.returncode == 3 and "ConfigInvalid" in again.stderr and "Traceback" not in again.stderr
