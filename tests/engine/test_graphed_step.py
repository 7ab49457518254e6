"""Steps whose passes are replayed: the tokens and accepted lengths of steps that are launched, whatever is asked."""

import contextlib
import itertools
import logging

import pytest
import torch

from baton.core.cuda_graphs import CudaGraphConfig
from baton.core.errors import ConfigInvalid
from baton.core.requests.sampling import GrammarSpec
from baton.core.verification import DraftSampleMethod, VerificationConfig, VerificationMode
from baton.engine.graphs import graphed_step
from baton.engine.graphs.backend import CallBackend, CaptureRefused
from baton.engine.graphs.key import EagerReason, GraphKind
from baton.engine.tp.rank_runners import Rank0Runner, RankRunner
from baton.kvcache.pool import KVPool
from baton.tests.engine import races, reference
from baton.tests.engine.graphs import assert_all_replayed, bundled_engine, graphed, with_graphs
from baton.tests.engine.recorder import RecorderBackend
from baton.tests.engine.test_local_engine import requests_for
from baton.tests.engine.test_tp_group import CHECKPOINT, generate, load, runner_of
from baton.tests.engine.toy import PerfectToyModel, ToyModel
from baton.tests.engine.toy_engine import request_of, toy_engine
from baton.tests.model.ranks import channel_of, on_ranks

fast = pytest.mark.fast
PRUNED = [0, 1, 2, 3, 5, 8, 13, 21]
ASKED = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "cut": {"temperature": 0.8, "top_k": 12, "top_p": 0.9},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bias": {"temperature": 0.7, "logit_bias": ((3, 2.0), (5, -4.0))},
    "words": {"temperature": 0.0, "bad_words": ((5,), (8, 1)), "min_tokens": 4},
    "allowed": {"temperature": 1.0, "allowed_token_ids": (2, 3, 5, 7, 11, 13)},
    "logprobs": {"temperature": 0.9, "logprobs": 3},
    "answers": {"temperature": 1.1, "n": 3},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def some_requests(kinds, k):
    """A few of each kind, of many lengths and with many caps, in one batch."""
    return [
        request_of(
            [(at * 3 + i * i) % 22 for i in range((1, 3, 9, 20)[at % 4])],
            k=min(k, (k, 1, 0, k)[at % 4]),
            seed=at,
            max_tokens=(7, 12, 17)[at % 3],
            ignore_eos=bool(at % 5),
            **ASKED[kind],
        )
        for at, kind in enumerate(kinds)
    ]


def outcome(engine, requests):
    results = engine.generate(requests)
    assert all(result.error is None for result in results)
    return [(result.choice, result.token_ids, result.counts, result.logprobs) for result in results]


FAST, DEFAULT = {(3, "async")}, {(0, "async"), (2, "sync"), (4, "async"), (1, "async"), (6, "async")}
CELLS = [
    pytest.param(*cell, marks=[fast] if cell in FAST else [] if cell in DEFAULT else [pytest.mark.slow])
    for cell in itertools.product((*range(5), 6), ("sync", "async"))
]


@pytest.mark.long
@pytest.mark.parametrize(("k", "scheduling"), CELLS)
def test_whatever_is_asked_the_tokens_are_the_same(k, scheduling):
    kinds = list(ASKED)
    wanted = outcome(toy_engine(k=k, scheduling="sync", num_blocks=80), some_requests(kinds, k))
    engine = with_graphs(toy_engine(k=k, scheduling=scheduling, num_blocks=80), sizes=(3, 5))
    assert outcome(engine, some_requests(kinds, k)) == wanted
    assert_all_replayed(engine)
    assert engine.runner.graphs.counts.num_sequences_padded > 0


@fast
@pytest.mark.parametrize("num_refused", [0, 1, 9])
def test_only_the_first_graph_of_a_kind_is_warmed_up_by_all_layers(num_refused):
    """What a layer allocates at its first use must be there before a capture; launching all again takes minutes.

    Graphs that are refused, as the largest may be, come first and launch nothing.
    """
    found, skipping, required = [], [], []

    class Model(PerfectToyModel):
        @contextlib.contextmanager
        def one_of_each_layer(self):
            skipping.append(True)
            yield
            skipping.pop()

    class Backend(CallBackend):
        def require(self, num_bytes):
            required.append(num_bytes)
            if len(required) <= num_refused:
                raise CaptureRefused("too large")

        def warm_up(self, work):
            found.append(("some layers" if skipping else "all layers", work.__self__.key.kind))
            work()

        def capture(self, pieces):
            assert not skipping
            return super().capture(pieces)

    engine = with_graphs(toy_engine(Model(), k=2, num_blocks=80), sizes=(1, 2, 4), backend=Backend())
    assert len(engine.runner.graphs.counts.failed) == num_refused
    kinds = [kind for _, kind in found]
    assert {*kinds} == {*GraphKind} and len(found) > 20
    firsts = {kinds.index(kind) for kind in GraphKind}
    assert [layers == "all layers" for layers, _ in found] == [at in firsts for at in range(len(found))]


