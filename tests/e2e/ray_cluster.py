"""A Baton on a cluster that `ray up` made of hosts of one machine: one head, workers by their hosts' resources."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from baton.client import Access, AsyncBatonClient
from baton.cluster.ray import certificates as ray_certificates
from baton.router.access.api_keys import digest_of, new_key
from baton.tests.e2e import ray_up
from baton.tests.e2e.hosts import Hosts

AUTH = (
    "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=~/.baton/ray_token RAY_USE_TLS=1 RAY_TLS_CA_CERT=~/.baton_ray/ca.pem "
    "RAY_TLS_SERVER_CERT=~/.baton_ray/cert.pem RAY_TLS_SERVER_KEY=~/.baton_ray/key.pem"
)
JOIN_S = 600.0
SERVE_S = 300.0
STOP_S = 60.0
STREAM_S = 240.0
RAY_OWN = re.compile(
    r"/raylet/raylet|gcs_server|/monitor\.py|/agent\.py|/main\.py|log_monitor|autoscaler|dashboard|^ray::"
)
FLAGS = (
    "--host 0.0.0.0 --grpc-port 50051 --admin-port 50052 --dtype float64 --num-speculative-tokens 2 --kv-memory-mib 64 "
    "--max-num-batched-tokens 64 --max-num-seqs 32 "
    "--start-timeout-s 240 --migration-wait-s 120 --max-wait-s 120 --request-timeout-s 280 --max-migrations 8"
)


class RayCluster:
    """Context manager: hosts, `ray up`, `baton serve`; `ray down` at its end.

    Args:
        directory: of files; short.
        num_prefill, num_decode: workers, each on a host of its own.
        flags: more of `baton serve`.
        dist: folder that `make wheelhouse` filled: hosts begin bare, and `ray up` installs Baton there.
    """

    def __init__(self, directory, num_prefill=1, num_decode=2, flags="", dist=None):
        self._directory = Path(directory)
        self.workers = [
            *(f"prefill-{at}" for at in range(num_prefill)),
            *(f"decode-{at}" for at in range(num_decode)),
        ]
        roles = {f"host-{name}": name.partition("-")[0] for name in self.workers}
        resources = {"head": None} | {host: {role: 1} for host, role in roles.items()}
        self.hosts = Hosts(self._directory, resources, is_bare=dist is not None)
        self.head = self.hosts["head"]
        self.file = ray_up.filled_in(self.hosts, "head", list(roles), self._directory, dist)
        self._up_s = ray_up.UP_S if dist is None else ray_up.INSTALL_S
        self.key = new_key()
        self._flags = f"{self._keys()} {FLAGS} --prefill {num_prefill} --decode {num_decode} {flags}"
        self._needed = {"prefill": num_prefill, "decode": num_decode}
        self.serve = None
        self.address = f"{self.head.address}:50051"
        self.admin_address = f"{self.head.address}:50052"

    def _keys(self):
        """Flags with one key, for clients and operators: beyond loopback both need one."""
        path = self._directory / "keys.jsonl"
        path.write_text(
            json.dumps({"name": "test", "tenant": "test", "sha256": digest_of(self.key), "expires": None}) + "\n"
        )
        return f"--api-keys-file {path} --admin-keys-file {path}"

    def client(self, timeout_s=STREAM_S):
        """A client of the public port."""
        return AsyncBatonClient(self.address, timeout_s=timeout_s, access=Access(api_key=self.key))

    def operator(self, timeout_s=30.0):
        """A client of the operators' port."""
        return AsyncBatonClient(self.admin_address, timeout_s=timeout_s, access=Access(api_key=self.key))

    def __enter__(self):
        try:
            ray_up.ray(self._directory, "up", "-y", "--no-config-cache", str(self.file), timeout_s=self._up_s)
            self.wait_joined()
            self._serve()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error):
        self.close()

    def wait_joined(self):
        """Until every host has joined with what it is for."""
        deadline_s = time.monotonic() + JOIN_S
        while True:
            said = self.head.run(f"{AUTH} ray status || true")
            found = {role: float(most) for most, role in re.findall(r"/([0-9.]+) (prefill|decode)", said)}
            if found == self._needed:
                return
            assert time.monotonic() < deadline_s, f"{found} of {self._needed} joined: {said}"
            time.sleep(5.0)

    def _serve(self):
        command = f"{AUTH} exec python -P -m baton.cluster serve --json --ray-address auto {self._flags}"
        self.log = (self._directory / "serve.log").open("wb")
        self.serve = subprocess.Popen(
            self.head.enter(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.log
        )
        line = self.serve.stdout.readline()
        if not line:
            raise RuntimeError(f"baton serve ended: {(self._directory / 'serve.log').read_text()[-4000:]}")
        self.announced = json.loads(line)
        assert self.announced["address"] == self.address, self.announced

    def save_logs(self):
        """What router, supervisor and workers have said so far; their hosts' files end with them."""
        into = self._directory / "logs"
        for host in self.hosts:
            (into / host.name).mkdir(parents=True, exist_ok=True)
            host.run(
                "cd /tmp; cp baton-*/*.err ray/session_latest/logs/worker-*.err ray/session_latest/logs/monitor* "
                f"{into / host.name} 2>/dev/null || true"
            )

    def close(self):
        """End Baton, which ends its workers; then the cluster."""
        if "BATON_KEEP" in os.environ:
            self.save_logs()
        if self.serve is not None:
            here = next(here for here, _, line in self.head.processes() if "-m baton.cluster serve" in line)
            signal_to(here, signal.SIGTERM)
            self.serve.wait(STOP_S)
            self.serve.stdout.close()
            self.serve = None
            left = [line for host in self.hosts for _, _, line in host.processes() if "Actor" in line]
            assert not left, left
        ray_up.ray(self._directory, "down", "-y", str(self.file))

    def runbook(self, name, *arguments, timeout_s=240.0):
        """One of ours, on the operator's machine: (exit code, its object)."""
        command = [
            sys.executable,
            "-P",
            "-m",
            "baton.cluster",
            "runbook",
            name,
            "--address",
            self.admin_address,
            "--json",
        ]
        made, own = Path(self._directory) / "ray_secrets", Path(self._directory) / "operator"
        ray_certificates.issue(made, own)
        environment = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(made / ray_certificates.TOKEN_FILE),
            "BATON_API_KEY": self.key,
            **ray_certificates.settings_of(own / "cert.pem", own / "key.pem", own / "ca.pem"),
        }
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=timeout_s + 60.0, env=environment
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def place_of(self, status, worker_id):
        """(host, process id as seen from here) of a worker: Ray chose among the hosts of its role."""
        state = next(worker.state for worker in status.workers if worker.state.worker_id == worker_id)
        host = next(host for host in self.hosts if host.address == state.address.rpartition(":")[0])
        return host, host.pid_here(state.rank_pids[0])

    def kill_head(self):
        """SIGKILL everything of Ray's on the head; what it says of itself goes on in Redis."""
        ended = [
            (here, line) for here, _, line in self.head.processes() if RAY_OWN.search(line) and "-m baton." not in line
        ]
        for here, _ in ended:
            signal_to(here, signal.SIGKILL)
        return [line for _, line in ended]

    def restart_head(self):
        """As an operator does it; what the runbook answers."""
        home = self._directory / "home"
        command = f"env HOME={home} RAY_AUTH_MODE=token ray up -y --no-config-cache --restart-only {self.file}"
        where = ("--ray-address", f"{self.head.address}:6379", "--timeout", "300")
        return self.runbook("head-restart", *where, "--command", command)


def signal_to(pid, number):
    """Send one."""
    os.kill(pid, number)


async def wait_calm(cluster, timeout_s):
    """Until all workers live and hold nothing of a request; what they hold where that does not come."""
    deadline_s = time.monotonic() + timeout_s
    held = "nothing was heard"
    while time.monotonic() < deadline_s:
        async with cluster.operator(timeout_s=5.0) as client:
            inventory = await client.inventory()
        held = {
            worker.state.worker_id: held_by(worker)
            for worker in inventory.workers
            if not worker.alive or any(held_by(worker).values())
        }
        if len(inventory.workers) == len(cluster.workers) and not held:
            return {}
        await asyncio.sleep(0.2)
    return held


def held_by(worker):
    """What a worker holds of requests, by kind."""
    held = worker.state.inventory
    return {
        "blocks": held.num_blocks - held.num_blocks_free,
        "quarantined": held.num_blocks_quarantined,
        "attends": held.num_requests_held,
        "incoming_transfers": held.num_kv_receives,
        "slots": held.num_slots_in_use,
        "requests": held.num_requests_waiting + held.num_requests_running,
    }
