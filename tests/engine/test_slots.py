"""What a slot holds after a sequence was placed in it, and with how many writes it got there."""

import tracemalloc

import pytest
import torch

import baton.tests.kernels.interpreter  # noqa: F401  (repairs it)
from baton.engine.step import slots as module
from baton.engine.step.slots import SlotTable
from baton.kernels import fused_copy_triton
from baton.kernels.dispatch_mode import DispatchMode
from baton.kernels.fused_copy import RunningCopies, fused_copy
from baton.kernels.implementation import Implementation

pytestmark = pytest.mark.fast
CPU = torch.device("cpu")


class Writes(DispatchMode):
    """Operations that write to some tensors."""

    def __init__(self, tensors):
        super().__init__()
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_written = function._schema.is_mutable and args[0].untyped_storage().data_ptr() in self._storages
        self.found += [str(function)] if is_written else []
        return function(*args, **(kwargs or {}))


def table_of(dtype=torch.bfloat16):
    return SlotTable(num_slots=4, max_blocks=6, hidden_size=5, vocab_size=9, eos_token_ids=(), dtype=dtype, device=CPU)


def content(table, slot):
    state, rows = table.gather(torch.tensor([slot]), 6)
    numbers = [state.last_token_B, state.draft_token_B, state.length_B, rows.limit_B, rows.draft_cap_B]
    return [int(number) for number in numbers], rows.block_tables_BM[0].tolist(), state.hidden_BD[0]


ROOM = {"blocks": (4, 2), "limit": 8, "null_block": 12, "draft_cap": 3}
HIDDENS = {
    "none": None,
    "its dtype": torch.arange(5).to(torch.bfloat16),
    "another": torch.arange(5, dtype=torch.float32),
}


@pytest.mark.parametrize("implementation", [Implementation.REFERENCE, Implementation.TRITON])
@pytest.mark.parametrize("hidden", HIDDENS)
def test_a_slot_holds_what_was_placed_in_it(hidden, implementation, monkeypatch):
    launches = []
    launch = fused_copy_triton.launch
    monkeypatch.setattr(fused_copy_triton, "launch", lambda *arguments: (launches.append(1), launch(*arguments)))
    monkeypatch.setattr(module, "fused_copy", lambda *pairs: fused_copy(*pairs, implementation=implementation))
    table = table_of()
    before = [content(table, slot) for slot in (0, 1, 3)]
    other = {"blocks": (9, 1, 5), "limit": 11, "null_block": 3, "draft_cap": 1}
    for number in (1, 20):
        table.place(2, last_token=3, draft_token=8, hidden_D=torch.ones(5), length=7, **other)
        table.place(2, last_token=number, draft_token=7, hidden_D=HIDDENS[hidden], length=number + 1, **ROOM)
    numbers, blocks, hidden_D = content(table, 2)
    assert numbers == [20, 7, 21, 8, 3], "nothing of the sequence before"
    assert blocks == [4, 2, 12, 12, 12, 12]
    wanted = torch.zeros(5) if HIDDENS[hidden] is None else HIDDENS[hidden]
    assert torch.equal(hidden_D.float(), wanted.float())
    after = [content(table, slot) for slot in (0, 1, 3)]
    assert [item[:2] for item in after] == [item[:2] for item in before]
    assert len(launches) == (4 if implementation is Implementation.TRITON else 0), "one for each time"


def test_a_table_is_cut_at_the_widest():
    table = table_of()
    table.place(1, blocks=range(9), limit=36, null_block=12, draft_cap=0)
    assert content(table, 1)[1] == [0, 1, 2, 3, 4, 5]


def test_placing_makes_no_list_as_long_as_the_longest_context():
    """A table of a model with 262,144 positions took 2 ms of each admission, in which no step was launched."""
    table = SlotTable(
        num_slots=2, max_blocks=16_384, hidden_size=5, vocab_size=9, eos_token_ids=(), dtype=torch.bfloat16, device=CPU
    )
    table.place(0, **ROOM)
    tracemalloc.start()
    try:
        table.place(1, **ROOM)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16_384


def test_a_sequence_is_placed_by_three_writes_on_a_cpu():
    """One for each of the tensors; there were seven, and a copy from the host."""
    table = table_of()
    with Writes([table._numbers_NC, table._tables_NM, table._hidden_ND]) as writes:
        table.place(2, last_token=3, draft_token=8, hidden_D=torch.ones(5), length=7, **ROOM)
    assert len(writes.found) == 3, writes.found


def test_sources_are_held_until_the_device_is_done(monkeypatch):
    class Event:
        is_over = False

        def query(self):
            return self.is_over

    events, waited = [], []

    def running(pairs, device):
        events.append(Event())
        return RunningCopies(tuple(pairs), (), events[-1])

    monkeypatch.setattr(module, "fused_copy", running)
    monkeypatch.setattr(module, "_MAX_RUNNING", 3)
    monkeypatch.setattr(RunningCopies, "wait", lambda self, limit_s: waited.append((self.event, limit_s)))
    table = table_of()

    def place():
        table.place(0, last_token=1, draft_token=1, length=1, **ROOM)
        return [item.event for item in table._running]

    place()
    place()
    assert place() == events
    assert waited == []
    assert place() == events[1:], "so many and no more"
    assert waited == [(events[0], module._COPY_LIMIT_S)]
    for event in events:
        event.is_over = True
    assert place() == events[4:], "those that are done are let go of"
