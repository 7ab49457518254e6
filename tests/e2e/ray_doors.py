"""`python -m baton.tests.e2e.ray_doors`: what listens on the hosts of `ray up`, and what another host gets of it.

One JSON object: `doors`, each with its host, process, port and address, whether docs/operations.md has it, and what
another account got from another network namespace, without a credential; `ended`: those that are gone after that.
Linux and root only (`hosts`).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from baton.kvtransfer.receiver.supervisor import MODULE as RECEIVER
from baton.tests.e2e import doors
from baton.tests.e2e.hosts import in_namespaces, why_not
from baton.tests.e2e.ray_cluster import RayCluster

DOC = Path(__file__).parents[2] / "docs" / "operations.md"
RAYS = re.compile("gcs_server|raylet|^ray::(RuntimeEnvAgent|DashboardAgent)|ray.util.client.server")


def declared_ports():
    """Ports and ranges of the document's table, as sets, with what they are of."""
    rows = [line.strip("|").split("|") for line in DOC.read_text().splitlines() if re.match(r"\| \d", line)]
    found = {}
    for ports, *_, whom in rows:
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", ports):
            found |= dict.fromkeys(range(int(first), int(last or first) + 1), whom.strip())
    return found


def listening_on(host):
    """(address, port, command line) of every listening socket there, ssh's aside."""
    lines = subprocess.run(
        ["nsenter", "-t", str(host.pid), "-n", "ss", "-Hltnp"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    commands = {here: command for here, _, command in host.processes()}
    for line in lines:
        address, _, port = line.split()[3].rpartition(":")
        pid = re.search(r"pid=(\d+)", line)
        command = commands.get(int(pid[1]), "") if pid else ""
        if "sshd" not in line:
            yield address.strip("[]").removeprefix("::ffff:"), int(port), command


def look_around(cluster):
    """Every door of every host."""
    known = declared_ports()
    for host in cluster.hosts:
        listening = sorted(listening_on(host))
        reached = {port: command for address, port, command in listening if address != "127.0.0.1"}
        kv = [port for port, command in reached.items() if RECEIVER in command]
        said = doors.knocked(reached, host=host.address, kv=kv)
        for address, port, command in listening:
            is_ours = "baton" in command or re.match("ray::(Prefill|Decode)Actor", command)
            yield {
                "host": host.name,
                "address": address,
                "port": port,
                "process": command[:120],
                "is_rays": bool(RAYS.search(command)) or 10001 <= port <= 10999,
                "is_declared": port in known or bool(is_ours),
                "answers": said["doors"].get(str(port), {}),
                "kv": said["kv"].get(str(port), {}),
            }


def is_there(cluster, door):
    """Whether it listens still, after the knocks at it."""
    return (door["address"], door["port"]) in {(at, port) for at, port, _ in listening_on(cluster.hosts[door["host"]])}


def main():
    if "--inside" not in sys.argv:
        why = why_not()
        if why:
            print(f"skipped: {why}", file=sys.stderr)
            return 3
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        command = [sys.executable, "-P", "-m", "baton.tests.e2e.ray_doors", "--inside"]
        return subprocess.run(in_namespaces(command), env=environment).returncode
    directory = tempfile.mkdtemp(prefix="bh", dir="/var/tmp")
    try:
        with RayCluster(directory, num_prefill=1, num_decode=1) as cluster:
            found = list(look_around(cluster))
            ended = [door for door in found if not is_there(cluster, door)]
            redis = "redis-cli -p 6390 ping 2>&1; redis-cli --tls --insecure -p 6390 ping 2>&1 || true"
            said = cluster.head.run(redis)
    finally:
        if "BATON_KEEP" not in os.environ:
            shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps({"doors": found, "ended": ended, "redis": said}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
