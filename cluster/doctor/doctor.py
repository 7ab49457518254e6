"""`baton doctor`: finds what on this machine keeps Baton from serving, or from serving well, each with a next step.

Checks only look and report; none changes anything. A failure means that serving cannot work (exit 3), a warning that it
may not work well or not as tested (exit 4).
"""

import importlib.util
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import baton
from baton.cluster.access import current_access
from baton.cluster.admin import fetch_status
from baton.cluster.commands.status import ranks_cell
from baton.cluster.doctor.decode_report import decode_data, format_decode
from baton.cluster.doctor.wires import (
    PairPath,
    TlsRefusal,
    format_paths,
    is_loopback,
    paths,
    paths_data,
    why_refused,
    wires,
)
from baton.cluster.doctor.wires import Path as KvPath
from baton.cluster.outcome import ExitCode, Output, exit_code_of, format_table
from baton.cluster.ray.session import TESTED_RAY
from baton.cluster.resolve import require_port_free
from baton.core.errors import NumericsUnsupported, PortInUse, StartupError
from baton.core.kv_transports import KV_TRANSPORTS
from baton.proto import admin_pb2, worker_pb2

_MAX_NAMED = 3  # shapes per line; `--json` has all
_FORMS = {
    "triton": "Triton kernels",
    "reference": "torch reference",
    "ordered": "ordered Triton kernels",  # these two are batch-invariant
    "invariant": "invariant reference",
}
_ASKED_FOR = "asked for by --kernels"


def compute_data(reply: admin_pb2.StatusReply) -> list[dict[str, Any]]:
    """Build the `--json` form: one object for each live worker that reports how it computes."""
    return [
        {
            "worker": worker.state.worker_id,
            "role": worker.state.role,
            "form": compute.form,
            "why": compute.why,
            "device": compute.device,
            "dtype": worker.state.dtype,
            "quantization": compute.quantization,
            "num_library_refused": compute.num_library_refused,
            "library_refused": list(compute.library_refused),
            "untuned": list(compute.untuned),
            "num_kernels_starting": compute.num_kernels_starting,
            "num_kernels_serving": compute.num_kernels_serving,
            "late_kernels": list(compute.late_kernels),
            "num_graphs_failed": len(worker.state.inventory.graphs.failed),
            "num_graphs_captured": worker.state.inventory.graphs.num_captured,
            "max_num_seqs": worker.state.max_num_seqs,
            "chosen": list(compute.chosen),
        }
        for worker, compute in _live(reply)
    ]


def format_compute(workers: Sequence[dict[str, Any]]) -> str:
    """Format the same data as a table."""
    if not workers:
        return "no live worker says how it computes"
    header = ("worker", "computes by", "why", "device", "dtype", "quantization", "fell back")
    rows = [
        (
            worker["worker"],
            _FORMS.get(worker["form"], worker["form"]),
            worker["why"] or "-",
            worker["device"],
            worker["dtype"],
            worker["quantization"],
            _fallbacks(worker) or "-",
        )
        for worker in workers
    ]
    chosen = [f"{worker['worker']}: {'; '.join(worker['chosen'])}" for worker in workers if worker["chosen"]]
    return "\n".join([format_table(header, [tuple(map(str, row)) for row in rows]), *chosen])


def compute_problems(reply: admin_pb2.StatusReply) -> Iterator[tuple[str, str, str]]:
    """Yield name, finding and next step for each worker that computes worse than its device could."""
    for worker, compute in _live(reply):
        name = f"kernels of {worker.state.worker_id}"
        is_slow = compute.form in ("reference", "invariant") and compute.device != "cpu"
        if is_slow and compute.why != _ASKED_FOR:
            yield name, f"torch computes, not Triton's kernels: {compute.why}", "docs/operations.md, *What computes*"
        if num_not_finite := worker.state.inventory.num_not_finite:
            detail = f"its model gave NaN or an infinity {num_not_finite} times, and those answers broke off there"
            next_step = "docs/operations.md, *What computes*: test the device, and the checkpoint on another"
            yield f"output of {worker.state.worker_id}", detail, next_step
        if compute.num_library_refused:
            detail = f"the library refused {compute.num_library_refused} float8 GEMMs, {_named(compute)}"
            yield name, detail, "its log says why; torch for CUDA 12.9 or later has them"
        if compute.num_kernels_serving:
            detail = f"{compute.num_kernels_serving} compiled while streams waited: {_some(compute.late_kernels)}"
            yield name, detail, "docs/operations.md, *What computes*; please report which requests came before"


