"""Resharding through the real services: a push for each prefill rank, one transfer for all decode ranks, by all paths.

As in `test_reshard`, what must be in every byte of every pool is said by plain loops.
"""

import contextlib
import itertools
import time

import pytest

from baton.core.clock import MonotonicClock
from baton.core.config import KVTransferConfig
from baton.core.requests.request import AttemptKey
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.receiver.service import Completed, IncomingFailed, ReceiverService, ReserveWanted, receiver_region
from baton.kvtransfer.receiver.setup import Listen, ReceiverSetup
from baton.kvtransfer.sender.async_writer import PushRange
from baton.kvtransfer.sender.service import Acked, DecodePeer, Denied, Granted, PushFailed, PushService
from baton.kvtransfer.transports.loopback import LoopbackHub
from baton.kvtransfer.transports.over_zmq import ZmqTransport
from baton.proto import kv_pb2
from baton.tests.kvtransfer.kept import latent
from baton.tests.kvtransfer.reshard import Group, layout_of, truth_of
from baton.tests.patience import patient

P_EPOCH, D_EPOCH = 11, 22
LIMIT_S = 60.0
DATA_PATHS = {"loopback": "zmq", "inline": "zmq", "raw": "tcp", "shm": "shm"}


class HandOver:
    """One attempt between two groups."""

    def __init__(self, data_path, source, target, memory=None, **options):
        self.source, self.target = source, target
        self.key = AttemptKey("r", 1)
        options |= {"max_frame_bytes": 2000}
        config = patient(transport=DATA_PATHS[data_path], **options)
        common = {"config": config, "clock": MonotonicClock()}
        hub = LoopbackHub()
        if memory is None:
            transport = hub.join("decode") if data_path == "loopback" else ZmqTransport("tcp://127.0.0.1:0", config)
            self.incoming = ReceiverService.on_thread(
                pool=target.pools, layout=target.layout, epoch=D_EPOCH, transport=transport, **common
            )
            self.incoming.start()
        else:
            setup = ReceiverSetup(
                epoch=D_EPOCH,
                layout=target.layout,
                num_blocks=target.num_blocks,
                num_state_slots=target.num_state_slots,
                tp_size=target.size,
                num_pools=1 if target.owner is None else target.size,
                listen=Listen("zmq", "tcp://127.0.0.1:0", ("shm",)),
                config=config,
            )
            self.incoming = ReceiverService.in_process(memory, setup)
        self.pushes = []
        for rank, pool in enumerate(source.pools):
            transport = hub.join(f"prefill-{rank}") if data_path == "loopback" else ZmqTransport(config=config)
            push = PushService(pool=pool, layout=source.layout, epoch=P_EPOCH, transport=transport, **common)
            push.start()
            self.pushes.append(push)
        self.peer = DecodePeer("d", self.incoming.address, D_EPOCH)
        self.heard = [[] for _ in self.pushes]
        self.landed = []

    def close(self):
        for push in self.pushes:
            push.close()
        self.incoming.close()

    def turn(self):
        for event in self.incoming.poll():
            assert not isinstance(event, IncomingFailed), event
            self.landed.append(event)
            if isinstance(event, ReserveWanted):
                self.incoming.grant(event.attempt, self.target.table)
        for heard, push in zip(self.heard, self.pushes, strict=True):
            events = push.poll()
            assert not any(isinstance(event, PushFailed | Denied) for event in events), events
            heard.extend(events)

    def wait_for(self, kind, heard):
        end_s = time.monotonic() + LIMIT_S
        while (found := next((event for event in heard if isinstance(event, kind)), None)) is None:
            assert time.monotonic() < end_s, (kind, self.heard, self.landed)
            self.turn()
            time.sleep(0.001)
        return found

    def run(self, cuts):
        """Reserve, adopt, compute in chunks between `cuts`, commit."""
        table = self.source.table
        prompt_len = self.source.prompt_len
        self.pushes[0].reserve(self.key, self.peer, table, prompt_len, prompt_len, LIMIT_S)
        grant = self.wait_for(Granted, self.heard[0]).grant
        for push in self.pushes[1:]:
            push.adopt(self.key, self.peer, table, prompt_len, grant)
        for first, stop in itertools.pairwise(cuts):
            for push in reversed(self.pushes):
                with push.writer.step([PushRange(self.key, first, stop - first)]) as step:
                    for layer in range(self.source.layout.num_layers):
                        step.submit(layer)
        for rank, push in reversed(tuple(enumerate(self.pushes))):
            state = kv_pb2.SequenceState(first_token=7) if rank == 0 else None
            push.commit(self.key, state, time.monotonic())
        complete = self.wait_for(Completed, self.landed)
        acked = [self.wait_for(Acked, heard) for heard in self.heard]
        return complete, acked


