"""Decode steps of a benchmark whose experts a fixed pattern chooses: what is chosen, what a row says, who may ask."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import typer.main

from baton.bench.decode_bench import decode
from baton.bench.decode_bench import floor as decode_floor
from baton.bench.decode_bench import tp_group as decode_tp_group
from baton.bench.decode_bench.options import read_options
from baton.cluster.cli import app
from baton.cluster.commands.bench import format_decode
from baton.core.errors import ConfigInvalid
from baton.kernels.ops import Ops
from baton.model.loader import load_model
from baton.tests.bench.test_decode import ThreadRemote
from baton.tests.e2e.conftest import TINY

ROOT = Path(__file__).parents[2]
NUM_EXPERTS, NUM_CHOSEN = 16, 4  # of tiny-mla, whose first layer has none, beside a shared one
MLA = {
    "shape": "tiny-mla", "layers": 2, "dtype": "float32", "device": "cpu", "prompt_len": 20, "steps": 2, "rounds": 1,
}  # fmt: skip


@pytest.fixture
def chosen(monkeypatch):
    """Weights and experts of every MoE layer, and which of these are held, by the operations of its model."""
    monkeypatch.setitem(decode_floor._COPY_BYTES, "cpu", 1 << 20)
    found, experts = defaultdict(list), Ops.experts

    def noting(self, x_TD, weight_TK, expert_TK, weights, may_wait):
        assert weights.has_shared is (expert_TK.shape[1] > NUM_CHOSEN)
        assert expert_TK[:, NUM_CHOSEN:].eq(NUM_EXPERTS).all(), "the shared expert stays the last choice"
        found[self].append((weight_TK[:, :NUM_CHOSEN].clone(), expert_TK[:, :NUM_CHOSEN].clone(), weights.held))
        return experts(self, x_TD, weight_TK, expert_TK, weights, may_wait)

    monkeypatch.setattr(Ops, "experts", noting)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield found
    torch.set_num_threads(before)


def counts_of(expert_TK):
    assert all(len(set(row)) == NUM_CHOSEN for row in expert_TK.tolist())
    return torch.bincount(expert_TK.flatten(), minlength=NUM_EXPERTS)


def test_every_expert_gets_the_same_work_in_every_pass(chosen):
    data = decode.bench_decode(read_options(**MLA, batch="1,4", mtp="0,2", fake_balance=True))
    calls = [call for of_model in chosen.values() for call in of_model]
    assert {len(expert_TK) for _, expert_TK, _ in calls} == {1, 3, 4, 12, 20}, "the trunk's and the draft head's passes"
    for weight_TK, expert_TK, _ in calls:
        count_E = counts_of(expert_TK)
        assert count_E.max() - count_E.min() == (0 if expert_TK.numel() % NUM_EXPERTS == 0 else 1)
        assert weight_TK.eq(1).all()
    assert all(row["fake_balance"] and not row["expert_parallel"] for row in data["rows"])
    assert "experts balanced by a pattern" in format_decode(data)


@pytest.mark.fast
def test_softmax_routers_are_overruled_too():
    model = decode.load_shape(read_options(**MLA | {"shape": "tiny"}, batch="4", fake_balance=True))
    num_experts, num_chosen = model.config.num_experts, model.config.num_experts_per_token
    weight_TK, expert_TK = model.ops.route(torch.randn(num_experts, num_experts), num_chosen, True)
    assert torch.bincount(expert_TK.flatten()).tolist() == [num_chosen] * num_experts
    assert weight_TK.eq(1).all()


def test_without_the_flag_the_router_chooses(chosen):
    data = decode.bench_decode(read_options(**MLA, batch="4", mtp="0"))
    calls = [call for of_model in chosen.values() for call in of_model]
    assert any(counts_of(expert_TK).max() > 1 for _, expert_TK, _ in calls if expert_TK.numel() == NUM_EXPERTS)
    assert not any(row["fake_balance"] for row in data["rows"])
    assert "balanced" not in format_decode(data)


def test_ranks_that_hold_whole_experts_get_the_same_work(chosen, monkeypatch):
    monkeypatch.setattr(decode_tp_group, "SpawnedRemote", ThreadRemote)
    options = read_options(**MLA, batch="1,3", mtp="0,1", fake_balance=True, expert_parallel=True)
    data = decode_tp_group.bench_decode_tp_group(options, 2, num_decisions=1)
    assert all(row["fake_balance"] and row["expert_parallel"] and row["tp"] == 2 for row in data["rows"])
    assert {held.first for calls in chosen.values() for _, _, held in calls} == {0, NUM_EXPERTS // 2}
    of_ranks = [[expert_TK for _, expert_TK, _ in calls] for calls in chosen.values()]
    assert len(of_ranks) == 2
    assert all(torch.equal(first, second) for first, second in zip(*of_ranks, strict=True))
    for expert_TK in of_ranks[0]:
        first, second = counts_of(expert_TK).view(2, -1).sum(dim=1).tolist()
        assert first == second, "two of each token's four choices"


@pytest.mark.fast
def test_a_model_without_experts_has_nothing_to_balance():
    with pytest.raises(ConfigInvalid, match="--fake-balance: qwen3-8b has no experts"):
        decode.load_shape(read_options(**MLA | {"shape": "8b"}, batch="1", fake_balance=True))


@pytest.mark.fast
def test_the_floor_counts_the_experts_that_are_touched():
    options = read_options(**MLA, batch="1", mtp="0")
    model = decode.load_shape(options)
    one = 3 * model.config.hidden_size * model.config.moe_intermediate_size * 4
    layout = model.kv_layout(16)

    def step_bytes(batch, is_balanced):
        sizes = {"num_drafts": 0, "batch": batch, "context_len": 0, "layout": layout, "is_balanced": is_balanced}
        return decode_floor.step_bytes(model.config, torch.float32, **sizes)

    balanced = [step_bytes(batch, is_balanced=True) for batch in (1, 3, 4, 5)]
    assert [other - balanced[0] for other in balanced] == [0, 8 * one, 12 * one, 12 * one]
    by_chance = [step_bytes(batch, is_balanced=False) for batch in (1, 3, 4, 5)]
    assert by_chance[0] == balanced[0]
    assert all(few < many for few, many in zip(by_chance[1:], balanced[1:], strict=True))


@pytest.mark.fast
def test_no_model_is_loaded_with_another_choice():
    options = read_options(**MLA, batch="1")
    kept = {"dtype": torch.float32, "device": torch.device("cpu"), "numerics": options.numerics, "with_mtp": True}
    assert load_model(TINY.with_name("tiny-mla"), **kept).ops.rechoose is None


@pytest.mark.long
def test_nothing_that_serves_changes_a_choice():
    """The one who sets it is in `bench`; wherever else it is set, it is nothing."""
    for path in sorted(ROOT.rglob("*.py")):
        room = path.relative_to(ROOT).parts[0]
        text = path.read_text() if room not in ("bench", "tests") and not room.startswith(".") else ""
        for node in ast.walk(ast.parse(text)) if "rechoose" in text else ():
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any("rechoose" in ast.unparse(target) for target in targets):
                    assert ast.unparse(node.value) == "None", path
            elif isinstance(node, ast.Constant | ast.keyword):  # `setattr`, or an argument
                assert "rechoose" not in (getattr(node, "arg", None), getattr(node, "value", None)), path


def test_one_command_alone_can_be_asked_for_balance():
    found, waiting = set(), [((), typer.main.get_command(app))]
    while waiting:
        names, command = waiting.pop()
        waiting += [((*names, name), one) for name, one in getattr(command, "commands", {}).items()]
        options = [text for option in command.params for text in (option.name, *option.opts)]
        if any("fake" in text and "balance" in text for text in options):
            found.add(names)
    assert found == {("bench", "decode")}
    assert "fake_balance" not in (ROOT / "core" / "config.py").read_text()
