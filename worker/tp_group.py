"""How the ranks of one worker become a group: rank 0 opens the places, has the others started, and they all meet there.

A group has one incarnation: when a rank ends, all end, and the process that started rank 0 starts the whole group
again, under a new epoch. Nothing is left behind by it: the link is an abstract socket, the store is rank 0's. Owns the
order of meeting; how ranks are started is the caller's (`RankStarter`), what they do then is the roles'.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch._C._distributed_c10d import TCPStore

from baton.core.config import WorkerConfig
from baton.core.errors import BatonError, WorkerLost, WorkerStartFailed, from_wire
from baton.engine.graphs.graphed_step import graphed_step
from baton.engine.step.runner import OpenPush, Runner
from baton.engine.tp import join as tp_group_join
from baton.engine.tp.collectives import GlooGroup, open_store
from baton.engine.tp.expert_balancer import ExpertBalancer
from baton.engine.tp.link import TPGroupLink
from baton.engine.tp.plan import PlanChannel
from baton.engine.tp.plan_codec import PlanCodec
from baton.engine.tp.rank_runners import Rank0Runner
from baton.model.parallel import Communicator
from baton.worker.loading import LoadedWorker, reach_of
from baton.worker.rank import RankPlace, RankStarter


def decode_runner(config: WorkerConfig, loaded: LoadedWorker, communicator: Communicator | None) -> Runner:
    """For a worker that decodes, and computes prompts; warmed up, its CUDA graphs captured."""
    runner = Runner(
        loaded.model,
        loaded.pool,
        max_num_seqs=config.max_num_seqs,
        num_draft_tokens=config.num_draft_tokens,
        communicator=communicator,
        eos_token_ids=loaded.tokenizer.eos_token_ids,
        verification=config.verification,
        lookup=config.lookup,
        grammars=loaded.grammars,
        host_kv_bytes=config.host_kv_bytes,
    )
    reach = reach_of(config, loaded.model)
    runner.compile_ahead(reach)
    runner.graphs = graphed_step(
        loaded.model,
        loaded.pool,
        config.graphs,
        max_num_sequences=config.max_num_seqs,
        num_draft_tokens=config.num_draft_tokens,
        max_model_len=config.max_model_len,
        max_num_tokens=reach.num_tokens,
        communicator=communicator,
    )
    runner.warm_up(reach)
    return runner


def prefill_runner(
    config: WorkerConfig, loaded: LoadedWorker, communicator: Communicator | None, open_push: OpenPush
) -> Runner:
    """For a worker that computes prompts alone, and pushes their KV; warmed up, graphs of its trunk captured."""
    runner = Runner(
        loaded.model,
        loaded.pool,
        max_num_seqs=config.max_num_seqs,
        num_draft_tokens=0,
        communicator=communicator,
        eos_token_ids=loaded.tokenizer.eos_token_ids,
        grammars=loaded.grammars,
        open_push=open_push,
    )
    reach = reach_of(config, loaded.model)
    runner.compile_ahead(reach, decodes=False)
    runner.graphs = graphed_step(
        loaded.model,
        loaded.pool,
        config.graphs,
        max_num_sequences=config.max_num_seqs,
        num_draft_tokens=0,
        max_model_len=config.max_model_len,
        max_num_tokens=reach.num_tokens,
        communicator=communicator,
        decodes=False,
    )
    runner.warm_up(reach, decodes=False)
    return runner


def rank0_runner(config: WorkerConfig, runner: Runner, channel: PlanChannel) -> Rank0Runner:
    """Rank 0's of a worker of several ranks, whose experts move if that was asked for."""
    balancer = None if runner.experts is None else ExpertBalancer(runner.experts, config.eplb_step_interval)
    return Rank0Runner(runner, channel, balancer)


JOIN_TIMEOUT_S: Final = 600.0  # the caller that waits for the worker has a deadline of its own
LOAD_TIMEOUT_S: Final = 3600.0  # and a large model takes its time

log = logging.getLogger(__name__)

