"""Chunks beside rows that decode: a step takes some decode steps' time, or as long as its host needs to launch it."""

import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.engine.chunk_budget import (
    DECODE_STEPS,
    DRAIN_STEPS,
    FIRST_LEN,
    FLOORS,
    LARGEST,
    LAUNCHES,
    MIN_LEN,
    WEIGHT,
    ChunkBudget,
)
from baton.engine.graphs.piecewise import MAX_EXPERT_ROWS, MAX_ROWS
from baton.tests.engine.toy_engine import request_of, toy_engine
from baton.worker.loading import GPU_NUM_TOKENS, MOE_GPU_NUM_TOKENS

pytestmark = pytest.mark.fast
ROWS = 4  # that decode


class Device:
    """Takes `decode_s` for decode rows, with any chunk `floor_s` more and `per_token_s` for each of its tokens.

    Its host takes `launch_s`.
    """

    def __init__(self, decode_s, per_token_s, launch_s=0.0, most=4096, floor_s=0.0):
        self.budget = ChunkBudget(most)
        self.decode_s, self.per_token_s, self.launch_s, self.floor_s = decode_s, per_token_s, launch_s, floor_s

    def step_s(self, num_tokens):
        return max(self.launch_s, self.decode_s + self.floor_s + num_tokens * self.per_token_s)

    @property
    def fits(self):
        """Tokens beside which a step takes as many decode steps as it may."""
        return (DECODE_STEPS - 1) * self.decode_s / self.per_token_s

    def run(self, num_steps, num_waiting=1, most=1 << 30):
        """Steps that decode and compute chunks in turn; the last chunk's length."""
        for _ in range(num_steps):
            self.budget.decoded(self.decode_s)
            length = self.budget.length(ROWS, num_waiting)
            self.budget.mixed(min(length, most), self.step_s(min(length, most)), self.launch_s)
        return self.budget.length(ROWS, 1)


def test_the_limits_are_those_that_the_docs_tell():
    told = " ".join((Path(__file__).parents[2] / "docs" / "engine.md").read_text().split())
    for what in (
        f"{DECODE_STEPS:g} times a decode-only step; {LAUNCHES:g} times the host's",
        f"{FLOORS:g} times a step with the shortest chunk",
        f"in {DRAIN_STEPS} steps, up to {'half' if LARGEST == 0.5 else LARGEST} of",
    ):
        assert what in told


def test_where_nothing_decodes_a_step_takes_all_it_may():
    device = Device(0.002, 1e-4)
    device.run(10)
    for budget in (ChunkBudget(4096), device.budget):
        before = budget.last_len
        assert budget.length(0, 1) == 4096
        assert budget.last_len == before, "of steps that decode, too"


def test_few_tokens_before_anything_is_known():
    budget = ChunkBudget(256)
    assert budget.length(ROWS, 1) == FIRST_LEN
    budget.mixed(FIRST_LEN, 1.0, 0.5)
    assert budget.length(ROWS, 1) == FIRST_LEN, "no step that only decodes was seen"


def test_what_the_host_takes_is_enough_to_begin_with():
    """Under load no step may only decode for long."""
    device, lengths = Device(0.007, 0.00002, launch_s=0.016), []
    for _ in range(100):
        lengths.append(device.budget.length(ROWS, 1))
        device.budget.mixed(lengths[-1], device.step_s(lengths[-1]), device.launch_s)
    assert lengths == sorted(lengths)
    assert lengths[30] > 400
    assert device.step_s(lengths[-1]) == pytest.approx(LAUNCHES * 0.016, rel=0.05)


@pytest.mark.parametrize("first_len", [1, 4000])
def test_a_step_takes_about_as_many_decode_steps_as_it_may(first_len):
    device = Device(0.010, 0.0001)
    device.budget._fitting = float(first_len)
    assert device.run(100) == pytest.approx(device.fits, abs=2)
    device.per_token_s = 0.001
    assert device.run(100) == MIN_LEN, "it is never tiny"
    device.per_token_s = 0.00002
    assert device.run(100) == pytest.approx(device.fits, abs=10)


