"""Threads beside the step: how many, whose turn it is, and that the step waits for none of them."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from baton.core.errors import InvalidGrammar
from baton.core.requests.sampling import GrammarSpec
from baton.core.requests.tokenizer import Tokenizer
from baton.core.start_time_fair_queue import OwnerUsage
from baton.engine.grammar import executor as grammar_executor
from baton.engine.grammar import grammar
from baton.engine.grammar import grammar as compiled_grammar
from baton.engine.grammar import trial as grammar_trial
from baton.engine.grammar.executor import GrammarExecutor, num_threads
from baton.engine.grammar.grammar import GrammarCompiler

pytestmark = pytest.mark.fast
TINY = Path(__file__).parents[2] / "assets" / "tiny"
LIMIT_S = 60.0  # of what would wait for ever


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_directory(TINY)


class Held:
    """Work that has begun when it says so, and ends when it may."""

    def __init__(self, executor, share=None):
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.result = executor.submit(self._run, share or OwnerUsage())

    def _run(self):
        self.begun.set()
        assert self.may_end.wait(LIMIT_S)

    def open(self):
        self.may_end.set()
        self.result.result(LIMIT_S)


@pytest.mark.parametrize(("num_cores", "num"), [(1, 1), (2, 1), (3, 1), (8, 4), (1000, 64)])
def test_the_step_keeps_half_of_the_cores(monkeypatch, num_cores, num):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    assert num_threads() == num
    assert GrammarExecutor()._pool._max_workers == num


def test_no_more_work_at_once_than_threads_and_these_are_nice():
    executor = GrammarExecutor(2)
    first, second, third = Held(executor), Held(executor), Held(executor)
    assert first.begun.wait(LIMIT_S)
    assert second.begun.wait(LIMIT_S)
    assert not third.begun.is_set()
    first.open()
    assert third.begun.wait(LIMIT_S)
    second.open()
    third.open()
    nice = executor.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), OwnerUsage()).result(
        LIMIT_S
    )
    assert nice >= grammar_executor.NICENESS
    assert executor.spent_s > 0.0


def test_who_has_spent_little_comes_before_who_has_spent_much():
    executor, heavy, light, order = GrammarExecutor(1), OwnerUsage(), OwnerUsage(), []
    gate = Held(executor, heavy)
    assert gate.begun.wait(LIMIT_S)
    heavy.charge(10.0)
    names = ["heavy 1", "heavy 2", "light 1", "light 2"]
    results = [
        executor.submit(lambda name=name: order.append(name), heavy if "heavy" in name else light) for name in names
    ]
    gate.open()
    for result in results:
        result.result(LIMIT_S)
    assert order == ["light 1", "light 2", "heavy 1", "heavy 2"]


def test_time_is_charged_to_the_owner_also_of_what_fails(monkeypatch):
    executor, share = GrammarExecutor(1), OwnerUsage()
    now_s = iter((10.0, 17.0))
    monkeypatch.setattr(grammar_executor.time, "monotonic", lambda: next(now_s))
    with pytest.raises(ZeroDivisionError):
        executor.submit(lambda: 1 / 0, share).result(LIMIT_S)
    assert (share.spent, executor.spent_s) == (7.0, 7.0)


def test_sequences_of_a_grammar_share_what_it_has_spent_and_a_new_compilation_pays_no_debt(tokenizer):
    compiler, spec = GrammarCompiler(tokenizer, 4096), GrammarSpec("regex", "[ab]+")
    before = compiler.compile(spec)
    before.share.charge(3.0)
    before.is_spent = True
    after = compiler.compile(spec)
    assert after is not before
    assert after.share is before.share
    before.remember((1,), mask_W := np.zeros(1, dtype=np.int32))
    assert after.recall([1]) is mask_W
    assert after.own([])._share is after.own([])._share is after.share
    assert compiler.compile(GrammarSpec("regex", "[ac]+")).share is not after.share


def test_the_step_waits_for_no_look_that_is_under_way(tokenizer):
    """A sequence goes on while its look waits for a turn: the next one is asked for at once, and comes after it."""
    compiler, spec = GrammarCompiler(tokenizer, 4096), GrammarSpec("regex", "[ab]+")
    compiled = compiler.compile(spec)
    compiler._executor = compiled._executor = GrammarExecutor(1)
    gate = Held(compiled._executor)
    assert gate.begun.wait(LIMIT_S)
    (token_id,) = tokenizer.encode("a")
    own = compiled.own([])
    looked = []
    look = own._looked
    own._looked = lambda text, drafts: looked.append(text) or look(text, drafts)

    def step():
        own.begin([], [])
        own.begin([token_id], [])
        own.begin([token_id, token_id], [])
        return own.found([token_id, token_id], [], 0.0)

    step_thread = ThreadPoolExecutor(1)
    try:
        assert step_thread.submit(step).result(LIMIT_S / 2).num_rows == 0, "nothing is known yet"
    finally:
        gate.open()
        step_thread.shutdown()
    found = own.found([token_id, token_id], [], LIMIT_S)
    expected = compiler.start(spec, [token_id, token_id]).look([])
    assert np.array_equal(found.masks_QW, expected.masks_QW)
    assert looked == [[token_id, token_id]], "what nobody asks for any more is not looked at"


@pytest.mark.parametrize("is_known", [True, False], ids=["spent", "not known"])
def test_a_sequence_that_is_placed_waits_for_no_compilation(is_known, tokenizer):
    """At other ranks than 0 every grammar is new; neither there nor for spent automata is there another trial."""
    compiler, spec = GrammarCompiler(tokenizer, 4096), GrammarSpec("regex", "(ab){1,3}")
    token_ids = tokenizer.encode("ab")
    expected = GrammarCompiler(tokenizer, 4096).start(spec, token_ids).look(tokenizer.encode("a"))
    if is_known:
        compiler.compile(spec).is_spent = True
    trial, compiler._compiles = compiler._trial, GrammarExecutor(1)
    compiler._trial = None
    gate = Held(compiler._compiles)
    assert gate.begun.wait(LIMIT_S)

    def step():
        states = [compiler.begin(spec, token_ids) for _ in range(2)]
        for state in states:
            state.begin(tokenizer.encode("a"))
        return states, [state.found(tokenizer.encode("a"), 0.0).num_rows for state in states]

    step_thread = ThreadPoolExecutor(1)
    try:
        states, num_rows = step_thread.submit(step).result(LIMIT_S / 2)
    finally:
        gate.open()
        step_thread.shutdown()
    assert num_rows == [0, 0], "nothing is known yet"
    for state in states:
        look = state.found(tokenizer.encode("a"), LIMIT_S)
        assert np.array_equal(look.masks_QW, expected.masks_QW)
        assert state.is_quick
    assert (compiler._trial, trial is None) == (None, not is_known)
    assert len({state._grammar for state in states}) == 1, "one compilation for both"


def test_tokens_that_a_grammar_forbids_are_found_when_it_is_compiled(tokenizer):
    state = GrammarCompiler(tokenizer, 4096).begin(GrammarSpec("regex", "ab"), tokenizer.encode("b"))
    state.found([], LIMIT_S)
    assert isinstance(state.error, InvalidGrammar)


@pytest.mark.long
def test_looks_of_one_sequence_never_overlap(tokenizer):
    compiled = GrammarCompiler(tokenizer, 4096).compile(GrammarSpec("regex", "[ab]+"))
    compiled._executor = GrammarExecutor(4)
    (token_id,) = tokenizer.encode("a")
    own = compiled.own([])
    begun, may_end = threading.Event(), threading.Event()
    look = own._looked

    def slow(text, drafts):
        if not text:
            begun.set()
            assert may_end.wait(LIMIT_S)
        else:
            assert may_end.is_set(), "beside the one before"
        return look(text, drafts)

    own._looked = slow
    own.begin([], [])
    assert begun.wait(LIMIT_S)
    own.begin([token_id], [])
    own.begin([token_id] * 2, [])
    Held(compiled._executor).open()  # there are threads for them
    may_end.set()
    assert own.found([token_id] * 2, [], LIMIT_S).num_rows == 1


def test_grammars_are_compiled_on_nice_threads(tokenizer, monkeypatch):
    made = []

    def new_matcher(*given):
        made.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return real(*given)

    real = compiled_grammar.new_matcher
    monkeypatch.setattr(compiled_grammar, "new_matcher", new_matcher)
    compiler = GrammarCompiler(tokenizer, 4096)
    compiler.compile(GrammarSpec("regex", "[ab]+"))
    assert made
    assert min(made) >= grammar_executor.NICENESS
    assert compiler.spent_s > 0.0


@pytest.mark.long
def test_grammars_are_tried_by_a_nice_process(tokenizer):
    compiler = GrammarCompiler(tokenizer, 4096)
    compiler.compile(GrammarSpec("regex", "a"))
    process = psutil.Process(compiler._trial._process.pid)
    schema = json.dumps({"type": "integer", "multipleOf": 999983})  # takes all the time that it may
    with ThreadPoolExecutor(1) as asker:
        asked = asker.submit(compiler.compile, GrammarSpec("json_schema", schema))
        nice = set()
        while not asked.done():
            for child in process.children(recursive=True):
                try:
                    nice.add(child.nice())
                except psutil.NoSuchProcess:
                    continue
        with pytest.raises(InvalidGrammar):
            asked.result()
    assert process.nice() + grammar_trial.NICENESS in nice


def test_what_keeps_the_gil_is_built_before_anybody_asks(tokenizer, monkeypatch):
    built = []
    real = grammar.new_tokens
    monkeypatch.setattr(grammar, "new_tokens", lambda *setup: built.append(setup) or real(*setup))
    compiler = GrammarCompiler(tokenizer, 4096)
    compiler.prepare()
    assert len(built) == 1
    compiler.compile(GrammarSpec("regex", "a"))
    assert len(built) == 1


def test_a_tokenizer_that_grammars_cannot_use_is_no_reason_not_to_start(tokenizer, monkeypatch):
    def refuses(*setup):
        raise InvalidGrammar("its tokenizer is unknown")

    monkeypatch.setattr(grammar, "new_tokens", refuses)
    compiler = GrammarCompiler(tokenizer, 4096)
    compiler.prepare()
    with pytest.raises(InvalidGrammar, match="unknown"):
        compiler.compile(GrammarSpec("regex", "a"))
