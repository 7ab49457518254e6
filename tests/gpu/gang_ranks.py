"""The ranks of a gang on GPUs, each a process, and what they are told to do. Importable by the processes."""

import multiprocessing
import time
import traceback

import torch

from baton.engine import gang_join
from baton.engine.gang import FollowDecode, FollowPrefill, LeadDecode, LeadPrefill
from baton.engine.nccl_group import NcclGroup
from baton.engine.plan import PlanChannel, plan_codec
from baton.engine.plan_messages import Stop
from baton.engine.tp_group import open_store
from baton.model.loader import load_model
from baton.tests.engine.test_gang import generate, runners_of

SIZE = 2
K = 2
ANSWER_S = 50.0


class Failed(str):
    """What a rank raised."""


def run_rank(rank, pipe, work, arguments):
    """Meets the others, does `work(channel, device, ...)`, and sends what comes of it."""
    try:
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
    except BaseException:
        pipe.send(Failed(traceback.format_exc()))
        raise
    pipe.send(result)
    pipe.recv()
    channel.close()
    channel.communicator.close()


def on_gpus(work, *arguments):
    """`work` at every rank; what each returned."""
    context = multiprocessing.get_context("spawn")
    pipes, ranks = [], []
    try:
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            ranks.append(context.Process(target=run_rank, args=(rank, theirs, work, arguments), daemon=True))
            ranks[-1].start()
            theirs.close()  # so that a rank's death is heard
            pipes.append(ours)
        pipes[1].send(answer_of(pipes[0]))
        results = [answer_of(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send(None)
        for rank in ranks:
            rank.join(5.0)
        return results
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def answer_of(pipe):
    assert pipe.poll(ANSWER_S), "a rank does not answer"
    answer = pipe.recv()
    assert not isinstance(answer, Failed), answer
    return answer


def use_group(channel, device):
    group, rank = channel.communicator, channel.communicator.rank
    total = group.all_sum(torch.full((3, 5), 1.0 + rank, device=device, dtype=torch.bfloat16))
    told = group.broadcast(torch.arange(4, device=device, dtype=torch.int32) + 10 * rank)
    said = group.gather_bytes(bytes([rank])), group.broadcast_bytes(b"from 0" if rank == 0 else b"")
    torch.cuda.synchronize(device)
    start_s = time.monotonic()
    for _ in range(1000):
        group.broadcast(told)
    torch.cuda.synchronize(device)
    return total.float().unique().tolist(), told.tolist(), said, (time.monotonic() - start_s) * 1e3


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
