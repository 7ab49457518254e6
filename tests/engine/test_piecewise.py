"""The trunk in pieces: the hidden states and KV of the trunk as one, whatever rows it is padded with."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from baton.core.numerics import Numerics
from baton.engine.graphs import piecewise
from baton.engine.graphs.backend import CallBackend
from baton.engine.graphs.key import EagerReason
from baton.engine.graphs.piecewise import PiecewiseTrunk, RowBuffers, row_sizes
from baton.engine.step.batch import ChunkRows, DecodeRows, decode_batch, prefill_inputs
from baton.kvcache.pool import KVPool
from baton.model.inputs import MixedBatch
from baton.model.loader import load_model
from baton.model.state_mixer import StateMixer
from baton.tests.engine.graphs import bundled_engine, with_graphs
from baton.tests.engine.recorder import RecorderBackend
from baton.tests.engine.test_graphed_step import outcome
from baton.tests.engine.test_local_engine import requests_for
from baton.tests.engine.test_tp_group import CHECKPOINT, load
from baton.tests.model.checkpoints import write_checkpoint
from baton.tests.model.ranks import on_ranks

pytestmark = pytest.mark.fast
SIZES = (8, 40)


class Setting:
    """A pool with two sequences of 20 positions, and steps that go on from there."""

    def __init__(self, model, rank=0, size=1):
        self.model = model
        layout = model.kv_layout(16)
        self.has_state = layout.has_state
        num_state_slots = 4 if self.has_state else 0  # the last is for a checkpoint
        self.pool = KVPool(layout, 12, model.device, rank=rank, size=size, num_state_slots=num_state_slots)
        self.tokens = np.arange(64) * 7 % model.config.vocab_size
        self.begin()

    def begin(self):
        """Compute both prompts; also again, since states that went on cannot be taken back."""
        for layer in range(self.pool.layout.num_layers):  # a copy of a slot has what is left in it, too
            self.pool.blocks(layer).zero_()
        ids_T, batch = self.batch([(0, 20, [0, 1, 2]), (0, 20, [3, 4, 5])], [])
        with torch.inference_mode():
            self.model.trunk(ids_T, batch, self.pool, lambda layer: None)

    def batch(self, chunks, decodes, num_rows=3):
        """Token ids and batch of chunks (start, length, blocks) and decode rows (first, blocks)."""
        ids, prompts, decode = [], None, None
        if chunks:
            rows = [
                ChunkRows(
                    token_ids=self.tokens,
                    start=start,
                    length=length,
                    blocks=blocks,
                    state_slot=self.slot(blocks),
                    keep_in=[(end, 3) for end in (32,) if self.has_state and start < end <= start + length],
                )
                for start, length, blocks in chunks
            ]
            inputs = prefill_inputs(rows, self.pool)
            ids.append(inputs.token_ids_T)
            prompts = inputs.batch
        if decodes:
            device = self.model.device
            first_B = torch.tensor([first for first, _ in decodes], device=device)
            tables_BM = torch.tensor([blocks for _, blocks in decodes], device=device)
            slots = [self.slot(blocks) for _, blocks in decodes]
            decode_rows = DecodeRows(
                block_tables_BM=tables_BM,
                limit_B=torch.full_like(first_B, 48),
                draft_cap_B=torch.zeros_like(first_B),
                state_slots_B=torch.tensor(slots, device=device) if self.has_state else None,
            )
            decode = decode_batch(first_B, num_rows, decode_rows, 48, self.pool)
            ids.append(torch.arange(len(decodes) * num_rows, device=device) % self.model.config.vocab_size)
        batch = prompts if decode is None else decode if prompts is None else MixedBatch(prompts=prompts, decode=decode)
        return torch.cat(ids), batch

    def slot(self, blocks):
        """The state slot of the sequence that has them."""
        return blocks[0] // 3 if self.has_state else None

    def steps(self):
        """Chunks alone, with decode rows, fewer and more rows than before."""
        yield self.batch([(20, 7, [0, 1, 2])], [(20, [3, 4, 5])])
        yield self.batch([(0, 5, [6, 7]), (20, 20, [0, 1, 2])], [(20, [3, 4, 5])], num_rows=1)
        yield self.batch([(5, 2, [6, 7])], [])
        yield self.batch([(7, 1, [6, 7])], [(21, [3, 4, 5])], num_rows=4)

    def kv(self):
        """All but scratch, which padding writes."""
        return [self.kept(layer) for layer in range(self.pool.layout.num_layers)]

    def kept(self, layer):
        """A copy of one layer's."""
        is_state = self.pool.layout.layers[layer].is_state
        return self.pool.blocks(layer)[: self.pool.num_state_slots if is_state else self.pool.num_blocks].clone()


