"""Tokens by the kernels that choose them: through the whole engine they are torch's, by either form of the kernels."""

import functools

import pytest
import torch

import baton.tests.kernels.interpreter  # noqa: F401  (repairs it)
from baton.core.numerics import Numerics
from baton.core.requests.sampling import SamplingParams
from baton.core.verification import DraftSampleMethod, VerificationConfig, VerificationMode
from baton.engine.grammar.masks import GrammarMasks
from baton.engine.graphs import kernel_warm_up
from baton.engine.local import LocalEngine
from baton.engine.sampling import kernel_sampler
from baton.engine.sampling.history import SampledSequence
from baton.engine.sampling.kernel_sampler import draw_rows, with_every_cut
from baton.engine.sampling.sampler import draw_noise, sampling_rows
from baton.engine.sampling.sampling_table import SamplingTable, rows_of
from baton.engine.speculation import kernel_verifier
from baton.engine.speculation.kernel_verifier import KernelVerifier
from baton.engine.speculation.verifiers import make_kernel_verifier, verifier_for
from baton.engine.speculation.verify import CoupledVerifier, DraftIds, VerifyInputs
from baton.kernels.implementation import Implementation
from baton.kernels.sampling import bounds_triton, logit_edits_triton, logprobs_triton, sample, sample_triton, verify
from baton.kernels.sampling.rows import EditedRows, settled
from baton.model.loader import load_model
from baton.tests.engine import host_guard, test_step_report
from baton.tests.engine.test_host_reads import steps_guarded  # noqa: F401
from baton.tests.engine.test_step_report import steps  # noqa: F401
from baton.tests.engine.test_verifiers import MODES, Batch, params_of
from baton.tests.engine.toy import ToyModel
from baton.tests.engine.toy_engine import request_of, toy_engine

CPU = torch.device("cpu")
REFERENCE, TRITON = Implementation.REFERENCE, Implementation.TRITON
PRUNED = [0, 1, 2, 3, 5, 8, 13, 21]
MIXED = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 6, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.05},
]
KERNEL_EDITS = [
    {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"temperature": 0.0, "logit_bias": ((3, 2.0), (5, -4.0))},
    {"temperature": 0.0},
    {"temperature": 0.8, "presence_penalty": 0.7, "logit_bias": ((9, 1.5),)},
]
EDITED = [
    {"temperature": 0.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"temperature": 1.0, "logit_bias": ((3, 2.0), (5, -4.0)), "logprobs": 3},
    {"temperature": 0.9, "bad_words": ((4,), (7, 1)), "min_tokens": 4, "top_p": 0.9},
    {"temperature": 1.1, "allowed_token_ids": (2, 3, 5, 7, 11, 13), "logprobs": 0, "prompt_logprobs": 2},
    {"temperature": 0.0},
]
REJECTION = VerificationMode.REJECTION
VERIFICATIONS = {
    "coupled": VerificationConfig(),
    "block": VerificationConfig(mode=REJECTION),
    "by token": VerificationConfig(mode=REJECTION, block=False),
    "point mass": VerificationConfig(mode=REJECTION, draft_sample_method=DraftSampleMethod.GREEDY),
    "synthetic": VerificationConfig.synthetic(0.8, 0.5, 0.2),
    "force": VerificationConfig.force(2),
}


