"""What `baton doctor --address` says of how each worker computes: the form, why it is that one, what fell back.

On a CPU a reference is as it should be. What is told with a next step is a GPU that computes without the kernels that
are made for it, a library that did not take products for which it was asked, and kernels that were compiled while
streams waited.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from baton.cluster.table import format_table
from baton.proto import admin_pb2, worker_pb2

_MAX_NAMED = 3  # shapes in a line; `--json` has all
_FORMS = {
    "triton": "Triton kernels",
    "reference": "torch reference",
    "ordered": "ordered Triton kernels",  # these two in invariant numerics
    "invariant": "invariant reference",
}
_ASKED_FOR = "asked for by --kernels"


def compute_data(reply: admin_pb2.StatusReply) -> list[dict[str, Any]]:
    """For `--json`: one object for each live worker that says it."""
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
    """The same for a person."""
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
    """Name, what was found, and the next step, where a worker computes slower than its device could."""
    for worker, compute in _live(reply):
        name = f"kernels of {worker.state.worker_id}"
        is_slow = compute.form in ("reference", "invariant") and compute.device != "cpu"
        if is_slow and compute.why != _ASKED_FOR:
            yield name, f"torch computes, not Triton's kernels: {compute.why}", "docs/operations.md, *What computes*"
        if compute.num_library_refused:
            detail = f"the library refused {compute.num_library_refused} float8 products, {_named(compute)}"
            yield name, detail, "its log says why; torch for CUDA 12.9 or later has them"
        if compute.num_kernels_serving:
            detail = f"{compute.num_kernels_serving} compiled while streams waited: {_some(compute.late_kernels)}"
            yield name, detail, "docs/operations.md, *What computes*; please report which requests came before"


def _named(compute: worker_pb2.Compute) -> str:
    return "of weights " + _some(compute.library_refused)


def _fallbacks(worker: dict[str, Any]) -> str:
    parts = []
    if worker["num_library_refused"]:
        parts.append(f"{worker['num_library_refused']} products refused ({_some(worker['library_refused'])})")
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
