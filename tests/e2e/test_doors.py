"""What listens in `baton serve`, and what another account of the machine gets of it: nothing.

The table in docs/security.md is the list: a socket that it lacks is a failure here.
"""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import grpc
import psutil
import pytest
import zmq

from baton.cluster import private_files
from baton.tests.e2e import doors, stranger

pytestmark = pytest.mark.ray

START_S = 180
STOP_S = 60


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    """(process id, what it announced) of a deployment as it comes, with every front door."""
    folder = tmp_path_factory.mktemp("serve")
    command = [
        sys.executable,
        "-P",
        "-m",
        "baton.cluster",
        "serve",
        "--model",
        "tiny",
        "--kv-memory-mib",
        "16",
        "--json",
    ]
    command += ["--grpc-port", "0", "--http-port", "0", "--metrics-port", "0"]
    out, err = folder / "out", folder / "err"
    # What an operator's own clusters are used with is no word on a private Ray.
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment)
    try:
        end_s = time.monotonic() + START_S
        while not out.read_text().endswith("\n"):
            assert process.poll() is None and time.monotonic() < end_s, err.read_text()
            time.sleep(0.1)
        private = doors.folder_of(process.pid)
        yield process.pid, json.loads(out.read_text())
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0
    assert not private.exists() and not private_files.kept_logs(private).exists(), "a normal end keeps no logs"


def test_every_listening_socket_is_declared_on_loopback_and_refuses_strangers(serving):
    pid, announced = serving
    private = doors.folder_of(pid)
    paths = [private, private / "router.err", *(private / "ray").glob("session_2*/logs"), *in_shared_memory(pid)]
    assert len(paths) >= 4
    found = doors.assert_closed(pid, announced, paths)
    assert {(door.process, door.name) for door in found} == doors.declared().keys() - {("router", "`--admin-port`")}


def test_the_table_of_functions_opens_to_certificate_and_token_alone_and_no_command_line_has_it(serving):
    pid, _ = serving
    head = next(process for process in doors.tree(pid) if process.name() == "gcs_server")
    token = head.environ()["RAY_AUTH_TOKEN"]
    assert re.fullmatch("[0-9a-f]{64}", token)
    [port] = {one.laddr.port for one in head.net_connections(kind="inet") if one.status == psutil.CONN_LISTEN}
    inside, proof = certificate_of(head), (("authorization", f"Bearer {token}"),)
    keys = "/ray.rpc.InternalKVGcsService/InternalKVKeys"
    assert stranger.knock(port, metadata=proof, credentials=inside)[keys] == "OK"
    assert stranger.knock(port, credentials=inside)[keys] == "UNAUTHENTICATED", "a certificate is no token"
    assert stranger.knock(port, metadata=proof)[keys] == "UNAVAILABLE", "a token is no certificate"
    assert keys_of(port, proof, inside), "the function table that a stranger must not write"
    for process in doors.tree(pid):
        assert not any(token in part for part in process.cmdline())
        assert process.nice() == 0
        if "baton.router" in process.cmdline() or process.pid == pid:
            assert token not in process.environ().values(), "who is no part of Ray has it"


def certificate_of(process):
    """What Ray's processes show each other."""
    names = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_SERVER_CERT")
    return grpc.ssl_channel_credentials(*(Path(process.environ()[name]).read_bytes() for name in names))


def test_files_are_for_this_account_alone(serving):
    pid, _ = serving
    private = doors.folder_of(pid)
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    seen = 0
    for folder, names, files in os.walk(private):
        for path in (Path(folder, name) for name in files):
            if not path.is_symlink():
                assert path.stat().st_mode & 0o077 == 0, path
                seen += 1
        if Path(folder) == private:
            assert sorted(names) == ["ray", "ray_tls"], (
                "Ray opens what it makes to all: nothing of ours may be in there"
            )
    assert seen > 10
    for path in in_shared_memory(pid):
        assert path.stat().st_mode & 0o077 == 0, path


def in_shared_memory(pid):
    """Files of /dev/shm that any process of a deployment has open or mapped."""
    found = set()
    for process in doors.tree(pid):
        found |= {part.path for part in process.memory_maps(grouped=True) if part.path.startswith("/dev/shm/")}
        found |= {file.path for file in process.open_files() if file.path.startswith("/dev/shm/")}
    return [path for path in map(Path, sorted(found)) if path.exists()]


def keys_of(port, proof, certificate):
    """What the function table answers one who has both."""
    method = "/ray.rpc.InternalKVGcsService/InternalKVKeys"
    with stranger.channel_to("127.0.0.1", port, certificate) as channel:
        call = channel.unary_unary(method, lambda data: data, lambda data: data)
        return call(b"\x0a\x03fun", timeout=stranger.WAIT_S, metadata=proof)


def test_a_kv_port_that_takes_a_stranger_is_a_failure():
    """The knock itself: a listener without a password takes it."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
        port = listener.bind_to_random_port("tcp://127.0.0.1")
        answers = stranger.say_kv(("127.0.0.1", port))
        assert answers["ZMTP NULL"] == stranger.TAKEN
        with pytest.raises(AssertionError, match="takes a stranger's messages"):
            doors.assert_keeps_kv_shut(doors.ListeningSocket("KV receiver process", "KV", "127.0.0.1", port), answers)


def test_a_socket_that_is_not_in_the_table_is_a_failure(serving):
    _, announced = serving
    listening = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", listening], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as more:
        more.stdout.readline()
        with pytest.raises(AssertionError, match=r"of no known kind.* is not declared in docs/security\.md"):
            doors.assert_closed(more.pid, announced)
        more.stdin.close()
