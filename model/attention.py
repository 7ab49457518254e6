"""Grouped-query attention with normalised queries and keys (Qwen3), over a paged KV pool.

Legend: T tokens, D hidden size, A query heads, H KV heads, E head size (head_dim), F = E / 2 rotary frequencies.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.kernels.kv_write import kv_write
from baton.kernels.ops import Ops
from baton.kernels.rope import rope
from baton.kvcache.pool import KVPool
from baton.model.config import ModelConfig
from baton.model.inputs import AttentionBatch, DecodeBatch
from baton.model.layers import RMSNorm, WeightSource


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What every layer of one forward pass shares.

    Attributes:
        batch: positions, slots and tables.
        pool: where K and V are written and read.
        cos_TF: cosines of the rotary angles.
        sin_TF: their sines.
        on_layer: called with a pool layer right after its K and V were written.
    """

    batch: AttentionBatch
    pool: KVPool
    cos_TF: torch.Tensor
    sin_TF: torch.Tensor
    on_layer: Callable[[int], None]

    @property
    def may_wait(self) -> bool:
        """Whether the host may wait for the device: in prefill, never in a decode step."""
        return not isinstance(self.batch, DecodeBatch)


class Attention:
    """One layer's attention; its KV is layer `layer` of the pool."""

    def __init__(self, source: WeightSource, prefix: str, layer: int, config: ModelConfig, ops: Ops) -> None:
        parts = [source.take(f"{prefix}.{name}_proj.weight") for name in "qkv"]
        self.qkv_QD = torch.cat(parts)
        self.out_DQ = source.take(f"{prefix}.o_proj.weight")
        self.query_norm = RMSNorm(source, f"{prefix}.q_norm", config.rms_norm_eps, ops)
        self.key_norm = RMSNorm(source, f"{prefix}.k_norm", config.rms_norm_eps, ops)
        self._heads = [part.shape[0] // config.head_dim for part in parts]  # as many as the weights are for
        self._head_dim = config.head_dim
        self._layer = layer
        self._ops = ops

    def __call__(self, x_TD: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """Write the tokens' K and V, then attend -> [T, D]."""
        heads_TXE = self._ops.linear(x_TD, self.qkv_QD).unflatten(1, (-1, self._head_dim))
        query_TAE, key_THE, value_THE = heads_TXE.split(self._heads, dim=1)
        query_TAE = rope(self.query_norm(query_TAE), inputs.cos_TF, inputs.sin_TF)
        key_THE = rope(self.key_norm(key_THE), inputs.cos_TF, inputs.sin_TF)
        key_NHSE, value_NHSE = inputs.pool.layer(self._layer)
        kv_write(key_THE, value_THE, _slots(inputs.batch), key_NHSE, value_NHSE)
        inputs.on_layer(self._layer)
        mixed_TQ = self._attend(query_TAE, key_NHSE, value_NHSE, inputs.batch).flatten(1)
        return self._ops.linear_inner(mixed_TQ, self.out_DQ)

    def _attend(
        self, query_TAE: torch.Tensor, key_NHSE: torch.Tensor, value_NHSE: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        if isinstance(batch, DecodeBatch):
            query_BQAE = query_TAE.unflatten(0, batch.positions_BQ.shape)
            mixed_BQAE = self._ops.attention_decode(
                query_BQAE, key_NHSE, value_NHSE, batch.block_tables_BM, batch.positions_BQ, batch.max_context_len
            )
            return mixed_BQAE.flatten(0, 1)
        return self._ops.attention_prefill(
            query_TAE, key_NHSE, value_NHSE, batch.block_tables_BM, batch.query_lens, batch.context_lens
        )


def _slots(batch: AttentionBatch) -> torch.Tensor:
    return batch.slots_BQ.flatten() if isinstance(batch, DecodeBatch) else batch.slots_T
