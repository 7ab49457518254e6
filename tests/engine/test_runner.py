"""What a runner makes of plans: order, tickets, errors, lifetimes, and what it hands off."""

import functools
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from baton.core.requests.request import AttemptKey
from baton.core.requests.sampling import SamplingParams
from baton.engine.step import runner as runner_module
from baton.engine.step.plan import Grow, Growth, Release, Resume, Step
from baton.engine.step.runner import Runner
from baton.kvcache.allocator import BlockTable
from baton.kvcache.pool import KVPool
from baton.tests.engine import reference
from baton.tests.engine.driver import Driver
from baton.tests.engine.toy import ToyModel

pytestmark = pytest.mark.fast
CPU = torch.device("cpu")
PROMPT = (7, 1, 4, 2, 9)
SAMPLING = SamplingParams(seed=3, max_tokens=12, temperature=1.0, ignore_eos=True)


@functools.cache
def wanted():
    return reference.generate(ToyModel(), list(PROMPT), SAMPLING)


def driver_of(model=None, *, k=2, num_blocks=40, **options):
    model = model or ToyModel()
    pool = KVPool(model.kv_layout(4), num_blocks, CPU)
    return Driver(Runner(model, pool, max_num_seqs=3, num_draft_tokens=k, **options), pool)


def gated(runner, name):
    """That part of steps waits for an event, from the next step on."""
    runner.drain()
    event, part = threading.Event(), getattr(runner, name)

    def wait(*arguments):
        assert event.wait(10.0)
        return part(*arguments)

    setattr(runner, name, wait)
    return event


def watched(model, seen):
    """What `seen` says in each pass of the trunk."""
    trunk, said = model.trunk, []

    def look(*arguments):
        hidden_TD = trunk(*arguments)
        said.append(seen(hidden_TD))
        return hidden_TD

    model.trunk = look
    return said


def test_steps_run_on_one_other_thread_without_autograd_whatever_the_caller_does():
    model = ToyModel()
    said = watched(model, lambda hidden_TD: (threading.get_ident(), hidden_TD.is_inference()))
    driver = driver_of(model)
    driver.start(0, PROMPT, SAMPLING)
    for mode in (True, False):
        with torch.inference_mode(mode):
            driver.step([0])
    assert len(set(said)) == 1
    assert said[0][0] != threading.get_ident()
    assert said[0][1]


def test_nothing_is_there_before_it_was_sampled_and_tokens_are_there_before_the_step_is_over():
    driver = driver_of()
    driver.start(0, PROMPT, SAMPLING)
    driver.runner.drain()
    sample, finish = gated(driver.runner, "_sample"), gated(driver.runner, "_finish")
    ticket = driver.launch([0])
    assert not ticket.is_sampled
    sample.set()
    emitted = ticket.result().decode[0].token_ids
    assert list(emitted) == wanted()[1 : 1 + len(emitted)]
    assert ticket.is_sampled
    assert not ticket.is_done
    finish.set()
    driver.runner.drain()
    assert ticket.is_done
    assert ticket.result().decode[0].token_ids == emitted


def test_operations_lie_between_the_steps_around_them():
    driver = driver_of()
    driver.start(0, PROMPT, SAMPLING)
    driver.runner.drain()
    sample = gated(driver.runner, "_sample")
    tickets = [driver.launch([0])]
    driver.runner.execute(Release(0))  # while the step that has it is still to be computed
    driver.place(0, (5, 6), SAMPLING)
    tickets.append(driver.launch(chunks=[driver.chunk(0)]))
    tickets.append(driver.launch([0]))
    sample.set()
    outputs = [ticket.result() for ticket in tickets]
    emitted = outputs[0].decode[0].token_ids
    assert list(emitted) == wanted()[1 : 1 + len(emitted)]
    tokens = [outputs[1].chunks[0].token, *outputs[2].decode[0].token_ids]
    assert tokens == reference.generate(ToyModel(), [5, 6], SAMPLING)[: len(tokens)]


