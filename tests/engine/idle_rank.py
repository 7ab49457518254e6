"""One rank of a group whose ranks hold different experts, in a process of its own, over random patterns of work.

Ranks attend for all sequences together, or each for its own alone.

A pattern is turns: a request comes, goes, or all that is there is read and nothing is launched; in between are steps of
some of the sequences and of some of the prompts. With as few rows as they have, a rank often holds none of the experts
that were chosen, and has to add its part of nothing all the same; or it has no row to attend for.
"""

import random
import zlib
from collections import Counter, deque
from pathlib import Path

import torch

from baton.bench.decode_bench.tp_group_rank import TPGroupRank
from baton.core.numerics import Numerics
from baton.core.requests.sampling import SamplingParams
from baton.engine.step.runner import Runner
from baton.engine.tp import decision, step_limit
from baton.engine.tp.rank_runners import Rank0Runner, RankRunner
from baton.kernels.moe import moe
from baton.kvcache.pool import KVPool
from baton.model.dealt_rows import DealtRows
from baton.model.loader import load_model
from baton.tests.engine.driver import Driver

NUM_SLOTS, NUM_DRAFTS, NUM_BLOCKS, BLOCK_SIZE = 4, 2, 64, 8
MAX_PROMPT_LEN, MAX_TOKENS = 30, 90
TURNS = ("come", "come", "go", "idle", *("step",) * 5)
HANG_S = 60.0  # of a step: so long it takes on no machine, however busy


class IdleRank(TPGroupRank):
    """See the module; after `meet` the others `follow` until rank 0 is told to `stop`."""

    def __init__(self, rank, size, path, dp_attention=False):
        super().__init__(rank, size, "cpu")
        self._path = Path(path)
        self._dp_attention = dp_attention
        self._decisions = self._num_decisions = 0
        self._passes = Counter()  # by whether this rank holds an expert that was chosen
        self._dealt = Counter()  # layers of passes by whether this rank has a row to attend for
        if size > 1:  # for as long as the process is there
            step_limit.MIN_LIMIT_S = HANG_S  # type: ignore[misc]
            self._watch()

    def play(self, seeds):
        """Rank 0: every pattern's tokens, by seed."""
        driver = self._driver
        with torch.inference_mode():
            return {seed: play(driver, seed) for seed in seeds}

    def lead(self):
        """Rank 0."""
        runner, pool = self._load()
        if self._channel is not None:
            runner = Rank0Runner(runner, self._channel)
        self._driver = Driver(runner, pool)

    def follow(self):
        """Another rank: until rank 0 stops."""
        runner, _ = self._load()
        with torch.inference_mode():
            RankRunner(runner, self._channel).run()

    def stop(self):
        """Rank 0: let the others go."""
        self._driver.runner.close()

    def seen(self):
        """What was decided, as a number, in how many decisions; passes with something for this rank, and without."""
        return (self._decisions, self._num_decisions), dict(self._dealt if self._dp_attention else self._passes)

    def _load(self):
        group = None if self._channel is None else self._channel.communicator
        options = {"dtype": torch.float64, "device": torch.device("cpu"), "numerics": Numerics.DEFAULT}
        cut = {"communicator": group, "expert_parallel": True, "dp_attention": self._dp_attention}
        model = load_model(self._path, with_mtp=True, random_seed=5, **options, **cut)
        pool = KVPool(model.kv_layout(BLOCK_SIZE), NUM_BLOCKS, model.device, rank=self._rank, size=self._size)
        limits = {"max_num_seqs": NUM_SLOTS, "num_draft_tokens": NUM_DRAFTS}
        return Runner(model, pool, communicator=group, **limits), pool

    def _watch(self):
        packed, held, gather = decision.pack_reference, moe.held_ids, DealtRows.shared

        def pack(*arguments):
            own_N = packed(*arguments)
            self._decisions = zlib.crc32(own_N.numpy().tobytes(), self._decisions)
            self._num_decisions += 1
            return own_N

        def held_ids(expert_TK, its):
            id_TK = held(expert_TK, its)
            self._passes[its is None or bool((id_TK < its.count).any())] += 1
            return id_TK

        def shared(dealt, x_OD):
            self._dealt[not dealt.is_idle] += 1
            return gather(dealt, x_OD)

        decision.pack_reference, moe.held_ids, DealtRows.shared = pack, held_ids, shared


def play(driver, seed):
    """(slot, tokens) of all that was read, in order; the driver is empty before and after."""
    draw = random.Random(seed)
    computing, decoding, in_flight, found = {}, [], deque(), []

    def read(num_left):
        while len(in_flight) > num_left:
            ticket, slots, chunks = in_flight.popleft()
            output = ticket.result()
            found.extend((slot, row.token_ids) for slot, row in zip(slots, output.decode, strict=True))
            found.extend((chunk.slot, made.token) for chunk, made in zip(chunks, output.chunks, strict=True))

    for _ in range(draw.randint(6, 20)):
        free = sorted({*range(NUM_SLOTS)} - {*computing, *decoding})
        match draw.choice(TURNS):
            case "come" if free:
                prompt = [draw.randrange(300) for _ in range(draw.randint(1, MAX_PROMPT_LEN))]
                sampling = SamplingParams(
                    temperature=draw.choice((0.0, 1.0)), seed=draw.randrange(9), max_tokens=MAX_TOKENS
                )
                driver.place(
                    free[0], prompt, sampling, draft_cap=draw.randint(0, NUM_DRAFTS), owner=draw.randrange(NUM_SLOTS)
                )
                computing[free[0]] = len(prompt)
            case "go" if computing or decoding:
                slot = draw.choice([*computing, *decoding])
                driver.release(slot)
                computing.pop(slot, None)
                decoding = [other for other in decoding if other != slot]
            case "step" if computing or decoding:
                slots = [slot for slot in decoding if draw.random() < 0.7 or not computing]
                chunks = []
                for slot in [slot for slot in computing if draw.random() < 0.6 or not slots]:
                    length = draw.randint(1, computing[slot])
                    chunks.append(driver.chunk(slot, length))
                    computing[slot] -= length
                ticket = driver.launch(slots, chunks=chunks, num_drafts=draw.randint(0, NUM_DRAFTS))
                in_flight.append((ticket, slots, chunks))
                ended = [slot for slot, left in computing.items() if left == 0]
                computing = {slot: left for slot, left in computing.items() if left}
                decoding += ended
            case _:
                read(0)
                driver.runner.drain()
        read(draw.randint(0, 2))
    read(0)
    for slot in [*computing, *decoding]:
        driver.release(slot)
    return found
