"""Jobs for a GPU in any order: layers arrive, flags run out, layers are asked for again, attempts are stopped."""

import random
from types import SimpleNamespace

import pytest

from baton.core.requests.request import AttemptKey
from baton.kvcache.geometry import PoolGeometry
from baton.kvtransfer.flag_page import FlagPage
from baton.kvtransfer.receiver.device_jobs import SLOT_WORDS, DeviceJobs
from baton.tests.kvtransfer.conftest import make_layout
from baton.tests.kvtransfer.kept import latent, state

LAYOUT = make_layout(num_layers=1, more=(latent(12), state(2, 4), latent(12), state(2, 4)))
MAX_TURNS = 3000


class Transfers:
    """Transfers into pools whose kernels end, and whose layers come and turn out to be corrupt, as `rng` says."""

    def __init__(self, rng, num_transfers, num_flags, num_ranks):
        self.rng = rng
        self.memory = memoryview(bytearray(FlagPage.num_bytes(num_flags, SLOT_WORDS)))
        self.page = FlagPage(self.memory, SLOT_WORDS)
        self.jobs = DeviceJobs(PoolGeometry(LAYOUT, 64, num_state_slots=4), self.page, num_ranks)
        self.absent, self.verified = {}, {}  # layers by attempt
        self.running = []  # launches
        self.asked = {}  # layers of each attempt whose jobs are open
        self.stopped = set()
        for number in range(num_transfers):
            attempt = AttemptKey(f"r{number}", 1)
            self.absent[attempt], self.verified[attempt] = set(range(LAYOUT.num_layers)), set()
            self.asked[attempt] = set()
            coverage = SimpleNamespace(is_complete=lambda attempt=attempt: not self.absent[attempt])
            incoming = SimpleNamespace(
                attempt=attempt, incoming_id=number, prompt_len=21, data_path="nvlink", coverage=coverage
            )
            assert self.jobs.begin(incoming, has_digest=True)

    def arrive(self):
        attempts = [attempt for attempt, layers in self.absent.items() if layers and attempt not in self.stopped]
        if attempts:
            attempt = self.rng.choice(attempts)
            layer = self.rng.choice(sorted(self.absent[attempt]))
            self.absent[attempt].remove(layer)
            assert self.jobs.complete(attempt, layer)

    def ask(self):
        busy = {attempt for attempt, layers in self.asked.items() if layers}
        assert busy == {attempt for attempt in self.asked if self.jobs.is_busy(attempt)}
        for wanted in self.jobs.desired_state():
            attempt = wanted.attempt
            assert attempt not in self.stopped
            assert attempt not in busy or not self.absent[attempt], "one round at a time while layers are to come"
            assert len({LAYOUT.layers[layer] for layer in wanted.layers}) == 1
            assert wanted.rank or not self.asked[attempt] & {*wanted.layers}, "each layer once"
            self.asked[attempt] |= {*wanted.layers}
            self.running.append(wanted)
        assert len({wanted.flag for wanted in self.running}) == len(self.running)

    def end_kernel(self):
        if self.running:
            wanted = self.running.pop(self.rng.randrange(len(self.running)))
            digests = [0] * len(wanted.layers)
            FlagPage.raise_flag(self.memory, SLOT_WORDS, wanted.flag, wanted.sequence, digests)

    def answer(self):
        for number, layer, _ in self.jobs.answers():
            attempt = AttemptKey(f"r{number}", 1)
            self.asked[attempt].remove(layer)
            if attempt not in self.stopped and self.rng.random() < 0.2:
                self.absent[attempt].add(layer)  # corrupt: it is written again
            else:
                self.verified[attempt].add(layer)

    def stop(self):
        if self.rng.random() < 0.1 and len(self.asked) > 1:
            attempt = self.rng.choice(list(self.asked)[1:])
            self.jobs.stop(attempt)
            self.stopped.add(attempt)

    def run(self):
        steps = [self.arrive, self.arrive, self.ask, self.end_kernel, self.answer, self.stop]
        for _ in range(MAX_TURNS):
            self.rng.choice(steps)()
            left = [attempt for attempt in self.asked if attempt not in self.stopped]
            if not self.running and all(len(self.verified[attempt]) == LAYOUT.num_layers for attempt in left):
                break
        else:
            pytest.fail("a layer is never verified")
        self.answer()
        assert not self.page.num_claimed
        for attempt in self.asked:
            assert not self.jobs.is_busy(attempt)
            self.jobs.end(attempt)


@pytest.mark.fast
@pytest.mark.parametrize(("num_flags", "num_ranks"), [(1, 1), (2, 1), (2, 2), (5, 2), (64, 4)])
@pytest.mark.parametrize("seed", range(20))
def test_every_layer_is_verified_whatever_ends_first(num_flags, num_ranks, seed):
    rng = random.Random(seed)
    Transfers(rng, rng.randrange(1, 6), num_flags, num_ranks).run()
