"""Exports workers' heartbeats as metrics, one declaration per metric, each read from the heartbeat message.

A worker's counters restart at 0 with each incarnation, as those of any restarted process do. Names have vLLM's meanings
under the prefix `baton_`: a draft is a row of a step that had draft tokens, and draft tokens accepted beyond the end of
a sequence count as accepted. The router shows lost workers until it forgets them, but what they hold is unknown.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.core.distribution import Distribution
from baton.core.telemetry.step_report import MethodCounts, RowCounts, StepReport
from baton.proto import worker_pb2
from baton.proto.wire import distribution_from_proto, kv_cache_usage, report_from_proto
from baton.router.placement.members import DECODE, Member, Members

Value = float | Distribution
Values = Value | Mapping[Any, float] | None  # a key is a label's value, or a tuple of several labels' values
BOTH: Final = ("worker", "role")
WORKER: Final = ("worker",)  # for metrics of a single role


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What the router knows about one worker.

    Attributes:
        member: the worker's membership entry.
        age_s: seconds since its last heartbeat.
        held: inventory from its last heartbeat.
        steps: step statistics from that inventory; None if the worker does not decode.
    """

    member: Member
    age_s: float
    held: worker_pb2.Inventory
    steps: StepReport | None


@dataclass(frozen=True, slots=True)
class WorkerMetric:
    """Declares one metric.

    Attributes:
        family: kind of metric.
        name: the metric's name without the prefix `baton_`.
        text: help text.
        read: returns the value, or a mapping from label values to values; None if the worker does not report it.
        labels: labels in addition to those of `by`.
        by: labels that identify the worker.
        is_of_lost: whether the metric is also known for lost workers.
    """

    family: type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]
    name: str
    text: str
    read: Callable[[WorkerReport], Values]
    labels: tuple[str, ...] = ()
    by: tuple[str, ...] = BOTH
    is_of_lost: bool = False


def _of_decode(read: Callable[[WorkerReport], float]) -> Callable[[WorkerReport], Values]:
    return lambda its: read(its) if its.member.state.role == DECODE else None


def _of_steps(read: Callable[[StepReport], Values]) -> Callable[[WorkerReport], Values]:
    return lambda its: None if its.steps is None else read(its.steps)


def _of_checkpoints(read: Callable[[worker_pb2.Inventory], Values]) -> Callable[[WorkerReport], Values]:
    return lambda its: read(its.held) if its.held.num_state_checkpoint_slots else None


def _of_compute(read: Callable[[worker_pb2.Compute], Values]) -> Callable[[WorkerReport], Values]:
    return lambda its: read(its.held.compute) if its.held.HasField("compute") else None


def _of_experts(read: Callable[[worker_pb2.ExpertBalance], Values]) -> Callable[[WorkerReport], Values]:
    return lambda its: read(its.held.experts) if its.held.HasField("experts") else None


def _of_graphs(read: Callable[[worker_pb2.GraphCounts], Values]) -> Callable[[WorkerReport], Values]:
    return lambda its: read(its.held.graphs) if its.held.HasField("graphs") else None


def _times(counts: worker_pb2.TransferCounts, name: str) -> Distribution | None:
    return distribution_from_proto(getattr(counts, name)) if counts.HasField(name) else None


def _by_place(counts: Iterable[int]) -> dict[str, float]:
    return {str(place): count for place, count in enumerate(counts)}


def _methods(steps: StepReport, read: Callable[[MethodCounts], int]) -> dict[str, float]:
    return {name: read(counts) for name, counts in steps.by_method.items()}


def _fates(steps: StepReport, read: Callable[[RowCounts], int], fates: Iterable[str]) -> dict[str, float]:
    return {fate: read(getattr(steps, fate)) for fate in fates}


