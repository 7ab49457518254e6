"""One worker's heartbeat with each of its numbers at an extreme: all requests still find a pair."""

import math
import random

import pytest
from google.protobuf.descriptor import FieldDescriptor

from baton.core.clock import VirtualClock
from baton.core.errors import InvalidRequest
from baton.proto import worker_pb2
from baton.router.access.message_limits import is_repeated
from baton.router.placement.local_prefill import MODES, LocalPrefill
from baton.router.placement.members import Members
from baton.router.placement.routing import make_policy
from baton.tests.router.test_least_cost import Table, request
from baton.tests.router.test_members import state

pytestmark = pytest.mark.fast


@pytest.fixture
def members():
    return Members(VirtualClock())


NO_NUMBERS = (math.nan, math.inf, -math.inf, -1.0, -5e-324)
EXTREMES = {
    FieldDescriptor.TYPE_DOUBLE: (*NO_NUMBERS, 0.0, 5e-324, 1e-12, 1e18, 1e308),
    FieldDescriptor.TYPE_UINT32: (0, 1, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 1, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 1, 2**64 - 1),
    FieldDescriptor.TYPE_BOOL: (False, True),
}
OTHERS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def numbers(kind, path=()):
    """(path, field) of every number in a message, however deep."""
    for field in kind.fields:
        if field.message_type is worker_pb2.DesiredState.DESCRIPTOR or field.message_type in path:
            continue  # which the table does not get
        if field.message_type is not None:
            yield from numbers(field.message_type, (*path, field))
        elif field.type in EXTREMES:
            yield (*path, field)
        else:
            assert field.type in OTHERS, f"{field.full_name}: what are this type's extremes?"


def put(message, path, value):
    """Set the number that a path leads to; of lists the first item, which is made if there is none."""
    *way, last = path
    for field in way:
        message = getattr(message, field.name)
        if is_repeated(field):
            if field.message_type.GetOptions().map_entry:
                return  # text to number, which nothing but metrics reads
            message = message[0] if len(message) else message.add()
    if is_repeated(last):
        del getattr(message, last.name)[:1]
        getattr(message, last.name).insert(0, value)
    else:
        setattr(message, last.name, value)


def measured(mode):
    """Two workers of each role that have measured all there is to measure."""
    table = Table(0, 0)
    table.policy = make_policy("prefix", table.clock, random.Random(0), table.index, local=LocalPrefill(mode))
    edges = [{"kv_address": f"tcp://d{at}", "epoch": 1, "data_path": "raw", "gbps": 10.0} for at in range(2)]
    for num in (1, 2):
        for name in ("p0", "p1", "d0", "d1"):
            paths = [worker_pb2.KvPath(**edge, round_trip_ms=1.0) for edge in edges]
            can = {"can_prefill": name[0] == "d"}
            rates = {"prefill_tokens_per_s": 1000.0, "full_prefill_tokens_per_s": 1000.0}
            member = table.beat(name, paths=paths, state=can, num_requests_finished=num, **rates)
            held = member.state.inventory
            held.prefill_pace.MergeFrom(worker_pb2.PrefillPace(fixed_s=0.001, per_token_s=0.001))
            for times in ("step_seconds", "host_gap_seconds", "step_tokens", "step_sequences"):
                getattr(held.steps, times).MergeFrom(worker_pb2.Distribution(counts=[num], total=0.02 * num))
            held.transfer.transfers, held.transfer.exposed_seconds = num, 0.001 * num
        table.clock.advance(0.25)
        table.pick()
    return table


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("who", ["p0", "d0"])
def test_no_number_of_one_worker_fails_the_requests_of_all(who, mode):
    table = measured(mode)
    good = worker_pb2.WorkerState()
    good.CopyFrom(table.members._members[who].state)
    num_taken = 0
    for path in numbers(worker_pb2.WorkerState.DESCRIPTOR):
        name = ".".join(field.name for field in path)
        for value in EXTREMES[path[-1].type]:
            bad = worker_pb2.WorkerState()
            bad.CopyFrom(good)
            put(bad, path, value)
            try:
                table.members.heartbeat(bad)
            except InvalidRequest:
                pass
            else:
                assert value not in NO_NUMBERS and value == value, f"{name} = {value} is believed"
                num_taken += 1
            for _ in range(2):
                table.clock.advance(0.1)
                pair = table.pick()
                assert all(member.capacity_len for member in (pair.prefill, pair.decode)), (name, value)
                live = table.members.live("prefill"), table.members.live("decode")
                assert 0 <= table.policy.cached_len(*live, request()) < request().prompt_len, (name, value)
            table.members._members[who].retired_epochs.clear()
            table.members.heartbeat(good)
    assert num_taken > 50, "most are only unlikely"


@pytest.mark.parametrize(
    ("role", "field", "bad"),
    [
        *((role, "num_blocks", {"num_blocks": 0}) for role in ("prefill", "decode")),
        ("prefill", "prefill_tokens_per_s", {"prefill_tokens_per_s": 1e-300}),
        ("decode", "fixed_s", {"prefill_pace": worker_pb2.PrefillPace(fixed_s=math.nan)}),
        ("prefill", "gbps", {"transfer": {"paths": [{"gbps": 1.0}, {"gbps": math.inf}]}}),
        ("decode", "bounds", {"steps": {"step_seconds": {"bounds": [math.nan], "counts": [1, 1]}}}),
    ],
)
def test_a_refusal_names_the_number(members, role, field, bad):
    report = state("w", role=role)
    report.inventory.MergeFrom(worker_pb2.Inventory(**bad))
    if field == "num_blocks":
        report.inventory.ClearField(field)
    with pytest.raises(InvalidRequest) as refused:
        members.heartbeat(report)
    assert refused.value.fields == {"field": field, "worker_id": "w"}
    assert not members.all()


def test_prefixes_without_blocks_are_refused(members):
    report = state("d", role="decode")
    report.prefix_naming.model = "m"
    with pytest.raises(InvalidRequest) as refused:
        members.heartbeat(report)
    assert refused.value.fields["field"] == "prefix_naming"
    report.prefix_naming.block_size = 16
    members.heartbeat(report)
