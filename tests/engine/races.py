"""A hunt for races in asynchronous decoding, and races to plant for it.

`hunt` runs many short requests of every kind through few slots and blocks, so that both change hands all the time, with
random pauses on the executor and on the host and result buffers that are overwritten once they were read. Whatever then
differs from a loop that computes one token at a time is a race.
"""

import contextlib
import functools
import random
import threading
import time

import numpy as np
import torch

from baton.engine.engine import Engine
from baton.engine.kv_offload import KVOffload
from baton.engine.sequence import Phase
from baton.engine.step import executor
from baton.engine.step.executor import ThreadExecutor
from baton.engine.step.host_future import HostFuture, ResultBuffers
from baton.engine.step.length_bounds import LengthBounds
from baton.engine.step.runner import Runner
from baton.tests.engine import reference
from baton.tests.engine.toy import ToyModel
from baton.tests.engine.toy_engine import EOS, request_of, toy_engine

MODEL = ToyModel()
POISON = -(1 << 40)


@functools.cache
def expected_tokens(prompt, params):
    return tuple(reference.generate(MODEL, prompt, params, (EOS,)))


def some_requests(rng, count):
    return [
        request_of(
            [rng.randrange(22) for _ in range(rng.choice((1, 3, 4, 7)))],
            k=rng.choice((0, 1, 3)),
            max_tokens=rng.choice((2, 3, 5, 9, 14)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(3),
            stop_token_ids=rng.choice(((), (1, 2, 3))),
        )
        for _ in range(count)
    ]


class Pauses:
    """Sleeps now and then, seeded."""

    def __init__(self, seed, longest_s):
        self._rng = random.Random(seed)
        self._longest_s = longest_s

    def __call__(self):
        if self._longest_s and self._rng.random() < 0.5:
            time.sleep(self._rng.random() * self._longest_s)


def poison(patch):
    give_back = ResultBuffers.give_back

    def give_back_poisoned(self, buffer):
        buffer.fill_(POISON)
        give_back(self, buffer)

    patch.setattr(ResultBuffers, "give_back", give_back_poisoned)


def pause_executor(patch, pause):
    do = executor._do

    def do_with_pauses(work, target):
        pause()
        error = do(work, target)
        pause()
        return error

    patch.setattr(executor, "_do", do_with_pauses)


def watch_blocks(patch, engine):
    """No block is given away while a step or a copy that is not over has it.

    Steps and copies of one engine happen in their order, so tokens alone would not tell; transfers do not wait for it.
    """
    runner, allocator, using = engine.runner, engine.scheduler.allocator, []
    launch, execute, release = runner.launch, runner.execute, allocator.release

    def launch_noted(step):
        slots = (*step.slots, *(chunk.slot for chunk in step.chunks))
        blocks = {block for slot in slots for block in runner._residents[slot].blocks}
        using.append((launch(step), blocks))
        return using[-1][0]

    def execute_noted(operation):
        ending = execute(operation)
        if ending is not None:
            using.append((ending, set(operation.blocks)))
        return ending

    def release_checked(table):
        using[:] = [item for item in using if not item[0].is_done]
        held = set().union(*(blocks for _, blocks in using))
        assert not held & set(table.blocks), "blocks are given away in use"
        release(table)

    patch.setattr(runner, "launch", launch_noted)
    patch.setattr(runner, "execute", execute_noted)
    patch.setattr(allocator, "release", release_checked)


PREEMPT = {"overcommit": True, "host_kv_bytes": 8 * 3 * 2 * 2 * 4 * 8, "preempt_at": (2, 7)}  # eight host blocks


def hunt(patch, *, seed=0, num_requests=24, longest_s=2e-3, plant=None, preempt=False):
    """Run and compare; returns the number of steps. `plant` is called with `patch` before the engine is made."""
    poison(patch)
    pause_executor(patch, Pauses(seed, longest_s))
    host_pause = Pauses(seed + 1, longest_s / 4)
    if plant is not None:
        plant(patch)
    rng = random.Random(seed)
    requests = some_requests(rng, num_requests)
    sizes = {"num_blocks": 12 if preempt else 16, "block_size": 4, "chunk_len": 5, "max_num_sequences": 3}
    engine = toy_engine(MODEL, k=3, **sizes, **(PREEMPT if preempt else {}))
    for layer in range(engine.pool.layout.num_layers):
        engine.pool.blocks(layer).fill_(torch.nan)
    watch_blocks(patch, engine)
    step = engine.step

    def step_with_pause():
        host_pause()
        step()

    patch.setattr(engine, "step", step_with_pause)
    results = engine.generate(requests)
    for request, result in zip(requests, results, strict=True):
        assert result.error is None
        assert result.token_ids == expected_tokens(request.prompt_token_ids, request.sampling)
        counts = result.counts
        assert counts.num_emitted_tokens == len(result.token_ids)
        assert sum(counts.num_accepted_at) == counts.num_accepted_tokens
    assert engine.engine.is_idle
    return engine.step_report().num_steps


# Races to plant: each is what a plausible slip would do.


def read_before_done(patch):
    """A result is looked at without waiting for it."""
    patch.setattr(HostFuture, "get", lambda self: self._tensor)


def one_result_buffer(patch):
    """All steps in flight write their results to the same place."""

    def take(self):
        if not self._free:
            self._free.append(torch.zeros(self._num_values, dtype=torch.int64))
        return self._free[0]

    patch.setattr(ResultBuffers, "take", take)
    patch.setattr(ResultBuffers, "give_back", lambda self, buffer: None)


def buffer_back_before_read(patch):
    """A result buffer is given back when its step is launched."""
    take = ResultBuffers.take

    def take_and_give_back(self):
        buffer = take(self)
        self._free.append(buffer)
        return buffer

    patch.setattr(ResultBuffers, "take", take_and_give_back)
    patch.setattr(ResultBuffers, "give_back", lambda self, buffer: buffer.fill_(POISON))


def shared_slots(patch):
    """The tensor of slots is filled anew for the next step while a step in flight has yet to read it."""
    batch_of = Runner._batch_of
    shared = torch.zeros(8, dtype=torch.int64)

    def batch_with_shared_slots(self, slots, num_drafts):
        batch = batch_of(self, slots, num_drafts)
        shared[: len(batch.slots)] = torch.tensor(batch.slots)
        return type(batch)(
            **{name: getattr(batch, name) for name in batch.__slots__ if name != "slots_B"},
            slots_B=shared[: len(batch.slots)],
        )

    patch.setattr(Runner, "_batch_of", batch_with_shared_slots)


def stale_batch(patch):
    """What is kept about a batch is taken for every later batch of the same slots, whoever is in them."""
    batch_of, kept = Runner._batch_of, {}

    def batch_from_memory(self, slots, num_drafts):
        return kept.setdefault((id(self), slots, num_drafts), batch_of(self, slots, num_drafts))

    patch.setattr(Runner, "_batch_of", batch_from_memory)


def length_in_place(patch):
    """The host writes the lengths it has just learned to the device, where the next step may be past them."""
    read = Engine._read

    def read_and_write(self, *, has_launched):
        read(self, has_launched=has_launched)
        time.sleep(4e-3)
        slots = [item.slot for item in self.scheduler.decoding()]
        least = self._bounds._least_N[slots] - len(self._flights)
        self.runner._table._numbers_NC[slots, 1] = torch.from_numpy(least)

    patch.setattr(Engine, "_read", read_and_write)


def first_token_from_the_host(patch):
    """The host writes the first token to the device once it has read it, as if the row did not decode until then.

    It does so with the next result: then the row has decoded, however late a busy machine reads and computes.
    """
    take, read = Engine._take_chunks, []

    def take_and_write(self, flight, output, now_s):
        for sequence, token_id in read:
            if sequence.slot is not None:
                self.runner._table._numbers_NC[sequence.slot, 0] = token_id
        published = take(self, flight, output, now_s)
        read[:] = [(item.sequence, item.token_ids[0]) for item in published]
        return published

    patch.setattr(Engine, "_take_chunks", take_and_write)


def decodes_before_its_first_token(patch):
    """A prompt's sequence decodes in the very step that ends its prompt, from what the slot held before."""
    write = Runner._write_sample

    def write_late(self, work):
        slots_F, work.slots_F = work.slots_F, None if work.slots_F is None else torch.zeros_like(work.slots_F)
        try:
            return write(self, work)
        finally:
            work.slots_F = slots_F

    patch.setattr(Runner, "_write_sample", write_late)


def bound_not_raised(patch):
    """The upper bound of lengths is left as it is while steps are in flight."""
    launch = LengthBounds.launch

    def launch_low(self, slots_B, most_B):
        launched = launch(self, slots_B, most_B)
        self._most_N[slots_B] -= most_B
        return launched

    def collect(self, launched, emitted_B):
        self._least_N[launched.slots_B] += emitted_B - 1
        self._most_N[launched.slots_B] += emitted_B

    patch.setattr(LengthBounds, "launch", launch_low)
    patch.setattr(LengthBounds, "collect", collect)


def bound_of_the_next(patch):
    """A late result moves the bounds of whoever has the slot now."""
    collect = LengthBounds.collect

    def collect_of_anyone(self, launched, emitted_B):
        collect(
            self, type(launched)(launched.slots_B, self._incarnation_N[launched.slots_B], launched.most_B), emitted_B
        )

    patch.setattr(LengthBounds, "collect", collect_of_anyone)


def freed_early(patch):
    """Slot and blocks are given back while a step in flight has them."""
    patch.setattr(Engine, "_last_step", lambda self, sequence: None)


def freed_early_but_noticed(patch):
    """The same, and what was to be waited for is not."""
    patch.setattr(Engine, "after", lambda self, ending, act: act())


def extra_tokens_kept(patch):
    """What a step made of a sequence that had ended before is taken for its own."""
    take = Engine._take_decode

    def take_all(self, flight, output, now_s):
        ended = [item for item in flight.decode if item.phase is Phase.ENDED]
        for item in ended:
            item.phase, item.checker._reason = Phase.RUNNING, None
        try:
            return take(self, flight, output, now_s)
        finally:
            for item in ended:
                item.phase = Phase.ENDED

    patch.setattr(Engine, "_take_decode", take_all)


def steps_overtake(patch):
    """Steps run beside each other instead of one after the other."""

    def give(self, work, target):
        done = executor._Done()

        def do():
            with torch.inference_mode():
                done.set(executor._do(work, target))

        threading.Thread(target=do, daemon=True).start()
        return done

    patch.setattr(ThreadExecutor, "_give", give)


def preempted_in_flight(patch):
    """A sequence gives its blocks away while a step has it."""
    patch.setattr(Engine, "runs", lambda self, sequence: False)
    patch.setattr(Engine, "_last_step", lambda self, sequence: None)


def freed_before_copied(patch):
    """Blocks are given away while they are being copied to the host."""
    patch.setattr(Engine, "after", lambda self, ending, act: act())


def copied_back_out_of_turn(patch):
    """What is on the host comes back before it is there."""
    submit = ThreadExecutor.submit

    def load_at_once(self, blocks, first, slot):
        with torch.inference_mode():
            for host_NX, pool_NX in self._layers:
                pool_NX.index_copy_(0, torch.tensor(blocks), host_NX[first : first + len(blocks)])
        return submit(self._executor, self._all_have_come, torch.zeros(1))

    patch.setattr(KVOffload, "load", load_at_once)


def room_for_the_least(patch):
    """Tables grow by what is certain, and not by what a step in flight may add."""

    def short_of_room(self, slots_B, most_B):
        wanted_B = np.minimum(self._least_N[slots_B] + most_B - 1, self._reach_N[slots_B])
        places = np.flatnonzero(wanted_B > self._limit_N[slots_B])
        return [(int(place), int(wanted_B[place])) for place in places]

    patch.setattr(LengthBounds, "short_of_room", short_of_room)


PLANTED = (
    read_before_done,
    one_result_buffer,
    buffer_back_before_read,
    shared_slots,
    stale_batch,
    length_in_place,
    first_token_from_the_host,
    decodes_before_its_first_token,
    bound_not_raised,
    freed_early,
    freed_early_but_noticed,
    extra_tokens_kept,
    steps_overtake,
)
PLANTED_IN_PREEMPTION = (preempted_in_flight, freed_before_copied, copied_back_out_of_turn, room_for_the_least)


def is_caught(make_patch, plant, *, num_rounds=25, preempt=False):
    """Whether some round of the hunt fails with the race planted."""
    for seed in range(num_rounds):
        with make_patch() as patch, contextlib.ExitStack():
            try:
                hunt(patch, seed=seed, plant=plant, longest_s=4e-3, preempt=preempt)
            except Exception as error:  # noqa: BLE001  whatever it breaks, it was noticed
                print(f"{plant.__name__}: round {seed}: {type(error).__name__}: {str(error)[:200]}")
                return True
    return False