def test_tokens_that_fit_while_the_host_launches_cost_nothing():
    """The host takes 16 ms, decode rows 7: 9 ms of tokens are free, and a tenth more is allowed."""
    device = Device(0.007, 0.00002, launch_s=0.016)
    assert device.run(100) == pytest.approx((LAUNCHES * 0.016 - 0.007) / 0.00002, rel=0.01)
    device.launch_s = 0.001
    assert device.run(100) == pytest.approx(device.fits, rel=0.01), "a fast host: decode steps"


def test_a_host_that_is_often_held_up_gets_no_longer_chunks():
    """Nine launches of ten take up to three times as long as they need."""
    device, rng, lengths = Device(0.007, 0.00002), random.Random(3), []
    for turn in range(400):
        device.launch_s = 0.020 if turn % 10 == 0 else rng.uniform(0.020, 0.060)
        lengths.append(device.run(1))
    assert max(lengths[100:]) <= (1.3 * LAUNCHES * 0.020 - 0.007) / 0.00002


def test_a_host_that_is_held_up_for_once_makes_chunks_no_shorter():
    device = Device(0.007, 0.00002, launch_s=0.016)
    fits = device.run(100)
    device.budget.mixed(fits, 0.050, 0.049)
    assert device.budget.length(ROWS, 1) == fits
    device.budget.mixed(fits, 0.050, 0.016)
    assert device.budget.length(ROWS, 1) < fits, "the device was slow"


def test_a_short_prompt_says_nothing_of_longer_chunks():
    device = Device(0.010, 0.0001)
    device.run(100)
    assert device.run(100, most=20) == pytest.approx(device.fits, abs=2)


def test_a_long_queue_of_prompts_gets_larger_chunks_and_leaves_the_length_that_fits():
    device = Device(0.010, 0.0001)
    fits = device.run(100)
    assert device.budget.length(ROWS, fits * DRAIN_STEPS) == fits
    assert device.budget.length(ROWS, 300 * DRAIN_STEPS) == 300
    assert device.budget.length(ROWS, 300 * DRAIN_STEPS + 1) == 301, "all within so many steps"
    largest = LARGEST * 4096 - ROWS
    assert device.budget.length(ROWS, largest * DRAIN_STEPS * 3 - 1) == largest, "in more steps"
    device.run(30, num_waiting=10_000_000)
    assert device.budget.length(ROWS, 1) == pytest.approx(fits, rel=0.01)


@pytest.mark.parametrize("num_waiting", [1_000, 50_000, 60_000, 90_000, 500_000])
def test_a_queue_is_computed_within_so_many_steps(num_waiting):
    device = Device(0.010, 0.001)
    fits = device.run(200)
    for first_len, late in ((0, 0), (5, 1_000), (5, 40_000)):
        left, at_once = num_waiting, max(DRAIN_STEPS, (num_waiting + late) / (LARGEST * 4096 - ROWS) + 1)
        num_steps = at_once + (DRAIN_STEPS if late else 0)
        for step in range(1000):
            if step == first_len:
                left += late
            length = device.budget.length(ROWS, left)
            assert length >= fits
            left -= length
            if left <= 0:
                break
        assert step < num_steps
        assert device.budget.length(ROWS, 100) == MIN_LEN, "a new queue"
    device.budget.length(ROWS, num_waiting)
    assert device.budget.length(0, num_waiting) == 4096
    assert device.budget.length(ROWS, 100) == MIN_LEN, "what waited was computed where nothing decoded"