@pytest.mark.parametrize("kind", ASKED)
def test_every_kind_alone(kind):
    wanted = outcome(toy_engine(k=3, num_blocks=80), some_requests([kind] * 5, 3))
    engine = with_graphs(toy_engine(k=3, num_blocks=80), sizes=(4,))
    assert outcome(engine, some_requests([kind] * 5, 3)) == wanted
    assert_all_replayed(engine)


@pytest.mark.parametrize("d2t", [None, PRUNED])
@pytest.mark.parametrize(
    "verification",
    [
        VerificationConfig(mode=VerificationMode.REJECTION),
        VerificationConfig(mode=VerificationMode.REJECTION, draft_sample_method=DraftSampleMethod.GREEDY),
        VerificationConfig.synthetic(0.8, 0.5, 0.2),
        VerificationConfig(mode=VerificationMode.FORCE, forced_len=2),
    ],
    ids=["rejection", "point masses", "synthetic", "force"],
)
def test_every_way_to_verify(verification, d2t):
    kinds = ["greedy", "sampled", "cut", "penalties"]

    def engine():
        return toy_engine(ToyModel(d2t=d2t), k=3, num_blocks=80, verification=verification)

    wanted = outcome(engine(), some_requests(kinds, 3))
    replayed = with_graphs(engine())
    assert outcome(replayed, some_requests(kinds, 3)) == wanted
    assert_all_replayed(replayed)


@pytest.mark.long
@fast
@pytest.mark.parametrize("k", [1, 2, 4, 6])
def test_a_perfect_head_stays_right(k):
    requests = [request_of([3, at], k=k, max_tokens=1 + 5 * (k + 1), ignore_eos=True) for at in range(5)]
    engine = with_graphs(toy_engine(PerfectToyModel(), k=k, max_num_sequences=3), sizes=(2, 3))
    for result in engine.generate(requests):
        assert result.counts.num_accepted_tokens == result.counts.num_draft_tokens == 5 * k
    assert_all_replayed(engine)


@pytest.mark.parametrize("k", [0, 3])
def test_the_bundled_model_and_grammars_that_visit_the_host_between_graphs(k, tiny_model, tiny_tokenizer, tiny_prompts):
    spec = GrammarSpec("regex", "(def|class) [a-z_]{1,40}")
    ways = [
        {"temperature": 0.0},
        {"temperature": 1.0, "grammar": spec, "ignore_eos": False},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    ]

    def engine():
        return bundled_engine(tiny_model, tiny_tokenizer, k)

    def requests():
        made = [requests_for(tiny_prompts[:7], k, max_tokens=8, **way) for way in ways]
        return [made[at % 3][at] for at in range(7)]

    wanted = outcome(engine(), requests())
    replayed = with_graphs(engine(), sizes=(4,), widths=(4, 16))
    assert outcome(replayed, requests()) == wanted
    assert_all_replayed(replayed)


@pytest.mark.long
@fast
@pytest.mark.parametrize("host_kv_bytes", [0, 1 << 16])
def test_preempted_sequences_go_on_alike(host_kv_bytes):
    kinds = ["greedy", "sampled", "penalties", "cut", "logprobs"]
    wanted = [(choice, tokens) for choice, tokens, *_ in outcome(toy_engine(k=3), some_requests(kinds, 3))]
    tight = {"num_blocks": 16, "overcommit": True, "host_kv_bytes": host_kv_bytes, "preempt_at": (3, 8)}
    engine = with_graphs(toy_engine(k=3, **tight))
    assert [(choice, tokens) for choice, tokens, *_ in outcome(engine, some_requests(kinds, 3))] == wanted
    assert_all_replayed(engine)


@pytest.mark.long
@fast
def test_a_hunt_finds_no_race(monkeypatch):
    make = races.toy_engine
    with monkeypatch.context() as patch:
        patch.setattr(races, "toy_engine", lambda *arguments, **sizes: with_graphs(make(*arguments, **sizes)))
        assert races.hunt(patch, seed=5) > 30


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_long_hunt_finds_no_race(monkeypatch):
    make, num_steps = races.toy_engine, 0
    for seed in range(60):
        with monkeypatch.context() as patch:
            patch.setattr(races, "toy_engine", lambda *arguments, **sizes: with_graphs(make(*arguments, **sizes)))
            num_steps += races.hunt(patch, seed=seed, num_requests=40)
    assert num_steps > 2000


