"""A deployment with everything that protects it, started as an operator does; and none of its secrets in any output."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from baton.tests.e2e import doors
from baton.tests.kvtransfer.transport_ends import make_curve_key
from baton.tests.router.certificates import Authority

pytestmark = pytest.mark.ray

PROMPT = "def planted_prompt_of_a_client():"


def baton(*arguments, environment=None):
    command = [sys.executable, "-P", "-m", "baton.cluster", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, timeout=60, env=os.environ | (environment or {}), text=True)
    return done.returncode, done.stdout, done.stderr


class Secrets:
    """What is planted, and everything that was printed."""

    def __init__(self, folder):
        self.folder = folder
        self.inside = Authority(folder)
        self.host = self.inside.files("host")
        self.operator = self.inside.files("operator")
        self.curve = make_curve_key(folder)["curve_key_file"]
        self.keys = {}
        for name in ("client", "operator"):
            _, out, _ = baton("keys", "create", name, "--file", folder / f"{name}s", "--tenant", "acme", "--json")
            self.keys[name] = json.loads(out)["key"]
            (folder / f"{name}.apikey").write_text(self.keys[name])
        self.seen = []

    def run(self, *arguments, **more):
        code, out, err = baton(*arguments, **more)
        self.seen.append(f"{arguments[0]}: {out}{err}")
        return code, out

    def planted(self):
        yield from self.keys.items()
        yield "a key that nobody has", "baton-planted-and-unknown"
        yield "a prompt", PROMPT[4:]
        for files in (self.host, self.operator):
            lines = Path(files.key_file).read_text().splitlines()
            yield files.key_file, max(lines, key=len)
        secret = next(line for line in Path(self.curve).read_text().splitlines() if "secret-key" in line)
        yield "the CURVE key", secret.partition("=")[2].strip().strip('"')

    def assert_unseen(self):
        everything = "\n".join(self.seen)
        for word in ("refused (key_unknown)", "prefill-0", "--operator-key-digest", "PEER_DID_NOT_RETURN", "raylet"):
            assert word in everything, f"the logs that are looked through lack {word}"
        for name, secret in self.planted():
            assert len(secret) >= 20
            where = everything.find(secret)
            assert where < 0, f"{name} is in: {everything[max(0, where - 200) : where]}"


@pytest.fixture
def secrets(tmp_path):
    return Secrets(tmp_path)


@pytest.fixture
def serving(secrets):
    host = secrets.host
    command = [sys.executable, "-P", "-m", "baton.cluster", "serve", "--model", "tiny", "--grpc-port", "0", "--json"]
    command += ["--admin-port", "0", "--transport", "zmq", "--kv-curve-key-file", secrets.curve]
    command += ["--tls-cert-file", host.cert_file, "--tls-key-file", host.key_file, "--tls-ca-file", host.ca_file]
    command += ["--api-keys-file", str(secrets.folder / "clients"), "--kv-memory-mib", "16"]
    command += ["--admin-keys-file", str(secrets.folder / "operators")]
    out, err = secrets.folder / "serve.out", secrets.folder / "serve.err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
    try:
        end_s = time.monotonic() + 120
        while not out.read_text().endswith("\n"):
            assert process.poll() is None and time.monotonic() < end_s, err.read_text()
            time.sleep(0.1)
        yield process, json.loads(out.read_text())
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        secrets.seen += [out.read_text(), err.read_text()]
    secrets.assert_unseen()


def test_no_secret_is_said_and_doctor_sees_that_all_is_encrypted(secrets, serving):
    process, at = serving
    folder = secrets.folder
    ask = ("generate", "--address", at["address"], "--prompt", PROMPT, "--max-tokens", 4, "--json")
    client = ("--tls-ca-file", secrets.inside.file)
    operator = ("--tls-ca-file", secrets.inside.file, "--tls-cert-file", secrets.operator.cert_file)
    operator += ("--tls-key-file", secrets.operator.key_file, "--api-key-file", folder / "operator.apikey")
    code, out = secrets.run(*ask, *client, "--api-key-file", folder / "client.apikey")
    answer = json.loads(out)
    assert code == 0 and len(answer["token_ids"]) == 4
    answered = secrets.seen.pop()  # whoever asks may see the own prompt
    assert secrets.keys["client"] not in answered
    assert secrets.run(*ask, *client, environment={"BATON_API_KEY": "baton-planted-and-unknown"})[0] == 1
    assert secrets.run(*ask, *client)[0] == 1
    assert secrets.run(*ask, "--api-key-file", folder / "client.apikey")[0] == 3
    assert secrets.run("status", "--address", at["admin_address"], *operator[:-2])[0] == 1
    code, out = secrets.run("status", "--address", at["admin_address"], "--json", *operator)
    assert code == 0 and all(worker["alive"] for worker in json.loads(out)["workers"])
    assert secrets.run("keys", "list", "--file", folder / "clients", "--json")[0] == 0
    code, out = secrets.run("doctor", "--grpc-port", 0, "--address", at["admin_address"], "--json", *operator)
    wires = {row["name"]: row["detail"] for row in json.loads(out)["findings"] if row["name"].startswith("wire")}
    assert wires.keys() == {"wire router", "wire prefill-0", "wire decode-0", "wire KV to decode-0"}
    assert all("TLSv1.3, asks for certificates" in wires[name] for name in wires if "KV" not in name)
    assert "CURVE" in wires["wire KV to decode-0"]
    doors.assert_closed(process.pid, at, [doors.folder_of(process.pid)])
    # What the processes were started with, and every log they have written.
    for child in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
        secrets.seen.append(" ".join(child.cmdline()))
    router = next(line for line in secrets.seen if "baton.router" in line)
    assert "--operator-key-digest" in router
    for path in logs_of(process.pid):
        secrets.seen.append(f"{path}: {path.read_text(errors='replace')}")


def logs_of(pid):
    """Of the router and of Ray, found by what the router's standard error leads to."""
    for child in psutil.Process(pid).children(recursive=True):
        if "baton.router" in child.cmdline():
            folder = Path(os.readlink(f"/proc/{child.pid}/fd/2")).parent
            assert folder.name.startswith("baton-")
            found = [path for path in folder.rglob("*") if path.is_file() and path.suffix in (".out", ".err", ".log")]
            assert len(found) > 2
            return found
    raise AssertionError("there is no router")
