"""Where other programs answer: a router that ends, an address that is not Ray's, a ray that is none."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import types
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from ray._private import services
from ray._private import worker as ray_worker

from baton.cluster.ray import certificates as ray_certificates
from baton.cluster.ray import private_ray
from baton.cluster.ray import session as ray_session
from baton.cluster.router_process import RouterProcess
from baton.core.errors import ModelFileDamaged, RayAccessRefused, RayUnavailable, RayVersionMismatch, WorkerStartFailed
from baton.core.inside import DeploymentSecret

pytestmark = pytest.mark.fast


def router(tmp_path, script):
    return RouterProcess(lambda ports: [sys.executable, "-S", "-c", script], tmp_path, DeploymentSecret.new())


@pytest.mark.parametrize(
    ("code", "kind", "match"),
    [(3, ModelFileDamaged, r"^tokenizer\.json is torn$"), (1, WorkerStartFailed, "code 1: a line")],
)
def test_the_last_words_of_a_router_are_its_typed_error(tmp_path, code, kind, match):
    wire = ModelFileDamaged("tokenizer.json is torn", path="/m").to_wire()
    process = router(tmp_path, f"import sys; print('a line', {wire!r}, sep='\\n', file=sys.stderr); sys.exit({code})")
    with pytest.raises(kind, match=match):
        process.wait_port(20.0)
    process.stop()


def test_other_last_words_are_quoted(tmp_path):
    process = router(tmp_path, "import sys; print('odd', file=sys.stderr); sys.exit(3)")
    with pytest.raises(WorkerStartFailed, match="code 3: odd"):
        process.wait_port(20.0)
    process.stop()


def test_no_time_left_is_told_without_a_negative_number(tmp_path):
    process = router(tmp_path, "import sys; sys.stdin.read()")
    with pytest.raises(WorkerStartFailed, match="start_timeout_s") as late:
        process.wait_port(-1.0)
    assert "-1" not in late.value.message
    process.stop()


@contextlib.contextmanager
def silent_listener():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@contextlib.contextmanager
def foreign_server():
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(0).wait()


@pytest.mark.parametrize("other", [silent_listener, foreign_server])
def test_what_listens_and_is_not_ray_is_refused_soon(monkeypatch, tmp_path, other):
    monkeypatch.setattr(ray_session, "CONNECT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(ray_session, "import_ray", lambda: None)  # refused before it is used
    start_s = time.monotonic()
    with other() as port, pytest.raises(RayUnavailable, match=f"no Ray cluster answers at 127.0.0.1:{port}"):
        ray_session.RaySession(f"127.0.0.1:{port}", namespace="n", temp_dir=tmp_path, num_gpus=None)
    assert time.monotonic() - start_s < 5


@pytest.mark.parametrize("address", ["here", "h:99999", "h:²", "h:", ":1", "\udcff:1", "127.0.0.1:1"])
def test_an_address_where_no_ray_can_be(monkeypatch, tmp_path, address):
    monkeypatch.setattr(ray_session, "import_ray", lambda: None)
    for given, variable in ((address, ""), ("auto", address)):
        if variable:
            monkeypatch.setattr(ray_session.os, "environ", {"RAY_ADDRESS": variable})
        with pytest.raises(RayUnavailable):
            ray_session.RaySession(given, namespace="n", temp_dir=tmp_path, num_gpus=None)


class HangingNode:
    """Fails to start as Ray's node does."""

    def __init__(self, ended, error):
        self.ended = ended
        raise error

    def kill_all_processes(self, check_alive, allow_graceful, wait):
        self.ended.append((check_alive, allow_graceful, wait))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Timed out waiting for file /tmp/x/gcs_server_port_1"),
        Exception("The current node timed out during startup."),
    ],
)
@pytest.mark.parametrize("num_hangs", [0, 1, ray_session.MAX_STARTS])
def test_a_head_that_hangs_is_started_again_and_not_for_ever(monkeypatch, tmp_path, num_hangs, caplog, error):
    ended, begun = [], []

    def init(address, **options):
        begun.append(address)
        if len(begun) <= num_hangs:
            HangingNode(ended, error)

    fake = types.SimpleNamespace(init=init, shutdown=lambda: None, cluster_resources=lambda: {"CPU": 2.0})
    monkeypatch.setattr(ray_session, "import_ray", lambda: fake)
    if num_hangs < ray_session.MAX_STARTS:
        session = ray_session.RaySession("local", namespace="n", temp_dir=tmp_path, num_gpus=None)
        assert session.resources == {"CPU": 2.0}
    else:
        with pytest.raises(RayUnavailable, match=r"(?i)timed out"):
            ray_session.RaySession("local", namespace="n", temp_dir=tmp_path, num_gpus=None)
    assert len(begun) == min(num_hangs + 1, ray_session.MAX_STARTS)
    again = len(begun) - 1
    assert ended == [(False, False, True)] * num_hangs
    assert caplog.text.count("is started again") == again


