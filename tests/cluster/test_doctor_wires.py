"""What `baton doctor` says is encrypted: by knocking at real ports, each kind of them."""

import json
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace

import grpc
import pytest

from baton.cluster import cli
from baton.cluster.doctor import doctor
from baton.cluster.doctor.doctor import check_wire
from baton.cluster.doctor.wires import PairPath, is_loopback, probe_tls, probe_zmq, why_refused, wires
from baton.core.config import KVTransferConfig
from baton.core.tls_files import TlsWatch
from baton.kvtransfer.transports.over_zmq import ZmqTransport
from baton.proto import admin_pb2
from baton.proto.secure_channel import server_credentials
from baton.tests.kvtransfer.transport_ends import make_curve_key
from baton.tests.router.certificates import Authority

pytestmark = pytest.mark.fast

CURVE = "CURVE, admits holders of the deployment's key"


@pytest.fixture
def serve():
    servers = []

    def make(tls=None):
        from concurrent.futures import ThreadPoolExecutor

        server = grpc.server(ThreadPoolExecutor(1))
        if tls is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            port = server.add_secure_port("127.0.0.1:0", server_credentials(TlsWatch(tls)))
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield make
    for server in servers:
        server.stop(None).wait(5)


def found(wire):
    return wire.is_encrypted, wire.detail


def test_grpc_ports(serve, tmp_path):
    authority = Authority(tmp_path)
    assert found(probe_tls("x", serve())) == (False, "in clear")
    public = probe_tls("x", serve(authority.issue("public")))
    assert found(public) == (True, "TLSv1.3, asks for no certificate")
    inside = probe_tls("x", serve(authority.files("inside")))
    assert found(inside) == (True, "TLSv1.3, asks for certificates")
    assert public.fingerprint != inside.fingerprint and len(inside.fingerprint) == 64


@pytest.mark.long
def test_certificates_that_are_wrong_or_soon_will_be(serve, tmp_path):
    authority, other = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    good = probe_tls("x", serve(authority.files("good", days=100, roles=("router", "decode"))), str(authority.file))
    assert check_wire(good).level == "ok" and 99 < (good.expires_s - time.time()) / 86_400 <= 100
    assert good.roles == ("decode", "router") and "of decode, router" in good.detail
    unnamed = probe_tls("x", serve(authority.files("unnamed", days=100)), str(authority.file))
    assert check_wire(unnamed).level == "warn" and "names no role" in unnamed.detail and not unnamed.problem
    soon = probe_tls("x", serve(authority.files("soon", days=10)), str(authority.file))
    assert check_wire(soon).level == "warn" and "until" in soon.detail and not soon.problem
    for files in (authority.files("late", days=-1), other.files("other")):
        wrong = probe_tls("x", serve(files), str(authority.file))
        assert wrong.is_encrypted and wrong.problem and check_wire(wrong).level == "warn"


def test_why_two_ends_of_tls_do_not_meet_is_found_out(serve, tmp_path):
    authority, other = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    address = serve(authority.files("host", names=("baton.internal", "10.0.0.1")))
    ours = authority.files("ours")
    refusal = why_refused(address, ours)
    assert refusal.why == f"the certificate of {address} names baton.internal, 10.0.0.1, not 127.0.0.1"
    assert refusal.step.startswith("give --tls-server-name baton.internal, or make a certificate that names 127.0.0.1")
    assert "not elsewhere" in why_refused(address, replace(ours, server_name="elsewhere")).why
    named = replace(ours, server_name="baton.internal")
    assert why_refused(address, named) is None, "they meet"
    assert "is not one of" in why_refused(address, replace(named, ca_file=str(other.file))).why
    bare = replace(named, cert_file="", key_file="")
    assert why_refused(address, bare).step == "give --tls-cert-file and --tls-key-file"
    strange = other.issue("strange")
    foreign = replace(named, cert_file=strange.cert_file, key_file=strange.key_file)
    assert "does not accept the certificate" in why_refused(address, foreign).why
    assert "does not speak TLS" in why_refused(serve(), named).why
    for nowhere in ("127.0.0.1:1", "nonsense", "unix:x"):
        assert why_refused(nowhere, named) is None, nowhere


def test_commands_say_that_a_certificate_lacks_the_name_and_doctor_which_it_has(serve, tmp_path, monkeypatch, capsys):
    authority = Authority(tmp_path)
    address = serve(authority.issue("host", names=("baton.internal",)))
    monkeypatch.setattr(doctor, "check_all", lambda port: iter(()))
    said = []
    for command in ("status", "doctor"):
        asked = ["baton", command, "--address", address, "--tls-ca-file", str(authority.file), "--json"]
        monkeypatch.setattr(sys, "argv", asked)
        with pytest.raises(SystemExit) as exit:
            cli.main()
        assert exit.value.code == 3
        said.append(json.loads(capsys.readouterr().out))
    assert "does not name 127.0.0.1" in said[0]["message"]
    assert f"`baton doctor --address {address}`" in said[0]["next"]
    assert "names baton.internal, not 127.0.0.1" in said[1]["message"]
    assert said[1]["next"].startswith("give --tls-server-name baton.internal")


def test_zmq_ports(tmp_path):
    for config, expected in (
        ({}, (False, "in clear, asks for the deployment's secret")),
        (make_curve_key(tmp_path), (True, CURVE)),
    ):
        end = ZmqTransport("tcp://127.0.0.1:0", KVTransferConfig(**config))
        try:
            assert found(probe_zmq("x", end.address.removeprefix("tcp://"))) == expected
        finally:
            end.close()


def test_ports_that_do_not_answer_or_speak_otherwise():
    for probe in (probe_tls, probe_zmq):
        for address in ("127.0.0.1:1", "nonsense", "127.0.0.1:x", "[::1]:1"):
            assert probe("x", address).is_encrypted is None, address
    silent = socket.create_server(("127.0.0.1", 0))

    def hang_up():
        with suppress(OSError):  # when it is shut down
            while True:
                silent.accept()[0].close()

    thread = threading.Thread(target=hang_up, daemon=True)
    thread.start()
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    assert probe_tls("x", address).is_encrypted is not True
    assert probe_zmq("x", address).is_encrypted is not True
    silent.shutdown(socket.SHUT_RDWR)
    thread.join(30)
    assert not thread.is_alive()
    silent.close()


def test_every_live_port_is_asked_and_a_clear_one_on_a_network_is_a_warning(serve):
    status = admin_pb2.StatusReply()
    for name, alive in (("decode-0", True), ("decode-1", False)):
        worker = status.workers.add(alive=alive)
        worker.state.worker_id, worker.state.address = name, serve()
        worker.state.kv_address = f"grpc://{serve()}"
    seen = list(wires(serve(), status))
    assert [wire.name for wire in seen] == ["router", "decode-0", "KV to decode-0"]
    assert {check_wire(wire).level for wire in seen} == {"ok"}  # loopback
    far = check_wire(PairPath("router", "10.0.0.1:50051", False, "in clear"))
    assert far.level == "warn" and "docs/security-setup.md" in far.next
    assert check_wire(PairPath("router", "10.0.0.1:50051", None, "?")).level == "warn"
    assert check_wire(PairPath("router", "10.0.0.1:50051", True, "TLS")).level == "ok"
    places = ("127.0.0.1:1", "[::1]:1", "localhost:1", "10.0.0.1:1", "host:1")
    assert [is_loopback(place) for place in places] == [True, True, True, False, False]