def _named(compute: worker_pb2.Compute) -> str:
    return "of weights " + _some(compute.library_refused)


def _fallbacks(worker: dict[str, Any]) -> str:
    parts = []
    if worker["num_library_refused"]:
        parts.append(f"{worker['num_library_refused']} GEMMs refused ({_some(worker['library_refused'])})")
    if worker["num_kernels_serving"]:
        parts.append(f"{worker['num_kernels_serving']} kernels compiled late ({_some(worker['late_kernels'])})")
    if worker["num_graphs_failed"]:
        parts.append(f"{worker['num_graphs_failed']} graphs failed")
    if worker["untuned"]:
        parts.append(f"{len(worker['untuned'])} shapes untuned ({_some(worker['untuned'])})")
    return "; ".join(parts)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _live(reply: admin_pb2.StatusReply) -> Iterator[tuple[admin_pb2.WorkerStatus, worker_pb2.Compute]]:
    for worker in reply.workers:
        if worker.alive and worker.state.inventory.HasField("compute"):
            yield worker, worker.state.inventory.compute


TESTED = {
    "torch": ("2.13.0", "2.11.0"),
    "triton": ("3.7.1", "3.6.0"),
    "ray": (TESTED_RAY,),
    "grpcio": ("1.85.1",),
    "protobuf": ("5.29.6",),
    "pyzmq": ("27.3.0",),
}
MIN_PYTHON = (3, 11)
MIN_OPEN_FILES = 4096
MIN_SHM_BYTES = 128 << 20
SELFTEST_SHAPES = ((256, 256), (1024, 256), (256, 1024), (4096, 512))  # (outputs, inputs)
RENEW_S = 14 * 86_400.0  # certificates that expire sooner should be replaced
FOREIGN_NAMES = ("kernels", "proto")


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    name: str
    level: Literal["ok", "warn", "fail"]
    detail: str
    next: str = ""


def doctor(output: Output, *, grpc_port: int, selftest: bool, address: str | None = None) -> ExitCode:
    """Run every check and print the findings; with a deployment's address, also its KV paths and decode steps.

    Raises:
        BatonError: the deployment at `address` refuses the call. If none answers there, that is one of the findings.
    """
    try:
        status = None if address is None else fetch_status(address)
    except StartupError as error:
        tls = current_access().tls
        refusal = why_refused(address, tls) if address is not None and tls.ca_file else None
        return _without_deployment(output, error, refusal, selftest=selftest)
    found = [] if status is None else paths(status)
    findings = list(check_all(grpc_port if status is None else None))
    if selftest:
        findings.append(check_numerics())
    findings += (
        []
        if status is None
        else [
            *check_ranks(status),
            *check_graphs(status),
            *check_kv_dtype(status),
            *check_staging(status),
            *check_compute(status),
            *check_prefill(status),
            *check_silence(status),
            *check_fitness(status),
        ]
    )
    findings += [check_path(path) for path in found]
    seen = [] if status is None or address is None else list(wires(address, status, current_access().tls.ca_file))
    findings += [check_wire(wire) for wire in seen]
    levels = {finding.level for finding in findings}
    code = ExitCode.PRECONDITION if "fail" in levels else ExitCode.PARTIAL if "warn" in levels else ExitCode.OK
    rows = [(item.level, item.name, item.detail, item.next) for item in findings]
    data: dict[str, Any] = {
        "ok": code is ExitCode.OK,
        "exit_code": code,
        "findings": [asdict(item) for item in findings],
    }
    text = format_table(("", "what", "found", "next"), rows)
    if status is not None:
        data["paths"] = paths_data(found)
        data["wires"] = [asdict(wire) for wire in seen]
        data["decode"] = decode_data(status)
        data["compute"] = compute_data(status)
        tables = format_paths(found), format_compute(data["compute"]), format_decode(data["decode"])
        text += "".join(f"\n\n{table}" for table in tables)
    output.emit(data, text)
    return code