def test_a_slot_that_is_taken_is_not_given_away():
    driver = driver_of()
    driver.place(1, PROMPT, SAMPLING)
    with pytest.raises(AssertionError):
        driver.place(1, PROMPT, SAMPLING)
    with pytest.raises(AssertionError):
        driver.place(3, PROMPT, SAMPLING)


def test_a_step_that_fails_says_so_at_its_ticket_and_at_all_later_ones():
    driver = driver_of()
    driver.start(0, PROMPT, SAMPLING)
    driver.step([0])
    driver.runner._model.trunk = lambda *arguments: 1 / 0
    bad = [driver.launch([0]) for _ in range(2)]
    for ticket in (*bad, *bad):
        with pytest.raises(ZeroDivisionError):
            ticket.result()
    del driver.runner._model.trunk
    with pytest.raises(ZeroDivisionError):
        driver.step([0])
    assert bad[0].is_done
    driver.runner.drain()
    driver.runner.close()


def test_a_step_that_fails_after_its_tokens_were_read_ends_what_follows():
    driver = driver_of()
    driver.start(0, PROMPT, SAMPLING)
    driver.runner.drain()
    driver.runner._model.mtp = lambda *arguments: 1 / 0
    ticket = driver.launch([0], num_drafts=1)
    assert ticket.result().decode[0].token_ids
    with pytest.raises(ZeroDivisionError):
        driver.step([0], num_drafts=0)


def executor_threads():
    return {thread for thread in threading.enumerate() if thread.name == "decode-steps"}


def test_a_runner_that_is_dropped_ends_its_thread():
    before = executor_threads()
    driver = driver_of()
    driver.start(0, PROMPT, SAMPLING)
    [thread] = executor_threads() - before
    del driver
    gc.collect()
    thread.join(5.0)
    assert not thread.is_alive()


def test_closing_waits_for_what_was_launched_and_nothing_is_launched_after_it():
    before = executor_threads()
    driver = driver_of()
    driver.start(0, PROMPT, SAMPLING)
    ticket = driver.launch([0])
    driver.runner.close()
    assert ticket.is_done
    assert not executor_threads() - before
    with pytest.raises(AssertionError, match="closed"):
        driver.launch([0])


def test_what_a_step_computed_is_let_go_of_before_the_step_counts_as_over():
    model = ToyModel()
    refs = watched(model, weakref.ref)
    driver = driver_of(model)
    driver.start(0, PROMPT, SAMPLING)
    finish = gated(driver.runner, "_finish")
    refs.clear()
    ticket = driver.launch([0])
    ticket.result()
    assert refs[0]() is not None
    finish.set()
    while not ticket.is_done:
        pass
    assert refs[0]() is None


def test_blocks_that_a_sequence_gets_while_it_runs_are_used():
    driver = driver_of(k=0)
    driver.place(0, PROMPT, SAMPLING, capacity_len=8)
    tokens = [driver.compute(0)]
    blocks = driver.allocator.reserve(12).blocks
    for _ in range(3):
        tokens += driver.decode([0])[0]
    driver.runner.execute(Grow((Growth(0, 2, blocks),)))
    driver.tables[0] = BlockTable((*driver.tables[0].blocks, *blocks), 4)
    for _ in range(8):
        tokens += driver.decode([0])[0]
    assert tokens == wanted()


