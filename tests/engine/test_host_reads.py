"""No step waits for the device: gathered, drafted, verified, scattered and counted without the host looking."""

import contextlib
import itertools

import pytest
import torch

from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import GrammarSpec, SamplingParams
from baton.core.verification import DraftSampleMethod, VerificationConfig, VerificationMode
from baton.engine.grammar.rows import EmittedTokens, GrammarRows
from baton.engine.local import LocalEngine
from baton.engine.step.runner import Runner
from baton.model.draft_head import invert_d2t
from baton.model.inputs import DecodeBatch
from baton.model.model import Model
from baton.tests.engine import host_guard
from baton.tests.engine.graphs import assert_all_replayed, with_graphs
from baton.tests.engine.host_guard import HostRead, guarded, methods_guarded

fast = pytest.mark.fast
SCHEMA = GrammarSpec("regex", "[a-z ]{30,}")
PLANS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "cut": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bias": {"temperature": 0.7, "logit_bias": ((3, 2.0), (5, -4.0))},
    "words": {"temperature": 0.0, "bad_words": ((5,), (8, 1)), "min_tokens": 4},
    "allowed": {"temperature": 1.0, "allowed_token_ids": tuple(range(40, 90))},
    "logprobs": {"temperature": 0.9, "logprobs": 3},
    "grammar": {"temperature": 0.9, "grammar": SCHEMA, "ignore_eos": False},
}
VERIFICATIONS = {
    "rejection": VerificationConfig(mode=VerificationMode.REJECTION),
    "point masses": VerificationConfig(mode=VerificationMode.REJECTION, draft_sample_method=DraftSampleMethod.GREEDY),
    "synthetic": VerificationConfig.synthetic(0.8, 0.5, 0.2),
    "force": VerificationConfig(mode=VerificationMode.FORCE, forced_len=2),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def steps_guarded(monkeypatch):
    """Every step of every runner runs under the guard, from gathering its slots to its end."""
    num_steps = []

    def under_guard(part):
        def part_guarded(self, work, *arguments):
            num_steps.append(bool(work.chunks))
            with guarded():
                return part(self, work, *arguments)

        return part_guarded

    with methods_guarded(monkeypatch):
        for name in ("_sample", "_finish"):
            monkeypatch.setattr(Runner, name, under_guard(getattr(Runner, name)))
        # A grammar is on the host; its copies have been waited for by events of their own.
        monkeypatch.setattr(GrammarRows, "masks", host_guard.visiting(GrammarRows.masks))
        monkeypatch.setattr(EmittedTokens, "accept", host_guard.visiting(EmittedTokens.accept))
        yield num_steps


def run(model, tokenizer, prompts, kinds, k, graphs, **options):
    engine = LocalEngine(
        model,
        tokenizer,
        num_blocks=100,
        block_size=16,
        num_draft_tokens=k,
        chunk_len=64,
        max_num_sequences=4,
        **options,
    )
    if graphs:
        with_graphs(engine, sizes=(4,), widths=(4, 16))
    requests = [
        GenerationRequest(
            key=AttemptKey(f"h{at}", 1),
            prompt_token_ids=prompts[at % 6],
            sampling=SamplingParams(seed=at, **{"max_tokens": 6, "ignore_eos": True} | PLANS[kind]),
            deadline_s=float("inf"),
            num_draft_tokens=min(k, at % 5 + 1),
        )
        for at, kind in enumerate(kinds)
    ]
    results = engine.generate(requests)
    assert all(result.error is None for result in results)
    if graphs:
        assert_all_replayed(engine)
    return [result.token_ids for result in results]


DEFAULT = {(0, False), (3, False), (1, True), (4, True), (6, True)}
CELLS = [
    pytest.param(*cell, marks=[] if cell in DEFAULT else [pytest.mark.slow])
    for cell in itertools.product((*range(5), 6), (False, True))
]


@pytest.mark.parametrize(("k", "graphs"), CELLS)
def test_no_step_waits(k, graphs, tiny_model, tiny_tokenizer, tiny_prompts, steps_guarded):
    run(tiny_model, tiny_tokenizer, tiny_prompts, list(PLANS), k, graphs)
    assert len(steps_guarded) > 4


@pytest.mark.parametrize("kind", PLANS)
def test_no_step_of_one_kind_waits(kind, tiny_model, tiny_tokenizer, tiny_prompts, steps_guarded):
    run(tiny_model, tiny_tokenizer, tiny_prompts, [kind, kind], 2, False)
    assert steps_guarded


@pytest.mark.parametrize("is_pruned", [False, True])
@pytest.mark.parametrize("way", VERIFICATIONS)
def test_no_verification_waits(way, is_pruned, tiny_model, tiny_tokenizer, tiny_prompts, steps_guarded):
    with pruned(tiny_model) if is_pruned else contextlib.nullcontext(tiny_model) as model:
        kinds = ["greedy", "sampled", "cut", "penalties"]
        run(model, tiny_tokenizer, tiny_prompts, kinds, 3, False, verification=VERIFICATIONS[way])
    assert steps_guarded


@pytest.mark.long
@fast
@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_that_looks_is_caught(graphs, tiny_model, tiny_tokenizer, tiny_prompts, steps_guarded, monkeypatch):
    trunk = Model.trunk

    def trunk_that_looks(self, token_ids_T, batch, *others):
        if isinstance(batch, DecodeBatch):
            assert int(batch.positions_BQ.max()) < batch.max_context_len
        return trunk(self, token_ids_T, batch, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Model, "trunk", trunk_that_looks)
        with pytest.raises(HostRead):
            run(tiny_model, tiny_tokenizer, tiny_prompts, ["greedy"], 1, graphs)


@contextlib.contextmanager
def pruned(model):
    """The model with a draft head over every third token, for a while."""
    whole = Model.__new__(Model)
    whole.__dict__ |= model.__dict__
    whole.d2t_C = whole.draft_columns_C = torch.arange(0, model.config.vocab_size, 3)
    whole._draft_head_CD = model._lm_head_WD[whole.d2t_C]
    whole._t2d_V = invert_d2t(whole.d2t_C, model.config.vocab_size)
    yield whole


def reads():
    x = torch.arange(6.0)
    yield "item", lambda: x[0].item()
    yield "float", lambda: float(x[0])
    yield "int", lambda: int(x[0])
    yield "bool", lambda: bool(x[0])
    yield "if", lambda: 1 if (x > 0).any() else 0
    yield "equal", lambda: torch.equal(x, x)
    yield "nonzero", lambda: x.nonzero()
    yield "mask as index", lambda: x[x > 2]
    yield "masked write", lambda: x.__setitem__(x > 2, 0.0)
    yield "masked_select", lambda: x.masked_select(x > 2)
    yield "where", lambda: torch.where(x > 2)
    yield "unique", lambda: x.unique()
    yield "bincount", lambda: x.long().bincount()
    yield "repeats", lambda: x.repeat_interleave(x.long())
    yield "slice", lambda: x[: x[2].long()]
    yield "range", lambda: torch.arange(x[3])
    yield "tolist", lambda: x.tolist()
    yield "numpy", lambda: x.numpy()
    yield "cpu", lambda: x.cpu()
    yield "index", lambda: [1, 2, 3][x[1].long()]


@fast
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(("name", "read"), list(reads()), ids=[name for name, _ in reads()])
def test_the_guard_sees(name, read, inference, monkeypatch):
    with methods_guarded(monkeypatch), torch.inference_mode(inference):
        with pytest.raises(HostRead), guarded():
            read()
        with contextlib.suppress(RuntimeError):  # a write of another test's inference tensor
            read()  # it is allowed outside


@fast
@pytest.mark.long
def test_the_guard_lets_pass_what_does_not_wait(monkeypatch):
    with methods_guarded(monkeypatch), torch.inference_mode(), guarded():
        x = torch.arange(12).view(3, 4)
        x = x.repeat_interleave(2, dim=1).masked_fill(x.repeat_interleave(2, dim=1) > 3, 0)
        x[torch.tensor([0, 2]), torch.tensor([1, 1])] = 5
        torch.where(x > 3, x, 0).sort(stable=True).values.cumsum(0)
        torch.nn.functional.linear(x.double(), x.double())
        host_guard.visiting(lambda: x.sum().item())()
