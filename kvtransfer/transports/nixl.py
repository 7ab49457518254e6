"""The data path of the optional extra `baton-pd[nixl]`: NIXL writes over UCX, from pool to pool.

Each side registers its pools once. The decode worker offers its pools (`NixlPools`). A prefill worker's opener
prepares, once per peer, descriptors of every block of which it and a rank of the peer both hold heads. A layer of whole
blocks is then one transfer made of indices; parts of blocks are named by address.

Pools are in host memory. NIXL cannot cancel. A write is done when NIXL reports it. A write that was posted and then
failed is neither done nor over, since what left this host may still be applied; it stays so, and `drain` does not
succeed, until the peer's incarnation is known to have ended (`outlived`).

Shapes: T descriptors.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.kvcache.geometry import LayerGeometry, PoolGeometry
from baton.kvcache.layout import MAX_BLOCK_SIZE, KVLayout, Range
from baton.kvtransfer.pool_io import PoolIO, PoolMemory
from baton.kvtransfer.protocol.frame import KVRange
from baton.kvtransfer.receiver.data_path import ReceiverSide, ServedDataPath
from baton.kvtransfer.sender.data_path import DataPathFailed, DataPathRefused, PushDataPath, SenderSide, Written
from baton.kvtransfer.transports.nixl_agent import NixlAgent, Transfers
from baton.proto import kv_pb2

REGISTER_LIMIT_S = 30.0
MEMORY = "DRAM"
MAX_RANKS = 64


def agent_name(role: str, epoch: int) -> str:
    """Return the agent name of one incarnation of one process."""
    return f"baton-{role}-{epoch:016x}"


def register(nixl: Any, pools: Sequence[PoolMemory]) -> Any:
    """Register pools with an agent."""
    return nixl.register_memory([(pool.ctypes.data, pool.nbytes, 0, "") for pool in pools], MEMORY)


class NixlPools:
    """The decode worker's side: its ranks' pools, registered once.

    Args:
        epoch: this incarnation.
        pools: memory of each rank's pool.
        places: descriptions of the pools; offsets are left out of the offer.

    Raises:
        DataPathRefused: NIXL is missing or does not accept the pools.
    """

    def __init__(self, epoch: int, pools: Sequence[PoolMemory], places: Sequence[kv_pb2.PoolPlace]) -> None:
        assert len(pools) == len(places)
        self._agent = NixlAgent(agent_name("decode", epoch))
        self._registered = self._agent.call(lambda agent: register(agent, pools), REGISTER_LIMIT_S)
        self._metadata: bytes = self._agent.call(lambda agent: agent.get_agent_metadata(), REGISTER_LIMIT_S)
        self._addresses = [pool.ctypes.data for pool in pools]
        self._places = list(places)

    def offer(self) -> kv_pb2.DataPathOffer:
        """Return what a peer needs to open the data path."""
        offer = kv_pb2.DataPathOffer(data_path="nixl")
        offer.nixl.agent = self._agent.name
        offer.nixl.metadata = self._metadata
        for address, place in zip(self._addresses, self._places, strict=True):
            pool = offer.nixl.pools.add(address=address, memory=MEMORY)
            pool.place.CopyFrom(place)
            pool.place.offset_bytes = 0
        return offer

    def close(self) -> None:
        """Deregister the pools; once this has returned, nothing is written any more."""
        self._agent.call(lambda agent: agent.deregister_memory(self._registered), REGISTER_LIMIT_S)
        self._agent.close()


def receiver_data_path(side: ReceiverSide) -> ServedDataPath:
    """Make the offer of a decode worker whose pools are in host memory.

    Raises:
        DataPathRefused: NIXL is missing or does not accept the pools.
    """
    pools = NixlPools(side.setup.epoch, side.memories, side.places)
    return ServedDataPath(pools.offer(), pools.close)


@dataclass(frozen=True, slots=True)
class Target:
    """The pool of one rank of the peer."""

    geometry: PoolGeometry
    address: int


def read_offer(offer: kv_pb2.NixlOffer, epoch: int, layout: KVLayout) -> list[Target]:
    """Return the pools of an offer, checked against each other.

    Raises:
        DataPathRefused: they cannot be the pools of one incarnation of one worker of this layout.
    """
    if offer.agent != agent_name("decode", epoch):
        raise DataPathRefused(f"the agent {offer.agent[:64]!r} is not of the incarnation {epoch:016x}")
    places = [pool.place for pool in offer.pools]
    sizes = {(place.tp_size, place.num_blocks, place.block_size, place.num_state_slots) for place in places}
    ranks = [pool.place.tp_rank for pool in offer.pools]
    if len(sizes) != 1 or len(ranks) > MAX_RANKS:
        raise DataPathRefused("the pools of the offer differ in size")
    ((tp_size, num_blocks, block_size, num_state_slots),) = sizes
    is_whole = tp_size == len(ranks) and ranks == list(range(tp_size))
    if bool(num_state_slots) != layout.has_state:
        raise DataPathRefused(f"pools of {num_state_slots} state slots")
    if not is_whole or num_blocks == 0 or block_size == 0 or MAX_BLOCK_SIZE % block_size:
        raise DataPathRefused("the pools of the offer are not those of one worker")
    theirs = layout.in_blocks_of(block_size)
    targets = []
    for rank, pool in enumerate(offer.pools):
        if pool.memory != MEMORY:
            raise DataPathRefused(f"pools in {pool.memory[:16]!r}, only host memory is built")
        geometry = PoolGeometry(theirs, num_blocks, rank, tp_size, num_state_slots=num_state_slots)
        if geometry.num_bytes != pool.place.num_bytes:
            raise DataPathRefused(f"a pool of {pool.place.num_bytes} bytes, its shape needs {geometry.num_bytes}")
        targets.append(Target(geometry, pool.address))
    return targets


# Computes where the heads of a span that two pools share lie in both of them: addresses for one-sided writes.
#
# Pools may differ in block size and in which heads they hold. Shapes: T descriptors, 3 numbers each.


Table = npt.NDArray[np.uint64]


def span_ranges(
    mine: LayerGeometry, theirs: LayerGeometry, blocks: Sequence[int], target_blocks: Sequence[int], span: KVRange
) -> Iterator[tuple[int, int, int]]:
    """Yield the heads of a span that both pools hold, as (offset here, offset there, bytes), joined where adjacent."""
    heads = common_heads(Range(span.head_first, span.head_count), common_heads(mine.heads, theirs.heads))
    joined: tuple[int, int, int] | None = None
    for here, there, num_bytes in _runs(mine, theirs, blocks, target_blocks, span, heads):
        if joined is not None and (joined[0] + joined[2], joined[1] + joined[2]) == (here, there):
            joined = (joined[0], joined[1], joined[2] + num_bytes)
            continue
        if joined is not None:
            yield joined
        joined = (here, there, num_bytes)
    if joined is not None:
        yield joined


def _runs(
    mine: LayerGeometry,
    theirs: LayerGeometry,
    blocks: Sequence[int],
    target_blocks: Sequence[int],
    span: KVRange,
    heads: Range,
) -> Iterator[tuple[int, int, int]]:
    size = min(mine.rows_per_block, theirs.rows_per_block)
    first = span.first
    while first < span.end:
        stop = min((first // size + 1) * size, span.end)
        here = mine.offset_bytes + blocks[first // mine.rows_per_block] * mine.block_bytes
        there = theirs.offset_bytes + target_blocks[first // theirs.rows_per_block] * theirs.block_bytes
        here += (heads.first - mine.head_first) * mine.head_bytes
        there += (heads.first - theirs.head_first) * theirs.head_bytes
        if stop - first == mine.rows_per_block == theirs.rows_per_block:
            yield here, there, heads.count * mine.head_bytes
        else:
            num_bytes = (stop - first) * mine.row_bytes
            here += first % mine.rows_per_block * mine.row_bytes
            there += first % theirs.rows_per_block * theirs.row_bytes
            for part in range(heads.count * mine.num_parts):
                yield here + part * mine.part_bytes, there + part * theirs.part_bytes, num_bytes
        first = stop


def common_heads(one: Range, other: Range) -> Range:
    """Return the heads in both ranges; count 0 if there are none."""
    first = max(one.first, other.first)
    return Range(first, max(0, min(one.stop, other.stop) - first))


def block_table(geometry: PoolGeometry, heads: Range, base: int) -> Table:
    """Return (address, bytes, device) of these heads of every block of every layer, scratch blocks included.

    A layer that does not hold them has the right number of rows, which are not used.
    """
    tables = []
    for layer in geometry.layers:
        table_T3 = np.zeros((layer.num_blocks, 3), dtype=np.uint64)
        count = common_heads(heads, layer.heads).count
        skip = max(0, heads.first - layer.head_first) * layer.head_bytes if count else 0
        offsets_T = np.arange(layer.num_blocks, dtype=np.uint64) * np.uint64(layer.block_bytes)
        table_T3[:, 0] = offsets_T + np.uint64(base + layer.offset_bytes + skip)
        table_T3[:, 1] = max(1, count * layer.head_bytes)
        tables.append(table_T3)
    return np.concatenate(tables)


OPEN_LIMIT_S = 5.0
_LOCAL = "NIXL_INIT_AGENT"
_PROBE_BYTES = 8


class NixlOpener:
    """The data path on the prefill side; see `sender.data_path.DataPathOpener`.

    Args:
        epoch: this incarnation.
        pool: this rank's pool, in host memory.
        memory: memory of that pool.
        rank: rank in the tensor-parallel group.
    """

    name = "nixl"

    def __init__(self, epoch: int, pool: PoolIO, memory: PoolMemory, rank: int = 0) -> None:
        self._pool = pool
        self._memory = memory
        self._agent: NixlAgent | None = None
        self._problem = ""
        try:
            self._agent = NixlAgent(f"{agent_name('prefill', epoch)}-{rank}")
            self._agent.call(lambda agent: register(agent, [memory]), REGISTER_LIMIT_S)
        except DataPathRefused as error:
            self._problem = str(error)

    @property
    def problem(self) -> str:
        """Why there is no agent; empty if there is one."""
        return self._problem

    def open(self, offer: kv_pb2.DataPathOffer, epoch: int, host_id: str) -> PushDataPath:
        """Load the peer's metadata, prepare descriptors, and read one word to see that the peer answers.

        Raises:
            DataPathRefused: the offer makes no sense here, or NIXL does not reach the peer.
        """
        if self._agent is None:
            raise DataPathRefused(self._problem)
        targets = read_offer(offer.nixl, epoch, self._pool.geometry.layout)
        return NixlDataPath(self._agent, self._pool, self._memory.ctypes.data, offer.nixl, targets)

    def close(self) -> None:
        """End the agent."""
        if self._agent is not None:
            self._agent.close()


def sender_data_path(side: SenderSide) -> NixlOpener:
    """Make the opener of a prefill rank whose pool is in host memory; where NIXL cannot work, it says why."""
    assert side.io is not None
    return NixlOpener(side.epoch, side.io, side.pool.bytes_view, side.pool.geometry.rank)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Descriptors of whole blocks of the heads that both sides hold, by layer and block."""

    heads: Range
    local: Any
    remote: Any


