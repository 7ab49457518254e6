"""Memory that ranks share, without CUDA: all of them have it or none, and a call goes through it where it fits."""

import contextlib
import importlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from baton.kernels.dispatch_mode import DispatchMode
from baton.kernels.rank_exchange import SLOT_BYTES, mailbox_bytes
from baton.tests.kvtransfer.test_rank_pools import MODULE, FakeCuda

pytestmark = pytest.mark.fast
CPU = torch.device("cpu")
USER = "baton.engine.tp.shared_mailbox"


@pytest.fixture
def cuda(monkeypatch):
    """The stand-in, and the module that uses it."""
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, MODULE, fake.module())
    monkeypatch.delitem(sys.modules, USER, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    fake.user = importlib.import_module(USER)
    yield fake
    sys.modules.pop(USER, None)


class Meeting:
    """Bytes of all ranks, for ranks that are threads."""

    def __init__(self, size):
        self._barrier = threading.Barrier(size, timeout=30)
        self._said = [b""] * size

    def end_of(self, rank):
        def gather(data):
            self._said[rank] = data
            self._barrier.wait()
            heard = list(self._said)
            self._barrier.wait()
            return heard

        return gather


def open_all(fake, size):
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        waiting = [
            pool.submit(fake.user.open_mailbox, rank, size, CPU, meeting.end_of(rank)) for rank in range(size)
        ]  # fmt: skip
        return [each.result() for each in waiting]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.long
def test_each_rank_reaches_the_memory_of_all(size, cuda):
    found = open_all(cuda, size)
    memories = [mailbox.memory for mailbox, _ in found]
    for rank, (mailbox, why) in enumerate(found):
        assert (mailbox.rank, mailbox.size, why) == (rank, size, "")
        assert mailbox.addresses_R.tolist() == [memory.data_ptr() for memory in memories]
        assert mailbox.memory.numel() == mailbox_bytes(size)
        assert not mailbox.memory.any()
    assert len(cuda.opened) == size * (size - 1)


def test_one_that_does_not_reach_another_has_all_do_without(cuda, monkeypatch, caplog):
    """For the reason of the first of them; what was opened is closed."""
    turns = iter([True, True, False, True, True, True, True, True, True, True, True, True])
    lock = threading.Lock()

    def can_reach(device, uuid):
        with lock:
            return next(turns)

    monkeypatch.setattr(cuda.user, "can_reach", can_reach)
    found = open_all(cuda, 4)
    assert [mailbox for mailbox, _ in found] == [None] * 4
    (why,) = {why for _, why in found}
    assert "does not reach that of rank" in why
    assert not cuda.opened
    assert "NCCL alone" in caplog.text


@pytest.mark.parametrize("fault", ["short", "size", "unshared"])
def test_what_cannot_be_shared_is_told_by_all(fault, cuda, monkeypatch):
    if fault == "short":
        cuda.short = True
    elif fault == "unshared":
        failed = sys.modules[MODULE].CudaFailed

        def refuse(address, device):
            raise failed("cudaIpcGetMemHandle failed: cudaErrorInvalidValue")

        monkeypatch.setattr(cuda.user, "export", refuse)
    found = open_all(cuda, 3 if fault == "size" else 2)
    assert {mailbox for mailbox, _ in found} == {None}
    (why,) = {why for _, why in found}
    said = {"short": "beyond its memory", "size": "groups of 3", "unshared": "cudaIpcGetMemHandle"}
    assert said[fault] in why
    assert not cuda.opened


class Operations(DispatchMode):
    """Names of torch's operations meanwhile."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.add(function._schema.name)
        return function(*arguments, **(keywords or {}))


class OneRank(contextlib.nullcontext):
    """Stands for NCCL's process group, of one rank that gathers its own."""

    def __init__(self):
        super().__init__()
        self.num_gathered, self.is_aborted = 0, False

    def abort(self):
        self.is_aborted = True

    def _allgather_base(self, gathered, x):
        self.num_gathered += 1
        gathered.copy_(x.expand_as(gathered))
        return self

    def wait(self):
        pass


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_rank_that_leaves_ends_its_waits_whether_its_device_works_or_not(has_failed, monkeypatch):
    from baton.engine.tp import collectives
    from baton.kernels import rank_exchange_triton
    from baton.kernels.rank_exchange import Mailbox

    def stream(stream):
        if has_failed:
            raise RuntimeError("an illegal memory access was encountered")
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    group = object.__new__(collectives.NcclGroup)
    memory = torch.zeros(mailbox_bytes(2), dtype=torch.uint8)
    group._mailbox, group._group, group._beside = Mailbox.of(0, memory, torch.tensor([0, 0])), OneRank(), None
    with Operations() as operations:
        group.close()
    assert operations.names <= {"aten::slice", "aten::view", "aten::detach", "aten::copy_"}, (
        "a kernel that is loaded first may wait"
    )
    assert group._group.is_aborted
    first, end = rank_exchange_triton.flags_at(2)
    flags = memory[first:end].view(torch.int64)
    assert (flags.min() > 1 << 60) if not has_failed else not flags.any()
    assert not memory[:first].any()
    assert not memory[end:].any()


def test_what_fits_goes_through_memory_and_the_rest_by_nccl(monkeypatch):
    from baton.engine.tp import collectives
    from baton.kernels.rank_exchange import Mailbox

    calls = []
    group = object.__new__(collectives.NcclGroup)
    group.rank, group.size, group.num_operations, group._group = 0, 2, 0, OneRank()
    memory = torch.zeros(1, dtype=torch.uint8)
    group._mailbox = Mailbox.of(0, memory, torch.tensor([0, 0]))
    monkeypatch.setattr(collectives.rank_exchange, "all_sum", lambda x, mailbox: calls.append("sum") or 2 * x)
    monkeypatch.setattr(
        collectives.rank_exchange, "all_gather", lambda x, mailbox: calls.append("gather") or torch.stack([x, x])
    )
    small, large = torch.ones(SLOT_BYTES // 4), torch.ones(SLOT_BYTES // 4 + 1)
    for x, through in ((small, ["sum", "gather"]), (large, []), (torch.ones(0), [])):
        calls.clear()
        before = group._group.num_gathered, group.num_operations
        assert torch.equal(group.all_sum(x), 2 * x)
        assert torch.equal(group.all_gather(x), torch.stack([x, x]))
        assert calls == through
        by_nccl = 2 if x is large else 0
        assert group._group.num_gathered - before[0] == by_nccl
        assert group.num_operations - before[1] == len(through) + by_nccl