class NarrowToy(ToyModel):
    """Its logits are bfloat16, of which many are equal; torch gets them as float32, as from a model."""

    def __init__(self, form, **options):
        super().__init__(**options)
        self.sampling_implementation = form

    def logits(self, hidden_ND):
        logits_NV = super().logits(hidden_ND).bfloat16()
        return logits_NV if self.sampling_implementation else logits_NV.float()


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several chunks of a small vocabulary."""
    monkeypatch.setattr(sample_triton, "CHUNK", 16)
    monkeypatch.setattr(sample_triton, "GROUP", 4)
    for name, value in (("CHUNK", 16), ("GROUP", 4), ("REREAD", 16), ("LISTED", 32)):
        monkeypatch.setattr(logprobs_triton, name, value)
    monkeypatch.setattr(logit_edits_triton, "CHUNK", 16)
    for name, value in (("TILE", 32), ("LISTED", 32), ("FEW", 16), ("RACED", 16)):
        monkeypatch.setattr(bounds_triton, name, value)


def generate(form, kinds, *, k=3, max_tokens=12, d2t=None, **options):
    engine = toy_engine(NarrowToy(form, d2t=d2t), k=k, num_blocks=100, **options)
    requests = [
        request_of(
            [at, 7, 2], k=max(0, k - at % 2), seed=at, max_tokens=max_tokens, ignore_eos="grammar" not in kind, **kind
        )
        for at, kind in enumerate(kinds)
    ]
    return engine.generate(requests), engine


def assert_same(found, wanted):
    for result, other in zip(found, wanted, strict=True):
        assert result.token_ids == other.token_ids
        assert result.counts == other.counts
        for name in ("logprobs", "prompt_logprobs"):
            for said, known in zip(getattr(result, name) or (), getattr(other, name) or (), strict=True):
                assert (said.token_id, said.rank) == (known.token_id, known.rank)
                assert [token for token, _ in said.top] == [token for token, _ in known.top]
                assert said.logprob == pytest.approx(known.logprob, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("k", [0, 3])
def test_tokens_and_accepted_drafts_are_those_of_torch(k, scheduling):
    wanted, _ = generate(None, MIXED, k=k)
    found, engine = generate(REFERENCE, MIXED, k=k, scheduling=scheduling)
    assert isinstance(engine.runner._verifier, KernelVerifier)
    assert_same(found, wanted)
    assert sum(result.counts.num_accepted_tokens for result in found) > 0 or k == 0


@pytest.mark.parametrize("d2t", [None, PRUNED])
@pytest.mark.parametrize("mode", VERIFICATIONS)
def test_every_mode_of_verification_gives_what_it_gives_by_torch(mode, d2t):
    options = {"verification": VERIFICATIONS[mode], "d2t": d2t}
    assert_same(generate(REFERENCE, MIXED, **options)[0], generate(None, MIXED, **options)[0])


@pytest.mark.parametrize("mode", ["coupled", "block", "point mass"])
@pytest.mark.parametrize("kinds", [EDITED, KERNEL_EDITS], ids=["all", "of kernels"])
def test_edits_and_reports_are_those_of_torch(kinds, mode):
    options = {"verification": VERIFICATIONS[mode]}
    assert_same(generate(REFERENCE, kinds, **options)[0], generate(None, kinds, **options)[0])


@pytest.mark.parametrize(("num_words", "implementation"), [(1, REFERENCE), (2, REFERENCE), (2, TRITON)])
@pytest.mark.parametrize("edits", [{}, {"logit_bias": ((3, 1.0),)}, {"presence_penalty": 1.0}, {"bad_words": ((2,),)}])
def test_grammars_beside_other_sequences_and_their_edits(edits, num_words, implementation):
    """Also where a bitmask has no bits for the last tokens."""
    vocab_size, num_drafts = 40, 1
    generator = torch.Generator().manual_seed(5)
    logits_BQV = (torch.randn(4, num_drafts + 1, vocab_size, generator=generator) * 2).bfloat16()
    asked = [SamplingParams(seed=at, temperature=at % 2, **(edits if at > 1 else {})) for at in range(4)]
    sampling = rows_of([_sequence(params) for params in asked], vocab_size, CPU)
    bitmask_GQW = torch.randint(-(1 << 31), 1 << 31, (2, num_drafts + 1, num_words), generator=generator).int()
    masks = GrammarMasks(
        index_G=torch.tensor([1, 2]),
        bitmask_GQW=bitmask_GQW,
        num_valid_G=torch.tensor([1, 1]),
        num_rows_G=torch.tensor([2, 2]),
    )
    position_B = torch.tensor([5, 9, 3, 30])
    given = {
        "drafts": DraftIds(torch.randint(0, vocab_size, (4, num_drafts), generator=generator)),
        "sampling": sampling,
        "position_B": position_B,
        "draft_cap_B": torch.full((4,), num_drafts),
    }
    noise_SQV = draw_noise(sampling, position_B, num_drafts + 1, vocab_size, torch.float32)
    masked_BQV = masks.apply(logits_BQV.float())
    wanted = CoupledVerifier().verify(VerifyInputs(target_logits_BQV=masked_BQV, noise_SQV=noise_SQV, **given))
    rows = draw_rows(sampling, position_B)
    verifier = make_kernel_verifier(VerificationConfig(), num_drafts, implementation, CPU)
    found = verifier.verify(VerifyInputs(target_logits_BQV=logits_BQV, rows=rows, masks=masks, **given))
    assert found.token_ids_BQ.tolist() == wanted.token_ids_BQ.tolist()
    assert found.accepted_len_B.tolist() == wanted.accepted_len_B.tolist()


def test_a_models_own_logits_are_read_as_they_come(tiny_directory, tiny_tokenizer):
    model = load_model(
        tiny_directory, dtype=torch.bfloat16, device=CPU, numerics=Numerics.DEFAULT, with_mtp=True
    )  # fmt: skip
    assert model.sampling_implementation is None
    made = []
    for form in (None, REFERENCE):
        model.sampling_implementation = form
        options = {"num_blocks": 40, "block_size": 16, "num_draft_tokens": 2, "chunk_len": 64}
        engine = LocalEngine(model, tiny_tokenizer, max_num_sequences=4, **options)
        kinds = [MIXED[0], MIXED[2], EDITED[1]]
        requests = [
            request_of([at + 5, 7], seed=at, max_tokens=6, ignore_eos=True, **kind) for at, kind in enumerate(kinds)
        ]
        made.append(engine.generate(requests))
        dtype = model.logits(torch.zeros(1, model.config.hidden_size, dtype=torch.bfloat16)).dtype
        assert dtype is (torch.bfloat16 if form else torch.float32)
    assert_same(made[1], made[0])


def test_a_batch_that_is_greedy_as_a_whole():
    greedy = [{"temperature": 0.0}] * 3
    for mode in (VerificationMode.GREEDY, REJECTION):
        options = {"verification": VerificationConfig(mode=mode)}
        assert_same(generate(REFERENCE, greedy, **options)[0], generate(None, greedy, **options)[0])


@pytest.mark.parametrize(
    ("kinds", "mode", "k"),
    [(MIXED, mode, 2) for mode in VERIFICATIONS]
    + [(MIXED, "coupled", 0), (MIXED, "block", 0), (EDITED, "coupled", 2), (KERNEL_EDITS, "block", 2)],
)
def test_nothing_is_read_on_the_host(kinds, mode, k, steps_guarded, monkeypatch):  # noqa: F811
    """But by the reference of the kernels and by the toy, which are no part of it on a GPU."""
    looks = [(verify, "verify_reference"), (sample, "verify_reference"), (ToyModel, "trunk"), (ToyModel, "mtp")]
    for owner, name in looks:
        monkeypatch.setattr(owner, name, host_guard.visiting(getattr(owner, name)))
    generate(REFERENCE, kinds, k=k, max_tokens=6, verification=VERIFICATIONS[mode])
    assert len(steps_guarded) > 2


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_what_was_drafted_accepted_and_emitted_is_conserved(scheduling, steps, monkeypatch):  # noqa: F811
    monkeypatch.setattr(test_step_report, "ToyModel", functools.partial(NarrowToy, REFERENCE))
    engine, streams = test_step_report.run_workload(3, 3, scheduling)
    assert engine.runner._model.sampling_implementation is REFERENCE
    assert test_step_report.check(engine, steps, streams, 3).kept.num_accepted_tokens > 0


@pytest.mark.parametrize("mode", VERIFICATIONS)
@pytest.mark.parametrize("d2t", [None, PRUNED])
def test_the_first_step_finds_its_kernels_compiled(mode, d2t, monkeypatch):
    """What a run asks of verification has the kinds and sizes that were asked before it, but for the batch's."""
    model, asked = NarrowToy(REFERENCE, d2t=d2t), set()
    model.dtype = torch.bfloat16

    def noted(function, logits, rows, *others, **options):
        drafts = others[0] if others else None
        kinds = [None] if drafts is None else [getattr(drafts, name) is None for name in drafts.__slots__]
        cuts = [getattr(rows, name) is None for name in rows.__slots__]
        asked.add((logits.shape[1:], drafts is not None and drafts.by_chance, *kinds, *cuts))
        return function(logits, rows, *others, **options)

    monkeypatch.setattr(kernel_verifier, "verify", functools.partial(noted, verify.verify))
    monkeypatch.setattr(kernel_sampler, "sample_by_kernels", functools.partial(noted, sample.sample))
    kernel_warm_up.warm_up_steps(model, verifier_for(model, VERIFICATIONS[mode], 3), 3)
    known = set(asked)
    generate(REFERENCE, MIXED[:3], d2t=d2t, verification=VERIFICATIONS[mode], max_tokens=6)
    generate(REFERENCE, [MIXED[0], {"temperature": 0.0}], d2t=d2t, verification=VERIFICATIONS[mode], max_tokens=6)
    assert asked == known


