"""The ranks of a TP group on GPUs, each a process, and what they are told to do. Importable by the processes."""

import multiprocessing
import random
import time
import traceback

import torch

from baton.core.errors import WorkerLost
from baton.engine.sampling.sampler import truncate
from baton.engine.tp import join as tp_group_join
from baton.engine.tp.collectives import NcclGroup, open_store
from baton.engine.tp.decision import Decisions
from baton.engine.tp.plan import PlanChannel, plan_codec
from baton.engine.tp.rank_runners import Rank0Runner, RankRunner
from baton.kernels.rank_exchange import sum_parts_reference
from baton.kernels.sampling.decision import pack
from baton.kernels.sampling.decision_reference import pack_reference
from baton.model.loader import load_model
from baton.model.vocab import CutVocab
from baton.tests.engine.test_tp_group import generate, runner_of
from baton.tests.model.together import part_of

SIZE = 2
K = 2
ANSWER_S = 200.0  # kernels are compiled in it


class Failed(str):
    """What a rank raised."""


def run_rank(rank, pipe):
    """Meets the others, then does one job after the other, each `work(channel, device, ...)` at every rank."""
    try:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        if rank == 0:
            store, listener = open_store(0, SIZE, 0), tp_group_join.RankListener(plan_codec(), SIZE)
            pipe.send((store.port, listener.address, listener.token))
            link = listener.accept(60.0)
        else:
            port, address, token = pipe.recv()
            store, link = open_store(rank, SIZE, port), tp_group_join.join(plan_codec(), rank, SIZE, address, token)
        channel = PlanChannel(link, NcclGroup(rank, SIZE, store, device))
        while (job := pipe.recv()) is not None:
            work, arguments = job
            with torch.inference_mode():
                pipe.send(work(channel, device, *arguments))
        channel.close()
        channel.communicator.close()
    except BaseException:
        pipe.send(Failed(traceback.format_exc()))
        raise


class GpuRanks:
    """A TP group of processes that is kept from test to test; after a failure others are started."""

    def __init__(self):
        self._pipes, self._processes = [], []

    def run(self, work, *arguments):
        """`work` at every rank; what each returned."""
        try:
            if not self._processes:
                self._start()
            for pipe in self._pipes:
                pipe.send((work, arguments))
            return [answer_of(pipe) for pipe in self._pipes]
        except BaseException:
            self._kill()
            raise

    def close(self):
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10.0)
        self._kill()

    def _start(self):
        context = multiprocessing.get_context("spawn")
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            self._processes.append(context.Process(target=run_rank, args=(rank, theirs), daemon=True))
            self._processes[-1].start()
            theirs.close()  # so that a rank's death is heard
            self._pipes.append(ours)
        self._pipes[1].send(answer_of(self._pipes[0]))

    def _kill(self):
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []


def answer_of(pipe):
    assert pipe.poll(ANSWER_S), "a rank does not answer"
    answer = pipe.recv()
    assert not isinstance(answer, Failed), answer
    return answer


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
    broadcast_us = (time.monotonic() - start_s) * 1e3
    return total.float().unique().tolist(), parts.tolist(), told.tolist(), said, broadcast_us


def exchanged_values(rank, index, shape, dtype):
    """What a rank has in a call: numbers whose sum depends on its order."""
    generator = torch.Generator().manual_seed(1000 * index + rank)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * (8 * index % 101 + 1)
    return values.to(dtype)


def drawn_exchanges(seed, count):
    """Calls that follow each other: kind, shape, dtype."""
    draw = random.Random(seed)
    shapes = [(1,), (3, 5), (1, 4096), (16, 4096), (64, 4096), (33, 7168), (128, 4096), (600, 4096), (7, 1023)]
    dtypes = [torch.bfloat16, torch.bfloat16, torch.float32, torch.float64]
    return [(draw.choice(["sum", "gather"]), draw.choice(shapes), draw.choice(dtypes)) for _ in range(count)]