def test_where_any_chunk_takes_long_it_is_worth_that():
    """In an MoE layer a few tokens choose nearly all experts. Shorter chunks would read them more often."""
    device = Device(0.003, 14.5e-6, floor_s=0.0155)
    worth = (FLOORS - 1) * 0.0185 / 14.5e-6
    device.run(100)
    lengths = sorted(device.budget.length(ROWS, 1) for _ in range(2))
    assert lengths[0] == pytest.approx(0.75 * worth, rel=0.02), "so that a change would be seen"
    assert lengths[-1] == pytest.approx(worth, rel=0.02)
    device.floor_s = 0.0
    assert device.run(100) == pytest.approx(device.fits, rel=0.02)
    rng = random.Random(3)
    device = Device(0.003, 14.5e-6)
    for turn in range(600):
        device.floor_s = 0.0155 * rng.uniform(0.95, 1.05) + (0.1 if turn % 90 == 89 else 0.0)
        device.run(1)
    assert device.budget.floor.seconds == pytest.approx(0.0185, rel=0.1), "also where times differ"


def test_where_chunks_add_no_weights_noise_makes_them_no_longer():
    device, rng, lengths = Device(0.006, 17e-6), random.Random(4), []
    for turn in range(2_000):
        device.floor_s = 0.006 * rng.uniform(-0.1, 0.1) + (0.05 if turn % 200 == 199 else 0.0)
        device.run(1, num_waiting=rng.choice([1, 1, 1, 40_000]))
        lengths.append(device.budget._fitting)
    assert max(lengths[100:]) < 1.35 * device.fits


def test_rows_that_decode_and_chunks_fit_into_a_step_together():
    """Where rows fill a step alone, prompts go on beside them, few tokens at a time."""
    rng = random.Random(3)
    for _ in range(500):
        most, num_rows = rng.randrange(MIN_LEN, 300), rng.randrange(1, 400)
        device = Device(rng.choice([1e-4, 1.0]), rng.choice([1e-6, 1e-3]), rng.choice([0.0, 0.1]), most)
        device.run(rng.randrange(40))
        length = device.budget.length(num_rows, rng.choice([1, 10_000_000]))
        assert MIN_LEN <= length
        assert num_rows + length <= max(most, num_rows + MIN_LEN)
    assert ChunkBudget(8).length(ROWS, 1) == 8


def test_times_are_those_of_late():
    device = Device(0.01, 0.0001)
    device.run(200)
    device.budget.decoded(0.05)
    assert device.budget.decode_s == pytest.approx(0.01 + WEIGHT * 0.04), "one stray step moves little"
    before = device.run(1)
    device.budget.mixed(before, 1.0, 0.0)
    assert device.budget.length(ROWS, 1) >= before // 2, "likewise"
    assert device.run(100) == pytest.approx(device.fits, abs=2)


def test_a_very_long_queue_is_computed_by_chunks_of_one_length():
    """Not by shorter ones when as many steps are over as a queue of fewer prompts takes."""
    budget, left, lengths = ChunkBudget(4096), 250_000, []
    while left > 0:
        lengths.append(budget.length(ROWS, left))
        left -= lengths[-1]
    assert len(set(lengths)) == 1
    assert 0.99 * LARGEST * 4096 < lengths[0] + ROWS <= LARGEST * 4096


@pytest.mark.parametrize("num_rows", [1, 255, 1024, 2047, 2048, 4096])
def test_steps_of_a_very_long_queue_have_graphs_by_default(num_rows):
    """With their decode rows: steps of more rows than any graph has are launched kernel by kernel."""
    for most, in_graphs in ((GPU_NUM_TOKENS, MAX_ROWS), (MOE_GPU_NUM_TOKENS, MAX_EXPERT_ROWS)):
        assert num_rows + ChunkBudget(most).length(num_rows, 10_000_000) <= max(in_graphs, num_rows + FIRST_LEN)


