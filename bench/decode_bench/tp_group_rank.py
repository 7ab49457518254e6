"""One rank of a measured TP group, in a process of its own: NCCL with one GPU per rank, or gloo on CPUs.

`bench.actor.SpawnedRemote` serves it. `meet` and everything after it must be called at all ranks at the same time.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from baton.bench.decode_bench.cell import DecodeCells
from baton.bench.decode_bench.decode import (
    floors,
    graph_counts,
    identity,
    load_shape,
    make_pool,
    make_runner,
    measured,
    measured_turns,
    stamp_executor,
)
from baton.bench.decode_bench.floor import copy_gbps
from baton.bench.decode_bench.options import DecodeOptions
from baton.engine.tp import join as tp_group_join
from baton.engine.tp.collectives import GlooGroup, open_store
from baton.engine.tp.decision import Decisions
from baton.engine.tp.plan import PlanChannel, plan_codec
from baton.engine.tp.rank_runners import Rank0Runner, RankRunner
from baton.model.parallel import Communicator

MEET_TIMEOUT_S = 120.0
_WARM = 20
_IN_GRAPH = 100
_REPLAYS = 20


class TPGroupRank:
    """See the module.

    Args:
        rank: number of this rank.
        size: size of the TP group.
        device_type: "cuda" or "cpu".
        shares_memory: whether small tensors are exchanged through memory that GPUs share.
    """

    def __init__(self, rank: int, size: int, device_type: str, *, shares_memory: bool = True) -> None:
        self._rank, self._size, self._shares_memory = rank, size, shares_memory
        self._device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
        if device_type == "cuda":
            torch.cuda.set_device(self._device)
        else:
            torch.set_num_threads(1)
        self._store: TCPStore | None = None
        self._listener: tp_group_join.RankListener | None = None
        self._channel: PlanChannel | None = None

    def open(self) -> tuple[int, str, str]:
        """At rank 0: listen, and return where the other ranks connect."""
        self._store = open_store(0, self._size, 0)
        self._listener = tp_group_join.RankListener(plan_codec(), self._size)
        return self._store.port, self._listener.address, self._listener.token

    def meet(self, port: int, address: str, token: str) -> None:
        """Form the TP group."""
        if self._listener is not None:
            link = self._listener.accept(MEET_TIMEOUT_S)
        else:
            self._store = open_store(self._rank, self._size, port)
            link = tp_group_join.join(plan_codec(), self._rank, self._size, address, token)
        assert self._store is not None
        group: Communicator
        if self._device.type == "cuda":
            from baton.engine.tp.collectives import NcclGroup  # CPUs have no use for it

            group = NcclGroup(self._rank, self._size, self._store, self._device, shares_memory=self._shares_memory)
        else:
            group = GlooGroup(self._rank, self._size, self._store)
        self._channel = PlanChannel(link, group)

    @torch.inference_mode()
    def time_decisions(self, batch: int, num_drafts: int, num_blocks: int, count: int) -> dict[str, float]:
        """Microseconds of such a step's decision message, and of its broadcast alone; on GPUs also in a graph.

        On GPUs also microseconds of the two kernels that make and compare it, each alone.

        Args:
            batch: number of sequences.
            num_drafts: K.
            num_blocks: entries of each block table.
            count: number of messages that are launched one by one.
        """
        assert self._channel is not None
        group = self._channel.communicator
        decisions = Decisions(group, self._device)
        values = torch.arange(batch * (num_drafts + 3), device=self._device).view(batch, -1)
        numbers = torch.arange(batch * 5, device=self._device).view(batch, -1).unbind(dim=1)[:3]  # as `Slots` has them
        tables = torch.arange(batch * num_blocks, device=self._device).view(batch, -1)
        state = [torch.arange(batch, device=self._device), *numbers, tables]
        packed = torch.zeros(values.numel() + 3, dtype=torch.int32, device=self._device)

        def agree() -> torch.Tensor:
            return decisions.agree(values, state)

        def broadcast() -> torch.Tensor:
            return group.broadcast(packed)

        works: dict[str, Callable[[], Any]] = {"decision": agree, "broadcast": broadcast}
        if self._device.type == "cuda":
            from baton.kernels.sampling.decision import compare, pack  # CPUs have no use for it

            works["pack"] = partial(pack, values, state, 1)
            works["compare"] = partial(compare, packed, packed.clone(), values)
        found: dict[str, float] = {}
        for name, work in works.items():
            for _ in range(_WARM):
                work()
            self._wait()
            begin_s = time.perf_counter()
            for _ in range(count):
                work()
            self._wait()
            found[f"{name}_eager_us"] = 1e6 * (time.perf_counter() - begin_s) / count
            if self._device.type == "cuda":
                found[f"{name}_graph_us"] = self._time_graph(work)
        return found

    @torch.inference_mode()
    def time_exchanges(self, num_rows: int, hidden_size: int) -> dict[str, float]:
        """Microseconds of a sum and of a gather of bfloat16 rows, in a graph of many."""
        assert self._channel is not None
        group = self._channel.communicator
        x = torch.ones(num_rows, hidden_size, dtype=torch.bfloat16, device=self._device)
        return {
            "sum_us": self._time_graph(partial(group.all_sum, x)),
            "gather_us": self._time_graph(partial(group.all_gather, x)),
        }

    @torch.inference_mode()
    def measure_decode(self, options: DecodeOptions, has_graphs: bool) -> tuple[list[dict[str, Any]], Any]:
        """At rank 0: rows of every cell, with or without graphs, and the graph counts; the other ranks follow."""
        assert self._channel is not None
        group = self._channel.communicator
        model = load_shape(options, communicator=group, device=self._device)
        pool = make_pool(options, model, rank=self._rank, size=self._size)
        gbps = copy_gbps(self._device)
        runner = make_runner(options, model, pool, group, has_graphs=has_graphs)
        if self._rank > 0:
            RankRunner(runner, self._channel).run()
            return [], None
        executor = stamp_executor(runner, self._device)
        lead = Rank0Runner(runner, self._channel)
        turns = measured_turns({has_graphs: DecodeCells(lead, executor, model, options)}, options)
        lead.close()
        rows = [
            {
                **identity(options, cell),
                "tp": self._size,
                **measured(found),
                **floors(options, model, cell, found, gbps, num_ranks=self._size),
            }
            for cell, found in turns.items()
        ]
        return rows, graph_counts(runner)

    def close(self) -> None:
        """Leave the TP group."""
        if self._channel is not None:
            self._channel.close()
            self._channel.communicator.close()

    def _time_graph(self, work: Any) -> float:
        """Time of `work`, in a graph that contains it many times."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            work()
        self._wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            kept = [work() for _ in range(_IN_GRAPH)]
        graph.replay()
        self._wait()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(torch.cuda.current_stream(self._device))
        for _ in range(_REPLAYS):
            graph.replay()
        end.record(torch.cuda.current_stream(self._device))
        self._wait()
        assert len(kept) == _IN_GRAPH
        return float(1e3 * begin.elapsed_time(end) / _REPLAYS / _IN_GRAPH)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