OnFatal = Callable[[BaseException], None]


def lead(size: int, epoch: int, codec: PlanCodec, device: torch.device, starter: RankStarter) -> PlanChannel:
    """Rank 0's channel to a TP group whose ranks have all come.

    Raises:
        StartupError: one of them cannot.
    """
    listener = tp_group_join.RankListener(codec, size)
    try:
        store = open_store(0, size, 0)
        for rank in range(1, size):
            starter.start(
                RankPlace(
                    rank=rank,
                    size=size,
                    epoch=epoch,
                    store_port=store.port,
                    link_address=listener.address,
                    link_token=listener.token,
                )
            )
        link = listener.accept(JOIN_TIMEOUT_S, starter.check)
    except WorkerLost as error:
        raise WorkerStartFailed(error.message, **error.fields) from error
    finally:
        listener.close()
    return _channel(link, store, device)


def follow(rank_place: RankPlace, codec: PlanCodec, device: torch.device) -> PlanChannel:
    """Another rank's channel.

    Raises:
        StartupError: rank 0 is not there any more.
    """
    try:
        link = tp_group_join.join(
            codec, rank_place.rank, rank_place.size, rank_place.link_address, rank_place.link_token
        )
    except WorkerLost as error:
        raise WorkerStartFailed(error.message, **error.fields) from error
    return _channel(link, open_store(rank_place.rank, rank_place.size, rank_place.store_port), device)


def lead_worker(
    config: WorkerConfig, epoch: int, codec: PlanCodec, starter: RankStarter | None, on_fatal: OnFatal
) -> tuple[PlanChannel | None, OnFatal]:
    """What rank 0 of a worker begins with: its channel, if it has other ranks, and what to tell when it cannot go on.

    Raises:
        StartupError: one of the ranks cannot come.
    """
    if config.tp_size == 1:
        return None, on_fatal
    assert starter is not None
    channel = lead(config.tp_size, epoch, codec, torch.device(config.device), starter)
    return channel, lambda error: end_tp_group(channel, error, on_fatal)


@contextmanager
def closed_if_it_fails(channel: PlanChannel | None) -> Iterator[None]:
    """A worker that cannot start leaves its group, and says what it has to; if another rank was first, what that said.

    Raises:
        BaseException: what happened inside, or what the other rank told of it.
    """
    try:
        yield
    except BaseException as error:
        if channel is None:
            raise
        failure = channel.link.failure if channel.link.rank == 0 else None
        channel.close(error if isinstance(error, BatonError) else None)
        if failure is not None:
            raise start_error(failure) from error
        raise


def watch_tp_group(channel: PlanChannel | None, on_fatal: OnFatal) -> None:
    """From here on the ranks serve, and any that fails ends them all.

    Raises:
        WorkerLost: one of them never came so far.
    """
    if channel is not None:
        channel.start(LOAD_TIMEOUT_S)
        channel.link.on_fail = on_fatal


def start_error(error: WorkerLost) -> BatonError:
    """What a rank that failed while the TP group started has to say; its own error if it told us."""
    cause = error.fields.get("cause")
    return WorkerStartFailed(error.message, **error.fields) if cause is None else from_wire(cause)


def end_tp_group(channel: PlanChannel, error: BaseException, on_fatal: OnFatal) -> None:
    """Rank 0 cannot go on, or another rank cannot: none of them may."""
    log.critical("the TP group ends: %s", error)
    channel.link.kill_peers()
    on_fatal(error)


def _channel(link: TPGroupLink, store: TCPStore, device: torch.device) -> PlanChannel:
    group: Communicator
    try:
        if device.type == "cuda":
            from baton.engine.tp.collectives import NcclGroup  # CPUs have no use for it

            group = NcclGroup(link.rank, link.size, store, device)
        else:
            group = GlooGroup(link.rank, link.size, store)
    except WorkerLost as error:
        link.leave(error)
        raise start_error(link.failure or error) from error
    return PlanChannel(link, group)
