"""A worker's processes on this host: find them, their log files and their stacks, and kill them."""

import shutil
import socket
import subprocess
from pathlib import Path

import psutil

from baton.core.errors import PreconditionUnmet
from baton.proto import worker_pb2

MARK = "ray::"  # prefix of the command lines of Ray's actors
STACK_S = 10.0


def is_here(state: worker_pb2.WorkerState) -> bool:
    """Return whether a worker's address belongs to this host."""
    host = state.address.rpartition(":")[0].strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:  # gaierror is one
        return False
    return True


def processes_of(state: worker_pb2.WorkerState) -> list[psutil.Process]:
    """Return the processes of this incarnation of a worker that still run on this host, in rank order.

    A process id alone is no proof: the first process must listen on the worker's port, and all must be Ray's.

    Raises:
        PreconditionUnmet: the worker is on another host.
    """
    if not is_here(state):
        host = state.address.rpartition(":")[0]
        raise PreconditionUnmet(f"{state.worker_id} runs on {host}; run this there", worker_id=state.worker_id)
    found = [process for pid in state.rank_pids if (process := _ray_process(pid)) is not None]
    if not found or found[0].pid != state.rank_pids[0] or not _listens(found[0], int(state.address.rpartition(":")[2])):
        return []
    return found


def _ray_process(pid: int) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        command = process.cmdline()
        is_ray = bool(command) and command[0].startswith(MARK)
        return process if is_ray and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def _listens(process: psutil.Process, port: int) -> bool:
    try:
        connections = process.net_connections(kind="tcp")
    except psutil.NoSuchProcess:
        return False
    return any(item.status == psutil.CONN_LISTEN and item.laddr.port == port for item in connections)


def log_files(processes: list[psutil.Process]) -> list[Path]:
    """Return the files that the processes write their stdout and stderr to."""
    found = []
    for process in processes:
        for number in (1, 2):
            try:
                path = Path(f"/proc/{process.pid}/fd/{number}").readlink()
            except OSError:
                continue
            if path.is_file():
                found.append(path)
    return list(dict.fromkeys(found))


def stacks(processes: list[psutil.Process]) -> dict[str, str]:
    """Describe what each process is doing: by py-spy where it is installed, and from /proc everywhere."""
    return {str(process.pid): _stack(process) for process in processes}


def _stack(process: psutil.Process) -> str:
    lines = []
    try:
        lines.append(f"{process.status()}, {process.num_threads()} threads, {process.cpu_times()}")
        for task in sorted(Path(f"/proc/{process.pid}/task").iterdir()):
            name = (task / "comm").read_text().strip()
            lines.append(f"thread {task.name} {name}: {(task / 'wchan').read_text().strip() or '-'}")
    except (psutil.NoSuchProcess, OSError) as error:
        lines.append(f"not readable: {error}")
    if shutil.which("py-spy"):
        # A stopped process cannot be paused again, so --nonblocking reads it as it is.
        command = ["py-spy", "dump", "--nonblocking", "--pid", str(process.pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=STACK_S, check=False)
            lines.append(done.stdout or done.stderr)
        except subprocess.TimeoutExpired:
            lines.append("py-spy: not in time")
    return "\n".join(lines)


def kill(processes: list[psutil.Process]) -> list[int]:
    """Send SIGKILL, which also reaches a stopped process; return the process ids."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return [process.pid for process in processes]