def trunks_of(setting, backend, tp_size=1):
    buffers = RowBuffers.of(SIZES[-1], setting.model, setting.pool, tp_size)
    made = [PiecewiseTrunk(num_rows, buffers, setting.model, setting.pool) for num_rows in reversed(SIZES)]
    for trunk in made:
        trunk.warm_up(backend)
        trunk.capture(backend)
    return made[::-1]


def hidden_of(setting, trunks=None):
    """Of each step, by pieces if there are any; and what was in the pool at the end."""
    found, heard, told = [], [], {}

    def on_layer(layer):
        heard.append(layer)
        told[layer] = setting.kept(layer)

    with torch.inference_mode():
        for ids_T, batch in setting.steps():
            if trunks is None:
                found.append(setting.model.trunk(ids_T, batch, setting.pool, on_layer))
            else:
                trunk = next(trunk for trunk in trunks if trunk.num_rows >= len(ids_T))
                found.append(trunk.replay(ids_T, batch, on_layer).clone())
            for layer, kept in told.items():
                assert torch.equal(kept, setting.kept(layer)), f"layer {layer} is written after it is told of"
    return found, setting.kv(), heard


def check(got, wanted, tolerance):
    for mine, theirs in zip(got[0] + got[1], wanted[0] + wanted[1], strict=True):
        assert (mine - theirs).abs().max() <= tolerance
    assert got[2] == wanted[2], "each layer is told of once, in order"


# Python of the invariant reference looks at what experts were chosen, so it cannot be recorded; nor is it, on a GPU.
@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "numerics"),
    [(RecorderBackend, Numerics.DEFAULT), (CallBackend, Numerics.DEFAULT), (CallBackend, Numerics.INVARIANT)],
)
def test_hidden_states_and_kv_are_those_of_the_trunk_as_one(backend, numerics, tiny_checkpoint):
    model = load(tiny_checkpoint(**CHECKPOINT), numerics=numerics)
    split, whole = Setting(model), Setting(model)
    got, wanted = hidden_of(split, trunks_of(split, backend())), hidden_of(whole)
    check(got, wanted, 0.0 if numerics is Numerics.INVARIANT else 1e-12)


@pytest.mark.parametrize(
    ("backend", "numerics"), [(RecorderBackend, Numerics.DEFAULT), (CallBackend, Numerics.INVARIANT)]
)
@pytest.mark.long
def test_latents_are_attended_to_between_pieces(backend, numerics, tmp_path):
    """Whose queries, keys and values are of three lengths."""
    path = write_checkpoint(tmp_path / "model", kind="deepseek_v3", tie=False)
    model = load_model(path, dtype=torch.float64, device=torch.device("cpu"), numerics=numerics, with_mtp=True)
    split, whole = Setting(model), Setting(model)
    got, wanted = hidden_of(split, trunks_of(split, backend())), hidden_of(whole)
    check(got, wanted, 0.0 if numerics is Numerics.INVARIANT else 1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "numerics"), [(RecorderBackend, Numerics.DEFAULT), (CallBackend, Numerics.INVARIANT)]
)
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_states_are_carried_on_between_pieces(kind, backend, numerics, tmp_path):
    """By two kinds of mixers in turn, each of which reads and makes what the other does not."""
    path = write_checkpoint(tmp_path / "model", kind=kind, layers=4)
    model = load_model(path, dtype=torch.float64, device=torch.device("cpu"), numerics=numerics, with_mtp=True)
    split, whole = Setting(model), Setting(model)
    trunks = trunks_of(split, backend())
    assert {isinstance(mixer, StateMixer) for trunk in trunks for mixer in trunk._mixers} == {True, False}
    got, wanted = hidden_of(split, trunks), hidden_of(whole)
    check(got, wanted, 0.0 if numerics is Numerics.INVARIANT else 1e-12)


