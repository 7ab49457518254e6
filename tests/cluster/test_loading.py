"""A KV pool for which there is no memory."""

import dataclasses
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from baton.cluster import checkpoint
from baton.cluster.commands.check import _text
from baton.cluster.resolve import find_model, resolve_worker
from baton.core.config import ServeConfig
from baton.core.errors import ConfigInvalid, ModelMissing
from baton.core.start_phase import KV_POOL, WARM_UP, WEIGHTS
from baton.engine.grammar.grammar import GrammarCompiler
from baton.engine.graphs.graphed_step import graph_sizes
from baton.engine.step.runner import Runner
from baton.engine.tp.expert_exchange import exchange_bytes
from baton.kernels.moe.held_experts import HeldExperts
from baton.kvcache.layout import CHECKPOINT_SHARE, NO_PREFIX_CACHE
from baton.prefill_worker.node import PrefillNode
from baton.router.served_model import ServedModel
from baton.tests.model.checkpoints import write_checkpoint
from baton.tests.model.test_parallel import Rank
from baton.worker import tp_group
from baton.worker.loading import load_worker
from baton.worker.tp_group import rank0_runner

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


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.long
def test_a_rank_of_a_worker_holds_whole_experts_if_asked(asked):
    values = {"model": "tiny-mla", "device": "cpu", "kv_memory_mib": 16, "tensor_parallel_size": 2}
    config = ServeConfig.from_mapping(values | {"enable_expert_parallel": asked})
    worker = resolve_worker(config, find_model("tiny-mla"), worker_id="w", tp_size=2)
    loaded = load_worker(worker, communicator=Rank(1, 2))
    assert Rank.how in loaded.sizes.why, "what heartbeats and `baton doctor` say was chosen"
    model = loaded.model
    sparse = [layer.mlp.experts for layer in model._decoder.layers if hasattr(layer.mlp, "experts")]
    assert sparse
    num_all = model.config.num_experts
    held = HeldExperts(num_all // 2, num_all // 2, num_all) if asked else None
    assert {experts.held for experts in sparse} == {held}


@pytest.mark.long
def test_a_rank_of_a_worker_has_all_of_attention_if_asked():
    values = {"model": "tiny-mla", "device": "cpu", "kv_memory_mib": 16, "tensor_parallel_size": 2}
    num_blocks = set()
    for asked in (False, True):
        config = ServeConfig.from_mapping(values | {"enable_dp_attention": asked})
        worker = resolve_worker(config, find_model("tiny-mla"), worker_id="w", tp_size=2)
        assert (worker.enable_dp_attention, worker.graphs.mode) == (asked, "auto")
        loaded = load_worker(worker, communicator=Rank(1, 2))
        layers = [*loaded.model._decoder.layers, loaded.model._mtp.layer]
        share = {layer.attention.expand_AYC.shape[0] * 2 // loaded.model.config.num_heads for layer in layers}
        assert share == {2 if asked else 1}
        num_blocks.add(loaded.pool.num_blocks)
        limits = {"max_num_sequences": 4, "num_draft_tokens": 1, "max_model_len": 64, "max_num_tokens": 64}
        rows = graph_sizes(loaded.model, loaded.pool, **limits).rows
        assert rows == (() if asked else (32, 64)), "the trunk of sequences dealt to ranks is launched"
        assert graph_sizes(loaded.model, loaded.pool, **limits, decodes=False).sizes == ()
    assert len(num_blocks) == 1, "of each rank's pool, which is its sequences' alone or all ranks' alike"


@pytest.mark.long
def test_a_prefill_worker_keeps_all_of_each_sequence_at_every_rank():
    """What decode workers do with sequences is theirs; both have CUDA graphs."""
    config = ServeConfig.from_mapping({"model": "tiny-mla", "device": "cpu", "enable_dp_attention": True})
    for role, has_owners in (("prefill", False), ("decode", True)):
        worker = resolve_worker(config, find_model("tiny-mla"), worker_id="w", role=role, tp_size=2)
        assert (worker.enable_dp_attention, worker.graphs.mode) == (has_owners, "auto")
        model = load_worker(dataclasses.replace(worker, kv_memory_mib=16), communicator=Rank(1, 2)).model
        assert model.num_pools == (2 if has_owners else 1)


def test_a_prefill_worker_whose_ranks_would_have_sequences_of_their_own_does_not_start():
    values = {"model": "tiny-mla", "device": "cpu", "enable_dp_attention": True}
    worker = resolve_worker(ServeConfig.from_mapping(values), find_model("tiny-mla"), worker_id="w", tp_size=2)
    with pytest.raises(ConfigInvalid, match=r"enable_dp_attention: .* this is a prefill worker"):
        PrefillNode(worker, print)


@pytest.mark.parametrize(("num_redundant", "num_held"), [(0, 8), (4, 10)])
@pytest.mark.long
def test_experts_of_a_worker_may_move_if_asked(num_redundant, num_held):
    values = {"model": "tiny-mla", "device": "cpu", "kv_memory_mib": 16, "tensor_parallel_size": 2}
    values |= {"enable_expert_parallel": True, "num_redundant_experts": num_redundant, "enable_eplb": True}
    config = ServeConfig.from_mapping(values | {"eplb_step_interval": 7})
    worker = resolve_worker(config, find_model("tiny-mla"), worker_id="w", tp_size=2)
    assert (worker.redundant_experts, worker.eplb_step_interval) == (num_redundant, 7)
    model = load_worker(worker, communicator=Rank(1, 2)).model
    assert {len(layer.experts.down_EDI) for layer in model.sparse_layers} == {num_held}
    assert all(layer.slots is not None for layer in model.sparse_layers)
    expert_bytes = model.sparse_layers[0].experts.down_EDI[0].nbytes * 3
    assert exchange_bytes(model) == (num_held + 3) * expert_bytes
    assert exchange_bytes(load_worker(replace(worker, redundant_experts=None), communicator=Rank(1, 2)).model) == 0


@pytest.mark.parametrize("moves", [True, False])
def test_rank_0_of_a_worker_balances_experts_that_may_move(moves, monkeypatch):
    config = resolve_worker(ServeConfig.from_mapping({"device": "cpu"}), find_model("tiny"), worker_id="w")
    runner = SimpleNamespace(experts=SimpleNamespace() if moves else None)
    lead = rank0_runner(replace(config, eplb_step_interval=7), runner, None)
    assert (lead.balancer is not None) == moves
    assert not moves or (lead.balancer._exchange, lead.balancer._interval) == (runner.experts, 7)


def test_what_grammars_need_is_built_before_a_worker_is_ready(monkeypatch):
    prepared = []
    monkeypatch.setattr(GrammarCompiler, "prepare", lambda compiler: prepared.append(compiler))
    config = ServeConfig.from_mapping({"device": "cpu", "kv_memory_mib": 8})
    worker = load_worker(resolve_worker(config, find_model("tiny"), worker_id="w"))
    assert prepared == [worker.grammars]


@pytest.mark.parametrize(
    ("num_sequences", "prefix_cache", "has_checkpoints"), [(4, True, True), (4, False, False), (14, True, False)]
)
def test_a_model_with_state_has_room_for_checkpoints_as_baton_check_says(
    tmp_path, num_sequences, prefix_cache, has_checkpoints
):
    path = write_checkpoint(tmp_path / "hybrid", kind="qwen3_5", layers=3, tokenizer=True)
    values = {
        "model": str(path),
        "device": "cpu",
        "kv_memory_mib": 1,
        "prefix_cache": prefix_cache,
        "max_num_seqs": num_sequences,
    }
    asked = ServeConfig.from_mapping(values)
    judged = checkpoint.judge(asked)
    loaded = load_worker(resolve_worker(asked, find_model(asked.model), worker_id="decode-0"))
    num_checkpoints = judged.facts["state_checkpoints"]
    assert num_checkpoints == loaded.pool.num_checkpoints
    assert (num_checkpoints > 0) == has_checkpoints
    assert judged.facts["kv_tokens"] == 16 * loaded.pool.num_blocks
    assert (f"and of {num_checkpoints} cached prefixes" in _text(judged)) == has_checkpoints
    assert (NO_PREFIX_CACHE in judged.notes) == (prefix_cache and not has_checkpoints)
    pool = loaded.pool
    assert pool.num_state_slots - num_checkpoints == pool.num_sequence_slots == 2 * num_sequences
    assert [*pool.checkpoint_slots] == [*range(pool.num_state_slots)][2 * num_sequences :]
    assert num_checkpoints * pool.layout.bytes_per_state_slot <= (1 << 20) / CHECKPOINT_SHARE
    (said,) = (why for why in loaded.sizes.why if "KV pool of" in why)
    assert (f"{num_checkpoints} checkpoints of state" in said) == has_checkpoints


def test_what_checkpoints_at_an_interval_cost_is_said(tmp_path):
    path = write_checkpoint(tmp_path / "hybrid", kind="qwen3_5", layers=3, tokenizer=True)
    values = {"model": str(path), "device": "cpu", "kv_memory_mib": 2, "state_checkpoint_interval": 128}
    asked = ServeConfig.from_mapping(values | {"max_num_seqs": 4})
    assert "cached prefixes, of which a prompt leaves one every 128 tokens" in _text(checkpoint.judge(asked))
    loaded = load_worker(resolve_worker(asked, find_model(asked.model), worker_id="decode-0"))
    num_checkpoints = loaded.pool.num_checkpoints
    said = f"{num_checkpoints} checkpoints of state, which prompts of {num_checkpoints * 128} tokens together leave"
    assert any(said in why for why in loaded.sizes.why)


def test_a_model_without_state_refuses_an_interval_of_checkpoints(tmp_path):
    asked = ServeConfig.from_mapping({"model": "tiny", "device": "cpu", "state_checkpoint_interval": 512})
    (refused,) = checkpoint.judge(asked).errors
    assert "state_checkpoint_interval: this model keeps no state" in refused.message
    with pytest.raises(ConfigInvalid) as again:
        load_worker(resolve_worker(asked, find_model(asked.model), worker_id="decode-0"))
    assert (again.value.message, again.value.fields) == (refused.message, {"keys": ["state_checkpoint_interval"]})


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.long
def test_kernels_are_compiled_ahead_of_graphs_and_of_the_warm_up(decodes, monkeypatch):
    done = []

    def note(name):
        def noted(*arguments, decodes=True, on_phase=None, **options):
            done.append((name, decodes))
            if name != "warm-up":
                on_phase(name, 1, 2)

        return noted

    monkeypatch.setattr(tp_group, "graphed_step", note("graphs"))
    monkeypatch.setattr(Runner, "compile_ahead", note("compile"))
    monkeypatch.setattr(Runner, "warm_up", note("warm-up"))
    config = ServeConfig.from_mapping({"device": "cpu", "kv_memory_mib": 8})
    worker = resolve_worker(config, find_model("tiny"), worker_id="w")
    loaded = load_worker(worker, lambda *phase: done.append(phase))
    num_tensors = done[0][2]
    assert done == [(WEIGHTS, at, num_tensors) for at in range(1, num_tensors + 1)] + [(KV_POOL, 0, 0)]
    done.clear()
    config, phases = loaded.applied(worker), []
    if decodes:
        runner = tp_group.decode_runner(config, loaded, None, lambda *phase: phases.append(phase))
        assert done == [("compile", True), ("graphs", True), ("warm-up", True)]
    else:
        runner = tp_group.prefill_runner(config, loaded, None, print, lambda *phase: phases.append(phase))
        assert done == [("compile", False), ("graphs", False), ("warm-up", False)]
    assert phases == [("compile", 1, 2), ("graphs", 1, 2), (WARM_UP, 0, 0)]
    runner.close()
