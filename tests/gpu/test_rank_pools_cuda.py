"""Transfers into the GPU pools of several ranks, byte by byte: each rank a process, on as many GPUs as there are."""

import dataclasses
import itertools
import secrets
import signal
import time

import pytest

from baton.bench.actor import SpawnedRemote
from baton.core.config import KVTransferConfig
from baton.core.requests.request import AttemptKey
from baton.kvcache.allocator import BlockTable
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.pool_io import PoolIO
from baton.kvtransfer.receiver.device_jobs import SCRATCH_SLOT
from baton.tests.gpu.gpu_tp_group_worker import GpuTPGroupWorker
from baton.tests.gpu.pusher import Pusher, content_of
from baton.tests.kvtransfer.kept import geometry_of, latent, state
from baton.tests.kvtransfer.receiver_worker import Completed, IncomingFailed

pytestmark = pytest.mark.gpu
NUM_BLOCKS = 96
EXTRA = (latent(72), state(2, 96))
TRANSPORTS = ("tcp", "nvlink")


def layout(block_size=16, **changes):
    fields = {"model_hash": "m", "num_layers": 6, "num_kv_heads": 4, "head_dim": 64, "dtype": "bfloat16"}
    return KVLayout.of_attention(**{**fields, **changes}, block_size=block_size)


class TPGroupPair:
    """A prefill process for each transport, and one decode worker of several ranks."""

    def __init__(self, tp_size, source, target, transports=TRANSPORTS, **config):
        self.source_layout = source
        arguments = (source, NUM_BLOCKS)
        self.prefills = {
            transport: SpawnedRemote(
                Pusher, 0, *arguments, secrets.randbits(63) | 1, KVTransferConfig(transport=transport, **config)
            )
            for transport in transports
        }
        self.worker = None
        try:
            self.worker = GpuTPGroupWorker(
                target, epoch=secrets.randbits(63) | 1, tp_size=tp_size, num_blocks=NUM_BLOCKS, staging_mib=64, **config
            )
        except BaseException:
            self.close()
            raise
        self.source = PoolIO(content_of(source, NUM_BLOCKS).numpy(), geometry_of(source, NUM_BLOCKS))
        self.blocks = {}

    def granted(self, transport, key, prompt_len):
        """Whether the prefill process gets blocks; not if it still believes in an incarnation that has ended."""
        service, prefill = self.worker.service, self.prefills[transport]
        self.blocks[key] = prefill.call("reserve", key, service.address, service.epoch, prompt_len)
        answer = prefill.post("wait", ["Granted", "PushFailed"], key)
        self.worker.wait_until(lambda: prefill._pipe.poll(), "answer", 30)
        return answer()[0] == "Granted"

    def hand_over(self, transport, key, prompt_len, chunk_len):
        """What the prefill process says in the end."""
        assert self.granted(transport, key, prompt_len)
        return self.push(transport, key, prompt_len, chunk_len)

    def push(self, transport, key, prompt_len, chunk_len):
        """The same, of what was granted."""
        answer = self.prefills[transport].post("hand_over", key, prompt_len, chunk_len, 0)
        self.worker.wait_until(
            lambda: self.worker.find(Completed, key) or self.worker.find(IncomingFailed, key), "end", 30
        )
        return answer

    def differing(self, key, prompt_len):
        return self.worker.differing(self.source, self.blocks[key], key, prompt_len)

    def data_path(self, transport):
        return self.prefills[transport].call("data_path", self.worker.service.address)

    def damage(self, rank, layer, times):
        """Have a word in a rank's part of a layer change once it is there, before it is verified."""
        worker, device = self.worker, self.worker.service._device
        launch, damaged = type(device).launch.__get__(device), []

        def damaging(wanted, table):
            is_hit = wanted.rank == rank and layer in wanted.layers
            if not is_hit or len(damaged) >= times:
                launch(wanted, table)
                return
            damaged.append(wanted)
            if wanted.staging.blocks:  # filled first, then damaged, then verified: what is there now is verified alone
                launch(dataclasses.replace(wanted, has_digest=False, flag=SCRATCH_SLOT), table)
            device.drain()
            worker.flip(rank, layer, table.blocks[1])
            launch(dataclasses.replace(wanted, staging=BlockTable((), 16)), table)

        device.launch = damaging
        return damaged

    def close(self):
        for prefill in self.prefills.values():
            prefill.end()
        if self.worker is not None:
            self.worker.close()


@pytest.fixture
def pair():
    made = []

    def make(*args, **options):
        made.append(TPGroupPair(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("tp_size", "num_kv_heads", "sizes"),
    [
        pytest.param(2, 4, (16, 64), id="two-ranks"),
        pytest.param(4, 2, (64, 16), id="four-ranks-of-which-two-hold-the-same"),
    ],
)
def test_every_rank_gets_its_bytes_and_damage_at_any_is_noticed(pair, tp_size, num_kv_heads, sizes):
    source = layout(sizes[0], num_kv_heads=num_kv_heads, more=EXTRA)
    both = pair(tp_size, source, dataclasses.replace(source, block_size=sizes[1]))
    worker, counts = both.worker, both.worker.service.inventory
    for transport in TRANSPORTS:
        for turn, (prompt_len, chunk_len) in enumerate([(1, 1), (700, 256), (333, 100)]):
            key = AttemptKey(f"{transport}-{turn}", 0)
            answer = both.hand_over(transport, key, prompt_len, chunk_len)
            assert both.differing(key, prompt_len) == []
            assert answer() == ("Acked", "")
            worker.release(key)
        data_path, why = both.data_path(transport)
        assert data_path in (("nvlink",) if transport == "nvlink" else ("raw", "inline")), why
    assert (counts()["frames_corrupt"], counts()["layers_corrupt"]) == (0, 0)
    num_corrupt = 0
    for transport in TRANSPORTS:
        for rank in (0, tp_size - 1):
            damaged = both.damage(rank, 3, times=1)
            key = AttemptKey(f"{transport}-damaged-at-{rank}", 0)
            answer = both.hand_over(transport, key, 300, 300)
            assert answer() == ("Acked", "")
            assert len(damaged) == 1
            assert both.differing(key, 300) == [], "it was pushed again"
            num_corrupt += 1
            worker.wait_until(lambda wanted=num_corrupt: counts()["layers_corrupt"] == wanted, "count")
            worker.release(key)
    both.damage(tp_size - 1, 3, times=2)
    key = AttemptKey("twice", 0)
    answer = both.hand_over("tcp", key, 300, 300)
    assert worker.find(IncomingFailed, key).reason == "layer 3 arrived corrupt twice"
    assert answer()[0] == "PushFailed"
    worker.wait_until(lambda: worker.blocks.num_free == NUM_BLOCKS, "every block")
    check_next_incarnation(both)


def check_next_incarnation(both):
    """A KV receiver process that dies is followed by one that serves, whatever kernels were at."""
    worker = both.worker
    dead = worker.service.epoch
    worker.kill(signal.SIGKILL)
    worker.wait_until(lambda: worker.service.epoch != dead, "another incarnation", 20)
    end_s = time.monotonic() + 20.0
    for number in itertools.count():
        key = AttemptKey("after", number)
        if both.granted("tcp", key, 100):
            break
        assert time.monotonic() < end_s, "no blocks from the next incarnation"
        settle_s = time.monotonic() + 0.3
        worker.wait_until(lambda until_s=settle_s: time.monotonic() > until_s, "pause")
    assert both.push("tcp", key, 100, 100)() == ("Acked", "")
    assert both.differing(key, 100) == []
