"""A decode worker's counts under preemption and cancels: what streams were given, readers told, devices computed."""

import time

import pytest

from baton.core.telemetry.step_report import no_rows
from baton.proto.wire import report_from_proto
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.topology import Topology

SETTLE_S = 5.0
WAYS = {
    "plain": {},
    "recomputed": {"preempt_at": (3, 9)},
    "from host memory": {"preempt_at": (3, 9), "host_kv_bytes": 1 << 26},
    "few blocks": {"num_blocks": 20, "num_prefill_blocks": 256, "overcommit": True},
}


def settled_report(topology):
    """The report once the copy of the device's counters has caught up with what was read."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        report = report_from_proto(topology.inventories()[-1].steps)
        if report.computed == report.read != no_rows(2):
            return report
        assert time.monotonic() < deadline_s, report
        time.sleep(0.02)


@pytest.mark.parametrize("scheduling", [pytest.param("sync", marks=pytest.mark.slow), "async"])
@pytest.mark.parametrize("way", WAYS)
def test_streams_readers_and_the_device_agree(way, scheduling, load_tiny, tokenizer):
    prompts = token_prompts(tokenizer, 9)
    options = {"num_drafts": 2, "max_tokens": 24}
    with Topology(load_tiny(), tokenizer, chunk_len=64, num_drafts=2, scheduling=scheduling, **WAYS[way]) as topology:
        outcomes = topology.generate(requests_for(prompts, sampled=True, **options))
        assert [outcome.error for outcome in outcomes] == [None] * len(prompts)
        topology.wait_idle(5.0)
        whole = settled_report(topology)
        assert whole.kept.num_tokens == sum(len(outcome.token_ids) - 1 for outcome in outcomes)
        stats = [outcome.decode_stats for outcome in outcomes if outcome.decode_stats is not None]
        assert whole.kept.num_rows == sum(item.num_verify_steps for item in stats)
        assert whole.kept.num_draft_tokens == sum(item.num_draft_tokens for item in stats)
        assert whole.kept.num_accepted_tokens == sum(item.num_accepted_tokens for item in stats)
        started = [topology.start(request) for request in requests_for(prompts, sampled=False, tag="gone", **options)]
        for at, running in enumerate(started):
            if at % 2:
                time.sleep(0.02)
                topology.cancel(running)
        outcomes = [topology.finish(running) for running in started]
        topology.wait_idle(5.0)
        more = settled_report(topology).since(whole)
        assert more.kept.num_tokens >= sum(max(0, len(outcome.token_ids) - 1) for outcome in outcomes)
        assert "preempt_at" not in WAYS[way] or topology.inventories()[-1].num_preemptions > 0
