"""The hand-off between GPU pools of two processes: over NVLink (or one GPU's own memory), and over sockets."""

import os
import secrets
import signal
import time

import pytest
import torch

from baton.bench.actor import SpawnedRemote
from baton.core.config import KVTransferConfig
from baton.core.requests.request import AttemptKey
from baton.kvcache.layout import KVLayout
from baton.kvtransfer.pool_io import PoolIO
from baton.tests.gpu.gpu_worker import GpuWorker
from baton.tests.gpu.pusher import Pusher, content_of
from baton.tests.kvtransfer.kept import geometry_of, latent, state
from baton.tests.kvtransfer.receiver_worker import Completed, Drained, IncomingFailed

pytestmark = pytest.mark.gpu
NUM_BLOCKS = 256
PREFILL_DEVICE = 1 if torch.cuda.device_count() > 1 else 0
TRANSPORTS = ("nvlink", "tcp")
SHORT = {"lease_s": 1.0, "heartbeat_s": 0.1}


def layout(block_size=16, **changes):
    fields = {"model_hash": "m", "num_layers": 6, "num_kv_heads": 4, "head_dim": 64, "dtype": "bfloat16"}
    return KVLayout.of_attention(**{**fields, **changes}, block_size=block_size)


EXTRA = (latent(72), state(2, 96))


class Pair:
    """A prefill process and a decode worker."""

    def __init__(self, transport, *, source=None, target=None, **config):
        self.epoch = secrets.randbits(63) | 1
        self.source_layout = source or layout()
        self.worker = GpuWorker(
            target or self.source_layout, epoch=self.epoch, num_blocks=NUM_BLOCKS, transport=transport, **config
        )
        options = KVTransferConfig(transport=transport, **config)
        arguments = (PREFILL_DEVICE, self.source_layout, NUM_BLOCKS, secrets.randbits(63) | 1, options)
        self.prefill = SpawnedRemote(Pusher, *arguments)
        content = content_of(self.source_layout, NUM_BLOCKS).numpy()
        self.source = PoolIO(content, geometry_of(self.source_layout, NUM_BLOCKS))
        self.blocks = {}

    def reserve(self, key, prompt_len):
        self.blocks[key] = self.prefill.call(
            "reserve", key, self.worker.service.address, self.worker.service.epoch, prompt_len
        )

    def hand_over(self, key, prompt_len, chunk_len, slow_ms=0):
        self.reserve(key, prompt_len)
        answer = self.prefill.post("hand_over", key, prompt_len, chunk_len, slow_ms)

        def has_ended():
            return self.worker.find(Completed, key) or self.worker.find(IncomingFailed, key)

        self.worker.wait_until(lambda: has_ended() or self.prefill._pipe.poll(), "end", 60)
        if has_ended():
            return answer
        result = answer()
        if key in self.worker.tables:  # it hears of the end in a moment; or was never asked, and the reason says why
            self.worker.wait_until(has_ended, "end")
        return lambda: result

    def differing(self, key, prompt_len):
        return self.worker.differing(self.source, self.blocks[key], key, prompt_len)

    def data_path(self):
        return self.prefill.call("data_path", self.worker.service.address)

    def close(self):
        self.prefill.end()
        self.worker.close()


