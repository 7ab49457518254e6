"""From what workers report in heartbeats to metrics by worker."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.core.clock import VirtualClock
from baton.core.distribution import Buckets
from baton.core.errors import BatonError
from baton.core.telemetry.step_report import COUNT_BOUNDS, GAP_BOUNDS_S, STEP_BOUNDS_S, RowCounts, StepReport, no_rows
from baton.proto import worker_pb2
from baton.proto.wire import report_from_proto, report_to_proto, waiting_to_proto
from baton.router.metrics import RouterMetrics
from baton.router.placement.members import ALIVE_S, MAX_GAP_S, Members
from baton.router.worker_metrics import WorkerCollector

pytestmark = pytest.mark.fast

GAPS_S = (0.0004, 0.002, 0.3, 7.0)


def rows(num_rows, proposed_at, accepted_at, num_tokens=None):
    num_tokens = num_rows + sum(accepted_at) if num_tokens is None else num_tokens
    return RowCounts(num_rows=num_rows, num_tokens=num_tokens, proposed_at=proposed_at, accepted_at=accepted_at)


def filled(bounds, values):
    buckets = Buckets(bounds)
    for value in values:
        buckets.observe(value)
    return buckets.read()


def report():
    kept, late, failed = rows(10, (8, 6), (5, 2)), rows(2, (2, 2), (1, 0)), rows(1, (1, 0), (0, 0))
    cut = rows(0, (0, 0), (1, 1), num_tokens=3)
    return StepReport(
        num_steps=4,
        computed=kept + late + failed + cut,
        kept=kept,
        cut=cut,
        late=late,
        failed=failed,
        step_s=filled(STEP_BOUNDS_S, [0.01] * 4),
        host_gap_s=filled(GAP_BOUNDS_S, GAPS_S),
        step_tokens=filled(COUNT_BOUNDS, [17, 0]),
        step_sequences=filled(COUNT_BOUNDS, [13]),
    )


def heartbeat(worker_id="d0", epoch=1, **inventory):
    state = worker_pb2.WorkerState(
        worker_id=worker_id,
        role="decode",
        epoch=epoch,
        address="a",
        kv_address="tcp://a",
        max_model_len=9,
        block_size=16,
        inventory=worker_pb2.Inventory(**{"num_blocks": 1, **inventory}),
    )
    return state


def samples(metrics):
    families = text_string_to_metric_families(metrics.render())
    return {(item.name, frozenset(item.labels.items())): item.value for family in families for item in family.samples}


class Found(dict):
    """Samples by name and labels."""

    def of(self, name, **labels):
        return self[f"baton_{name}", frozenset(labels.items())]


@pytest.fixture
def members():
    return Members(VirtualClock())


@pytest.fixture
def metrics(members):
    found = RouterMetrics()
    found.registry.register(WorkerCollector(members))
    return found


def test_a_report_crosses_the_wire_unchanged():
    assert report_from_proto(report_to_proto(report())) == report()


def test_every_number_has_its_name(members, metrics):
    waiting = waiting_to_proto({"blocks": 3, "slot": 1})
    members.heartbeat(
        heartbeat(
            num_blocks=8,
            num_blocks_free=2,
            num_requests_running=5,
            waiting=waiting,
            steps=report_to_proto(report()),
            num_preemptions=7,
            num_recomputed_tokens=90,
            num_offloaded_blocks=12,
            num_restored_blocks=11,
            num_host_full=2,
            graphs=worker_pb2.GraphCounts(
                num_captured=20,
                failed={"a": "no memory"},
                num_steps_replayed=30,
                num_steps_eager={"too wide": 4},
                num_steps_piecewise=7,
            ),
        )
    )
    found = Found(samples(metrics))
    assert found.of("spec_decode_num_drafts_total", worker="d0") == 8
    assert found.of("spec_decode_num_draft_tokens_total", worker="d0") == 14
    assert found.of("spec_decode_num_accepted_tokens_total", worker="d0") == 9  # as vLLM: those behind an end, too
    accepted = [found.of("accepted_tokens_per_position_total", worker="d0", position=str(at)) for at in range(2)]
    proposed = [found.of("draft_tokens_per_position_total", worker="d0", position=str(at)) for at in range(2)]
    assert (accepted, proposed) == ([6, 3], [8, 6])
    assert found.of("decode_steps_total", worker="d0") == 4
    assert [found.of("cuda_graphs", worker="d0", fate=fate) for fate in ("captured", "failed")] == [20, 1]
    steps = [
        found.of("decode_graph_steps_total", worker="d0", how=how) for how in ("replayed", "piecewise", "too wide")
    ]
    assert steps == [30, 7, 4]
    names = ("preemptions", "recomputed_tokens", "offloaded_blocks", "restored_blocks", "host_kv_full")
    assert [found.of(f"{name}_total", worker="d0") for name in names] == [7, 90, 12, 11, 2]
    tokens = [found.of("decode_tokens_total", worker="d0", fate=fate) for fate in ("kept", "cut", "late", "failed")]
    assert tokens == [17, 3, 3, 1]
    assert found.of("decode_computed_tokens_total", worker="d0") == sum(tokens)
    assert [found.of("decode_rows_total", worker="d0", fate=fate) for fate in ("kept", "late", "failed")] == [10, 2, 1]
    assert found.of("decode_computed_rows_total", worker="d0") == 13
    assert found.of("kv_cache_usage", worker="d0", role="decode") == 0.75
    assert found.of("num_requests_running", worker="d0", role="decode") == 5
    assert found.of("num_requests_waiting", worker="d0", role="decode", reason="blocks") == 3


def test_the_balance_of_experts_is_shown_once_it_was_read(members, metrics):
    of_worker = {"worker": "d0", "role": "decode"}
    members.heartbeat(heartbeat())
    assert not [key for key in samples(metrics) if "expert" in key[0]], "of workers whose experts move alone"
    members.heartbeat(heartbeat(experts=worker_pb2.ExpertBalance()))
    found = Found(samples(metrics))
    assert found.of("expert_moves_total", **of_worker) == 0
    assert ("baton_expert_balance", frozenset(of_worker.items())) not in found
    members.heartbeat(heartbeat(experts=worker_pb2.ExpertBalance(balance=0.75, num_layers_moved=4)))
    found = Found(samples(metrics))
    assert found.of("expert_moves_total", **of_worker) == 4
    assert found.of("expert_balance", **of_worker) == 0.75


def test_buckets_hold_what_prometheus_expects(members, metrics):
    members.heartbeat(heartbeat(steps=report_to_proto(report())))
    found = Found(samples(metrics))
    for bound in (*GAP_BOUNDS_S, math.inf):
        name = "+Inf" if bound == math.inf else str(bound)
        num = found.of("decode_host_gap_seconds_bucket", worker="d0", le=name)
        assert num == sum(gap <= bound for gap in GAPS_S)
    assert found.of("decode_host_gap_seconds_count", worker="d0") == len(GAPS_S)
    assert found.of("decode_host_gap_seconds_sum", worker="d0") == pytest.approx(sum(GAPS_S))


def test_a_new_life_begins_at_0_and_a_dead_worker_is_not_shown(members, metrics):
    members.heartbeat(heartbeat(steps=report_to_proto(report())))
    nothing = filled(COUNT_BOUNDS, ())
    times = {name: nothing for name in ("step_s", "host_gap_s", "step_tokens", "step_sequences")}
    fates = {name: no_rows(2) for name in ("computed", "kept", "cut", "late", "failed")}
    members.heartbeat(heartbeat(epoch=2, steps=report_to_proto(StepReport(num_steps=0, **fates, **times))))
    members.heartbeat(heartbeat("d1", steps=report_to_proto(report())))
    found = Found(samples(metrics))
    assert found.of("spec_decode_num_drafts_total", worker="d0") == 0
    assert found.of("spec_decode_num_drafts_total", worker="d1") == 8
    for _ in range(int(ALIVE_S / MAX_GAP_S) + 1):
        members._clock.advance(MAX_GAP_S)
        members.expire()
    of_lost = {"baton_worker_up", "baton_worker_heartbeat_age_seconds", "baton_worker_incarnations_total"}
    assert {name for name, labels in samples(metrics) if "worker" in dict(labels)} == of_lost


def test_no_name_is_given_twice(members, metrics):
    members.heartbeat(heartbeat(steps=report_to_proto(report())))
    names = [metric.name for metric in metrics.registry.collect()]
    assert len(names) == len(set(names))


def test_a_report_whose_numbers_do_not_fit_is_refused(members):
    for spoil in (
        lambda steps: steps.kept.proposed_at.append(1),
        lambda steps: steps.late.accepted_at.pop(),
        lambda steps: steps.host_gap_seconds.counts.pop(),
        lambda steps: steps.ClearField("step_tokens"),
        lambda steps: steps.step_seconds.bounds.reverse(),
    ):
        steps = report_to_proto(report())
        spoil(steps)
        with pytest.raises(BatonError):
            members.heartbeat(heartbeat(steps=steps))


def test_shares_are_those_of_drafts_that_were_there():
    found = report()
    assert found.acceptance_per_position == (6 / 8, 3 / 6)
    assert found.mean_acceptance_len == 1 + 9 / 8
    assert found.tokens_per_step == 17 / 2
    assert found.read == found.computed
    assert found.since(found).computed == no_rows(2)
    assert found.since(found).mean_acceptance_len is None
    assert found.since(found).acceptance_per_position == (None, None)


def test_how_a_worker_computes_is_told_with_what_fell_back(members, metrics):
    compute = worker_pb2.Compute(
        form="triton",
        quantization="fp8",
        num_library_refused=7,
        untuned=["a 1", "b 2"],
        num_kernels_starting=120,
        num_kernels_serving=2,
    )
    members.heartbeat(heartbeat(compute=compute))
    members.heartbeat(heartbeat("d1"))
    found = Found(samples(metrics))
    its = {"worker": "d0", "role": "decode"}
    assert found.of("kernel_form", **its, form="triton", quantization="fp8") == 1
    assert found.of("kernel_library_refused_total", **its) == 7
    assert found.of("kernel_untuned_shapes", **its) == 2
    named = [key for key in found if key[0].startswith("baton_kernel_")]
    assert found.of("kernel_compiles_total", **its, when="starting") == 120
    assert found.of("kernel_compiles_total", **its, when="serving") == 2
    assert len(named) == 5, "an older worker says nothing"


def test_time_in_grammars_is_a_counter_by_worker():
    members, metrics = Members(VirtualClock()), RouterMetrics()
    metrics.registry.register(WorkerCollector(members))
    members.heartbeat(heartbeat(grammar_seconds=2.5))
    assert 'baton_grammar_seconds_total{role="decode",worker="d0"} 2.5' in metrics.render()


def test_output_that_was_not_finite_is_a_counter_by_worker():
    members, metrics = Members(VirtualClock()), RouterMetrics()
    metrics.registry.register(WorkerCollector(members))
    members.heartbeat(heartbeat(num_not_finite=2))
    assert 'baton_outputs_not_finite_total{role="decode",worker="d0"} 2.0' in metrics.render()
