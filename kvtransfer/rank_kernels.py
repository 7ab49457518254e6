"""The launches for one `DigestWanted`: they fill the pool of one rank from staging memory, and digest it there.

Staging memory holds every head; a rank's pool holds some of them, and the launches access only those. The pool may be
on any GPU: it is an address that the launching device can reach. This module does not handle streams: all calls are
made with the rank's own stream current.
"""

from collections.abc import Sequence

import torch

from baton.core.requests.request import AttemptKey
from baton.kernels.kv.pool_digest import kv_digest
from baton.kernels.kv.scatter import PoolAddress, ScatterRange, Tuning, WriteCompletion, kv_scatter
from baton.kvcache.allocator import BlockTable
from baton.kvcache.geometry import LayerGeometry
from baton.kvtransfer.device_stream import DeviceStream
from baton.kvtransfer.flag_page import WORD_BYTES
from baton.kvtransfer.receiver.actions import DigestWanted
from baton.kvtransfer.receiver.device_jobs import SCRATCH_SLOT, SLOT_WORDS

_NOBODY = AttemptKey("", 0)

# Measured beside the decode step of an 8B model: four multiprocessors verify 165 GB/s and slow it by less than 1 %.
VERIFY = Tuning(num_programs=4)
FILL = Tuning(num_programs=8)  # PCIe is the limit
TP_GROUP_PROGRAMS = 8  # for all ranks together: each has a part of the bytes, and most of them are behind NVLink


class RankKernels:
    """The launches of one rank.

    Args:
        pool: the rank's pool, as the launching device reaches it.
        layers: layers of the pool.
        staging: the staging memory, as the launching device reaches it.
        flags_address: address of the flag page for that device.
        device: device that launches.
        num_ranks: number of ranks whose launches share it.
    """

    def __init__(
        self,
        pool: PoolAddress,
        layers: Sequence[LayerGeometry],
        staging: PoolAddress,
        flags_address: int,
        device: torch.device,
        num_ranks: int,
    ) -> None:
        self._pool = pool
        self._layers = layers
        self._staging = staging
        self._flags_address = flags_address
        self._launches = DeviceStream(device)
        each = Tuning(num_programs=max(1, TP_GROUP_PROGRAMS // num_ranks))
        self._fill, self._verify = (FILL, VERIFY) if num_ranks == 1 else (each, each)

    def launch(self, wanted: DigestWanted, table: BlockTable) -> None:
        """Launch one kernel, or two where layers come from staging memory; the last one raises the flag."""
        piece = self._piece(wanted)
        answer = self._completion(wanted.flag, wanted.sequence)
        layer = self._layers[wanted.layers[0]]
        ids = self._launches.ids(tuple(layer.blocks_of(table.blocks, table.state_slot, piece.first + piece.count)))
        workspace = self._launches.workspace(piece.first + piece.count)
        if wanted.staging.blocks:
            done = self._completion(SCRATCH_SLOT, wanted.sequence) if wanted.has_digest else answer
            staged = layer.blocks_of(wanted.staging.blocks, wanted.staging.state_slot, piece.first + piece.count)
            source = self._launches.ids(tuple(staged))
            kv_scatter(self._staging, source, self._pool, ids, piece, workspace, done, self._fill, with_digest=False)
        if wanted.has_digest:
            kv_digest(self._pool, ids, piece, workspace, answer, self._verify)

    def warm_up(self) -> None:
        """Compile the kernels that incoming transfers will need, by launches that move nothing."""
        shapes = set()
        for index, layer in enumerate(self._layers):
            shape = (layer.head_first, layer.num_heads, layer.num_parts, layer.rows_per_block, layer.row_bytes)
            if shape in shapes:
                continue
            shapes.add(shape)
            block = BlockTable((0,), layer.rows_per_block, 0 if layer.blocks_per_slot else None)
            for has_digest in (True, False):
                self.launch(
                    DigestWanted(
                        attempt=_NOBODY,
                        rank=0,
                        flag=SCRATCH_SLOT,
                        sequence=0,
                        layers=(index,),
                        first=0,
                        count=0,
                        staging=block,
                        has_digest=has_digest,
                    ),
                    block,
                )

    def _piece(self, wanted: DigestWanted) -> ScatterRange:
        layer = self._layers[wanted.layers[0]]
        return ScatterRange(
            layers=wanted.layers,
            first=wanted.first,
            count=wanted.count,
            head_first=layer.head_first,
            head_count=layer.num_heads,
        )

    def _completion(self, slot: int, sequence: int) -> WriteCompletion:
        return WriteCompletion(self._flags_address + slot * SLOT_WORDS * WORD_BYTES, sequence)