def test_what_ray_says_is_a_line_of_our_log(monkeypatch, tmp_path, caplog, capsys):
    its_own = ray_worker.print_to_stdstream
    monkeypatch.setattr(ray_worker, "print_to_stdstream", its_own)  # put back behind the test
    fake = types.SimpleNamespace(init=lambda **options: None, cluster_resources=dict)
    monkeypatch.setattr(ray_session, "import_ray", lambda: fake)
    ray_session.RaySession("local", namespace="n", temp_dir=tmp_path, num_gpus=None)
    text = "\x1b[33m(raylet)\x1b[0m it failed:\nTraceback\n  File"
    ray_worker.print_to_stdstream({"lines": [text, "x" * 9999], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "Ray says: (raylet) it failed: Traceback File"
    assert len(second) < 600 and second.endswith("x...")
    assert capsys.readouterr().out == ""


def test_a_ray_without_a_version_or_that_cannot_be_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace())
    with pytest.raises(RayVersionMismatch, match="no version"):
        ray_session.import_ray()
    monkeypatch.delitem(sys.modules, "ray")

    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "ray":
                raise OSError("libgcc_s.so.1: cannot open shared object file")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(RayUnavailable, match="libgcc"):
        ray_session.import_ray()


@pytest.mark.parametrize(
    ("mode", "answers", "is_refused"),
    [
        (None, grpc.StatusCode.OK, True),
        ("token", grpc.StatusCode.OK, True),
        ("token", grpc.StatusCode.UNAUTHENTICATED, False),
        ("disabled", grpc.StatusCode.OK, False),
    ],
)
def test_a_cluster_that_is_open_to_all_is_refused_unless_that_is_meant(monkeypatch, mode, answers, is_refused):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setattr(ray_session, "_answer_without_token", lambda address: answers)
    if is_refused:
        with pytest.raises(RayUnavailable, match="asks for no token"):
            ray_session.require_token_there("h:1")
    else:
        ray_session.require_token_there("h:1")


def test_a_cluster_is_not_joined_without_a_token(monkeypatch, tmp_path):
    for name in private_ray.TOKEN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ray_session, "_answer_without_token", lambda address: grpc.StatusCode.UNAUTHENTICATED)
    monkeypatch.setattr(ray_session, "import_ray", lambda: None)
    try:
        with pytest.raises(RayAccessRefused, match="RAY_AUTH_TOKEN_PATH"):
            ray_session.RaySession("127.0.0.1:1", namespace="n", temp_dir=tmp_path, num_gpus=None)
        assert not list(tmp_path.iterdir()), "no token file appears by itself"
    finally:
        monkeypatch.undo()
        private_ray.read_settings()