def use_exchange(channel, device, seed):
    """Drawn calls one after the other, one rank late at times, and all of them in a graph that is replayed.

    Returns:
        how tensors cross, those of the calls that were wrong, and those of the replays.
    """
    group, calls = channel.communicator, drawn_exchanges(seed, 150)
    tensors, wanted = [], []
    for index, (kind, shape, dtype) in enumerate(calls):
        parts_R = torch.stack([exchanged_values(rank, index, shape, dtype) for rank in range(group.size)])
        tensors.append(parts_R[group.rank].to(device))
        wanted.append((sum_parts_reference(parts_R) if kind == "sum" else parts_R).to(device))

    def run(is_late):
        found = []
        for index, ((kind, _, _), x) in enumerate(zip(calls, tensors, strict=True)):
            if is_late and index % 7 == group.rank:
                torch.cuda._sleep(200_000)
            found.append(group.all_sum(x) if kind == "sum" else group.all_gather(x))
        return found

    def wrong(found):
        return [index for index, (own, right) in enumerate(zip(found, wanted, strict=True)) if not same(own, right)]

    bad = wrong(run(True)) + wrong(run(False))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            captured = run(False)
        replayed = []
        for turn in range(20):
            for each in captured:
                each.zero_()
            if turn % 3 == group.rank:
                torch.cuda._sleep(1_000_000)
            graph.replay()
            replayed += wrong(captured)
            replayed += wrong(run(False))  # launched one by one between replays
    torch.cuda.synchronize(device)
    return group.how, bad, replayed


def leave_a_rank_waiting(channel, device):
    """Rank 0 adds alone; whether it waits, and whether leaving the group ends the wait."""
    group = channel.communicator
    if group.rank == 1:
        return None
    group.all_sum(torch.ones(8, device=device))
    done = torch.cuda.Event()
    done.record()
    time.sleep(0.3)
    is_waiting = not done.query()
    group.close()
    end_s = time.monotonic() + 20.0
    while not done.query() and time.monotonic() < end_s:
        time.sleep(0.01)
    return is_waiting, done.query()


def same(left, right):
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def step_of(batch, num_drafts, num_blocks, device):
    """What a decode step decides, and upon what: columns of one table, and block tables."""
    generator = torch.Generator().manual_seed(batch)
    numbers_BC = torch.randint(1 << 40, (batch, 5), generator=generator).to(device)
    tables_BM = torch.randint(1 << 31, (batch, num_blocks), generator=generator).to(device)
    values_BC = torch.randint(150_000, (batch, num_drafts + 3), generator=generator).to(device)
    return values_BC, [torch.arange(batch, device=device).flip(0), *numbers_BC.unbind(dim=1)[:3], tables_BM]


def use_decisions(channel, device):
    """Of each shape: whether the message is the reference's, and what was agreed the values, in a graph as well."""
    group, found = channel.communicator, []
    decisions = Decisions(group, device)
    for batch, num_drafts, num_blocks in ((1, 1, 1), (16, 1, 80), (64, 3, 128), (7, 2, 513), (200, 5, 40)):
        values_BC, state = step_of(batch, num_drafts, num_blocks, device)
        wanted_N = pack_reference(values_BC, state, 9)
        is_packed = all(torch.equal(message_N, wanted_N) for message_N in pack(values_BC, state, 9))
        is_agreed = torch.equal(decisions.agree(values_BC, state), values_BC)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            decided_BC = decisions.agree(values_BC, state)
        for _ in range(3):
            decided_BC.zero_()
            graph.replay()
            is_agreed &= torch.equal(decided_BC, values_BC)
        found.append((is_packed, is_agreed))
    return found


def diverge(channel, device, what):
    """What a step gives if rank 1 differs in `what`; whether its reader is told; whether the next one is agreed."""
    group = channel.communicator
    decisions, is_other = Decisions(group), group.rank == 1
    values_BC, state = step_of(2, 1, 5, device)
    wrong_BC, wrong_state = values_BC.clone(), [tensor.clone() for tensor in state]
    if is_other:
        wrong_BC[1, 2] += what == "values"
        wrong_state[4][1, 4] += what == "state"
        if what == "order":
            wrong_state[1], wrong_state[2] = state[2], state[1]
        decisions._num_made += what == "number"
    decided = decisions.agree(wrong_BC, wrong_state).flatten().tolist()
    decisions._num_made = 7
    is_agreed = torch.equal(decisions.agree(values_BC, state), values_BC)
    try:
        decisions.check(decided)
    except WorkerLost:
        return decided, True, is_agreed
    return decided, False, is_agreed


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
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
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


def use_model(channel, device, path, dtype, numerics, mode, random_seed=None):
    group = channel.communicator
    model = load_model(
        path,
        dtype=dtype,
        device=device,
        numerics=numerics,
        with_mtp=True,
        communicator=group,
        random_seed=random_seed,
    )
    runner = runner_of(model, K, group)
    if group.rank == 0:
        lead = Rank0Runner(runner, channel)
        tokens = generate(lead, K, mode)
        lead.close()
        return tokens
    RankRunner(runner, channel).run()
    return None
