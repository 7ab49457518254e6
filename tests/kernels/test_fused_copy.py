"""Many copies at once: any size and address, bytes beside a target stay, what depends on an order is refused."""

import random

import pytest
import torch

from baton.core.errors import KernelArgumentInvalid
from baton.kernels import fused_copy_triton
from baton.kernels.fused_copy import RunningCopies, fused_copy
from baton.kernels.implementation import Implementation

CPU = torch.device("cpu")
KINDS = [Implementation.TRITON, Implementation.REFERENCE]


def noise(num_bytes, seed=0):
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Arena:
    """Bytes with copies between places of them that do not touch."""

    def __init__(self, sizes, seed):
        chance = random.Random(seed)
        self.sources, self.targets, at = [], [], 0
        for size in sizes:
            at += chance.randrange(20)
            self.sources.append((at, size))
            at += size
        self.source = noise(at + 32, seed)
        at = 0
        for size in sizes:
            at += chance.randrange(20)
            self.targets.append((at, size))
            at += size
        self.target = noise(at + 32, seed + 1)
        self.wanted = self.target.clone()
        for (to, size), (begin, _) in zip(self.targets, self.sources, strict=True):
            self.wanted[to : to + size] = self.source[begin : begin + size]

    def pairs(self):
        return [
            (self.target[to : to + size], self.source[begin : begin + size])
            for (to, size), (begin, _) in zip(self.targets, self.sources, strict=True)
        ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_any_size_at_any_address(kind, seed):
    chance = random.Random(seed)
    sizes = [0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 100, 4095, 8193, 20_000] + [chance.randrange(300) for _ in range(10)]
    chance.shuffle(sizes)
    arena = Arena(sizes, seed)
    before = arena.source.clone()
    running = fused_copy(arena.pairs(), CPU, implementation=kind)
    assert torch.equal(arena.target, arena.wanted)
    assert torch.equal(arena.source, before)
    assert running.is_done
    running.wait(0)


def test_every_pair_of_places_within_a_vector():
    for apart in (0, 1, 3, 7, 8, 11, 15):
        for size in (1, 8, 9, 47):
            source, target = noise(96), noise(96, 1)
            wanted = target.clone()
            wanted[7 : 7 + size] = source[apart : apart + size]
            pairs = [(target[7 : 7 + size], source[apart : apart + size])]
            fused_copy(pairs, CPU, implementation=Implementation.TRITON)
            assert torch.equal(target, wanted), (apart, size)


@pytest.mark.fast
def test_other_dtypes_and_shapes():
    sources = [torch.arange(7), torch.randn(3, 5).bfloat16(), torch.randn(2).to(torch.float8_e4m3fn), torch.ones(4) > 0]
    targets = [torch.zeros_like(source) for source in sources]
    running = fused_copy(list(zip(targets, sources, strict=True)), CPU, implementation=Implementation.TRITON)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8))
    assert [pair[1] is source for pair, source in zip(running.pairs, sources, strict=True)] == [True] * 4


@pytest.mark.fast
@pytest.mark.parametrize("kind", KINDS)
def test_values_keep_their_order_in_another_shape(kind):
    sources = [torch.arange(6.0), torch.arange(6.0).view(3, 2), torch.tensor(4.0), torch.ones(1, 1, 2)]
    targets = [torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(1), torch.zeros(2)]
    fused_copy(list(zip(targets, sources, strict=True)), CPU, implementation=kind)
    assert [target.flatten().tolist() for target in targets] == [source.flatten().tolist() for source in sources]


@pytest.mark.fast
def test_a_call_holds_its_own_table():
    first = fused_copy([(torch.zeros(3), torch.ones(3))], CPU, implementation=Implementation.TRITON)
    second = fused_copy([(torch.zeros(4), torch.ones(4))], CPU, implementation=Implementation.TRITON)
    assert first.tables[0].data_ptr() != second.tables[0].data_ptr()
    assert first.tables[0].tolist() == [[first.pairs[0][0].data_ptr(), first.pairs[0][1].data_ptr(), 12]]
    with pytest.raises(AttributeError):
        first.pairs = ()


class Never:
    def query(self):
        return False


@pytest.mark.fast
def test_waiting_has_a_limit():
    running = RunningCopies(((torch.zeros(1), torch.ones(1)),), (), Never())
    assert not running.is_done
    with pytest.raises(TimeoutError, match="1 copies"):
        running.wait(0.01)


@pytest.mark.fast
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_copy(kind):
    same = torch.arange(5)
    assert fused_copy([], CPU, implementation=kind).pairs == ()
    assert fused_copy([(same, same), (same[:0], torch.zeros(0, dtype=torch.int64))], CPU, implementation=kind).is_done
    assert torch.equal(same, torch.arange(5))


def test_one_source_may_be_copied_to_many_and_neighbours_may_touch():
    memory = noise(64)
    source = memory[:16].clone()
    pairs = [(memory[16:32], memory[:16]), (memory[32:48], memory[:16]), (memory[48:], memory[:16])]
    fused_copy(pairs, CPU, implementation=Implementation.TRITON)
    assert torch.equal(memory, source.repeat(4))


MEMORY = torch.zeros(64, dtype=torch.uint8)


@pytest.mark.fast
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(MEMORY[:8], MEMORY[4:12])], r"pairs\[0\]: overlaps"),
        ([(MEMORY[:8], MEMORY[16:24]), (MEMORY[7:9], MEMORY[30:32])], r"pairs\[1\]: overlaps with the copy 0"),
        ([(MEMORY[:8], MEMORY[16:24]), (MEMORY[40:44], MEMORY[5:9])], r"pairs\[1\]: overlaps with the copy 0"),
        ([(MEMORY[40:44], MEMORY[:32]), (MEMORY[50:52], MEMORY[8:10])], "are to be copied"),
        ([(MEMORY[32:64], MEMORY[:32]), (MEMORY[8:10], torch.ones(2, dtype=torch.uint8))], "overlaps"),
        ([(MEMORY[:8], torch.zeros(1, dtype=torch.int64))], "int64 is to be copied"),
        ([(MEMORY[:8:2], MEMORY[8:12])], "target is not contiguous"),
        ([(MEMORY[:4], MEMORY[8:16:2])], "source is not contiguous"),
        ([(MEMORY[:8], torch.zeros(8, dtype=torch.uint8, device="meta"))], "source is on meta"),
        ([(MEMORY[:0], MEMORY[:0])] * 4097, "more than 4096"),
    ],
)
def test_what_does_not_fit_is_refused(pairs, message, kind):
    with pytest.raises(KernelArgumentInvalid, match=message):
        fused_copy(pairs, CPU, implementation=kind)
    assert not MEMORY.any()


def test_long_copies_are_steps_of_several_programs():
    source, target = noise(100_003), noise(100_003 + 16)
    at = (source.data_ptr() + 3 - target.data_ptr()) % 16
    table_N3 = torch.tensor([[target[at:].data_ptr(), source.data_ptr() + 3, 100_000]])
    before = target.clone()
    fused_copy_triton.launch(table_N3, 100_000)
    assert torch.equal(target[at : at + 100_000], source[3:])
    assert torch.equal(target[:at], before[:at])
    assert torch.equal(target[at + 100_000 :], before[at + 100_000 :])