@pytest.mark.parametrize("kind", MIXED)
def test_edited_rows_are_chosen_alike_by_the_kernels_of_every_cut(kind):
    generator = torch.Generator().manual_seed(4)
    logits_BV = torch.randn(3, 50, generator=generator).bfloat16()
    edited = EditedRows.of(torch.randn(2, 1, 50, generator=generator), torch.tensor([0, 2]), 3)
    params = [SamplingParams(**kind, seed=seed) for seed in range(3)]
    rows = draw_rows(sampling_rows(params, CPU), torch.arange(3))
    found = with_every_cut(rows)
    assert None not in (found.top_k_B, found.top_p_B, found.min_p_B)
    for implementation in (TRITON, REFERENCE):
        wanted_B = sample.sample(logits_BV, rows, edited=edited, implementation=implementation)
        found_B = sample.sample(logits_BV, found, edited=edited, implementation=implementation)
        assert found_B.tolist() == wanted_B.tolist()


def interpreted(kinds, mode, **options):
    """Sync: the interpreter is one for all threads, so a prefill must not meet a step."""
    options |= {"verification": VERIFICATIONS[mode], "scheduling": "sync", "max_num_sequences": 9}
    assert_same(generate(TRITON, kinds, **options)[0], generate(None, kinds, **options)[0])