@contextlib.contextmanager
def tls_server(folder, code):
    """It asks for a certificate of the folder's authority, and answers every call with a code."""

    class Refusing(grpc.GenericRpcHandler):
        def service(self, handler_call_details):
            proof = dict(handler_call_details.invocation_metadata).get("authorization", "")
            known = grpc.StatusCode.OK if proof == "Bearer good" else code
            return grpc.unary_unary_rpc_method_handler(lambda request, context: answer(known, context))

    def answer(known, context):
        if known is not grpc.StatusCode.OK:
            context.abort(known, "no")
        return b""

    read = [(folder / name).read_bytes() for name in ("key.pem", "cert.pem", "ca.pem")]
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=(Refusing(),))
    credentials = grpc.ssl_server_credentials([(read[0], read[1])], read[2], require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def use_certificate(monkeypatch, folder):
    files = (folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    for name, value in ray_certificates.settings_of(*files).items():
        monkeypatch.setenv(name, value)


def test_a_cluster_with_certificates_takes_its_own_and_tells_others_what_to_say(monkeypatch, tmp_path):
    monkeypatch.setattr(ray_session, "CONNECT_TIMEOUT_S", 20.0)
    for name in ("ours", "others"):
        ray_certificates.make(tmp_path / name / "secrets")
        ray_certificates.issue(tmp_path / name / "secrets", tmp_path / name)
    for name in ray_certificates.TLS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with tls_server(tmp_path / "ours", grpc.StatusCode.UNAUTHENTICATED) as address:
        with pytest.raises(RayAccessRefused, match="none is given: say RAY_USE_TLS=1"):
            ray_session.require_ray(address)
        use_certificate(monkeypatch, tmp_path / "others")
        with pytest.raises(RayAccessRefused, match="not the one of RAY_TLS_CA_CERT"):
            ray_session.require_ray(address)
        use_certificate(monkeypatch, tmp_path / "ours")
        ray_session.require_ray(address)
        for token, is_taken in (("good", True), ("bad", False)):
            monkeypatch.setattr(ray_session, "token_header", lambda said=token: (("authorization", f"Bearer {said}"),))
            if is_taken:
                ray_session.require_token_taken(address)
            else:
                with pytest.raises(RayAccessRefused, match="refuses this token"):
                    ray_session.require_token_taken(address)
    with foreign_server() as port, pytest.raises(RayUnavailable, match="it may speak no TLS"):
        ray_session.require_ray(f"127.0.0.1:{port}")


@pytest.mark.parametrize("missing", ["variable", "file"])
def test_a_certificate_that_is_not_there_is_named(monkeypatch, tmp_path, missing):
    ray_certificates.make(tmp_path / "secrets")
    ray_certificates.issue(tmp_path / "secrets", tmp_path)
    use_certificate(monkeypatch, tmp_path)
    if missing == "file":
        (tmp_path / "key.pem").unlink()
    else:
        monkeypatch.delenv("RAY_TLS_SERVER_KEY")
    with pytest.raises(RayAccessRefused, match="RAY_TLS_SERVER_KEY"):
        ray_session.require_ray("127.0.0.1:1")


def test_what_a_private_ray_is_started_with_is_taken_back(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/an/operators/own")
    monkeypatch.setenv("RAY_USE_TLS", "0")
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", "/an/operators/own")
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    popen = services.ConsolePopen
    before, umask = dict(os.environ), os.umask(0o022)
    try:
        with pytest.raises(ZeroDivisionError), private_ray.closed_doors("secret", tmp_path / "tls") as options:
            assert options == {"_node_ip_address": "127.0.0.1"}
            assert {name: os.environ.get(name) for name in private_ray.TOKEN_VARIABLES} == {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": "secret",
                "RAY_AUTH_TOKEN_PATH": None,
            }
            assert os.environ["RAY_worker_niceness"] == "0"
            assert os.environ["RAY_USE_TLS"] == "1"
            for name in ray_certificates.TLS_VARIABLES[1:]:
                file = Path(os.environ[name])
                assert file.parent == tmp_path / "tls" and file.stat().st_mode & 0o077 == 0
            with services.ConsolePopen(["cat"], stdin=subprocess.PIPE) as child:
                assert os.getpgid(child.pid) == child.pid
            raise ZeroDivisionError
        assert dict(os.environ) == before
        assert services.ConsolePopen is popen
        assert os.umask(umask) == 0o022
    finally:
        os.umask(umask)
        monkeypatch.undo()
        private_ray.read_settings()
