"""Hosts of one machine: each has a network, processes, files of its own, and an ssh server. Linux and root only.

A host is a network namespace on a bridge, with PID, mount, UTS and IPC namespaces, so that `ray stop` there ends
nothing here, and memory of one host is not another's. Everything is made in namespaces of the caller's own
(`in_namespaces`), and is gone with its process.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

NETWORK = "10.77.0"
GATEWAY = f"{NETWORK}.254"
TOOLS = ("ip", "nsenter", "unshare", "ssh", "ssh-keygen", "rsync", "redis-server", "redis-cli", "ray")
SSHD = "/usr/sbin/sshd"
HOME = "/run/root"  # of root there: the interpreter may lie in the real one
START_S = 20.0

INIT = r"""
set -e
mount --make-rprivate /
cp -a /etc {dir}/etc
mkdir -p {dir}/etc/baton
cp {dir}/resources.json {dir}/etc/baton/ 2>/dev/null || true
mount --bind {dir}/etc /etc
umount /etc/hosts /etc/hostname 2>/dev/null || true
cat {dir}/hosts > /etc/hosts
mount -t tmpfs tmpfs /tmp
chmod 1777 /tmp
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
mkdir -p {dir}/home {home}
mount --bind {dir}/home {home}
chmod 700 {home}
mkdir -m 700 {home}/.ssh
cp {keys}/id_ed25519 {home}/.ssh/
chmod 600 {home}/.ssh/id_ed25519
sed -i 's#^root:.*#root:x:0:0:root:{home}:/bin/bash#' /etc/passwd
hostname {name}
printf '%s\n' 'export PATH={path}' 'export PYTHONPATH={pythonpath}' {exports} \
    'if [ -f ~/.bashrc ]; then . ~/.bashrc; fi' > {home}/.profile
{sshd} -f {keys}/sshd_config -h {keys}/host_key -E {dir}/sshd.log
exec {python} -c 'import signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True: time.sleep(3600)'
"""
SSHD_CONFIG = """
PermitRootLogin yes
UsePAM no
StrictModes no
AuthorizedKeysFile {keys}/id_ed25519.pub
PidFile /run/sshd.pid
MaxStartups 100
"""


def why_not():
    """Why hosts cannot be made here; empty if they can."""
    missing = [tool for tool in TOOLS if shutil.which(tool, path=_path()) is None]
    missing += [] if Path(SSHD).exists() else [SSHD]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = ["unshare", "-n", "-m", "-p", "-u", "-i", "-f", "--mount-proc", "ip", "link", "add", "p0", "type", "veth"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=20)
    return "" if done.returncode == 0 else f"no namespaces: {done.stderr.strip()}"


def in_namespaces(command):
    """The same command in namespaces of its own; all that it starts ends with it."""
    return ["unshare", "-n", "-m", "-p", "-f", "--mount-proc", "--kill-child", *command]


def _path():
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


class Host:
    """One host.

    Attributes:
        pid: of its first process, as seen from here.
    """

    def __init__(self, name, address, root, keys, resources, names, exports, is_bare):
        self.name, self.address = name, address
        directory = root / name
        directory.mkdir()
        if resources is not None:
            (directory / "resources.json").write_text(json.dumps(resources))
        (directory / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{at} {who}\n" for who, at in names.items())
        )
        init = INIT.format(
            dir=directory,
            keys=keys,
            name=name,
            path=f"{sys.base_prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin" if is_bare else _path(),
            pythonpath="" if is_bare else os.environ.get("PYTHONPATH", ""),
            exports=" ".join(f"'export {key}={value}'" for key, value in exports.items()),
            sshd=SSHD,
            home=HOME,
            python=sys.executable,
        )
        self._log = (directory / "init.log").open("wb")
        command = ["unshare", "-n", "-m", "-p", "-u", "-i", "-f", "--kill-child", "--mount-proc", "sh", "-c", init]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        self.pid = self._first_child()
        self._join(address)

    def _first_child(self):
        path = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            children = path.read_text().split()
            if children:
                return int(children[0])
            time.sleep(0.02)
        raise RuntimeError(f"{self.name} did not start")

    def _join(self, address):
        here = f"v-{self.name}"[:15]
        _sh(f"ip link add {here} type veth peer name eth0 netns {self.pid}")
        _sh(f"ip link set {here} master br0 up")
        for command in (
            "ip link set lo up",
            f"ip addr add {address}/24 dev eth0",
            "ip link set eth0 up",
            f"ip route add default via {GATEWAY}",
        ):
            self.network(command)

    def network(self, command):
        """A command in its network, which sees this machine's files."""
        _sh(f"nsenter -t {self.pid} -n {command}")

    def link(self, up):
        """Plug its cable in, or out."""
        _sh(f"ip link set {f'v-{self.name}'[:15]} {'up' if up else 'down'}")

    def enter(self, command):
        """What runs a command on it, with its user's environment."""
        spaces = ["nsenter", "-t", str(self.pid), "-n", "-m", "-p", "-u", "-i"]
        return [*spaces, "env", "-i", f"HOME={HOME}", "USER=root", "bash", "--login", "-c", f"cd; {command}"]

    def run(self, command, timeout_s=60.0):
        """Run one to its end; its stdout."""
        done = subprocess.run(self.enter(command), capture_output=True, text=True, timeout=timeout_s)
        if done.returncode:
            raise RuntimeError(f"{self.name}: {command}: {done.stdout[-2000:]} {done.stderr[-2000:]}")
        return done.stdout

    def processes(self):
        """(pid here, pid there, command line) of everything on it."""
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for path in Path("/proc").iterdir():
            if not path.name.isdecimal():
                continue
            try:
                if os.readlink(path / "ns/pid") != space:
                    continue
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                lines = (path / "status").read_text().splitlines()
            except OSError:
                continue
            own = next(line for line in lines if line.startswith("NSpid:")).split()[-1]
            found.append((int(path.name), int(own), command))
        return found

    def pid_here(self, pid_there):
        """The process id here of one of its processes."""
        found = [here for here, there, _ in self.processes() if there == pid_there]
        assert len(found) == 1, f"{self.name} has {len(found)} processes {pid_there}"
        return found[0]

    def is_up(self):
        """Its ssh server listens."""
        return (
            subprocess.run(
                ["nsenter", "-t", str(self.pid), "-n", "ss", "-Htln", "sport = :22"], capture_output=True, text=True
            ).stdout
            != ""
        )


