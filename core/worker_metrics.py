"""What workers report in their heartbeats, under the names of metrics; the hand-off's are in `core.metrics`.

Counters of a worker begin at 0 again with each of its lives, as those of any restarted process do. Names keep vLLM's
meanings under `baton_`: a draft is a row of a step that had draft tokens, and drafts that were accepted behind the end
of a sequence count as accepted. Only what is fed is defined here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.core.distribution import Distribution
from baton.core.step_report import RowCounts, StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTotals:
    """What one life of one worker says of itself.

    Attributes:
        worker: its name.
        role: of it.
        num_running: requests that are computed.
        num_waiting: requests that are not, by what they wait for.
        kv_cache_usage: share of its KV blocks that somebody holds, 0 ... 1.
        steps: of a decode worker.
        giving_way: of a decode worker, what preemption has cost, by the names of metrics.
        graphs: of a decode worker with CUDA graphs.
        compute: how its model is computed; None of a worker that does not say.
        grammar_s: that sequences spent in grammar matchers of their own.
    """

    worker: str
    role: str
    num_running: int
    num_waiting: Mapping[str, int]
    kv_cache_usage: float
    steps: StepReport | None
    giving_way: Mapping[str, int] | None = None
    graphs: "GraphTotals | None" = None
    compute: "ComputeTotals | None" = None
    grammar_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTotals:
    """CUDA graphs of one life of a decode worker.

    Attributes:
        num_captured: graphs.
        num_failed: graphs that could not be captured.
        num_steps: by how they were run: "replayed", or why they were launched one by one.
    """

    num_captured: int
    num_failed: int
    num_steps: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTotals:
    """How one life of a worker computes.

    Attributes:
        form: "triton", "reference", "ordered" or "invariant".
        quantization: of its weights, "none" or "fp8".
        num_library_refused: float8 products that the library did not take.
        num_untuned: kernels' shapes that are in no tuned table.
        num_kernels: compiled or loaded, by when: "starting", or "serving", while streams waited.
    """

    form: str
    quantization: str
    num_library_refused: int
    num_untuned: int
    num_kernels: Mapping[str, int] = field(default_factory=dict)


GIVING_WAY: Final = {
    "preemptions": "Times that a request gave its KV blocks to others",
    "recomputed_tokens": "Positions whose KV was dropped and is computed again",
    "offloaded_blocks": "KV blocks copied to host memory",
    "restored_blocks": "KV blocks copied back",
    "host_kv_full": "Preemptions that found too little host memory, where there is any",
}
_COUNTERS: Final[tuple[tuple[str, str, Callable[[StepReport], int]], ...]] = (
    ("spec_decode_num_drafts", "Verify steps of one sequence with drafts", lambda steps: steps.verified.num_drafts),
    ("spec_decode_num_draft_tokens", "Drafts proposed", lambda steps: steps.verified.num_draft_tokens),
    ("spec_decode_num_accepted_tokens", "Drafts accepted", lambda steps: steps.verified.num_accepted_tokens),
    ("decode_steps", "Decode steps", lambda steps: steps.num_steps),
    ("decode_computed_rows", "Verify steps of one sequence, counted on the device", lambda s: s.computed.num_rows),
    ("decode_computed_tokens", "Tokens emitted, counted on the device", lambda s: s.computed.num_tokens),
    ("decode_computed_draft_tokens", "Drafts proposed, counted on the device", lambda s: s.computed.num_draft_tokens),
    (
        "decode_computed_accepted_tokens",
        "Drafts accepted, counted on the device",
        lambda steps: steps.computed.num_accepted_tokens,
    ),
)
_PLACES: Final[tuple[tuple[str, str, Callable[[RowCounts], tuple[int, ...]]], ...]] = (
    ("accepted_tokens_per_position", "Drafts accepted, by their place in a step", lambda rows: rows.accepted_at),
    ("draft_tokens_per_position", "Drafts proposed, by their place in a step", lambda rows: rows.proposed_at),
)
_FATES: Final = ("kept", "cut", "late", "failed")
_HISTOGRAMS: Final[tuple[tuple[str, str, Callable[[StepReport], Distribution]], ...]] = (
    ("decode_step_seconds", "From a decode step's begin to its end, on the device", lambda steps: steps.step_s),
    (
        "decode_host_gap_seconds",
        "From a decode step's end to the next one's begin, while there was work",
        lambda steps: steps.host_gap_s,
    ),
    ("decode_step_tokens", "Tokens that one decode step gave to requests", lambda steps: steps.step_tokens),
    ("decode_step_sequences", "Sequences of one decode step", lambda steps: steps.step_sequences),
)


class WorkerCollector(Collector):
    """Turns the reports of all workers into metrics by worker."""

    def __init__(self, read: Callable[[], Iterable[WorkerTotals]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """As of the last heartbeats."""
        found = tuple(self._read())
        yield from _gauges(found)
        grammars = CounterMetricFamily(
            "baton_grammar_seconds",
            "Time that grammars took beside the steps: to compile new ones, and to follow those that are slow",
            labels=("worker", "role"),
        )
        for item in found:
            grammars.add_metric((item.worker, item.role), item.grammar_s)
        yield grammars
        steps = {item.worker: item.steps for item in found if item.steps is not None}
        for name, text in GIVING_WAY.items():
            counter = CounterMetricFamily(f"baton_{name}", text, labels=("worker",))
            for item in found:
                if item.giving_way is not None:
                    counter.add_metric((item.worker,), item.giving_way[name])
            yield counter
        yield from _graphs(found)
        yield from _compute(found)
        for name, text, of in _COUNTERS:
            counter = CounterMetricFamily(f"baton_{name}", text, labels=("worker",))
            for worker, report in steps.items():
                counter.add_metric((worker,), of(report))
            yield counter
        for name, text, places_of in _PLACES:
            counter = CounterMetricFamily(f"baton_{name}", text, labels=("worker", "position"))
            for worker, report in steps.items():
                for place, count in enumerate(places_of(report.verified)):
                    counter.add_metric((worker, str(place)), count)
            yield counter
        yield _fates("decode_rows", "Verify steps of one sequence that were read, by their fate", steps, _num_rows)
        yield _fates("decode_tokens", "Tokens of steps that were read, by their fate", steps, _num_tokens)
        for name, text, distribution_of in _HISTOGRAMS:
            histogram = HistogramMetricFamily(f"baton_{name}", text, labels=("worker",))
            for worker, report in steps.items():
                distribution = distribution_of(report)
                histogram.add_metric((worker,), cumulative(distribution), distribution.total)
            yield histogram


def _gauges(found: Iterable[WorkerTotals]) -> Iterator[Metric]:
    labels = ("worker", "role")
    running = GaugeMetricFamily("baton_num_requests_running", "Requests that a worker computes", labels=labels)
    waiting = GaugeMetricFamily(
        "baton_num_requests_waiting", "Requests at a worker, by what they wait for", labels=(*labels, "reason")
    )
    usage = GaugeMetricFamily("baton_kv_cache_usage", "Share of a worker's KV blocks that are held", labels=labels)
    for item in found:
        running.add_metric((item.worker, item.role), item.num_running)
        for reason, num in item.num_waiting.items():
            waiting.add_metric((item.worker, item.role, reason), num)
        usage.add_metric((item.worker, item.role), item.kv_cache_usage)
    yield from (running, waiting, usage)


def _graphs(found: Iterable[WorkerTotals]) -> Iterator[Metric]:
    graphs = GaugeMetricFamily("baton_cuda_graphs", "CUDA graphs, by what became of them", labels=("worker", "fate"))
    ways = CounterMetricFamily(
        "baton_decode_graph_steps", "Decode steps, by how graphs ran them or why not", labels=("worker", "how")
    )
    for item in found:
        if item.graphs is not None:
            graphs.add_metric((item.worker, "captured"), item.graphs.num_captured)
            graphs.add_metric((item.worker, "failed"), item.graphs.num_failed)
            for how, num in item.graphs.num_steps.items():
                ways.add_metric((item.worker, how), num)
    yield from (graphs, ways)


def _compute(found: Iterable[WorkerTotals]) -> Iterator[Metric]:
    labels = ("worker", "role")
    form = GaugeMetricFamily(
        "baton_kernel_form", "1: what computes a worker's model, and how", labels=(*labels, "form", "quantization")
    )
    refused = CounterMetricFamily(
        "baton_kernel_library_refused", "Float8 products that a slower kernel had to compute", labels=labels
    )
    untuned = GaugeMetricFamily(
        "baton_kernel_untuned_shapes", "Shapes of kernels that are in no tuned table", labels=labels
    )
    compiles = CounterMetricFamily(
        "baton_kernel_compiles", "Kernels compiled or loaded from a cache, by when", labels=(*labels, "when")
    )
    for item in found:
        if item.compute is not None:
            its = item.worker, item.role
            form.add_metric((*its, item.compute.form, item.compute.quantization), 1)
            refused.add_metric(its, item.compute.num_library_refused)
            untuned.add_metric(its, item.compute.num_untuned)
            for when, num in item.compute.num_kernels.items():
                compiles.add_metric((*its, when), num)
    yield from (form, refused, untuned, compiles)


def _fates(name: str, text: str, steps: Mapping[str, StepReport], of: Callable[[RowCounts], int]) -> Metric:
    counter = CounterMetricFamily(f"baton_{name}", text, labels=("worker", "fate"))
    for worker, report in steps.items():
        for fate in _FATES:
            if fate != "cut" or of is not _num_rows:  # the row itself is kept
                counter.add_metric((worker, fate), of(getattr(report, fate)))
    return counter


def _num_rows(rows: RowCounts) -> int:
    return rows.num_rows


def _num_tokens(rows: RowCounts) -> int:
    return rows.num_tokens


def cumulative(distribution: Distribution) -> list[tuple[str, float]]:
    """Buckets as Prometheus has them: each with all values up to its bound."""
    num = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*distribution.bounds, None), distribution.counts, strict=True):
        num += count
        buckets.append(("+Inf" if bound is None else str(float(bound)), num))
    return buckets
