"""What the router says a worker has cached of a prompt, of a model with state, is what the worker finds.

The router's policy and index, fed by the logs of three workers' schedulers, in virtual time: prompts that begin alike,
turns of chats, and prompts again, while others are computed; with room for all checkpoints, and with little.
"""

import random

import pytest

from baton.core.block_hash import block_hashes
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence
from baton.kvcache.allocator import BlockAllocator
from baton.kvcache.block_log import BlockLog
from baton.kvcache.prefix_index import PrefixIndex
from baton.kvcache.state_checkpoints import StateCheckpoints
from baton.tests.router.test_least_cost import BLOCK, Table

pytestmark = pytest.mark.fast

NUM_SLOTS = 8
STEP_S = 0.05


class Worker:
    """A scheduler, and the steps of a worker that ends a prompt with its first token."""

    def __init__(self, num_checkpoints, num_blocks, interval):
        self.log = BlockLog()
        slots = range(NUM_SLOTS, NUM_SLOTS + num_checkpoints)
        checkpoints = StateCheckpoints(slots, self.log, interval=interval)
        index = PrefixIndex(self.log, checkpoints)
        allocator = BlockAllocator(num_blocks, BLOCK, index, num_state_slots=NUM_SLOTS)
        self.scheduler = Scheduler(allocator, num_slots=NUM_SLOTS)

    def add(self, request):
        names = block_hashes(request.prompt_token_ids, model="m", tenant="", block_size=BLOCK, with_mtp=False)
        sequence = Sequence(request=request, checker=None, draft_cap=0, submitted_s=0.0, block_hashes=names)
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        self.scheduler.give_blocks()
        self.scheduler.give_slots()
        for sequence, chunk in self.scheduler.chunks(2048):
            sequence.num_computed = chunk.end
            self.scheduler.name_blocks(sequence, sequence.table, chunk.start, chunk.end, chunk.keep_in)
            if not sequence.num_left:
                self.scheduler.remove(sequence)()


class Clients:
    """Prompts: a third begin as others of their group do, a third go on with a chat, a third were asked before."""

    def __init__(self, seed):
        self._rng = random.Random(seed)
        self._groups = [self._tokens(400) for _ in range(12)]
        self._chats = [self._tokens(150) for _ in range(12)]
        self._asked = [self._tokens(300) for _ in range(4)]

    def _tokens(self, length):
        return tuple(self._rng.randrange(5000) for _ in range(length))

    def prompt(self, at):
        if at % 3 == 0:
            return self._rng.choice(self._groups) + self._tokens(self._rng.randrange(20, 200))
        if at % 3 == 1:
            chat = self._rng.randrange(len(self._chats))
            self._chats[chat] = (self._chats[chat] + self._tokens(60))[-1500:]
            return self._chats[chat]
        if self._rng.random() < 0.3:
            self._asked.append(self._tokens(self._rng.randrange(20, 600)))
        return self._rng.choice(self._asked[-12:])


def run(num_requests, *, num_checkpoints, num_blocks, steps_between, interval):
    """(predicted, found) tokens of each request; a log's changes are heard a step late."""
    table, clients = Table(3, 1), Clients(num_requests)
    workers, naming = {}, {"with_checkpoints": True, "checkpoint_interval": interval}
    for at in range(3):
        table.beat(f"p{at}", naming=naming)
        workers[f"p{at}"] = Worker(num_checkpoints, num_blocks, interval)
    asked = []
    for at in range(num_requests):
        request = GenerationRequest(
            key=AttemptKey(f"{at}", 1), prompt_token_ids=clients.prompt(at), sampling=SamplingParams(max_tokens=1),
            deadline_s=1e9,
        )  # fmt: skip
        pair = table.pick(request)
        asked.append((pair.expected_cached_len, workers[pair.prefill.state.worker_id].add(request)))
        for _ in range(steps_between):
            for name, worker in workers.items():
                heard = worker.log.since(table.index.version(table.incarnation(name)))
                worker.step()
                for change in heard:
                    assert table.index.apply(table.incarnation(name), change)
            table.clock.advance(STEP_S)
            for name in workers:
                table.beat(name, naming=naming)
    while any(worker.scheduler.sequences() for worker in workers.values()):
        for worker in workers.values():
            worker.step()
    return [(predicted, sequence.num_cached) for predicted, sequence in asked]


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_checkpoints", "num_blocks", "steps_between", "interval"),
    [
        (256, 8192, 1, 0),
        (24, 8192, 1, 0),
        (24, 400, 1, 0),
        (24, 400, 4, 0),
        (1024, 8192, 1, 128),
        (96, 8192, 1, 128),
        (48, 400, 4, 128),
    ],
)
def test_what_is_predicted_is_found(num_checkpoints, num_blocks, steps_between, interval):
    options = {"num_blocks": num_blocks, "steps_between": steps_between, "interval": interval}
    made = run(1000, num_checkpoints=num_checkpoints, **options)
    assert sum(found > 0 for _, found in made) > 500
    assert sum(predicted == found for predicted, found in made) >= (1000 if num_checkpoints >= 256 else 990)
