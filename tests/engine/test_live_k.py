"""k changed while sequences run: the same tokens, and drafts as good as if it had never been another."""

import itertools

import pytest
import torch

from baton.core.errors import InvalidRequest
from baton.core.request import AttemptKey, GenerationRequest
from baton.core.sampling import SamplingParams
from baton.engine.local import LocalEngine
from baton.engine.speculation import Speculation
from baton.tests.engine.toy import PerfectToyModel, ToyModel
from baton.tests.engine.toy_engine import request_of, toy_engine

torch.set_num_threads(1)  # threads that wait for each other are slow on a busy machine
SWITCHES = (0, 3, 1, 0, 2)
PER_K = 2  # steps


def generate(engine, requests, ks=None):
    """Results, and the accepted lengths of every step by (output length before it, k)."""
    accepted = []
    runner_step = engine._decode.step

    def step(slots):
        lengths = [len(sequence.token_ids) for sequence in engine._scheduler.decoding()]
        output = runner_step(slots)
        accepted.extend(zip(lengths, output.proposed_lens, output.accepted_lens, strict=True))
        return output

    engine._decode.step = step
    for request in requests:
        engine.submit(request)
    for num_steps in itertools.count():
        if all(engine._ended(request.key) for request in requests):
            return [engine._unread[request.key][-1].result for request in requests], accepted
        if ks is not None:
            engine.speculation.set_mode(ks[num_steps // PER_K % len(ks)])
        engine.step()


@pytest.mark.fast
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_do_not_change_with_k(temperature):
    requests = [
        request_of([at, 2, 5], k=4, max_tokens=40, temperature=temperature, seed=at, ignore_eos=True) for at in range(3)
    ]
    plain = toy_engine(ToyModel(), k=4, num_blocks=60).generate(requests)
    switched, _ = generate(toy_engine(ToyModel(), k=4, num_blocks=60), requests, SWITCHES)
    assert [result.token_ids for result in switched] == [result.token_ids for result in plain]


@pytest.mark.fast
def test_no_hole_is_left_where_there_were_no_drafts():
    """This model's head is right whenever its KV and hidden states are: every draft must stand, whatever k was."""
    request = request_of([3, 1, 4], k=4, max_tokens=50, temperature=0.0, ignore_eos=True)
    engine = toy_engine(PerfectToyModel(), k=4, num_blocks=60)
    for layer in range(engine.pool.layout.num_layers):
        engine.pool.blocks(layer).fill_(torch.nan)
    [result], accepted = generate(engine, [request], SWITCHES)
    assert {k for _, k, _ in accepted} == set(SWITCHES)
    assert all(accepted_len == k for _, k, accepted_len in accepted)
    assert result.token_ids == toy_engine(PerfectToyModel(), k=0, num_blocks=60).generate([request])[0].token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_bundled_model_accepts_as_much_after_a_switch(temperature, tiny_model, tiny_tokenizer, tiny_prompts):
    def engine():
        return LocalEngine(
            tiny_model,
            tiny_tokenizer,
            num_blocks=100,
            block_size=16,
            num_draft_tokens=3,
            chunk_len=512,
            max_num_sequences=1,
        )

    def request(name, prompt):
        return GenerationRequest(
            key=AttemptKey(name, 1),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=32, temperature=temperature, seed=5, ignore_eos=True),
            deadline_s=float("inf"),
            num_draft_tokens=3,
        )

    compared = []
    for prompt in tiny_prompts[5:7]:
        # What a step with k drafts accepts at a given length, in an engine that always drafted 3: the first k of them.
        [plain], steps = generate(engine(), [request("plain", prompt)])
        [switched], switched_steps = generate(engine(), [request("switched", prompt)], SWITCHES)
        assert switched.token_ids == plain.token_ids
        known = {length: accepted_len for length, _, accepted_len in steps}
        compared += [(k, accepted, known[length]) for length, k, accepted in switched_steps if length in known]
    assert len([k for k, _, _ in compared if k > 0]) > 2
    assert all(accepted == min(k, whole) for k, accepted, whole in compared)


@pytest.mark.fast
def test_a_request_may_lower_k_but_not_raise_it():
    low = request_of([1, 2], k=1, max_tokens=20, temperature=0.0, ignore_eos=True)
    high = request_of([1, 3], k=4, max_tokens=20, temperature=0.0, ignore_eos=True)
    engine = toy_engine(ToyModel(), k=4, num_blocks=60)
    engine.speculation.set_mode(2)
    for result, k in zip(engine.generate([low, high]), (1, 2), strict=True):
        assert result.counts.num_draft_tokens == k * result.counts.num_verify_steps
    with pytest.raises(InvalidRequest):
        engine.speculation.set_mode(5)


@pytest.mark.fast
def test_speculation_off_for_good_leaves_the_head_alone():
    model = ToyModel()
    engine = toy_engine(model, k=4, num_blocks=60)
    engine.generate([request_of([1, 2], k=0, max_tokens=20, temperature=0.0, ignore_eos=True)])
    assert model.num_mtp_calls == 1  # in prefill


@pytest.mark.fast
def test_auto_learns_from_the_steps_of_the_engine():
    engine = LocalEngine(
        PerfectToyModel(),
        toy_engine()._tokenizer,
        num_blocks=60,
        block_size=4,
        num_draft_tokens=4,
        chunk_len=16,
        max_num_sequences=4,
        speculation=Speculation(4, None),
    )
    requests = [request_of([at], k=4, max_tokens=60, temperature=0.0, ignore_eos=True) for at in range(6)]
    plain = toy_engine(PerfectToyModel(), k=0, num_blocks=60).generate(requests)
    assert [one.token_ids for one in engine.generate(requests)] == [one.token_ids for one in plain]
    assert engine.speculation.is_auto
    assert engine.speculation.num_drafts > 0  # every draft stands