def padding_left_over(patch):
    """Rows past a batch are left as a larger batch had them."""
    replay = graphed_step.StaticPass.replay

    def replay_without_padding(self, token_ids_BQ, first_B, rows, hidden_TD):
        kept = self._numbers_BC.clone()
        template, self._padding_BC = self._padding_BC, kept
        try:
            return replay(self, token_ids_BQ, first_B, rows, hidden_TD)
        finally:
            self._padding_BC = template

    patch.setattr(graphed_step.StaticPass, "replay", replay_without_padding)


def hidden_not_copied(patch):
    """An MTP entry is joined with the hidden states of an earlier step."""
    replay = graphed_step.StaticPass.replay

    def replay_stale(self, token_ids_BQ, first_B, rows, hidden_TD):
        if hidden_TD is not None:
            hidden_TD = self._hidden_TD[: len(hidden_TD)].clone()
        return replay(self, token_ids_BQ, first_B, rows, hidden_TD)

    patch.setattr(graphed_step.StaticPass, "replay", replay_stale)


def first_rows_of_another_order(patch):
    """Results are read from the end of the buffer."""
    replay = graphed_step.StaticPass.replay

    def replay_from_the_end(self, *arguments):
        return self._output_TD[-len(replay(self, *arguments)) :]

    patch.setattr(graphed_step.StaticPass, "replay", replay_from_the_end)


def shared_between_kinds(patch):
    """A graph is found by its sizes alone."""
    find = graphed_step.GraphedStep._find

    def find_by_size(self, *arguments):
        graphs = find(self, *arguments)
        by_size = {(graph.key.num_rows, graph.key.num_sequences, graph.key.width): graph for graph in graphs.values()}
        return {
            kind: by_size[graph.key.num_rows, graph.key.num_sequences, graph.key.width]
            for kind, graph in graphs.items()
        }

    patch.setattr(graphed_step.GraphedStep, "_find", find_by_size)


@pytest.mark.parametrize(
    "plant", [padding_left_over, hidden_not_copied, first_rows_of_another_order, shared_between_kinds]
)
def test_planted_faults_are_caught(plant, monkeypatch):
    requests = [request_of([at, 5, 9], k=3, max_tokens=20, ignore_eos=True) for at in range(12)]
    wanted = [(result.token_ids, result.counts) for result in toy_engine(k=3, max_num_sequences=4).generate(requests)]
    with monkeypatch.context() as patch:
        plant(patch)
        engine = with_graphs(toy_engine(k=3, max_num_sequences=4), sizes=(4,))
        try:
            got = [(result.token_ids, result.counts) for result in engine.generate(requests)]
        except (AssertionError, RuntimeError, IndexError, AttributeError):
            return
    assert got != wanted


def test_steps_that_no_graph_fits_are_launched_and_counted(caplog):
    kinds = list(ASKED)
    wanted = outcome(toy_engine(k=3, num_blocks=80), some_requests(kinds, 3))

    def fail(what, number):
        if what == "capture" and number % 5 == 0:
            raise RuntimeError("an operation that cannot be captured")
        if what == "require" and number == 3:
            raise CaptureRefused("no memory")

    options = [
        ({"sizes": (1, 2)}, EagerReason.SEQUENCES),
        ({"widths": (2,)}, EagerReason.CONTEXT),
        ({"max_entries": 30}, EagerReason.CONTEXT),
        ({"backend": RecorderBackend(fail)}, EagerReason.FAILED),
    ]
    for given, reason in options:
        caplog.clear()
        engine = with_graphs(toy_engine(k=3, num_blocks=80), **given)
        assert outcome(engine, some_requests(kinds, 3)) == wanted
        counts = engine.runner.graphs.counts
        assert counts.num_steps_eager[reason] > 0
        assert sum(counts.num_steps_eager.values()) == counts.num_steps_eager[reason]
        told = [record for record in caplog.records if reason.value in record.getMessage()]
        assert len(told) == 1
        if reason is EagerReason.FAILED:
            assert counts.num_steps_replayed > 0
            assert {why.split(":")[0] for why in counts.failed.values()} == {"RuntimeError", "CaptureRefused"}
            lines = [record for record in caplog.records if "computed as it comes" in record.getMessage()]
            assert 0 < len(lines) <= min(len(counts.failed), 8)


