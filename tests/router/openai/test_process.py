"""The router process with HTTP: its ports, and what it refuses at the start."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from baton.tests.e2e.conftest import TINY

pytestmark = pytest.mark.fast
COMMAND = [sys.executable, "-P", "-m", "baton.router", "--model-name", "tiny", "--model-path", str(TINY), "--port", "0"]


def children_of(pid):
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


def command_of(pid):
    """Empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return ""


@pytest.mark.long
def test_it_says_both_ports_and_ends_with_its_parent():
    process = subprocess.Popen(
        [*COMMAND, "--http-port", "0", "--exit-with-parent"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    ports = json.loads(process.stdout.readline())
    with urllib.request.urlopen(f"http://127.0.0.1:{ports['http_port']}/health", timeout=5) as reply:
        assert json.load(reply) == {"status": "ok"}
    assert ports["grpc_port"] != ports["http_port"]
    process.stdin.close()
    process.stdout.close()
    assert process.wait(10) == 0


@pytest.mark.long
def test_a_process_that_reads_bodies_waits_for_the_first_and_ends_with_the_router():
    process = subprocess.Popen([*COMMAND, "--http-port", "0"], stdout=subprocess.PIPE)
    process.stdout.readline()
    while not (found := [pid for pid in children_of(process.pid) if "reader_process" in command_of(pid)]):
        time.sleep(0.05)
    process.terminate()
    process.stdout.close()
    assert process.wait(10) == 0
    assert not any("reader_process" in command_of(pid) for pid in found)


@pytest.mark.long
def test_what_is_refused_at_the_start():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        for flags, error in (
            (["--http-port", str(listener.getsockname()[1])], "PortInUse"),
            (["--http-port", "0", "--chat-template", "/no/where"], "ConfigInvalid"),
            (["--http-port", "0", "--host", "192.0.2.1"], "ConfigInvalid"),
        ):
            done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=30)
            assert done.returncode == 3, done.stderr
            assert json.loads(done.stderr.strip().splitlines()[-1])["error"] == error