@pytest.fixture
def pair():
    made = []

    def make(*args, **options):
        made.append(Pair(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("digest", [True, False])
def test_bytes_arrive_whole_in_chunks_of_any_size(pair, transport, digest):
    both = pair(transport, source=layout(more=EXTRA), digest=digest)
    for turn, (prompt_len, chunk_len) in enumerate([(1, 1), (16, 16), (700, 256), (333, 100), (1024, 1024)]):
        key = AttemptKey(f"r{turn}", 0)
        answer = both.hand_over(key, prompt_len, chunk_len)
        assert both.differing(key, prompt_len) == []
        assert answer() == ("Acked", "")
        both.worker.release(key)
    data_path, why = both.data_path()
    assert data_path == {"nvlink": "nvlink", "tcp": data_path}[transport], why
    assert data_path in ("nvlink", "raw", "inline")
    assert both.worker.blocks.num_free == NUM_BLOCKS
    both.worker.wait_until(
        lambda: not both.worker.service.inventory()["num_kv_receives"], "end of every incoming transfer"
    )
    counts = both.worker.service.inventory()
    assert (counts["frames_corrupt"], counts["layers_corrupt"]) == (0, 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("source", "target"), [(16, 64), (64, 16)])
def test_blocks_of_two_sizes(pair, transport, source, target):
    both = pair(transport, source=layout(source), target=layout(target))
    key = AttemptKey("r", 0)
    assert both.hand_over(key, 700, 256)() == ("Acked", "")
    assert both.differing(key, 700) == []


def test_auto_takes_nvlink(pair):
    both = pair("auto")
    key = AttemptKey("r", 0)
    assert both.hand_over(key, 100, 100)() == ("Acked", "")
    assert both.data_path() == ("nvlink", "")
    assert both.differing(key, 100) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_layer_is_pushed_only_behind_the_kernel_that_makes_it(pair, transport):
    both = pair(transport)
    key = AttemptKey("r", 0)
    answer = both.hand_over(key, 1024, 1024, slow_ms=30)
    assert both.differing(key, 1024) == []
    assert answer() == ("Acked", "")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_cancel_in_the_middle_gives_everything_back(pair, transport):
    both = pair(transport)
    for turn in range(5):
        key = AttemptKey(f"r{turn}", 0)
        both.reserve(key, 1024)
        granted = both.prefill.post("wait", ["Granted"], key)
        both.worker.wait_until(lambda key=key: key in both.worker.tables, "blocks")
        both.worker.wait_until(lambda: (both.worker.poll(), True)[1], "poll")
        assert granted()[0] == "Granted"
        pushing = both.prefill.post("step", key, 0, 512, 5, range(turn + 1))
        both.worker.service.abort(key, "not wanted any more")
        start_s = time.monotonic()
        both.worker.wait_for(Drained, key, 10.0)
        assert time.monotonic() - start_s < 1.0
        pushing()
        ended = both.prefill.post("wait", ["PushFailed"], key)
        assert "not wanted" in ended()[1]
        both.prefill.call("wait", ["PushDrained"], key)
    assert both.worker.blocks.num_free == NUM_BLOCKS


def test_blocks_of_a_dead_prefill_process_wait_until_it_is_gone(pair):
    both = pair("nvlink", **SHORT)
    key = AttemptKey("r", 0)
    both.reserve(key, 1024)
    both.worker.wait_until(lambda: key in both.worker.tables, "blocks")
    waiting = both.prefill.post("wait", ["Granted"], key)
    both.worker.poll()
    assert waiting()[0] == "Granted"
    both.prefill.call("step", key, 0, 512, 0)
    pid = both.prefill._process.pid
    os.kill(pid, signal.SIGSTOP)
    both.worker.wait_for(IncomingFailed, key, 10.0)
    end_s = time.monotonic() + 2.0
    while time.monotonic() < end_s:
        both.worker.poll()
        time.sleep(0.005)
    assert both.worker.find(Drained, key) is None, "it may come back and write"
    os.kill(pid, signal.SIGKILL)
    both.worker.wait_for(Drained, key, 10.0)
    assert both.worker.blocks.num_free == NUM_BLOCKS


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("times", [1, 2])
def test_a_word_that_changes_in_the_pool_is_noticed(pair, transport, times):
    both = pair(transport)
    worker = both.worker
    device = worker.service._device
    launch, damaged = device.launch, []

    def damaging(wanted, table):
        is_hit = 3 in wanted.layers
        if not is_hit or len(damaged) >= times:
            launch(wanted, table)
            return
        damaged.append(wanted)
        shape = worker.pool.geometry.layer(3)
        at = shape.offset_bytes + table.blocks[5] * shape.block_bytes + 80
        if wanted.staging.blocks:  # filled first, then damaged, then verified: what is there now is verified alone
            launch(type(wanted)(**{**fields(wanted), "has_digest": False, "flag": 256}), table)
        device.drain()
        worker.pool.data_bytes[at] ^= 4
        torch.cuda.synchronize()
        launch(type(wanted)(**{**fields(wanted), "staging": type(table)((), 16)}), table)

    device.launch = damaging
    key = AttemptKey("r", 0)
    answer = both.hand_over(key, 300, 300)
    counts = worker.service.inventory
    if times == 1:
        assert answer() == ("Acked", "")
        assert both.differing(key, 300) == []
        worker.wait_until(lambda: counts()["layers_corrupt"] == 1, "count")
    else:
        assert worker.find(IncomingFailed, key).reason == "layer 3 arrived corrupt twice"
        assert answer()[0] == "PushFailed"
        worker.wait_for(Drained, key, 10.0)


def fields(wanted):
    return {name: getattr(wanted, name) for name in wanted.__slots__}


def test_many_at_once_over_both_data_paths_leave_nothing(pair):
    pairs = [pair(transport, staging_mib=8) for transport in TRANSPORTS]
    for both in pairs:
        keys = [AttemptKey(f"r{index}", 0) for index in range(12)]
        for key in keys:
            both.reserve(key, 250)
        answers = []
        for key in keys:
            answers.append(both.prefill.post("hand_over", key, 250, 100))
            both.worker.wait_for(Completed, key, 60.0)
            assert both.differing(key, 250) == []
            assert answers[-1]() == ("Acked", "")
            both.worker.release(key)
        assert both.worker.blocks.num_free == NUM_BLOCKS


def test_a_receiver_process_that_dies_is_followed_by_one_that_serves(pair):
    both = pair("nvlink", **SHORT)
    key = AttemptKey("before", 0)
    assert both.hand_over(key, 100, 100)() == ("Acked", "")
    dead = both.worker.service.epoch
    both.worker.kill(signal.SIGKILL)
    # Its epoch is known before it listens, maybe at another address than the first.
    both.worker.wait_until(lambda: both.worker.service._host.num_incarnations == 2, "another incarnation", 20)
    assert both.worker.service.epoch != dead
    after = AttemptKey("after", 0)
    assert both.hand_over(after, 100, 100)() == ("Acked", "")
    assert both.differing(after, 100) == []
