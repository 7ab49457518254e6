"""Forms the TP group of one worker: rank 0 opens the meeting points, has the others started, and all connect there.

A group has one incarnation: when a rank ends, all end, and the process that started rank 0 starts the whole group
again, under a new epoch. A group leaves nothing behind: the link is an abstract socket, and the store is rank 0's. This
module owns the order of joining; the caller starts the ranks (`RankStarter`), and the roles decide what they do then.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch._C._distributed_c10d import TCPStore

from baton.core.config import WorkerConfig
from baton.core.errors import BatonError, WorkerLost, WorkerStartFailed, from_wire
from baton.core.start_phase import WARM_UP, OnPhase, no_phase
from baton.engine.graphs.graphed_step import graphed_step
from baton.engine.step.runner import OpenPush, Runner
from baton.engine.tp import join as tp_group_join
from baton.engine.tp.collectives import GlooGroup, open_store
from baton.engine.tp.expert_balancer import ExpertBalancer
from baton.engine.tp.link import TPGroupLink
from baton.engine.tp.plan import PlanChannel
from baton.engine.tp.plan_codec import PlanCodec
from baton.engine.tp.rank_runners import Rank0Runner
from baton.model.model import Model
from baton.model.parallel import Alone, Communicator
from baton.worker.loading import LoadedWorker, reach_of
from baton.worker.rank import RankPlace, RankStarter


def decode_runner(
    config: WorkerConfig,
    loaded: LoadedWorker,
    communicator: Communicator | None,
    on_phase: OnPhase = no_phase,
) -> Runner:
    """Make the runner of a worker that decodes and computes prompts; warmed up, its CUDA graphs captured."""
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
    agree_on_layers(loaded.model, communicator or Alone())
    reach = reach_of(config, loaded.model)
    runner.compile_ahead(reach, on_phase=on_phase)
    runner.graphs = graphed_step(
        loaded.model,
        loaded.pool,
        config.graphs,
        max_num_sequences=config.max_num_seqs,
        num_draft_tokens=config.num_draft_tokens,
        max_model_len=config.max_model_len,
        max_num_tokens=reach.num_tokens,
        communicator=communicator,
        on_phase=on_phase,
    )
    on_phase(WARM_UP, 0, 0)
    runner.warm_up(reach)
    return runner


def prefill_runner(
    config: WorkerConfig,
    loaded: LoadedWorker,
    communicator: Communicator | None,
    open_push: OpenPush,
    on_phase: OnPhase = no_phase,
) -> Runner:
    """Make the runner of a worker that only computes prompts, and pushes their KV; warmed up, trunk graphs captured."""
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
    agree_on_layers(loaded.model, communicator or Alone())
    reach = reach_of(config, loaded.model)
    runner.compile_ahead(reach, decodes=False, on_phase=on_phase)
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
        on_phase=on_phase,
    )
    on_phase(WARM_UP, 0, 0)
    runner.warm_up(reach, decodes=False)
    return runner


def agree_on_layers(model: Model, group: Communicator) -> None:
    """Let passes that compute one layer of each kind compute the same layers at every rank.

    Each rank sees its own weights alone. If one of them skipped a layer that another computes, their collectives would
    not meet.
    """
    votes = group.gather_bytes(json.dumps(sorted(model.alike_layers())).encode())
    alike = [set(json.loads(vote)) for vote in votes]
    model.never_skip(set.union(*alike) - set.intersection(*alike))


def rank0_runner(config: WorkerConfig, runner: Runner, channel: PlanChannel) -> Rank0Runner:
    """Make rank 0's runner of a worker with several ranks; its experts move if that was configured."""
    balancer = None if runner.experts is None else ExpertBalancer(runner.experts, config.eplb_step_interval)
    return Rank0Runner(runner, channel, balancer)


JOIN_TIMEOUT_S: Final = 600.0  # the caller that waits for the worker has its own deadline
LOAD_TIMEOUT_S: Final = 3600.0  # a large model takes long to load

log = logging.getLogger(__name__)

OnFatal = Callable[[BaseException], None]


def lead(size: int, epoch: int, codec: PlanCodec, device: torch.device, starter: RankStarter) -> PlanChannel:
    """Return rank 0's channel to a TP group, once all ranks have joined.

    Raises:
        StartupError: a rank cannot join.
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
    """Return another rank's channel to rank 0.

    Raises:
        StartupError: rank 0 is gone.
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
    """Return rank 0's channel, if the worker has other ranks, and what to call when it cannot go on.

    Raises:
        StartupError: a rank cannot join.
    """
    if config.tp_size == 1:
        return None, on_fatal
    assert starter is not None
    channel = lead(config.tp_size, epoch, codec, torch.device(config.device), starter)
    return channel, lambda error: end_tp_group(channel, error, on_fatal)


@contextmanager
def closed_if_it_fails(channel: PlanChannel | None) -> Iterator[None]:
    """Leave the TP group with an error if the block fails; if another rank failed first, raise that rank's error.

    Raises:
        BaseException: the error raised inside, or the one that the other rank reported.
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
    """Watch the ranks, which serve from here on: if any fails, all end.

    Raises:
        WorkerLost: a rank never came to this point, or just ended.
    """
    if channel is not None:
        channel.start(LOAD_TIMEOUT_S)
        channel.link.on_fail = on_fatal
        if channel.link.failure is not None:  # it failed before the callback was set
            raise channel.link.failure


def start_error(error: WorkerLost) -> BatonError:
    """Return the error of a rank that failed while the TP group started; its own error if it reported one."""
    cause = error.fields.get("cause")
    return WorkerStartFailed(error.message, **error.fields) if cause is None else from_wire(cause)


def end_tp_group(channel: PlanChannel, error: BaseException, on_fatal: OnFatal) -> None:
    """End all ranks, because rank 0 or another rank cannot go on."""
    log.critical("the TP group ends: %s", error)
    channel.link.kill_peers()
    on_fatal(error)


def _channel(link: TPGroupLink, store: TCPStore, device: torch.device) -> PlanChannel:
    group: Communicator
    try:
        if device.type == "cuda":
            from baton.engine.tp.collectives import NcclGroup  # CPUs do not need it

            group = NcclGroup(link.rank, link.size, store, device)
        else:
            group = GlooGroup(link.rank, link.size, store)
    except WorkerLost as error:
        link.leave(error)
        raise start_error(link.failure or error) from error
    return PlanChannel(link, group)
