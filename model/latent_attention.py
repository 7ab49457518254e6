"""Multi-head latent attention: projections, latent rows in the pool, and the heads' attention over them.

Source: DeepSeek-V2 (2024), section 2.1; transformers `DeepseekV3Attention`. A rank of a group holds a range of heads,
and every row of the pool. `kernels.mla.latent_rows` has both forms of the attention and says which is used where.

Legend: T tokens, D hidden size, A query heads (of this rank), E columns of a query, N of them that are not rotated, R
that are rotated, C length of a latent, V columns of a value, Y = N + V, X = C + R elements of a row, K blocks of the
pool, S positions of one.
"""

import torch

from baton.kernels.attention.decode_plan import SplitKVPlans
from baton.kernels.ops import Ops, Rows, Weight, plain
from baton.kvcache.pool import KVPool
from baton.model.attention import Attention, AttentionInputs
from baton.model.config import ModelConfig
from baton.model.inputs import DecodeBatch, PrefillBatch
from baton.model.latent_sizes import NORM_EPS
from baton.model.layers import RMSNorm, WeightSource
from baton.model.tensor_spec import latent_linears


class LatentAttention(Attention):
    """Latent attention of one layer. Its rows are pool layer `layer`, key and value in one."""

    def __init__(self, source: WeightSource, prefix: str, layer: int, config: ModelConfig, ops: Ops) -> None:
        assert config.latent is not None
        self._sizes = sizes = config.latent
        down, up, out = latent_linears(config, prefix)
        self.down_XD = source.take_linear(*down)
        self.query_norm = RMSNorm(source, f"{prefix}.q_a_layernorm", NORM_EPS, ops) if up else None
        self.query_up_QX = source.take_linear(*up) if up else None
        self.latent_norm = source.take(f"{prefix}.kv_a_layernorm.weight"), NORM_EPS
        # Wide even in a float8 checkpoint, because the absorbed form multiplies with its transpose.
        expand_QC = source.take(f"{prefix}.kv_b_proj.weight")
        self.expand_AYC = expand_QC.unflatten(0, (-1, sizes.nope_dim + sizes.value_dim))
        self.out_DQ = source.take_linear(*out)
        self.layer = layer
        self._scale = sizes.query_dim**-0.5 * config.rope.score_factor
        self._ops = ops

    @property
    def reader(self) -> Weight:
        """The weight of the GEMM that alone reads the rows given to `project`."""
        return self.down_XD

    def project(self, x_TD: Rows, inputs: AttentionInputs) -> tuple[torch.Tensor, None]:
        """Write the tokens' rows; returns their queries [T, A, E]."""
        sizes, angles = self._sizes, (inputs.cos_TF, inputs.sin_TF)
        down_TX = self._ops.linear(x_TD, self.down_XD)
        query_TX, latent_TC, turning_TR = down_TX.tensor_split([-sizes.row_len, -sizes.rope_dim], dim=1)
        if self.query_norm is not None and self.query_up_QX is not None:
            normed, _ = self.query_norm.read_by(self.query_up_QX, query_TX)
            query_TX = self._ops.linear(normed, self.query_up_QX)
        query_TAE = query_TX.unflatten(1, (-1, sizes.query_dim))
        rows_KSX, interleaved = inputs.pool.blocks(self.layer)[:, 0, 0], sizes.is_interleaved
        query_TAE = self._ops.latent_norm_rope_write(
            query_TAE,
            latent_TC,
            turning_TR,
            self.latent_norm,
            angles,
            inputs.slots_T,
            rows_KSX,
            interleaved=interleaved,
        )
        return query_TAE, None

    def stored(self, pool: KVPool) -> tuple[torch.Tensor, ...]:
        """Rows of the layer, [K, S, X], and the up-projection of its latents."""
        return pool.blocks(self.layer)[:, 0, 0], self.expand_AYC

    def mix(self, read: tuple[torch.Tensor, ...], inputs: AttentionInputs) -> Rows:
        """Heads' values, [T, A * V]; of decode rows alone as the output projection reads them."""
        if not isinstance(inputs.batch, DecodeBatch):
            return super().mix(read, inputs)
        inputs.on_layer(self.layer)
        return self._decoded(self.out_DQ, read[0], inputs.batch, self.stored(inputs.pool))

    def join(self, mixed_TQ: Rows, gate_TAE: torch.Tensor | None = None) -> torch.Tensor:
        """Output projection of the heads' values, [T, A * V] -> [T, D]."""
        assert gate_TAE is None
        return self._ops.linear_inner(mixed_TQ, self.out_DQ)

    def _attend_prompts(
        self, query_TAE: torch.Tensor, batch: PrefillBatch, stored: tuple[torch.Tensor, ...], plans: SplitKVPlans
    ) -> torch.Tensor:
        rows_KSX, expand_AYC = stored
        return self._ops.mla_prefill(
            query_TAE,
            rows_KSX,
            expand_AYC,
            batch.block_tables_BM,
            batch.query_lens,
            batch.context_lens,
            nope_dim=self._sizes.nope_dim,
            scale=self._scale,
            plans=plans,
        )

    def _attend_decode(
        self, query_TAE: torch.Tensor, batch: DecodeBatch, stored: tuple[torch.Tensor, ...], plans: SplitKVPlans
    ) -> torch.Tensor:
        value_TQ = plain(self._decoded(None, query_TAE, batch, stored))
        value_TAV: torch.Tensor = value_TQ.unflatten(1, (-1, self._sizes.value_dim))
        return value_TAV

    def _decoded(
        self, reader: Weight | None, query_TAE: torch.Tensor, batch: DecodeBatch, stored: tuple[torch.Tensor, ...]
    ) -> Rows:
        """Heads' values of decode rows, [T, A * V], in the form in which the GEMM of `reader` takes them."""
        rows_KSX, expand_AYC = stored
        return self._ops.mla_decode(
            query_TAE.unflatten(0, batch.positions_BQ.shape),
            rows_KSX,
            expand_AYC,
            batch.block_tables_BM,
            batch.positions_BQ,
            batch.max_context_len,
            nope_dim=self._sizes.nope_dim,
            scale=self._scale,
            reader=reader,
        )
