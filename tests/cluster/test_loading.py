"""A KV pool for which there is no memory."""

import dataclasses

import pytest

from baton.cluster.resolve import find_model, resolve_worker
from baton.core.config import ServeConfig
from baton.core.errors import ConfigInvalid
from baton.worker.loading import load_worker

pytestmark = pytest.mark.fast


def test_a_pool_too_large_for_this_machine_names_its_key():
    config = ServeConfig.from_mapping({"device": "cpu", "mtp": 0})
    worker = dataclasses.replace(resolve_worker(config, find_model("tiny"), worker_id="w"), kv_memory_mib=1 << 40)
    with pytest.raises(ConfigInvalid, match=r"^kv_memory_mib: a KV pool of \d+ MiB does not fit") as refused:
        load_worker(worker)
    assert refused.value.fields["keys"] == ["kv_memory_mib"]