def _without_deployment(output: Output, error: StartupError, refusal: TlsRefusal | None, *, selftest: bool) -> ExitCode:
    """Report the findings on this machine, and why there are none about the deployment."""
    step = "give an address of gRPC that `baton serve` has printed, on the host that printed it"
    if refusal is not None:
        error, step = StartupError(refusal.why, **error.fields), refusal.step
    findings = [*check_all(None), *([check_numerics()] if selftest else [])]
    findings.append(Finding("deployment", "fail", error.message, step))
    code = exit_code_of(error)
    data = {"ok": False, "exit_code": code, "findings": [asdict(item) for item in findings]}
    data |= {"error": type(error).__name__, "message": error.message, "fields": error.fields, "next": step}
    rows = [(item.level, item.name, item.detail, item.next) for item in findings]
    output.emit(data, format_table(("", "what", "found", "next"), rows))
    output.note(f"baton: {type(error).__name__}: {error.message}\nnext: {step}", "ERROR")
    return code


def check_all(grpc_port: int | None) -> Iterator[Finding]:
    """Run every quick check; without a port if there is a deployment, which already listens on its own."""
    yield check_python()
    yield from (check_package(name, tested) for name, tested in TESTED.items())
    yield check_devices()
    if grpc_port is not None:
        yield check_port(grpc_port)
    yield check_ray_auth(os.environ.get("RAY_AUTH_MODE"), Path.home() / ".ray" / "auth_token")
    yield from (check_name(name) for name in FOREIGN_NAMES)
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield check_shm(Path("/dev/shm"))
    yield check_transports()


def check_python() -> Finding:
    """Check the interpreter's version."""
    version = platform.python_version()
    if sys.version_info < MIN_PYTHON:
        return Finding("python", "fail", version, "use Python 3.11 or newer")
    return Finding("python", "ok", version)


def check_package(name: str, tested: tuple[str, ...]) -> Finding:
    """Compare an installed distribution with the versions that Baton is tested with."""
    wanted = " or ".join(tested)
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "fail", "not installed", f"pip install {name}=={tested[0]}")
    if version.partition("+")[0] in tested:
        return Finding(name, "ok", version)
    if name == "ray":
        return Finding(name, "fail", f"{version}; tested is {wanted}", f"pip install ray=={tested[0]}")
    return Finding(name, "warn", f"{version}; tested is {wanted}", "use constraints.txt when installing")


def check_devices() -> Finding:
    """Report the devices that workers would compute on."""
    if importlib.util.find_spec("torch") is None:
        return Finding("devices", "fail", "torch is not installed", "pip install torch")
    import torch

    if not torch.cuda.is_available():
        has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
        if has_gpu:
            return Finding("devices", "warn", "a GPU is there, torch cannot use it", "install a CUDA build of torch")
        return Finding("devices", "ok", f"CPU, {os.cpu_count()} cores")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding("devices", "ok", ", ".join(names))


def check_port(port: int) -> Finding:
    """Check whether `baton serve` could listen on the port."""
    try:
        require_port_free("127.0.0.1", port)
    except PortInUse as error:
        return Finding("grpc port", "warn", error.message, "serve with another --grpc-port; 0 picks a free one")
    return Finding("grpc port", "ok", f"{port} is free")


def check_ray_auth(mode: str | None, token: Path) -> Finding:
    """Check how clusters are joined and started; a private Ray has a token of its own in any case."""
    if mode is not None and mode.lower() == "disabled":
        return Finding(
            "ray auth",
            "warn",
            "RAY_AUTH_MODE=disabled: whatever reaches the ports of a cluster started or joined with it runs code there",
            "start clusters with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE, and join them with both",
        )
    if token.exists() and mode is None:
        return Finding(
            "ray auth",
            "warn",
            f"{token} exists and RAY_AUTH_MODE is unset: `ray start --head` would demand tokens of every worker",
            "export RAY_AUTH_MODE=token, with the file on every node",
        )
    return Finding("ray auth", "ok", f"RAY_AUTH_MODE={mode or 'unset, no token file'}")