class Hosts:
    """A switch and hosts on it; context manager.

    Args:
        root: of files; short.
        resources: by name of the host, what its resources.json holds; None for none.
        exports: environment of every login.
        is_bare: logins find Python and nothing of this checkout or its environment.
    """

    def __init__(self, root, resources, exports=None, *, is_bare=False):
        self.root = Path(root)
        self.keys = self.root / "keys"
        self.keys.mkdir(mode=0o700)
        _sh("ip link set lo up")
        _sh("ip link add br0 type bridge")
        _sh(f"ip addr add {GATEWAY}/24 dev br0")
        _sh("ip link set br0 up")
        for name in ("id_ed25519", "host_key"):
            _sh(f"ssh-keygen -q -t ed25519 -N '' -f {self.keys / name}")
        (self.keys / "sshd_config").write_text(SSHD_CONFIG.format(keys=self.keys))
        names = {name: f"{NETWORK}.{at}" for at, name in enumerate(resources, 1)}
        self._hosts = {
            name: Host(name, names[name], self.root, self.keys, resources[name], names, exports or {}, is_bare)
            for name in resources
        }
        deadline_s = time.monotonic() + START_S
        while not all(host.is_up() for host in self._hosts.values()):
            assert time.monotonic() < deadline_s, "a host has no ssh server"
            time.sleep(0.1)

    def __getitem__(self, name):
        return self._hosts[name]

    def __iter__(self):
        return iter(self._hosts.values())


def _sh(command):
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
