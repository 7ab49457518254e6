"""The line for blocks and for room at decode workers: order, lookahead, and that queued requests hold nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Phase, Sequence
from baton.kvcache.allocator import BlockAllocator
from baton.kvtransfer.sender.service import DecodePeer
from baton.prefill_worker.push_line import PushLine
from baton.prefill_worker.request import PrefillRequest

pytestmark = pytest.mark.fast


class Line:
    """A push line over a scheduler, without engine and hand-off."""

    def __init__(self, num_blocks=64, chunk_len=32, num_slots=8):
        self.allocator = BlockAllocator(num_blocks, 16)
        self.scheduler = Scheduler(self.allocator, num_slots=num_slots)
        self.push_line = PushLine(self.scheduler, chunk_len)
        self.chunk_len = chunk_len
        self.requests = []

    def add(self, name, prompt_len, peer="d0"):
        request = GenerationRequest(
            key=AttemptKey(name, 1),
            prompt_token_ids=tuple(range(prompt_len)),
            sampling=SamplingParams(max_tokens=4),
            deadline_s=1e9,
        )
        sequence = Sequence(request=request, checker=None, draft_cap=0, submitted_s=0.0, is_pushed=True)
        self.requests.append(PrefillRequest(sequence, DecodePeer(peer, f"{peer}:1", 1), None))
        self.scheduler.add(sequence)
        self.push_line.add(self.requests[-1])
        return self.requests[-1]

    def ask(self, now_s=0.0):
        """The name of the request that asks its decode worker now."""
        request = self.push_line.next_to_reserve(now_s)
        assert request is None or request.sequence.phase is Phase.RESERVING
        return None if request is None else request.key.request_id

    def get(self, name):
        return next(request for request in self.requests if request.key.request_id == name)

    def grant(self, request):
        self.scheduler.make_ready(request.sequence)
        self.scheduler.give_slots()

    def ready(self):
        """As `ask`; it is granted at once."""
        name = self.ask()
        if name is not None:
            self.grant(self.get(name))
        return name

    def move(self, request, phase):
        """Take a request that asks to where it waits for its decode worker."""
        if phase is Phase.SENDING:
            self.grant(request)
            self.scheduler.send(request.sequence)()
        elif phase is Phase.ABORTING:
            self.scheduler.abort(request.sequence)()

    def compute(self):
        """One step, over when this returns; those whose prompts it completed."""
        chunks = self.scheduler.chunks(self.chunk_len)
        assert sum(chunk.length for _, chunk in chunks) <= self.chunk_len
        for sequence, chunk in chunks:
            assert chunk.start == sequence.num_computed
            assert chunk.push == sequence.key
            sequence.num_computed = chunk.end
        return [self.get(sequence.key.request_id) for sequence, _ in chunks if not sequence.num_left]

    def remove(self, request):
        self.push_line.remove(request)
        self.requests.remove(request)
        self.scheduler.remove(request.sequence)()

    def count(self, *phases):
        return self.scheduler.count(*phases)


def test_a_queued_request_holds_no_blocks():
    line = Line(chunk_len=16)
    for name in "abcd":
        line.add(name, 64)
    assert line.ready() == "a"
    assert line.ask() is None, "64 tokens are ahead, two chunks are 32"
    assert line.allocator.num_reserved == 4
    assert line.count(Phase.WAITING) == line.push_line.num_waiting() == 3
    assert line.push_line.num_tokens_queued() == 256


def test_the_lookahead_reserves_the_next_one_before_the_last_chunk():
    line = Line()
    first = line.add("a", 80)
    line.add("b", 16)
    assert line.ready() == "a"
    assert line.ask() is None
    first.sequence.num_computed = 32
    assert line.ready() == "b"


def test_no_more_are_granted_than_there_are_slots():
    line = Line(num_slots=2, chunk_len=100)
    for name in "abc":
        line.add(name, 16)
    assert [line.ready(), line.ready(), line.ready()] == ["a", "b", None]
    assert line.compute() == line.requests[:2]
    assert line.ready() == "c", "those that are computed count no more"


def test_a_step_is_filled_from_several_sequences_up_to_its_budget():
    line = Line()
    for name in "ab":
        line.add(name, 20)
        line.ready()
    chunks = line.scheduler.chunks(32)
    assert [(item.key.request_id, chunk.start, chunk.length) for item, chunk in chunks] == [("a", 0, 20), ("b", 0, 12)]


def test_a_prompt_that_does_not_fit_now_waits_and_keeps_its_place():
    line = Line(num_blocks=4, chunk_len=64)
    held = line.allocator.reserve(48)
    line.add("long", 32)
    line.add("short", 16)
    assert line.ask() is None, "the short one must not overtake for ever"
    line.allocator.release(held)
    assert line.ask() == "long"


def test_removing_frees_the_blocks():
    line = Line()
    request = line.add("a", 33)
    assert line.ready() == "a"
    assert line.allocator.num_reserved == request.num_blocks == 3
    line.remove(request)
    assert line.allocator.num_reserved == request.num_blocks == 0
    assert line.scheduler.sequences() == ()
    line.scheduler.check_empty()


def test_a_busy_decode_worker_holds_up_no_other():
    line = Line(chunk_len=16)
    for number in range(5):
        line.add(f"busy{number}", 64, "d0")
    line.add("free", 64, "d1")
    assert [line.ask() for _ in range(3)] == ["busy0", "busy1", "free"]
    assert line.ask() is None
    assert line.allocator.num_reserved == 12, "the others hold nothing"


def test_those_that_wait_for_one_decode_worker_hold_its_share_of_the_blocks():
    line = Line(num_blocks=9, chunk_len=16)
    for name, prompt_len, peer in (("big", 64, "d0"), ("next", 16, "d0"), ("other", 48, "d1")):
        line.add(name, prompt_len, peer)
    assert line.ask() == "big", "alone it may take more than a third"
    assert line.ask() == "other"
    assert line.ask() is None


@pytest.mark.parametrize("phase", [Phase.RESERVING, Phase.SENDING, Phase.ABORTING])
def test_a_stalled_decode_worker_stops_its_own_requests_only(phase):
    line = Line(num_blocks=30, chunk_len=16)
    for number in range(8):
        line.add(f"stalled{number}", 80, "d0")
        line.add(f"good{number}", 80, "d1")
    num_good = 0
    for step in range(40):
        while (name := line.ask(step * 0.1)) is not None:
            request = line.get(name)
            if request.peer.worker_id == "d0":
                line.move(request, phase)
            else:
                line.grant(request)
        for done in [item for item in line.requests if item.peer.worker_id == "d1" and item.num_blocks]:
            line.remove(done)
            num_good += 1
        held = sum(item.num_blocks for item in line.requests if item.peer.worker_id == "d0")
        assert 0 < held <= (10 if num_good < 8 else 15), "its share; half of all where it is alone"
    assert num_good == 8
    assert line.allocator.num_reserved == held


def test_none_waits_for_blocks_that_only_a_stalled_decode_worker_could_give_back():
    line = Line(num_blocks=12, chunk_len=16)
    stalled = line.add("stalled", 64, "d0")
    assert line.ask() == "stalled"
    line.move(stalled, Phase.SENDING)
    line.add("big", 160, "d1")
    line.add("small", 16, "d2")
    assert line.ask(10.0) is None, "it may end any moment, and the big one is first"
    assert line.ask(10.4) is None
    assert line.ask(10.6) == "small"
    line.remove(stalled)
    line.remove(line.get("small"))
    assert line.ask(10.7) == "big"
    assert line.allocator.num_reserved == 10


@given(
    prompts=st.lists(st.tuples(st.integers(1, 60), st.sampled_from(["d0", "d1", "d2"])), min_size=1, max_size=25),
    stalled=st.sets(st.sampled_from(["d0", "d1"])),
    num_blocks=st.integers(16, 40),
)
@pytest.mark.long
def test_whichever_stalls_every_other_one_is_served_in_order(prompts, stalled, num_blocks):
    line = Line(num_blocks)
    for index, (prompt_len, peer) in enumerate(prompts):
        line.add(f"{index:02}", prompt_len, peer)
    served = []
    for step in range(200):
        while (name := line.ask(step * 0.1)) is not None:
            if line.get(name).peer.worker_id not in stalled:
                line.grant(line.get(name))
        for request in line.compute():
            served.append((request.peer.worker_id, request.key.request_id))
            line.remove(request)
    for peer in {"d0", "d1", "d2"} - stalled:
        names = [f"{index:02}" for index, (_, to) in enumerate(prompts) if to == peer]
        assert [name for to, name in served if to == peer] == names
    assert not [name for to, name in served if to in stalled]
    assert line.count(Phase.RESERVING) <= 2 * len(stalled)


@given(
    prompt_lens=st.lists(st.integers(1, 90), min_size=1, max_size=12),
    chunk_len=st.sampled_from([16, 24, 48, 1000]),
    num_blocks=st.integers(6, 40),
)
@pytest.mark.long
def test_every_prompt_is_computed_once_in_order(prompt_lens, chunk_len, num_blocks):
    line = Line(num_blocks, chunk_len)
    for index, prompt_len in enumerate(prompt_lens):
        line.add(f"{index:02}", prompt_len)
    done = []
    while line.requests:
        while line.ready() is not None:
            pass
        ended = line.compute()
        for request in ended:
            done.append(request.key)
            line.remove(request)
        assert len(done) <= len(prompt_lens)
        assert ended or any(item.sequence.num_computed for item in line.requests)
    assert done == sorted(done)
    assert len(done) == len(prompt_lens)
    assert line.allocator.num_free == num_blocks
    line.scheduler.check_empty()