def check_name(name: str) -> Finding:
    """Check whether `import kernels` or `import proto` would find a folder of Baton's."""
    spec = importlib.util.find_spec(name)
    places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    root = Path(baton.__file__).resolve().parent
    if any(root in Path(place).resolve().parents and "site-packages" not in place for place in places if place):
        detail = f"`import {name}` finds {places[0]}"
        return Finding(f"name {name}", "fail", detail, "do not put the checkout on PYTHONPATH")
    return Finding(f"name {name}", "ok", "not ours")


def check_open_files(limit: int) -> Finding:
    """Check the limit of open files: every stream, push and Ray connection needs a socket."""
    if limit != resource.RLIM_INFINITY and limit < MIN_OPEN_FILES:
        return Finding("open files", "warn", f"limit {limit}", "ulimit -n 65536")
    return Finding("open files", "ok", "unlimited" if limit == resource.RLIM_INFINITY else f"limit {limit}")


def check_shm(path: Path) -> Finding:
    """Check shared memory, which holds Ray's object store."""
    if not path.is_dir():
        return Finding("shared memory", "warn", f"{path} does not exist", "mount a tmpfs there")
    free = shutil.disk_usage(path).free
    if free < MIN_SHM_BYTES:
        return Finding("shared memory", "warn", f"{free >> 20} MiB free", "run the container with --shm-size=1g")
    return Finding("shared memory", "ok", f"{free >> 20} MiB free")


def check_transports() -> Finding:
    """Report the transports that workers of this machine can use for KV; a missing one is not an error."""
    problems = {name: declared.problem for name, declared in KV_TRANSPORTS.items()}
    reasons = [f"{name}: {problem}" for name, problem in problems.items() if problem]
    usable = ", ".join(name for name, problem in problems.items() if not problem)
    return Finding("KV transports", "ok", usable + (f" ({'; '.join(reasons)})" if reasons else ""))


def check_ranks(status: admin_pb2.StatusReply) -> list[Finding]:
    """Report the live workers of a deployment that are TP groups."""
    return [
        Finding(f"ranks of {worker.state.worker_id}", "ok", ranks_cell(list(worker.state.rank_pids)))
        for worker in status.workers
        if worker.alive and len(worker.state.rank_pids) > 1
    ]


def check_prefill(status: admin_pb2.StatusReply) -> Iterator[Finding]:
    """Report whether decode workers compute all prompts, because no prefill worker takes requests."""
    if not status.local_prefill.only_way:
        return
    if not any(worker.state.role == "prefill" for worker in status.workers):
        yield Finding("prefill workers", "ok", "none: decode workers compute the prompts")
        return
    detail = "none takes requests: decode workers compute the prompts"
    drained = [
        one.state.worker_id for one in status.workers if one.state.role == "prefill" and one.draining and one.alive
    ]
    undo = f"`baton drain {drained[0]} --undo`" if drained else "look at their logs"
    yield Finding("prefill workers", "warn", detail, f"{undo}; `baton runbook scale` starts more")


def check_silence(status: admin_pb2.StatusReply) -> Iterator[Finding]:
    """Report workers that are silent and were not drained: they are dead, hang, or are cut off."""
    for worker in status.workers:
        if not worker.alive and not worker.draining:
            name = worker.state.worker_id
            detail = f"silent since {worker.heartbeat_age_s:.1f} s, and gets nothing"
            yield Finding(f"worker {name}", "warn", detail, f"`baton runbook hung-tp-group --worker {name}`")


def check_fitness(status: admin_pb2.StatusReply) -> Iterator[Finding]:
    """Report live workers that the router has found unable to serve."""
    for worker in status.workers:
        if worker.unfit:
            name = worker.state.worker_id
            detail = f"reports and answers no canary: {worker.unfit_reason}"
            yield Finding(
                f"worker {name}", "warn", detail, f"see its log; `baton runbook hung-tp-group --worker {name}`"
            )