def test_steps_of_a_very_long_queue_keep_their_graphs_while_its_sequences_begin_to_decode():
    """And the queue is drained as fast as these allow."""
    budget, left, num_rows = ChunkBudget(GPU_NUM_TOKENS), 256_000, 1
    while left > 0:
        length = budget.length(num_rows, left)
        assert min(0.97 * MAX_ROWS, num_rows + left) <= num_rows + length <= MAX_ROWS
        left, num_rows = left - length, min(num_rows + 2, 256)


@pytest.mark.parametrize("num_gone", [70_000, 400_000, (1 << 64) - 1])
def test_a_queue_that_goes_away_leaves_no_longer_chunks(num_gone):
    """As of a router whose clients give up. What comes after it gets the chunks of a queue of its own length."""
    device = Device(0.010, 0.0001)
    fits = device.run(100)
    for num_waiting, least, most in ((3_000, fits, fits), (30_000, 30_000 / DRAIN_STEPS, 32_000 / DRAIN_STEPS)):
        device.budget.length(0, 1)
        assert device.budget.length(ROWS, num_gone) > 1_000
        assert least <= device.budget.length(ROWS, num_waiting) <= most


@dataclass(frozen=True)
class Costs:
    """A step's, in seconds: weights are read or rows multiplied, whichever takes longer, and rows attend."""

    weights: float
    token: float
    attending: float
    fixed: float

    def step_s(self, num_rows, num_tokens):
        return max(self.weights, self.token * (num_rows + num_tokens)) + self.attending * num_rows + self.fixed


LLAMA_8B = Costs(4.9e-3, 24e-6, 50e-6, 1e-3)  # about those of an H100, and of an H200
FLOAT8_32B = Costs(7.6e-3, 62e-6, 70e-6, 2e-3)
PROMPT_LEN, ANSWER_LEN, MOST = 1024, 128, 4096


class MoeLoad:
    """About Qwen3.5-35B-A3B on an H200: some rows read some experts, any chunk reads nearly all."""

    MEASURED = ((0, 3.2e-3), (1, 3.2e-3), (16, 8.8e-3), (64, 16.6e-3), (256, 26.2e-3))  # rows and seconds

    def step_s(self, num_rows, num_tokens):
        (few, few_s), (more, more_s) = next(
            pair for pair in zip(self.MEASURED, self.MEASURED[1:], strict=False) if num_rows <= pair[1][0]
        )
        decode_s = few_s + (more_s - few_s) * (num_rows - few) / (more - few)
        return max(decode_s, 18.5e-3) + 14.5e-6 * num_tokens if num_tokens else decode_s


def closed_loop(length, costs, num_clients, budget=None, num_turns=3):
    """(tokens a second, 99th percentile of gaps) of clients that ask so often, as soon as they are answered."""
    now, num_emitted, gaps = 0.0, 0, []
    waiting = deque([PROMPT_LEN, turn] for turn in [num_turns] * num_clients)
    running = []  # [tokens left, when the last came, turns left]
    while waiting or running:
        num_rows, room = len(running), 0
        num_waiting = sum(left for left, _ in waiting)
        if num_waiting:
            room = length(num_rows, num_waiting)
        num_tokens, started = 0, []
        while waiting and num_tokens < room:
            part = min(waiting[0][0], room - num_tokens)
            num_tokens += part
            waiting[0][0] -= part
            if not waiting[0][0]:
                started.append(waiting.popleft()[1])
        took = costs.step_s(num_rows, num_tokens)
        now += took
        if budget is not None and num_rows:
            budget.mixed(num_tokens, took, 1e-3) if num_tokens else budget.decoded(took)
        num_emitted += num_rows + len(started)
        gaps += [now - last for _, last, _ in running]
        running = [[left - 1, now, turns] for left, _, turns in running]
        waiting.extend([PROMPT_LEN, turns - 1] for left, _, turns in running if not left and turns > 1)
        running = [item for item in running if item[0]] + [[ANSWER_LEN - 1, now, turns] for turns in started]
    return num_emitted / now, sorted(gaps)[int(0.99 * len(gaps))]