def check(data_path, tp_prefill, tp_decode, num_heads, sizes, dtype, prompt_len, **options):
    check_layouts(
        data_path, tp_prefill, tp_decode, [layout_of(num_heads, dtype, size) for size in sizes], prompt_len, **options
    )


def check_layouts(data_path, tp_prefill, tp_decode, layouts, prompt_len, *, owner=None, **options):
    """Returns what each prefill rank pushed."""
    truth = truth_of(layouts[0], prompt_len)
    source = Group(layouts[0], tp_prefill, prompt_len, seed=1)
    memory = make_memory = None
    if data_path == "shm" or owner is not None:
        probe = Group(layouts[1], tp_decode, prompt_len, seed=2)
        memory = receiver_region(probe.geometries, KVTransferConfig())
        make_memory = lambda geometry: memory.pool(geometry.rank)  # noqa: E731
    target = Group(layouts[1], tp_decode, prompt_len, seed=2, make_memory=make_memory, owner=owner)
    source.place(truth)
    expected = target.expected(truth)
    with contextlib.closing(HandOver(data_path, source, target, memory, **options)) as hand_over:
        complete, acked = hand_over.run(sorted({0, prompt_len // 3, prompt_len // 2, prompt_len}))
        used = {choice.data_path for push in hand_over.pushes for choice in push.data_paths().values()}
        assert used == {"inline" if data_path == "loopback" else data_path}
    for pool, wanted in zip(target.pools, expected, strict=True):
        assert (pool.bytes_view == wanted).all()
    num_bytes = layouts[0].payload_bytes(prompt_len)
    assert complete.bytes_landed == num_bytes
    assert sum(event.bytes_pushed for event in acked) == num_bytes
    return [event.bytes_pushed for event in acked]


CELLS = [
    (1, 2, 4, (16, 64), "bfloat16", 83),
    (2, 1, 4, (64, 16), "float8_e4m3fn", 70),
    (2, 2, 1, (16, 16), "float32", 33),
    (4, 2, 2, (16, 64), "float16", 83),
    (2, 4, 8, (64, 64), "float64", 130),
    (4, 1, 8, (16, 16), "bfloat16", 1),
    (1, 4, 1, (64, 16), "float8_e4m3fn", 64),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell[0]}-{cell[1]}, {cell[2]} heads, {cell[3]}, {cell[4]}")
@pytest.mark.parametrize("data_path", ["loopback", "inline", "raw"])
def test_over_two_sided_data_paths(data_path, cell):
    check(data_path, *cell)


@pytest.mark.parametrize("cell", CELLS[:4], ids=lambda cell: f"{cell[0]}-{cell[1]}, {cell[2]} heads, {cell[4]}")
def test_the_sender_writes_the_pools_of_all_ranks(cell):
    check("shm", *cell)


@pytest.mark.parametrize("tp_decode", [1, 2, 4])
@pytest.mark.parametrize("tp_prefill", [1, 2, 4])
@pytest.mark.parametrize("data_path", ["loopback", "raw", "shm"])
def test_latents_go_over_the_links_of_all_ranks(data_path, tp_prefill, tp_decode):
    """Rows that every rank holds whole: pushed once, 64 positions by each rank in turn, to all that hold them."""
    check_latents(data_path, tp_prefill, tp_decode)


@pytest.mark.parametrize(
    ("data_path", "tp_prefill", "tp_decode", "owner"),
    [("shm", 1, 2, 1), ("shm", 2, 4, 2), ("shm", 4, 2, 0), ("raw", 1, 4, 3), ("raw", 4, 2, 1), ("inline", 2, 2, 1)],
)
def test_latents_land_in_the_pool_of_the_owner_alone(data_path, tp_prefill, tp_decode, owner):
    """All ranks push, each its positions; of the decode worker's pools no byte of another changes."""
    check_latents(data_path, tp_prefill, tp_decode, owner=owner)


def check_latents(data_path, tp_prefill, tp_decode, **options):
    layers = (latent(16, dtype="bfloat16"), latent(16, dtype="bfloat16"), latent(24, dtype="bfloat16"))
    layouts = [KVLayout(model_hash="m", layers=layers, block_size=size, has_mtp=True) for size in (16, 64)]
    prompt_len = 300
    pushed = check_layouts(data_path, tp_prefill, tp_decode, layouts, prompt_len, **options)
    wanted = [0] * tp_prefill
    for position in range(prompt_len):
        wanted[position // 64 % tp_prefill] += 2 * (16 + 16 + 24)
    assert pushed == wanted
    assert min(pushed) > 0


@pytest.mark.parametrize("data_path", ["inline", "raw", "shm"])
def test_without_digests(data_path):
    check(data_path, *CELLS[0], digest=False)
