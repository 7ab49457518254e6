"""A gang over NCCL: what the group does, and tokens of two GPUs equal to those of one. Each rank is a process."""

import multiprocessing
import time

import pytest
import torch

from baton.core.numerics import Numerics
from baton.engine import gang_join
from baton.engine.gang import FollowDecode, FollowPrefill, LeadDecode, LeadPrefill
from baton.engine.nccl_group import NcclGroup
from baton.engine.plan import PlanChannel, plan_codec
from baton.engine.plan_messages import Stop
from baton.engine.tp_group import open_store
from baton.engine.truncation import truncate
from baton.model.vocab import CutVocab
from baton.tests.engine.test_gang import CHECKPOINT, generate, load, runners_of
from baton.tests.model.together import part_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SIZE = 2
K = 2


def run_rank(rank, pipe, work, arguments):
    """Meets the others, does `work(channel, device, ...)`, and sends what comes of it."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if rank == 0:
        store, listener = open_store(0, SIZE, 0), gang_join.Listener(plan_codec(), SIZE)
        pipe.send((store.port, listener.address, listener.token))
        link = listener.accept(60.0)
    else:
        port, address, token = pipe.recv()
        store, link = open_store(rank, SIZE, port), gang_join.join(plan_codec(), rank, SIZE, address, token)
    channel = PlanChannel(link, NcclGroup(rank, SIZE, store, device))
    with torch.inference_mode():
        result = work(channel, device, *arguments)
    pipe.send(result)
    pipe.recv()
    channel.close()


def on_gpus(work, *arguments):
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(SIZE)]
    ranks = [
        context.Process(target=run_rank, args=(rank, ends[rank][1], work, arguments), daemon=True)
        for rank in range(SIZE)
    ]
    for rank in ranks:
        rank.start()
    ends[1][0].send(ends[0][0].recv())
    results = [ours.recv() for ours, _ in ends]
    for ours, _ in ends:
        ours.send(None)
    for rank in ranks:
        rank.join(20.0)
        rank.kill()
    return results


def use_group(channel, device):
    group, rank = channel.communicator, channel.communicator.rank
    total = group.all_sum(torch.full((3, 5), 1.0 + rank, device=device, dtype=torch.bfloat16))
    parts = group.all_gather(torch.tensor([[rank, 7]], device=device))
    told = group.broadcast(torch.arange(4, device=device, dtype=torch.int32) + 10 * rank)
    said = group.gather_bytes(bytes([rank])), group.broadcast_bytes(b"from 0" if rank == 0 else b"")
    torch.cuda.synchronize(device)
    start_s = time.monotonic()
    for _ in range(1000):
        group.broadcast(told)
    torch.cuda.synchronize(device)
    return total.float().unique().tolist(), told.tolist(), said, parts.tolist(), (time.monotonic() - start_s) * 1e3


def test_the_group_adds_broadcasts_and_carries_bytes():
    for total, told, said, parts, broadcast_us in on_gpus(use_group):
        assert total == [3.0]
        assert parts == [[[0, 7]], [[1, 7]]]
        assert told == [0, 1, 2, 3]
        assert said == ([b"\0", b"\1"], b"from 0")
        print(f"broadcast of a decision: {broadcast_us:.1f} us, launched one by one")


def use_vocab(channel, device, vocab_size, num_rows):
    """What is chosen among ranks, and how long it takes: launched one by one, and replayed from a graph."""
    group = channel.communicator
    logits_NV = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)).to(device)
    logits_NV[0] = 1.0
    logits_NV[1, [5, vocab_size - 1]] = 99.0
    vocab = CutVocab(vocab_size, group.rank, group.size, group.all_gather)
    own_NW = part_of(logits_NV, vocab).contiguous()
    before = group.num_operations
    ids_N = vocab.argmax(own_NW)
    num_operations = group.num_operations - before
    top_k_U, top_p_U = torch.tensor([50, 0], device=device), torch.tensor([0.9, 0.99], device=device).double()
    rows_UQV = (logits_NV[2:6] - logits_NV[2:6].amax(-1, keepdim=True)).view(2, 2, -1)
    kept_UQV = vocab.gather(truncate(part_of(rows_UQV, vocab), top_k_U, top_p_U, vocab))
    is_kept_alike = torch.equal(kept_UQV, truncate(rows_UQV, top_k_U, top_p_U))
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        vocab.argmax(own_NW)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured_N = vocab.argmax(own_NW)
        graph.replay()
        stream.synchronize()
        start_s = time.monotonic()
        for _ in range(200):
            graph.replay()
        stream.synchronize()
    graph_us = (time.monotonic() - start_s) * 1e6 / 200
    is_right = torch.equal(ids_N, logits_NV.argmax(-1)) and torch.equal(captured_N, ids_N)
    return is_right, is_kept_alike, num_operations, graph_us


@pytest.mark.parametrize("vocab_size", [151_936, 1003])
def test_tokens_are_chosen_among_ranks(vocab_size):
    for is_right, is_kept_alike, num_operations, graph_us in on_gpus(use_vocab, vocab_size, 8):
        assert is_right
        assert is_kept_alike
        assert num_operations == 1
        print(f"argmax of 8 rows of {vocab_size}: {graph_us:.1f} us, in a graph")


def use_model(channel, device, path, dtype, numerics, mode):
    group = channel.communicator
    model = load(path, group, dtype, numerics, device)
    prefill, decode = runners_of(model, K, group)
    if group.rank == 0:
        lead = LeadDecode(decode, channel)
        tokens = generate(LeadPrefill(prefill, channel), lead, K, mode)
        lead.close()
        return tokens
    follow, decode_ranks = FollowPrefill(prefill, channel), FollowDecode(decode, channel)
    while not isinstance(plan := channel.hear(), Stop):
        assert follow.take(plan, lambda layer: None) or decode_ranks.take(plan)
        decode_ranks.look()
    return None


@pytest.mark.parametrize("mode", ["greedy", "coupled", "cut", "everything"])
@pytest.mark.parametrize(
    ("dtype", "numerics"),
    [(torch.float64, Numerics.DEFAULT), (torch.float32, Numerics.INVARIANT), (torch.bfloat16, Numerics.INVARIANT)],
)
def test_two_gpus_give_the_tokens_of_one(dtype, numerics, mode, tiny_checkpoint):
    path = tiny_checkpoint(**CHECKPOINT)
    one = load(path, None, dtype, numerics, torch.device("cuda", 0))
    wanted = generate(*runners_of(one, K), K, mode)
    assert on_gpus(use_model, path, dtype, numerics, mode) == [wanted, None]