@pytest.mark.parametrize("costs", [LLAMA_8B, FLOAT8_32B], ids=["8B", "32B in float8"])
@pytest.mark.parametrize("num_clients", [1, 4, 16, 64, 256])
def test_clients_that_wait_for_each_other_get_the_rate_of_prompts_first(num_clients, costs):
    """And their gaps are at most two thirds as long. A worker begins with nothing known of its device."""
    budget = ChunkBudget(MOST)
    rate, gap = closed_loop(budget.length, costs, num_clients, budget)
    rate_first, gap_first = closed_loop(lambda num_rows, _: 2 * MOST - num_rows, costs, num_clients)
    assert rate > 0.97 * rate_first
    assert gap <= (0.67 if num_clients >= 16 else 1.01) * gap_first


@pytest.mark.parametrize(
    ("num_clients", "most"),
    [*((num, MOE_GPU_NUM_TOKENS) for num in (1, 4, 8, 16, 64, 256)), *((num, MOST) for num in (1, 4, 8, 16, 64))],
)
def test_clients_of_an_moe_layer_get_most_of_the_rate_of_prompts_first(num_clients, most):
    """With chunks that read all weights for a few tokens eight clients got a third of it, and sixteen two thirds.

    By default, and of smaller steps; of these 256 clients get 0.898, since their rows have a share.
    """
    budget, num_turns = ChunkBudget(most), 12 if num_clients <= 16 else 3
    rate, gap = closed_loop(budget.length, MoeLoad(), num_clients, budget, num_turns)
    longest = MOE_GPU_NUM_TOKENS
    rate_first, _ = closed_loop(lambda num_rows, _: longest - num_rows, MoeLoad(), num_clients, None, num_turns)
    assert rate > (0.9 if num_clients >= 64 else 0.7) * rate_first
    assert gap < (0.030 if num_clients <= 16 else 0.090)


def test_an_engine_asks_for_its_rows_and_for_all_prompts_that_wait(monkeypatch):
    """Those that run, and those in line; drafts are rows."""
    engine = toy_engine(k=2, chunk_len=12, max_num_sequences=3, scheduling="sync")
    asked, length = [], engine.engine.budget.length
    monkeypatch.setattr(engine.engine.budget, "length", lambda *given: asked.append(given) or min(length(*given), 5))
    engine.submit(request_of([1, 2, 3], max_tokens=30, ignore_eos=True))
    engine.step()
    assert asked == [(0, 3)]
    for prompt in ([4] * 9, [5] * 7, [6] * 8):
        engine.submit(request_of(prompt, max_tokens=30, ignore_eos=True))
    engine.step()
    engine.step()
    assert asked[1:] == [(3, 9 + 7 + 8), (3, 4 + 7 + 8)], "the last of them has no slot yet"


def test_prompts_that_wait_elsewhere_count_until_as_many_tokens_were_computed(monkeypatch):
    """A router sends few prompts at a time, however many wait there."""
    engine = toy_engine(k=2, chunk_len=12, max_num_sequences=3, scheduling="sync")
    asked, length = [], engine.engine.budget.length
    monkeypatch.setattr(engine.engine.budget, "length", lambda *given: asked.append(given) or min(length(*given), 5))
    engine.submit(request_of([1, 2, 3], max_tokens=30, ignore_eos=True))
    engine.step()
    engine.engine.num_queued_tokens = 12
    engine.submit(request_of([4] * 11, max_tokens=30, ignore_eos=True))
    for _ in range(3):
        engine.step()
    assert asked[1:] == [(3, 11 + 12), (3, 6 + 7), (3, 1 + 2)]
    assert engine.engine.num_queued_tokens == 1
    engine.submit(request_of([5] * 4, max_tokens=30, ignore_eos=True))
    engine.step()
    assert engine.engine.num_queued_tokens == 0, "never less"


