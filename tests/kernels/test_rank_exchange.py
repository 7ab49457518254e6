"""Exchanges between ranks: the kernel in the interpreter, each rank a process, against sums and parts in torch."""

import mmap
import multiprocessing
import random
import traceback

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels import rank_exchange, rank_exchange_triton
from baton.kernels.rank_exchange import SLOT_BYTES, Mailbox, mailbox_bytes, sum_parts_reference
from baton.kernels.tiles import wide_dtype
from baton.tests.kernels.harness import Guards, same_bits

ANSWER_S = 120.0


class Ranks:
    """As many processes, forked, whose mailboxes are memory that all of them have at the same addresses."""

    def __init__(self, size):
        self.size = size
        self._maps = [mmap.mmap(-1, mailbox_bytes(size)) for _ in range(size)]
        self.memories = [torch.frombuffer(each, dtype=torch.uint8) for each in self._maps]
        self.addresses_R = torch.tensor([memory.data_ptr() for memory in self.memories])
        context = multiprocessing.get_context("fork")
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            self._processes.append(context.Process(target=self._serve, args=(rank, theirs), daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)

    def mailbox(self, rank):
        return Mailbox.of(rank, self.memories[rank], self.addresses_R)

    def _serve(self, rank, pipe):
        torch.set_num_threads(1)
        while (job := pipe.recv()) is not None:
            try:
                pipe.send(job[0](self.mailbox(rank), *job[1]))
            except BaseException:  # noqa: BLE001  the test shows it
                pipe.send(traceback.format_exc())

    def start(self, rank, work, *arguments):
        self._pipes[rank].send((work, arguments))

    def answer(self, rank):
        assert self._pipes[rank].poll(ANSWER_S), f"rank {rank} does not answer"
        found = self._pipes[rank].recv()
        assert not isinstance(found, str), found
        return found

    def run(self, work, *arguments):
        for rank in range(self.size):
            self.start(rank, work, *arguments)
        return [self.answer(rank) for rank in range(self.size)]

    def close(self):
        for process in self._processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def groups():
    made = {}

    def group_of(size):
        if size not in made:
            made[size] = Ranks(size)
        return made[size]

    yield group_of
    for each in made.values():
        each.close()


def values_of(rank, shape, dtype, seed):
    """What a rank has; numbers whose sum depends on its order."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        scale = torch.exp(8 * torch.rand(shape, generator=generator, dtype=torch.float64))
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def call_all(mailbox, calls):
    """Sums and gathers, one after the other; what each returned."""
    found = []
    for kind, shape, dtype, seed in calls:
        guards = Guards()
        x = guards.copy(values_of(mailbox.rank, shape, dtype, seed))
        operation = rank_exchange.all_sum if kind == "sum" else rank_exchange.all_gather
        found.append(operation(x, mailbox).numpy(force=True) if dtype != torch.bfloat16 else
                     operation(x, mailbox).view(torch.int16).numpy())  # fmt: skip
        guards.check()
    return found


def expected(size, kind, shape, dtype, seed):
    parts_R = torch.stack([values_of(rank, shape, dtype, seed) for rank in range(size)])
    return sum_by_hand(parts_R) if kind == "sum" else parts_R


def sum_by_hand(parts_R):
    """Value by value, in the order that is promised."""
    wide = [part.to(wide_dtype(parts_R.dtype)) for part in parts_R]
    while len(wide) > 1:
        wide = [wide[index] + wide[index + 1] for index in range(0, len(wide), 2)]
    return wide[0].to(parts_R.dtype)


def check_calls(ranks, calls):
    for found in ranks.run(call_all, calls):
        for values, call in zip(found, calls, strict=True):
            wanted = expected(ranks.size, *call)
            values = torch.from_numpy(values)
            assert same_bits(values.view(torch.bfloat16) if wanted.dtype == torch.bfloat16 else values, wanted), call


@pytest.mark.parametrize("size", [2, 4, 8])
def test_calls_one_after_the_other(size, groups):
    """Of drawn shapes, dtypes and kinds, so that a half is used again while others still have the one before."""
    draw = random.Random(size)
    calls = []
    for seed in range({2: 10, 4: 6, 8: 2}[size]):
        kind = draw.choice(["sum", "sum", "gather"])
        dtypes = [torch.bfloat16, torch.float32, torch.float64]
        dtype = draw.choice(dtypes if kind == "sum" else [*dtypes, torch.int64, torch.int32, torch.bool])
        shape = draw.choice([(1,), (7,), (3, 5), (1, 4096), (2, 7168), (16, 2048), (33, 127)])
        calls.append((kind, shape, dtype, seed))
    check_calls(groups(size), calls)


def test_a_whole_slot_and_one_value_more(groups):
    num_values = SLOT_BYTES // 2
    check_calls(groups(2), [("sum", (num_values,), torch.bfloat16, 1), ("gather", (SLOT_BYTES,), torch.bool, 2)])
    mailbox = groups(2).mailbox(0)
    for operation in (rank_exchange.all_sum, rank_exchange.all_gather):
        with pytest.raises(KernelArgumentInvalid, match="a slot"):
            operation(torch.zeros(num_values + 1, dtype=torch.bfloat16), mailbox)
        with pytest.raises(KernelArgumentInvalid, match="a slot"):
            operation(torch.zeros(0), mailbox)
        with pytest.raises(KernelArgumentInvalid, match="contiguous"):
            operation(torch.zeros(4, 4).T[:2], mailbox)
    with pytest.raises(KernelArgumentInvalid, match="size"):
        mailbox_bytes(3)


def test_a_rank_waits_for_all_and_reads_what_they_stored_last(groups):
    """One rank is late, twice: what the other finds is of that call, not of the one before in that half."""
    ranks = groups(2)
    for seed in range(3):
        ranks.start(0, call_all, [("sum", (5, 64), torch.float32, seed)])
        assert not ranks._pipes[0].poll(0.2)
        ranks.start(1, call_all, [("sum", (5, 64), torch.float32, seed)])
        wanted = expected(2, "sum", (5, 64), torch.float32, seed)
        for rank in range(2):
            assert same_bits(torch.from_numpy(ranks.answer(rank)[0]), wanted)


def test_calls_have_two_halves_in_turn():
    """Or a rank that is ahead would write what another still reads."""
    ranks = Ranks(2)
    try:
        ranks.run(call_all, [("gather", (8,), torch.int64, seed) for seed in (1, 2, 3)])
        slots = [memory[-4 * SLOT_BYTES :].view(2, 2, SLOT_BYTES)[..., :64] for memory in ranks.memories]
        for half, seed in ((1, 3), (0, 2)):
            wanted = expected(2, "gather", (8,), torch.int64, seed)
            for memory in slots:
                assert torch.equal(memory[half].contiguous().view(torch.int64), wanted)
    finally:
        ranks.close()


def test_a_wait_for_a_rank_that_is_gone_can_be_ended():
    ranks = Ranks(2)
    try:
        ranks.start(0, call_all, [("sum", (3,), torch.float32, 1)])
        assert not ranks._pipes[0].poll(0.2)
        ranks.mailbox(0).release()
        ranks.answer(0)
    finally:
        ranks.close()


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_parts_gathered_otherwise(size, dtype):
    parts_R = torch.stack([values_of(rank, (3, 704), dtype, 7) for rank in range(size)])
    guards = Guards()
    total = guards.empty(3, 704, dtype=dtype)
    rank_exchange_triton.launch_sum(guards.copy(parts_R), total)
    guards.check()
    assert same_bits(total, sum_by_hand(parts_R))
    assert same_bits(sum_parts_reference(parts_R), sum_by_hand(parts_R))
    assert same_bits(rank_exchange.sum_parts(parts_R), sum_by_hand(parts_R))