_Gauge, _Counter, _Histogram = GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily
WORKER_METRICS: Final = (
    WorkerMetric(
        _Gauge,
        "worker_up",
        "1 while a worker is heard of, 0 once it is lost",
        lambda its: its.member.alive,
        is_of_lost=True,
    ),
    WorkerMetric(
        _Gauge,
        "worker_heartbeat_age_seconds",
        "Since a worker was last heard of",
        lambda its: its.age_s,
        is_of_lost=True,
    ),
    WorkerMetric(
        _Counter,
        "worker_incarnations",
        "Incarnations of a worker that the router has seen",
        lambda its: its.member.num_epochs,
        is_of_lost=True,
    ),
    WorkerMetric(
        _Gauge, "num_requests_running", "Requests that a worker computes", lambda its: its.held.num_requests_running
    ),
    WorkerMetric(
        _Gauge,
        "num_requests_waiting",
        "Requests at a worker, by what they wait for",
        lambda its: {item.reason: item.num_requests for item in its.held.waiting},
        labels=("reason",),
    ),
    WorkerMetric(
        _Gauge, "num_requests_held", "Requests a worker has not let go of", lambda its: its.held.num_requests_held
    ),
    WorkerMetric(_Gauge, "num_kv_receives", "Hand-offs under way at a worker", lambda its: its.held.num_kv_receives),
    WorkerMetric(
        _Counter,
        "grammar_seconds",
        "Time that grammars took beside the steps: to compile new ones, and to follow those that are slow",
        lambda its: its.held.grammar_seconds,
    ),
    WorkerMetric(
        _Counter,
        "outputs_not_finite",
        "Times that an answer broke off at a worker because its model gave NaN or an infinity",
        lambda its: its.held.num_not_finite,
    ),
    WorkerMetric(
        _Counter,
        "gc_seconds",
        "Time in which Python's garbage collector stopped a worker, since it is ready",
        lambda its: its.held.gc_seconds,
    ),
    WorkerMetric(
        _Gauge, "kv_cache_usage", "Share of a worker's KV blocks that are held", lambda its: kv_cache_usage(its.held)
    ),
    WorkerMetric(
        _Gauge,
        "kv_blocks",
        "KV blocks of a worker, by state",
        lambda its: {
            "free": its.held.num_blocks_free,
            "reserved": its.held.num_blocks_reserved,
            "quarantined": its.held.num_blocks_quarantined,
        },
        labels=("state",),
    ),
    WorkerMetric(
        _Gauge,
        "state_checkpoints",
        "Checkpoints of state that cached prefixes have, and room for more, of a model whose layers keep state",
        _of_checkpoints(
            lambda its: {
                "held": its.num_state_checkpoints,
                "free": its.num_state_checkpoint_slots - its.num_state_checkpoints,
            }
        ),
        labels=("state",),
    ),
    WorkerMetric(
        _Counter,
        "state_checkpoints_evicted",
        "Those evicted for others, or with their blocks",
        _of_checkpoints(lambda its: its.num_state_checkpoints_evicted),
    ),
    WorkerMetric(
        _Counter,
        "preemptions",
        "Times that a request gave its KV blocks to others",
        _of_decode(lambda its: its.held.num_preemptions),
        by=WORKER,
    ),
    WorkerMetric(
        _Counter,
        "recomputed_tokens",
        "Positions whose KV was dropped and is computed again",
        _of_decode(lambda its: its.held.num_recomputed_tokens),
        by=WORKER,
    ),
    WorkerMetric(
        _Counter,
        "offloaded_blocks",
        "KV blocks copied to host memory",
        _of_decode(lambda its: its.held.num_offloaded_blocks),
        by=WORKER,
    ),
    WorkerMetric(
        _Counter,
        "restored_blocks",
        "KV blocks copied back",
        _of_decode(lambda its: its.held.num_restored_blocks),
        by=WORKER,
    ),
    WorkerMetric(
        _Counter,
        "host_kv_full",
        "Preemptions that found too little host memory, where there is any",
        _of_decode(lambda its: its.held.num_host_full),
        by=WORKER,
    ),
    WorkerMetric(
        _Counter, "kv_transfer_bytes", "KV pushed (prefill) or landed (decode)", lambda its: its.held.transfer.bytes
    ),
    WorkerMetric(_Counter, "kv_transfer_frames", "Frames pushed or landed", lambda its: its.held.transfer.frames),
    WorkerMetric(_Counter, "kv_transfer_resent", "Frames pushed again", lambda its: its.held.transfer.resent),
    WorkerMetric(
        _Counter,
        "kv_transfer_late_dropped",
        "Frames that no incoming transfer wanted any more",
        lambda its: its.held.transfer.late_dropped,
    ),
    WorkerMetric(
        _Counter, "kv_transfer_corrupt", "Frames that failed their check", lambda its: its.held.transfer.corrupt
    ),
    WorkerMetric(
        _Counter,
        "kv_transfer_fallbacks",
        "Times that a worse data path was used than should work",
        lambda its: its.held.transfer.fallbacks,
    ),
    WorkerMetric(
        _Counter,
        "kv_transfer_credit_stall_seconds",
        "Time in which frames were ready and the window was full",
        lambda its: its.held.transfer.credit_stall_seconds,
    ),
    WorkerMetric(
        _Counter,
        "kv_transfer_refused",
        "Connections and HELLOs to decode workers without the deployment's secret",
        lambda its: its.held.transfer.refused,
    ),
    WorkerMetric(
        _Gauge,
        "kv_transfer_quarantined_blocks",
        "Blocks that a peer might still write",
        lambda its: its.held.transfer.quarantined_blocks,
    ),
    WorkerMetric(
        _Histogram,
        "kv_transfer_seconds",
        "From the first frame until the transfer is complete",
        lambda its: _times(its.held.transfer, "transfer_times"),
    ),
    WorkerMetric(
        _Histogram,
        "kv_transfer_exposed_seconds",
        "From the end of the prefill until the transfer is complete",
        lambda its: _times(its.held.transfer, "exposed_times"),
    ),
    WorkerMetric(
        _Gauge,
        "cuda_graphs",
        "CUDA graphs, by what became of them",
        _of_graphs(lambda its: {"captured": its.num_captured, "failed": len(its.failed)}),
        labels=("fate",),
        by=WORKER,
    ),
    WorkerMetric(
        _Counter,
        "decode_graph_steps",
        "Steps, by how graphs ran them or why not",
        _of_graphs(
            lambda its: {
                "replayed": its.num_steps_replayed,
                "piecewise": its.num_steps_piecewise,
                **its.num_steps_eager,
            }
        ),
        labels=("how",),
        by=WORKER,
    ),
    WorkerMetric(
        _Gauge,
        "expert_balance",
        "Mean load of a worker's ranks by the largest, lately, where experts may move between them",
        _of_experts(lambda its: its.balance if its.HasField("balance") else None),
    ),
    WorkerMetric(
        _Counter,
        "expert_moves",
        "Times that a layer's experts were put to other ranks",
        _of_experts(lambda its: its.num_layers_moved),
    ),
    WorkerMetric(
        _Gauge,
        "kernel_form",
        "1: what computes a worker's model, and how",
        _of_compute(lambda its: {(its.form, its.quantization): 1}),
        labels=("form", "quantization"),
    ),
    WorkerMetric(
        _Counter,
        "kernel_library_refused",
        "Float8 GEMMs that a slower kernel had to compute",
        _of_compute(lambda its: its.num_library_refused),
    ),
    WorkerMetric(
        _Gauge,
        "kernel_untuned_shapes",
        "Shapes of kernels that are in no tuned table",
        _of_compute(lambda its: len(its.untuned)),
    ),
    WorkerMetric(
        _Counter,
        "kernel_compiles",
        "Kernels compiled or loaded from a cache, by when",
        _of_compute(lambda its: {"starting": its.num_kernels_starting, "serving": its.num_kernels_serving}),
        labels=("when",),
    ),
    WorkerMetric(
        _Counter,
        "spec_decode_num_drafts",
        "Verify steps of one sequence with drafts",
        _of_steps(lambda its: its.verified.num_drafts),
        by=WORKER,
    ),
    WorkerMetric(
        _Counter,
        "spec_decode_num_draft_tokens",
        "Drafts proposed",
        _of_steps(lambda its: its.verified.num_draft_tokens),
        by=WORKER,
    ),
    WorkerMetric(
        _Counter,
        "spec_decode_num_accepted_tokens",
        "Drafts accepted",
        _of_steps(lambda its: its.verified.num_accepted_tokens),
        by=WORKER,
    ),
    WorkerMetric(_Counter, "decode_steps", "Decode steps", _of_steps(lambda its: its.num_steps), by=WORKER),
    WorkerMetric(
        _Counter,
        "decode_method_steps",
        "Decode steps, by what made their drafts",
        _of_steps(lambda its: _methods(its, lambda counts: counts.num_steps)),
        labels=("method",),
        by=WORKER,
    ),
    WorkerMetric(
        _Counter,
        "decode_method_draft_tokens",
        "Drafts in rows that were kept, by what made them",
        _of_steps(lambda its: _methods(its, lambda counts: counts.num_draft_tokens)),
        labels=("method",),
        by=WORKER,
    ),
    WorkerMetric(
        _Counter,
        "decode_method_accepted_tokens",
        "Of those, drafts accepted and kept",
        _of_steps(lambda its: _methods(its, lambda counts: counts.num_accepted_tokens)),
        labels=("method",),
        by=WORKER,
    ),
    WorkerMetric(
        _Counter,
        "decode_computed_rows",
        "Verify steps of one sequence, counted on the device",
        _of_steps(lambda its: its.computed.num_rows),
        by=WORKER,
    ),
    WorkerMetric(
        _Counter,
        "decode_computed_tokens",
        "Tokens emitted, counted on the device",
        _of_steps(lambda its: its.computed.num_tokens),
        by=WORKER,
    ),
    WorkerMetric(
        _Counter,
        "decode_computed_draft_tokens",
        "Drafts proposed, counted on the device",
        _of_steps(lambda its: its.computed.num_draft_tokens),
        by=WORKER,
    ),
    WorkerMetric(
        _Counter,
        "decode_computed_accepted_tokens",
        "Drafts accepted, counted on the device",
        _of_steps(lambda its: its.computed.num_accepted_tokens),
        by=WORKER,
    ),
    WorkerMetric(
        _Counter,
        "accepted_tokens_per_position",
        "Drafts accepted, by their place in a step",
        _of_steps(lambda its: _by_place(its.verified.accepted_at)),
        labels=("position",),
        by=WORKER,
    ),
    WorkerMetric(
        _Counter,
        "draft_tokens_per_position",
        "Drafts proposed, by their place in a step",
        _of_steps(lambda its: _by_place(its.verified.proposed_at)),
        labels=("position",),
        by=WORKER,
    ),
    WorkerMetric(
        _Counter,
        "decode_rows",
        "Verify steps of one sequence that were read, by their fate",
        _of_steps(lambda its: _fates(its, lambda rows: rows.num_rows, ("kept", "late", "failed"))),
        labels=("fate",),
        by=WORKER,
    ),
    WorkerMetric(
        _Counter,
        "decode_tokens",
        "Tokens of steps that were read, by their fate",
        _of_steps(lambda its: _fates(its, lambda rows: rows.num_tokens, ("kept", "cut", "late", "failed"))),
        labels=("fate",),
        by=WORKER,
    ),
    WorkerMetric(
        _Histogram,
        "decode_step_seconds",
        "From a decode step's begin to its end, on the device",
        _of_steps(lambda its: its.step_s),
        by=WORKER,
    ),
    WorkerMetric(
        _Histogram,
        "decode_host_gap_seconds",
        "From a decode step's end to the next one's begin, while there was work",
        _of_steps(lambda its: its.host_gap_s),
        by=WORKER,
    ),
    WorkerMetric(
        _Histogram,
        "decode_step_tokens",
        "Tokens that one decode step gave to requests",
        _of_steps(lambda its: its.step_tokens),
        by=WORKER,
    ),
    WorkerMetric(
        _Histogram,
        "decode_step_sequences",
        "Sequences of one decode step",
        _of_steps(lambda its: its.step_sequences),
        by=WORKER,
    ),
)