@fast
@pytest.mark.long
def test_more_drafts_than_are_captured_are_launched():
    model = ToyModel()
    engine = toy_engine(model, k=3)
    wanted = outcome(engine, some_requests(["greedy"], 3))
    engine = toy_engine(model, k=3)
    engine.runner.graphs = graphed(model, engine.pool, k=1, sizes=(4,))
    assert outcome(engine, some_requests(["greedy"], 3)) == wanted
    assert engine.runner.graphs.counts.num_steps_eager[EagerReason.DRAFTS] > 0


@fast
def test_a_start_reports_how_many_graphs_are_captured(tiny_model):
    phases, rows = [], (4, 8)
    pool = KVPool(tiny_model.kv_layout(16), 20, torch.device("cpu"))
    step = graphed(tiny_model, pool, k=2, sizes=(1, 3), rows=rows, on_phase=lambda *phase: phases.append(phase))
    num_total = len(list(step._sizes.keys())) + len(rows)
    assert step.counts.num_captured + len(step.counts.failed) == num_total
    assert phases == [("CUDA graphs", at, num_total) for at in range(num_total)]


@fast
def test_nothing_is_captured_where_there_is_no_gpu(caplog):
    model = ToyModel()
    pool = KVPool(model.kv_layout(4), 10, torch.device("cpu"))
    limits = {"max_num_sequences": 4, "num_draft_tokens": 2, "max_model_len": 90}
    with caplog.at_level(logging.INFO):
        for mode in ("auto", "off"):
            assert graphed_step.graphed_step(model, pool, CudaGraphConfig(mode=mode), **limits) is None
        with pytest.raises(ConfigInvalid, match="device is cpu"):
            graphed_step.graphed_step(model, pool, CudaGraphConfig(sizes=(1, 2)), **limits)
    assert not caplog.records


@pytest.mark.long
@fast
def test_steps_with_chunks_of_prompts_are_launched_and_those_that_only_decode_replayed():
    """A step with chunks is no step that no graph fits: it is not counted among those."""
    engine = with_graphs(toy_engine(k=2), sizes=(4,))
    eager, trunk = [], engine.runner._model.trunk

    def watched(ids_T, batch, *others):
        eager.append(type(batch).__name__)
        return trunk(ids_T, batch, *others)

    engine.runner._model.trunk = watched
    requests = [request_of([3, at], k=2, max_tokens=4 + 6 * at, ignore_eos=True) for at in range(6)]
    results = engine.generate(requests)
    assert set(eager) == {"PrefillBatch", "MixedBatch"}
    assert_all_replayed(engine)
    for request, result in zip(requests, results, strict=True):
        wanted = reference.generate(ToyModel(), list(request.prompt_token_ids), request.sampling)
        assert list(result.token_ids) == wanted


@pytest.mark.parametrize("failing", [None, "require", "capture"])
def test_one_rank_that_cannot_capture_leaves_all_without(failing, tiny_checkpoint):
    """Over two real ranks: all graphs, or none of a size, at both; and the tokens of one rank without graphs."""
    path, k, mode = tiny_checkpoint(**CHECKPOINT), 2, "coupled"
    wanted = generate(runner_of(load(path), k), k, mode)

    def refuse(what, number):
        if what == failing and number in (1, 4):
            raise RuntimeError("not here")

    def work(group):
        runner, channel = runner_of(load(path, group), k, group), channel_of(group)
        # Recorded operations cannot hold a group's (gloo is no operation of torch), so steps are called again.
        backend = _Refusing(refuse if group.rank == 1 else lambda what, number: None)
        pool = runner._pool
        step = graphed(runner._model, pool, k=k, sizes=(2, 3), widths=(4, 32), backend=backend, group=group)
        runner.graphs = step
        try:
            if group.rank > 0:
                RankRunner(runner, channel).run()
                return None, step.counts
            lead = Rank0Runner(runner, channel)
            tokens = generate(lead, k, mode)
            lead.close()
            return tokens, step.counts
        finally:
            channel.close()

    (tokens, lead), (_, follower) = on_ranks(2, work)
    assert tokens == wanted
    assert (lead.num_captured, lead.failed) == (follower.num_captured, follower.failed)
    assert lead.num_steps_eager == follower.num_steps_eager
    assert lead.num_steps_replayed == follower.num_steps_replayed > 0
    assert len(lead.failed) == (0 if failing is None else 2)
    assert all(why == "rank 1: RuntimeError: not here" for why in lead.failed.values())


class _Refusing(CallBackend):
    def __init__(self, refuse):
        self._recorder = RecorderBackend(refuse)

    def require(self, num_bytes):
        self._recorder.require(num_bytes)

    def capture(self, work):
        self._recorder._count("capture")
        return super().capture(work)
