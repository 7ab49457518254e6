"""Where the ranks of a worker go on GPUs: one each, all of one group on one node, or a refusal that counts them."""

from types import SimpleNamespace

import pytest

from baton.cluster.ray.crew import Crew, CrewPlan
from baton.cluster.resolve import find_model, resolve_worker, worker_ids
from baton.core.config import ServeConfig
from baton.core.errors import WorkerStartFailed
from baton.core.inside import DeploymentSecret

pytestmark = pytest.mark.fast


def config_of(**values):
    return ServeConfig.from_mapping({"device": "cuda", **values})


def crew(config, num_gpus):
    session = SimpleNamespace(resources={"GPU": float(num_gpus)}, is_private=True, ray=None)
    shells = {"prefill": None, "decode": None}
    model = find_model("tiny")
    about = {"device": "cuda", "name": "baton-x", "router_address": "127.0.0.1:1", "secret": DeploymentSecret.new()}
    return Crew(session, CrewPlan(config=config, model=model, shells=shells, rank_shells=shells, **about))


class Groups:
    """Remembers what was asked for."""

    def place(self, worker_id, bundles, timeout_s):
        self.asked = (worker_id, bundles, timeout_s)
        return "strategy"


@pytest.mark.parametrize(("tp_prefill", "tp_decode", "needed"), [(1, 2, 3), (2, 2, 4), (1, 4, 5), (4, 8, 12)])
def test_every_rank_needs_a_gpu_of_its_own(tp_prefill, tp_decode, needed):
    config = config_of(prefill=1, tp_prefill=tp_prefill, tp_decode=tp_decode)
    ids = worker_ids(config)
    assert crew(config, needed)._workers_per_gpu(ids) == 1
    with pytest.raises(WorkerStartFailed, match=f"2 workers of {needed} ranks need as many GPUs.*has {needed - 1}"):
        crew(config, needed - 1)._workers_per_gpu(ids)


def test_a_decode_worker_of_several_gpus_is_one_group_on_one_node():
    config = config_of(tp_decode=4)
    workers = crew(config, 5)
    workers._groups = groups = Groups()
    options = {
        "num_gpus": 1.0,
        "resources": {"decode": 1},
        "runtime_env": {"env_vars": {"A": "b"}},
        "name": "baton-x-decode-0",
    }
    tp_group = workers._place_tp_group("decode-0", "decode", 4, options)
    assert groups.asked == ("decode-0", [{"GPU": 1.0, "decode": 1}, *[{"GPU": 1.0}] * 3], config.start_timeout_s)
    assert options["scheduling_strategy"] == "strategy"
    assert (tp_group.num_gpus, tp_group.environment, tp_group.name) == (1.0, {"A": "b"}, "baton-x-decode-0")


def test_ranks_share_host_memory_for_kv_and_not_that_of_gpus():
    config = config_of(tp_decode=2, kv_offloading_size=4)
    worker = resolve_worker(config, find_model("tiny"), worker_id="decode-0", device="cuda", tp_size=2)
    assert (worker.tp_size, worker.host_kv_bytes) == (2, 2 << 30)
    assert worker.gpu_memory_utilization == config.gpu_memory_utilization
