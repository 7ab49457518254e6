"""Thirty faults, one table, one test: every stream is replayed, everything held comes back, every state is hit.

`python -m pytest tests/e2e/test_thirty_faults.py -m slow -s` prints which states of requests the faults hit.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.tests.e2e.checker import Checker, Replay
from baton.tests.e2e.fault_run import STATES, Campaign, FaultRun
from baton.tests.e2e.fleet import Fleet
from baton.tests.e2e.thirty_faults import ROWS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NUM_THREADS = 64
CONFIG = {"max_num_seqs": 6}


class Stage:
    """The deployment that rows share. One that a row has left broken is put away."""

    def __init__(self):
        self.runner = asyncio.Runner()
        # One thread reads what each worker says; two deployments at once have more workers than a default pool threads.
        self.runner.get_loop().set_default_executor(ThreadPoolExecutor(NUM_THREADS))
        self.fleet = None

    async def ready(self):
        if self.fleet is None:
            self.fleet = Fleet(config=CONFIG)
            await self.fleet.start()
        return self.fleet

    async def clear(self):
        fleet, self.fleet = self.fleet, None
        if fleet is not None:
            await fleet.close()


@pytest.fixture(scope="module")
def stage():
    made = Stage()
    yield made
    made.runner.run(made.clear())
    made.runner.close()


@pytest.fixture(scope="module")
def campaign(load_tiny, tokenizer):
    made = Campaign(Checker(Replay(load_tiny(), tokenizer)), tokenizer)
    made.checker._replay.learn(made.asks(10))
    yield made
    print(f"\n{made.table()}\n{made.checker.num_replayed} streams replayed")


async def play(row, stage, campaign):
    run = FaultRun(row, None if row.own else await stage.ready(), campaign)
    try:
        if row.own:
            await row.act(run)
            run.check()
        else:
            await run.begin()
            await row.act(run)
            await run.finish()
    except BaseException:
        await stage.clear()
        raise
    finally:
        await run.close()


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_fault(stage, campaign, row):
    stage.runner.run(play(row, stage, campaign))


def test_every_state_was_hit(campaign):
    if len(campaign.histogram) < len(ROWS):
        pytest.skip("only some of the faults were put in")
    assert [row.number for row in ROWS] == list(range(1, 31))
    missed = [state for state in STATES if not any(hits[state] for hits in campaign.histogram.values())]
    assert not missed