def test_prompts_that_wait_elsewhere_are_forgotten_once_none_comes(monkeypatch):
    """They were cancelled, or others compute them; else a prompt computed again would count as the first of many."""
    engine = toy_engine(k=2, chunk_len=12, max_num_sequences=2, scheduling="sync")
    asked, length = [], engine.engine.budget.length
    monkeypatch.setattr(engine.engine.budget, "length", lambda *given: asked.append(given) or length(*given))
    for prompt in ([1, 2, 3], [4] * 5):
        engine.submit(request_of(prompt, max_tokens=30, ignore_eos=True))
        engine.step()
    engine.engine.num_queued_tokens = 1000
    engine.submit(request_of([5] * 7, max_tokens=30, ignore_eos=True))
    engine.step()
    assert engine.engine.num_queued_tokens == 1000, "a prompt waits for a slot"
    while len(asked) < 3:
        engine.step()
    assert asked[2] == (3, 7 + 1000)
    engine.step()
    assert engine.engine.num_queued_tokens == 0


def test_a_worker_computes_as_many_prompt_tokens_a_second_as_beside_its_decode_rows(monkeypatch):
    """Their time counts, too, because prompts wait for it; and such a step is full when it has its share."""
    engine = toy_engine(k=0, chunk_len=64, max_num_sequences=20, num_blocks=800, scheduling="sync")
    monkeypatch.setattr(engine.engine.runner.meter, "durations_s", lambda _: (0.01, 0.05))
    monkeypatch.setattr(engine.engine.budget, "mixed", lambda *_: None)  # so that chunks get no longer
    for at in range(6):
        engine.submit(request_of([at] * 64, max_tokens=1))
        engine.step()
    assert engine.engine.full_tokens_per_s() == pytest.approx(64 / 0.05)
    engine.submit(request_of([2], max_tokens=90, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.engine.budget._fitting = 20.0  # more than half of its share, and less than half of a step
    for at in range(6, 16):
        engine.submit(request_of([at] * 64, max_tokens=1))
    for _ in range(20):
        engine.step()
    assert engine.engine.full_tokens_per_s() == pytest.approx(20 / 0.05)


def test_the_rate_is_known_beside_many_decode_rows(monkeypatch):
    """They leave a long queue's prompts less than half of what these have beside a single one."""
    engine = toy_engine(k=0, chunk_len=128, max_num_sequences=60, num_blocks=4000, scheduling="sync")
    monkeypatch.setattr(engine.engine.runner.meter, "durations_s", lambda _: (0.01, 0.05))
    monkeypatch.setattr(engine.engine.budget, "mixed", lambda *_: None)
    for _ in range(50):
        engine.submit(request_of([2], max_tokens=90, ignore_eos=True))
    for _ in range(3):
        engine.step()
    assert engine.engine.full_tokens_per_s() == 0.0
    engine.engine.budget._fitting = 1.0
    engine.engine.num_queued_tokens = 1 << 20
    for at in range(6):
        engine.submit(request_of([at] * 64, max_tokens=1))
    for _ in range(8):
        engine.step()
    assert engine.engine.full_tokens_per_s() == pytest.approx(MIN_LEN / 0.05)


@pytest.mark.parametrize("num_decode_rows", [0, 1, 60, 1023, 2047, 2048, 4000, 5000])
@pytest.mark.parametrize("fitting", [1, 300, 3000])
@pytest.mark.parametrize("most", [8, 256, 4096])
def test_a_full_step_has_what_any_number_of_prompts_would_get(most, fitting, num_decode_rows):
    """Else a short prompt's step would count as full, and its rate would be far too low, or none would count."""
    budget = ChunkBudget(most)
    budget._fitting = float(fitting)
    full_len = budget.full_len(num_decode_rows)
    assert 0.95 * full_len <= budget.length(num_decode_rows, 1 << 40) <= full_len