@pytest.mark.parametrize("k", [1, 2])
def test_a_sequence_goes_on_elsewhere_from_what_was_handed_off(k):
    """KV, first token, draft and hidden state are all that a decode worker gets, and drafts are as they were here."""
    here, there = driver_of(k=k), driver_of(k=k)
    tokens = [here.start(0, PROMPT, SAMPLING)]
    pushed = []

    class Push:
        def submit(self, layer):
            pushed.append(layer)

        def close(self):
            pushed.append("end")

    opened = []
    sender = driver_of(k=0, open_push=lambda parts: opened.append(parts) or Push())
    key, other_key = AttemptKey("p", 1), AttemptKey("q", 1)
    tokens.append(here.start(1, (5, 6), SAMPLING))
    sender.place(2, PROMPT, SAMPLING)
    sender.place(0, (5, 6), SAMPLING)
    sender.step(chunks=[sender.chunk(2, 3, push=key)])
    ticket = sender.launch(chunks=[sender.chunk(2, push=key), sender.chunk(0, push=other_key)])
    states = ticket.handoffs()
    assert [made.token for made in ticket.result().chunks] == tokens
    here.runner.drain()
    for slot, state in enumerate(states):
        draft, hidden_D = here.runner._table.draft_of(slot)
        assert (state.draft_token, state.hidden) == (int(draft), hidden_D.numpy().tobytes())
    made, state = ticket.result().chunks[0], states[0]
    assert states[0] != states[1]
    assert opened == [[(key, 0, 3)], [(key, 3, 2), (other_key, 0, 2)]]
    assert pushed == [0, 1, 2, "end"] * 2, "every layer, the head's too, in order"
    pool, target = sender.runner._pool, there.runner._pool
    table = there.allocator.reserve(5 + 12 + k)
    for layer in range(3):
        for source, block in zip(sender.tables[2].blocks, table.blocks, strict=False):
            target.blocks(layer)[block] = pool.blocks(layer)[source]
    there.place(
        1, (*PROMPT, made.token), SAMPLING, num_output=1, resume=Resume(state.draft_token, state.hidden), table=table
    )
    for _ in range(4):
        assert here.step([0]).decode == there.step([1]).decode


def test_without_an_mtp_head_nothing_but_the_token_is_handed_off():
    class Push:
        def submit(self, layer):
            assert layer < 2

        def close(self):
            pass

    driver = driver_of(ToyModel(with_mtp=False), k=0, open_push=lambda parts: Push())
    driver.place(0, PROMPT, SAMPLING)
    driver.place(1, (5, 6), SAMPLING)
    keys = [AttemptKey(name, 1) for name in "pq"]
    ticket = driver.launch(chunks=[driver.chunk(0, push=keys[0]), driver.chunk(1, push=keys[1])])
    assert [made.token for made in ticket.result().chunks] == [
        wanted()[0],
        reference.generate(ToyModel(), [5, 6], SAMPLING)[0],
    ]
    assert [(state.draft_token, state.hidden) for state in ticket.handoffs()] == [(None, b"")] * 2


def test_a_step_of_nothing_is_a_bug():
    with pytest.raises(AssertionError):
        driver_of().runner.launch(Step())


def test_a_token_that_was_chosen_before_stays_chosen_also_where_this_pass_would_choose_another():
    driver, other = driver_of(k=0), (wanted()[0] + 1) % 22
    tokens = (*PROMPT, other)
    driver.place(0, tokens, SAMPLING, num_output=1, knows_next=True)
    assert driver.compute(0) == other
    following = driver.start(1, tokens, SAMPLING, num_output=1)
    assert driver.decode([0]) == [(following,)]


@pytest.mark.parametrize("decodes", [True, False])
def test_on_a_gpu_the_warm_up_is_compiled_ahead(decodes, monkeypatch):
    driver, done = driver_of(), []
    runner = driver.runner

    def compile_ahead(work, num_ranks, on_phase):
        done.append((num_ranks, on_phase))
        work()

    monkeypatch.setattr(runner_module, "compile_ahead", compile_ahead)
    monkeypatch.setattr(runner, "warm_up", lambda reach, *, decodes: done.append((reach, decodes)))
    runner.compile_ahead("reach", decodes=decodes, on_phase=pytest.fail)
    assert not done, "a CPU compiles nothing"
    monkeypatch.setattr(runner, "_pool", SimpleNamespace(device=torch.device("cuda:0")))
    monkeypatch.setattr(runner, "_communicator", SimpleNamespace(size=4))
    runner.compile_ahead("reach", decodes=decodes, on_phase=print)
    assert done == [(4, print), ("reach", decodes)]
    monkeypatch.undo()
    runner.close()