@pytest.mark.long
def test_a_tape_launches_the_delta_nets_behind_the_second():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-m", "baton.tests.engine.layer_tapes"]
    text = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=300).stdout
    taped, num_nets = json.loads(text)
    assert num_nets == 6
    assert taped == [num_nets - 2] * 4


def padding_that_is_not_scratch(patch):
    """Rows past a step write the KV of the step before again."""
    replay = PiecewiseTrunk.replay

    def replay_with_padding(self, ids_T, *others):
        kept, pool = self._pool, {name: getattr(self._pool, name) for name in ("layer", "device")}
        self._pool = type("Pool", (), pool | {"scratch_slot": 3})()
        try:
            return replay(self, ids_T, *others)
        finally:
            self._pool = kept

    patch.setattr(PiecewiseTrunk, "replay", replay_with_padding)


def attention_that_is_not_handed_on(patch):
    """The next piece reads what the attention of an earlier layer made."""
    take = PiecewiseTrunk._take

    def take_first(self, mixer, read):
        take(self, mixer, read if len(self._mixers) == 0 else self._buffers.of_mixer(mixer).read)

    patch.setattr(PiecewiseTrunk, "_take", take_first)


def positions_of_the_step_before(patch):
    patch.setattr(piecewise, "positions_of", lambda batch: torch.zeros_like(piecewise.slots_of(batch)))


@pytest.mark.parametrize(
    "plant", [padding_that_is_not_scratch, attention_that_is_not_handed_on, positions_of_the_step_before]
)
@pytest.mark.long
def test_planted_faults_are_caught(plant, tiny_checkpoint, monkeypatch):
    model = load(tiny_checkpoint(**CHECKPOINT))
    split, whole = Setting(model), Setting(model)
    plant(monkeypatch)
    got, wanted = hidden_of(split, trunks_of(split, RecorderBackend())), hidden_of(whole)
    with pytest.raises(AssertionError):
        check(got, wanted, 1e-12)


@pytest.mark.long
def test_ranks_compute_their_parts(tiny_checkpoint):
    path = tiny_checkpoint(**CHECKPOINT)
    wanted = hidden_of(Setting(load(path)))

    def work(group):
        split = Setting(load(path, group), group.rank, group.size)
        # Recorded operations cannot hold a group's: gloo is no operation of torch.
        return hidden_of(split, trunks_of(split, CallBackend(), group.size))

    for hidden, _, heard in on_ranks(2, work):
        check((hidden, [], heard), (wanted[0], [], wanted[2]), 1e-12)


@pytest.mark.long
@pytest.mark.parametrize("k", [0, 2])
def test_an_engine_says_the_same(k, tiny_model, tiny_tokenizer, tiny_prompts):
    def engine():
        return bundled_engine(tiny_model, tiny_tokenizer, k)

    def requests():
        return requests_for(tiny_prompts[:9], k, max_tokens=8, temperature=0.8)

    wanted = outcome(engine(), requests())
    replayed = with_graphs(engine(), sizes=(4,), widths=(4, 16), rows=(8, 20))
    assert outcome(replayed, requests()) == wanted
    for length in (12, 40):  # alone, so that a step has their rows and no others
        outcome(replayed, requests_for([tiny_prompts[-1][:length]], k, max_tokens=1))
    counts = replayed.runner.graphs.counts
    assert counts.num_steps_piecewise > 0
    assert counts.num_steps_eager[EagerReason.ROWS] > 0


def test_sizes_cover_all_that_a_step_may_have(tiny_model):
    dense = dataclasses.replace(tiny_model.config, num_experts=0)
    sparse = tiny_model.config
    assert row_sizes(0, dense) == ()
    assert row_sizes(20, dense) == (20,)
    assert row_sizes(1 << 20, dense)[-1] == piecewise.MAX_ROWS
    assert row_sizes(1 << 20, sparse)[-1] == piecewise.MAX_EXPERT_ROWS
    sizes = row_sizes(700, dense)
    assert sizes[-1] == 700
    for size, after in itertools.pairwise(sizes):
        assert 0 < after - size <= max(32, size / 8)