class WorkerCollector(Collector):
    """Turns all workers' last heartbeats into metrics; any thread may read it."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        reports = [self._report(member) for member in (*self._members.all(), *self._members.gone())]
        for metric in WORKER_METRICS:
            family = metric.family(f"baton_{metric.name}", metric.text, labels=(*metric.by, *metric.labels))
            for its in reports:
                if its.member.alive or metric.is_of_lost:
                    _add(
                        family, (its.member.state.worker_id, its.member.state.role)[: len(metric.by)], metric.read(its)
                    )
            yield family

    def _report(self, member: Member) -> WorkerReport:
        held = member.state.inventory
        steps = report_from_proto(held.steps) if held.HasField("steps") else None
        return WorkerReport(member, self._members.heartbeat_age_s(member), held, steps)


def _add(family: Any, labels: tuple[str, ...], values: Values) -> None:
    match values:
        case None:
            return
        case Distribution():
            family.add_metric(labels, _cumulative(values), values.total)
        case Mapping():
            for more, value in values.items():
                family.add_metric((*labels, *((more,) if isinstance(more, str) else more)), value)
        case _:
            family.add_metric(labels, values)


def _cumulative(distribution: Distribution) -> list[tuple[str, float]]:
    """Return Prometheus' cumulative buckets, each counting all values up to its bound."""
    num = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*distribution.bounds, None), distribution.counts, strict=True):
        num += count
        buckets.append(("+Inf" if bound is None else str(float(bound)), num))
    return buckets
