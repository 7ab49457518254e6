"""A KV pool for which there is no memory."""

import dataclasses
import json

import pytest

from baton.cluster.resolve import find_model, resolve_worker
from baton.core.config import ServeConfig
from baton.core.errors import ConfigInvalid, ModelMissing
from baton.engine.grammar.grammar import GrammarCompiler
from baton.router.served_model import ServedModel
from baton.worker.loading import load_worker

pytestmark = pytest.mark.fast


def test_a_pool_too_large_for_this_machine_names_its_key():
    config = ServeConfig.from_mapping({"device": "cpu", "num_speculative_tokens": 0})
    worker = dataclasses.replace(resolve_worker(config, find_model("tiny"), worker_id="w"), kv_memory_mib=1 << 40)
    with pytest.raises(ConfigInvalid, match=r"^kv_memory_mib: a KV pool of \d+ MiB does not fit") as refused:
        load_worker(worker)
    assert refused.value.fields["keys"] == ["kv_memory_mib"]


def test_a_shape_alone_is_served_with_random_weights_and_refused_without(tmp_path):
    config = {**json.loads((find_model("tiny").path / "config.json").read_text()), "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelMissing, match=r"tokenizer\.json"):
        find_model(str(tmp_path))
    values = {"model": str(tmp_path), "load_format": "dummy", "device": "cpu", "kv_memory_mib": 8}
    asked = ServeConfig.from_mapping(values)
    model = find_model(asked.model, is_dummy=asked.is_dummy)
    loaded = [load_worker(resolve_worker(asked, model, worker_id=worker_id)) for worker_id in ("prefill-0", "decode-0")]
    assert loaded[0].layout.hash == loaded[1].layout.hash
    served = ServedModel.from_directory("shape", tmp_path, weights="random")
    assert served.tokenizer.encode("hi") == loaded[0].tokenizer.encode("hi") == [104, 105]
    assert served.vocab_size == loaded[0].model.config.vocab_size


def test_what_grammars_need_is_built_before_a_worker_is_ready(monkeypatch):
    prepared = []
    monkeypatch.setattr(GrammarCompiler, "prepare", lambda compiler: prepared.append(compiler))
    config = ServeConfig.from_mapping({"device": "cpu", "kv_memory_mib": 8})
    worker = load_worker(resolve_worker(config, find_model("tiny"), worker_id="w"))
    assert prepared == [worker.grammars]