def check_graphs(status: admin_pb2.StatusReply) -> list[Finding]:
    """Report the CUDA graphs of live decode workers; what was not captured is launched kernel by kernel, slower."""
    findings: list[Finding] = []
    for worker in status.workers:
        if not worker.alive or not worker.state.inventory.HasField("graphs"):
            continue
        name, graphs = f"CUDA graphs of {worker.state.worker_id}", worker.state.inventory.graphs
        replayed = [("replayed", graphs.num_steps_replayed), ("piecewise", graphs.num_steps_piecewise)]
        ways = [*replayed, *sorted(graphs.num_steps_eager.items())]
        steps = ", ".join(f"{num} {how}" for how, num in ways if num) or "none"
        detail = f"{graphs.num_captured} captured; steps: {steps}"
        if graphs.failed:
            graph, why = min(graphs.failed.items())
            detail += f"; {len(graphs.failed)} not captured, such as {graph}: {why}"
            findings.append(Finding(name, "warn", detail, "free GPU memory, or choose --cuda-graph-sizes"))
        else:
            findings.append(Finding(name, "ok", detail))
    return findings


def check_kv_dtype(status: admin_pb2.StatusReply) -> Iterator[Finding]:
    """Compare the KV dtypes of live workers; workers with different ones are not paired."""
    found: dict[str, list[str]] = {}
    for worker in status.workers:
        if worker.alive and worker.state.kv_dtype:
            found.setdefault(worker.state.kv_dtype, []).append(worker.state.worker_id)
    if len(found) == 1:
        yield Finding("KV dtype", "ok", f"{next(iter(found))} at every worker")
    elif found:
        detail = "; ".join(f"{dtype} at {', '.join(workers)}" for dtype, workers in sorted(found.items()))
        yield Finding("KV dtype", "warn", detail, "start all workers with one --kv-cache-dtype")


def check_staging(status: admin_pb2.StatusReply) -> Iterator[Finding]:
    """Report the longest hand-off by sockets to each live decode worker that states it: those with KV pools on GPUs."""
    for worker in status.workers:
        state, limit_len = worker.state, worker.state.inventory.max_handoff_len
        if not worker.alive or not limit_len:
            continue
        name, detail = f"KV staging of {state.worker_id}", f"hand-offs by sockets of up to {limit_len} positions"
        if limit_len >= state.max_model_len:
            yield Finding(name, "ok", detail)
        else:
            more = f"{detail}; longer prompts, up to {state.max_model_len}, are computed by decode workers"
            yield Finding(name, "warn", more, "a larger --kv-staging-mib, and as much twice in /dev/shm (--shm-size)")


def check_compute(status: admin_pb2.StatusReply) -> list[Finding]:
    """Report live workers that compute slower than their device could."""
    return [Finding(name, "warn", detail, step) for name, detail, step in compute_problems(status)]


def check_path(path: KvPath) -> Finding:
    """Report the KV path of one pair of workers."""
    name = f"KV {path.prefill} to {path.decode}"
    if path.is_broken:
        return Finding(name, "warn", path.why, "read the reasons; `--transport auto` takes whatever works")
    return Finding(name, "ok", path.cell() if path.has_met else path.why)


def check_wire(wire: PairPath) -> Finding:
    """Report one port of a deployment. Unencrypted traffic is fine within one host, and a warning on a network."""
    name, detail = f"wire {wire.name}", f"{wire.address}: {wire.detail}"
    if wire.is_encrypted is None:
        return Finding(name, "warn", detail, "run doctor where the port can be reached")
    if wire.problem or (wire.expires_s is not None and wire.expires_s - time.time() < RENEW_S):
        return Finding(name, "warn", detail, "replace the certificate's files; they are read again by themselves")
    if wire.roles == ():
        return Finding(name, "warn", detail, "name its roles in its certificate, as docs/security-setup.md does")
    if wire.is_encrypted:
        return Finding(name, "ok", detail)
    if is_loopback(wire.address):
        return Finding(name, "ok", f"{detail}, on this host only")
    return Finding(name, "warn", detail, "docs/security-setup.md says how to encrypt it")


def check_numerics() -> Finding:
    """Check whether a row's result is independent of its batch on this machine."""
    import torch

    from baton.kernels.selftest import check_invariance

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        check_invariance(SELFTEST_SHAPES, torch.float32, device)
    except NumericsUnsupported as error:
        return Finding("numerics", "fail", error.message, "leave --batch-invariant out here, and report this machine")
    return Finding("numerics", "ok", f"invariant numerics hold on this machine's {device.type}")
