"""One fault, from the first stream to the last look: what a row of the table is carried out with.

A `FaultRun` starts streams, waits until requests are where the row wants them hit, notes where every one of them was at
that moment, and in the end has the checker look at all that was delivered and at what is still held.
"""

import asyncio
import contextlib
import itertools
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from baton.client import AsyncBatonClient
from baton.core.errors import BatonError
from baton.core.requests.sampling import SamplingParams
from baton.tests.e2e.checker import Ask, Clients, Delivery
from baton.tests.e2e.fleet import wait_until
from baton.tests.e2e.prompts import token_prompts

STATES = (
    "queued",  # at the router, for its turn
    "admitted",  # with workers, which hold nothing for it yet
    "reserving",  # blocks at the prefill worker, none at the decode worker
    "pushing",
    "committing",  # computed and pushed, not acknowledged
    "complete",  # verified, waits for a slot
    "preempted",
    "decoding",
    "finishing",  # its last tokens are under way
)
NUM_STREAMS, NUM_TOKENS = 10, 40
AIM_S = 60.0
RELEASE_S = 2 * 2.0 + 26.0  # two leases, and what a busy machine takes
MORE = {"num_fds": 8, "num_threads": 6, "num_tasks": 6}  # than at first: connections to peers' next lives


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault of the table.

    Attributes:
        number: in the matrix.
        name: of the fault.
        how: it is put in, and what is right; for the report.
        act: puts it in.
        aims: states in which it must hit requests.
        hits: workers that may be another incarnation afterwards.
        own: has a deployment of its own.
    """

    number: int
    name: str
    how: str
    act: Callable[["FaultRun"], Awaitable[None]]
    aims: tuple[str, ...]
    hits: tuple[str, ...] = ()
    own: bool = False

    def __str__(self):
        return f"{self.number:02d}-{self.name.replace(' ', '-')}"


@dataclass
class Campaign:
    """What all rows share.

    Attributes:
        histogram: by row, how many requests each fault hit in each state.
        bases: descriptors, threads and tasks of each incarnation when it first held nothing.
    """

    checker: object
    tokenizer: object
    histogram: dict[int, Counter] = field(default_factory=dict)
    bases: dict = field(default_factory=dict)
    num_deliveries: int = 0

    def asks(self, num, *, seed=0, max_len=150, max_tokens=NUM_TOKENS):
        """Greedy and sampled ones in turn."""
        prompts = token_prompts(self.tokenizer, 8 + num, seed=seed, max_len=max_len)[8:]
        prompts = [(*prompt, *range(300, 340)) for prompt in prompts]  # none so short that it has no state to be in
        return [
            Ask(
                tuple(prompt),
                SamplingParams(max_tokens=max_tokens, temperature=float(at % 2), seed=at, ignore_eos=True),
            )
            for at, prompt in enumerate(prompts)
        ]

    def table(self):
        """The histogram, as text."""
        lines = [f"{'fault':>6} " + " ".join(f"{state:>10}" for state in STATES)]
        total = Counter()
        for number, counts in sorted(self.histogram.items()):
            total.update(counts)
            lines.append(f"{number:>6} " + " ".join(f"{counts[state] or '.':>10}" for state in STATES))
        lines.append(f"{'all':>6} " + " ".join(f"{total[state]:>10}" for state in STATES))
        return "\n".join(lines)


class FaultRun:
    """See above.

    Args:
        row: the fault.
        fleet: where it is put; None if the row has its own.
        campaign: what it adds to.
    """

    def __init__(self, row, fleet, campaign):
        self.row, self.fleet, self.campaign = row, fleet, campaign
        self.deliveries = []
        self.hits = campaign.histogram.setdefault(row.number, Counter())
        self.epochs_before = {}
        self._tasks = {}
        self._names = itertools.count()
        self._clients = None
        self._asks = campaign.asks(NUM_STREAMS)

    async def begin(self):
        await self.fleet.ready()
        self.epochs_before = {name: worker.epoch for name, worker in self.fleet.workers.items()}
        self._clients = Clients(f"127.0.0.1:{self.fleet.router.port}", f"tenant-{self.row.number}")

    def use(self, clients):
        """Of a deployment of its own."""
        self._clients = clients

    # Streams

    def stream(self, num=NUM_STREAMS, asks=None, pause=None, clients=None, **changes):
        """Start so many; they run from now on."""
        asks = asks or self._asks
        started = []
        for ask in itertools.islice(itertools.cycle(asks), num):
            one = Delivery(f"f{self.row.number}-{next(self._names)}", ask, **changes)
            self._tasks[one] = asyncio.create_task((clients or self._clients).ask(one, pause))
            self.deliveries.append(one)
            started.append(one)
        return started

    async def over(self, deliveries=None):
        """Until those have ended, or all."""
        tasks = [self._tasks[one] for one in (self.deliveries if deliveries is None else deliveries)]
        await asyncio.gather(*tasks, return_exceptions=True)

    def disconnect(self, one):
        """Its client goes away."""
        self._tasks[one].cancel()

    @property
    def open_ids(self):
        return [one.name for one in self.deliveries if not one.is_over]

    # Moments

    def note(self, states):
        """A fault hits now: where every request is."""
        self.hits.update(state for state in states.values() if state in STATES)

    async def aim(self, state, least=1, renew=True):
        """Until so many requests are in a state; returns where all are. Streams are renewed while there are none."""
        end_s = time.monotonic() + AIM_S
        while True:
            states = await self.fleet.states(self.open_ids)
            if sum(found == state for found in states.values()) >= least:
                return states
            assert time.monotonic() < end_s, f"no request was {state}: {states}"
            if renew and len(self.open_ids) < 3:
                self.stream()
            await asyncio.sleep(0.005)

    async def hit(self, state, **how):
        """Aim, and note."""
        states = await self.aim(state, **how)
        self.note(states)
        return states

    async def strike(self, name, state, number=signal.SIGKILL, *, group=False):
        """A signal that a worker sends itself when a request is in a state there."""
        worker = self.fleet.workers[name]
        worker.order("strike", state=state, signal=int(number), group=group)
        await self.struck(name)

    async def struck(self, name):
        """Until a worker's strike has come; streams are renewed until then."""
        worker = self.fleet.workers[name]
        end_s = time.monotonic() + AIM_S
        while True:
            try:
                states = await asyncio.wait_for(worker.struck.get(), 0.2)
                break
            except TimeoutError:
                assert time.monotonic() < end_s, f"{name} had no request to be struck at"
                if len(self.open_ids) < 3:
                    self.stream()
        self.note({key: "admitted" if state == "attending" else state for key, state in states.items()})

    async def relaunch(self, name, **options):
        """After its death."""
        worker = self.fleet.workers[name]
        await worker.ended()
        self.fleet.launch(name, **options)

    @contextlib.asynccontextmanager
    async def admin(self):
        """A client of the router."""
        async with AsyncBatonClient(f"127.0.0.1:{self.fleet.router.admin_port}", timeout_s=20.0) as client:
            yield client

    # What must hold

    async def finish(self):
        """All invariants; then it serves as before."""
        await self.over()
        await self.fleet.ready()
        await self._released()
        after = self.stream(4)
        await self.over()
        assert all(one.reason for one in after), f"it does not serve any more: {[one.error for one in after]}"
        self.check()
        await self._released()
        for name, worker in self.fleet.workers.items():
            if name not in self.row.hits and name in self.epochs_before:
                assert worker.epoch == self.epochs_before[name], f"I5 {name} was not hit, and is another incarnation"
        assert await self.fleet.is_healthy(), "I5 a worker is not healthy"
        await self.close()

    def check(self):
        """What was delivered, and where faults hit."""
        self.campaign.checker.check(self.deliveries)
        self.campaign.num_deliveries += len(self.deliveries)
        missed = [state for state in self.row.aims if not self.hits[state]]
        assert not missed, f"the fault hit no request that was {missed}: {self.hits}"

    async def close(self):
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._clients is not None:
            await self._clients.close()

    async def _released(self):
        """I3."""
        end_s = time.monotonic() + RELEASE_S
        while left := await self.fleet.held():
            assert time.monotonic() < end_s, f"I3 held for nobody: {left}"
            await asyncio.sleep(0.1)
        bases = self.campaign.bases
        while left := [
            (name, kind, counts, bases[name, epoch])
            for (name, epoch), counts in (await self.fleet.resources()).items()
            for kind, most in MORE.items()
            if counts[kind] > bases.setdefault((name, epoch), counts)[kind] + most
        ]:
            assert time.monotonic() < end_s, f"I3 more than at first: {left}"
            await asyncio.sleep(0.2)


def errors_of(deliveries, kind=BatonError):
    """The errors of a kind among their ends."""
    return [one.error for one in deliveries if isinstance(one.error, kind)]


async def lost(fleet, name, timeout_s=30.0):
    """Until the router takes a worker for lost."""
    await wait_until(
        lambda: not any(m.alive for m in fleet.router.members.all() if m.state.worker_id == name),
        timeout_s,
        f"{name} lost",
    )