class NixlDataPath:
    """The data path to one incarnation of one peer; see `sender.data_path.PushDataPath`."""

    name = "nixl"

    def __init__(
        self, agent: NixlAgent, pool: PoolIO, base: int, offer: kv_pb2.NixlOffer, targets: Sequence[Target]
    ) -> None:
        self.num_blocks = targets[0].geometry.num_blocks
        self.num_state_slots = targets[0].geometry.num_state_slots
        self.block_size = targets[0].geometry.layout.block_size
        self._agent = agent
        self._pool = pool
        self._base = base
        self._targets = tuple(targets)
        self._peer = offer.agent
        self._posted: list[Transfers] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._prepared: list[list[_Prepared | None]] = []
        try:
            agent.call(lambda nixl: _add_peer(nixl, offer), OPEN_LIMIT_S)
            self._probe()
            self._prepared = agent.call(self._prepare, OPEN_LIMIT_S)
        except DataPathRefused:
            self.close()
            raise

    def write(
        self, blocks: Sequence[int], target_blocks: Sequence[int], span: KVRange, *, with_digest: bool
    ) -> Written:
        """Post the span to every rank that holds one of its heads.

        Raises:
            DataPathFailed: the data path is closed, or an earlier write on it has failed.
        """
        with self._lock:
            is_broken = any(item.is_lost for item in self._posted)
        if self._is_closed or is_broken:
            raise DataPathFailed(
                "the data path is closed" if self._is_closed else "a NIXL transfer to this peer has failed"
            )
        digest = self._pool.digest(blocks, span) if with_digest else None
        plans = [self._plan(rank, blocks, target_blocks, span) for rank in range(len(self._targets))]

        def post(nixl: Any, handles: list[Any]) -> None:
            for plan in plans:
                for make in plan:
                    handle = make(nixl)
                    handles.append(handle)
                    if nixl.transfer(handle) not in ("DONE", "PROC"):
                        raise DataPathFailed("a transfer was refused")

        transfers = self._agent.post(post, digest)
        with self._lock:
            self._posted = [item for item in self._posted if not item.wait(0)]
            self._posted.append(transfers)
        return transfers

    def drain(self, timeout_s: float) -> bool:
        """Wait for everything that was posted."""
        end_s = time.monotonic() + timeout_s
        with self._lock:
            posted = tuple(self._posted)
        return all(item.wait(max(0.0, end_s - time.monotonic())) for item in posted)

    def outlived(self) -> None:
        """Count failed writes as over: only the incarnation that has ended could have applied what was on its way."""
        with self._lock:
            lost = [item for item in self._posted if item.is_lost]
        for item in lost:
            item.end("a NIXL transfer failed")

    def close(self) -> None:
        """Release the descriptors and forget the peer. Failed writes count as over from here on."""
        self._is_closed = True
        self.outlived()
        prepared, self._prepared = self._prepared, []

        def forget(nixl: Any) -> None:
            for layers in prepared:
                for item in {id(item): item for item in layers if item is not None}.values():
                    nixl.release_dlist_handle(item.local)
                    nixl.release_dlist_handle(item.remote)
            nixl.remove_remote_agent(self._peer)

        try:
            self._agent.call(forget, OPEN_LIMIT_S)
        except DataPathRefused:
            return  # it never knew the peer, or is ending itself

    def _plan(self, rank: int, blocks: Sequence[int], target_blocks: Sequence[int], span: KVRange) -> list[Any]:
        """Return the functions that make, on the agent, the transfers to one rank."""
        mine, theirs = self._pool.geometry.layer(span.layer), self._targets[rank].geometry.layer(span.layer)
        prepared, size = self._prepared[rank][span.layer], mine.rows_per_block
        if not common_heads(common_heads(mine.heads, theirs.heads), Range(span.head_first, span.head_count)).count:
            return []
        begin, whole_end = -(-span.first // size), span.end // size
        covers = prepared is not None and common_heads(prepared.heads, Range(span.head_first, span.head_count))
        if prepared is None or covers != prepared.heads or begin >= whole_end:
            return [self._by_address(rank, blocks, target_blocks, span)]
        plan = [self._by_index(rank, prepared, span.layer, blocks[begin:whole_end], target_blocks[begin:whole_end])]
        for first, stop in ((span.first, begin * size), (whole_end * size, span.end)):
            if first < stop:
                part = KVRange(span.layer, first, stop - first, span.head_first, span.head_count)
                plan.append(self._by_address(rank, blocks, target_blocks, part))
        return plan

    def _by_index(
        self, rank: int, prepared: _Prepared, layer: int, blocks: Sequence[int], target_blocks: Sequence[int]
    ) -> Any:
        here_T = np.array(blocks, dtype=np.int32) + _first_row(self._pool.geometry, layer)
        there_T = np.array(target_blocks, dtype=np.int32) + _first_row(self._targets[rank].geometry, layer)
        return lambda nixl: nixl.make_prepped_xfer("WRITE", prepared.local, here_T, prepared.remote, there_T)

    def _by_address(self, rank: int, blocks: Sequence[int], target_blocks: Sequence[int], span: KVRange) -> Any:
        target = self._targets[rank]
        mine, theirs = self._pool.geometry.layer(span.layer), target.geometry.layer(span.layer)
        ranges = list(span_ranges(mine, theirs, blocks, target_blocks, span))
        here = [(self._base + here, num_bytes, 0) for here, _, num_bytes in ranges]
        there = [(target.address + there, num_bytes, 0) for _, there, num_bytes in ranges]

        def make(nixl: Any) -> Any:
            local, remote = nixl.get_xfer_descs(here, MEMORY), nixl.get_xfer_descs(there, MEMORY)
            return nixl.initialize_xfer("WRITE", local, remote, self._peer)

        return make

    def _probe(self) -> None:
        """Read a word of the peer's scratch block into the local one; no other code reads either."""
        mine, target = self._pool.geometry.layer(0), self._targets[0]
        theirs = target.geometry.layer(0)
        here = self._base + mine.offset_bytes + (mine.num_blocks - 1) * mine.block_bytes
        there = target.address + theirs.offset_bytes + (theirs.num_blocks - 1) * theirs.block_bytes

        def post(nixl: Any, handles: list[Any]) -> None:
            local = nixl.get_xfer_descs([(here, _PROBE_BYTES, 0)], MEMORY)
            remote = nixl.get_xfer_descs([(there, _PROBE_BYTES, 0)], MEMORY)
            handles.append(nixl.initialize_xfer("READ", local, remote, self._peer))
            nixl.transfer(handles[-1])

        transfers = self._agent.post(post)
        try:
            if not transfers.wait(OPEN_LIMIT_S) or not transfers.done:
                raise DataPathRefused("the peer does not answer over NIXL")
        except DataPathFailed as error:
            raise DataPathRefused(str(error)) from error

    def _prepare(self, nixl: Any) -> list[list[_Prepared | None]]:
        """Prepare descriptors for each rank of the peer and each layer whose blocks have one size on both sides."""
        prepared: list[list[_Prepared | None]] = []
        for target in self._targets:
            shared: dict[Range, _Prepared] = {}
            layers: list[_Prepared | None] = []
            for mine, theirs in zip(self._pool.geometry.layers, target.geometry.layers, strict=True):
                heads = common_heads(mine.heads, theirs.heads)
                if not heads.count or mine.rows_per_block != theirs.rows_per_block:
                    layers.append(None)
                    continue
                if heads not in shared:
                    local = block_table(self._pool.geometry, heads, self._base)
                    remote = block_table(target.geometry, heads, target.address)
                    shared[heads] = _Prepared(
                        heads,
                        nixl.prep_xfer_dlist(_LOCAL, local, MEMORY),
                        nixl.prep_xfer_dlist(self._peer, remote, MEMORY),
                    )
                layers.append(shared[heads])
            prepared.append(layers)
        return prepared


def _first_row(geometry: PoolGeometry, layer: int) -> int:
    """Return the row at which a layer begins in a `block_table`."""
    return sum(before.num_blocks for before in geometry.layers[:layer])


def _add_peer(nixl: Any, offer: kv_pb2.NixlOffer) -> None:
    name = nixl.add_remote_agent(offer.metadata)
    found = name.decode() if isinstance(name, bytes) else str(name)
    if found != offer.agent:
        nixl.remove_remote_agent(found)
        raise DataPathRefused(f"metadata of the agent {found[:64]!r}, offered was {offer.agent!r}")
    nixl.make_connection(found)