def test_the_kernels_give_the_same_in_the_interpreter():
    interpreted([MIXED[0], MIXED[2]], "coupled", k=1, max_tokens=3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", VERIFICATIONS)
@pytest.mark.parametrize("edits", [EDITED[1:3], KERNEL_EDITS[1::2]], ids=["all", "of kernels"])
def test_the_kernels_give_the_same_in_the_interpreter_at_length(edits, mode):
    interpreted([*MIXED, *edits], mode, k=2, max_tokens=5)


@pytest.mark.fast
@pytest.mark.parametrize("config", MODES, ids=lambda config: f"{config.mode.value}-{config.block}")
@pytest.mark.long
def test_verdicts_are_plain_pythons(config):
    """The same batches as for the verifiers by torch: what must not be read is NaN."""
    verifier = make_kernel_verifier(config, 3, REFERENCE, CPU)
    batch = Batch(config, num_rows=24, dtype=torch.float32)
    inputs = batch.inputs(verifier.draft_law)
    object.__setattr__(inputs, "rows", draw_rows(inputs.sampling, inputs.position_B))
    verified = verifier.verify(inputs)
    lens = verified.accepted_len_B.tolist()
    for row, (tokens, accepted) in enumerate(zip(verified.token_ids_BQ.tolist(), lens, strict=True)):
        assert tokens == batch.expected(row) + [0] * (3 - accepted), row


@pytest.mark.fast
def test_who_chooses_is_the_models_to_say():
    assert isinstance(verifier_for(NarrowToy(None), VerificationConfig(), 2), CoupledVerifier)
    assert isinstance(verifier_for(NarrowToy(TRITON), VerificationConfig(), 2), KernelVerifier)


@pytest.mark.fast
@pytest.mark.parametrize("num_rows", [3, 4])
def test_rows_of_a_batch_begin_where_kernels_expect_it(num_rows):
    """Of tables and without them, all sampled and not; else a kernel would be compiled anew while it serves."""
    params = params_of(8)[1:]  # every fourth is greedy
    table = SamplingTable(num_slots=8, vocab_size=7, device=CPU)
    for slot, item in enumerate(params):
        table.place(slot, _sequence(item))
    position_BC = torch.arange(num_rows * 3).view(-1, 3)
    for rows in (table.rows(range(num_rows), params[:num_rows]), sampling_rows(params[:num_rows], CPU), None):
        made = draw_rows(rows, position_BC[:, 1])
        assert made.position_B.tolist() == position_BC[:, 1].tolist()
        for name in made.__slots__:
            tensor = getattr(made, name)
            assert tensor is None or (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0), name
            assert tensor is None or len(tensor) == num_rows
        wanted = [item.temperature for item in params[:num_rows]] if rows else [0.0] * num_rows
        assert made.temperature_B.tolist() == wanted
        if rows:
            assert made.top_k_B.tolist() == [item.top_k for item in params[:num_rows]]
            assert made.seed_B.tolist() == [0 if item.greedy else item.seed for item in params[:num_rows]]


@pytest.mark.fast
def test_settled_numbers_are_the_same_ones():
    x = torch.arange(12)
    assert settled(x) is x
    for view in (x[1:], x[::2], x.view(3, 4)[:, 1], x[:0]):
        assert settled(view).tolist() == view.tolist()
        assert settled(view).data_ptr() % 16 == 0


def _sequence(params):
    return SampledSequence(params=params, prompt_token_ids=(1,), output_token_ids=(2,))
