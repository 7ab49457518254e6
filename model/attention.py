"""Grouped-query attention over a paged KV pool.

Legend: T tokens, D hidden size, A query heads, H KV heads, E head size (head_dim), F = E / 2 rotary frequencies.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from baton.kernels.attention.decode_plan import SplitKVPlans
from baton.kernels.delta_net.rows import StateRows
from baton.kernels.moe.expert_slots import RoutedRows
from baton.kernels.ops import Ops, Rows, Weight, plain
from baton.kernels.pointwise.qk_norm_rope_write import HeadNorms, LayerPool
from baton.kvcache.pool import KVPool
from baton.model.config import ModelConfig
from baton.model.dealt_rows import DealtRows
from baton.model.inputs import AttentionBatch, DecodeBatch, MixedBatch, PrefillBatch
from baton.model.layers import WeightSource


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What all layers of one forward pass share.

    Attributes:
        batch: positions, slots and tables; if rows are distributed over ranks, of this rank's rows only, as are all
            fields down to `plans`.
        slots_T: int64, where every row's K and V are written.
        pool: where K and V are written and read.
        cos_TF: cosines of the rotary angles.
        sin_TF: their sines.
        on_layer: called with a pool layer right after its K and V were written.
        plans: work partitions of attention, made by the first layer that needs them.
        state_rows: the same rows for layers that keep state; () if the layout has none.
        routed: the same rows for layers whose experts may move; None if there are none.
        dealt: which rank attends for which rows; None: every rank for all of them.
    """

    batch: AttentionBatch
    slots_T: torch.Tensor
    pool: KVPool
    cos_TF: torch.Tensor
    sin_TF: torch.Tensor
    on_layer: Callable[[int], None]
    plans: SplitKVPlans = field(default_factory=SplitKVPlans)
    state_rows: tuple[StateRows, ...] = ()
    routed: RoutedRows | None = None
    dealt: DealtRows | None = None

    @property
    def may_wait(self) -> bool:
        """Whether the host may wait for the device: never if the pass has decode rows."""
        return isinstance(self.batch, PrefillBatch) if self.dealt is None else self.dealt.may_wait


class Attention:
    """One layer's attention: project, attend, join. Its KV is pool layer `layer`."""

    def __init__(self, source: WeightSource, prefix: str, layer: int, config: ModelConfig, ops: Ops) -> None:
        self.qkv_QD = source.take_linear(*(f"{prefix}.{name}_proj.weight" for name in "qkv"))
        self.out_DQ = source.take_linear(f"{prefix}.o_proj.weight")
        names = [f"{prefix}.{name}_proj.bias" for name in "qkv"]
        self.bias_Q = source.take(*names) if config.has_qkv_bias else None
        self.norms: HeadNorms | None = None
        self._is_gated = config.has_output_gate
        if config.has_head_norms:
            query_D, key_D = (source.take(f"{prefix}.{name}_norm.weight") for name in "qk")
            plus_one = config.has_plus_one_norms
            self.norms = HeadNorms(query_D=query_D, key_D=key_D, eps=config.rms_norm_eps, plus_one=plus_one)
        self._scales = source.take_kv_scales(prefix)
        self.layer = layer
        self._ops = ops

    @property
    def reader(self) -> Weight:
        """The weight of the GEMM that alone reads the rows given to `project`."""
        return self.qkv_QD

    def project(self, x_TD: Rows, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Write the tokens' K and V; returns their queries [T, A, E] and their outputs' gates, [T, A, E], if any."""
        key_NHSE, value_NHSE = inputs.pool.layer(self.layer)
        key_scale, value_scale = (None, None) if self._scales is None else self._scales
        qkv_TQ = self._ops.linear(x_TD, self.qkv_QD)
        query_TAE = self._ops.qk_norm_rope_write(
            qkv_TQ,
            self.norms,
            (inputs.cos_TF, inputs.sin_TF),
            inputs.slots_T,
            LayerPool(key_NHSD=key_NHSE, value_NHSD=value_NHSE, key_scale=key_scale, value_scale=value_scale),
            self.bias_Q,
            gated=self._is_gated,
        )
        if not self._is_gated:
            return query_TAE, None
        num_heads, head_dim = query_TAE.shape[1:]
        pairs_TA2E = qkv_TQ[:, : 2 * num_heads * head_dim].unflatten(1, (num_heads, 2, head_dim))
        return query_TAE, pairs_TA2E[:, :, 1]

    def mix(self, read: tuple[torch.Tensor, ...], inputs: AttentionInputs) -> Rows:
        """Attention output [T, A * E] for the queries ([T, A, E],), whose K and V are already written."""
        inputs.on_layer(self.layer)
        parts = self.attend(read[0], inputs.batch, self.stored(inputs.pool), inputs.plans)
        mixed_TAE = parts[0] if len(parts) == 1 else torch.cat(parts)
        return mixed_TAE.flatten(1)

    def stored(self, pool: KVPool) -> tuple[torch.Tensor, ...]:
        """K and V of the layer, each [N, H, S, E], and their scales, float32 [1], if its KV is float8."""
        return *pool.layer(self.layer), *(self._scales or ())

    def attend(
        self, query_TAE: torch.Tensor, batch: AttentionBatch, stored: tuple[torch.Tensor, ...], plans: SplitKVPlans
    ) -> tuple[torch.Tensor, ...]:
        """Attention outputs, separately for chunks and decode rows, each [.., A, E]; called after `project`."""
        match batch:
            case PrefillBatch():
                return (self._attend_prompts(query_TAE, batch, stored, plans),)
            case DecodeBatch():
                return (self._attend_decode(query_TAE, batch, stored, plans),)
            case MixedBatch():
                num_prompt = len(batch.prompts.positions_T)
                return (
                    self._attend_prompts(query_TAE[:num_prompt], batch.prompts, stored, plans),
                    self._attend_decode(query_TAE[num_prompt:], batch.decode, stored, plans),
                )

    def join(self, mixed_TQ: Rows, gate_TAE: torch.Tensor | None = None) -> torch.Tensor:
        """Output projection, [T, A * E] -> [T, D], of outputs times the sigmoid of their gate, rounded once."""
        if gate_TAE is not None:
            mixed_TQ = self._ops.gate_output(plain(mixed_TQ), gate_TAE)
        return self._ops.linear_inner(mixed_TQ, self.out_DQ)

    def _attend_prompts(
        self, query_TAE: torch.Tensor, batch: PrefillBatch, stored: tuple[torch.Tensor, ...], plans: SplitKVPlans
    ) -> torch.Tensor:
        key_NHSE, value_NHSE, *scales = stored
        return self._ops.attention_prefill(
            query_TAE,
            key_NHSE,
            value_NHSE,
            batch.block_tables_BM,
            batch.query_lens,
            batch.context_lens,
            batch.lens_on_device,
            plans=plans,
            scales=(scales[0], scales[1]) if scales else None,
        )

    def _attend_decode(
        self, query_TAE: torch.Tensor, batch: DecodeBatch, stored: tuple[torch.Tensor, ...], plans: SplitKVPlans
    ) -> torch.Tensor:
        key_NHSE, value_NHSE, *scales = stored
        mixed_BQAE = self._ops.attention_decode(
            query_TAE.unflatten(0, batch.positions_BQ.shape),
            key_NHSE,
            value_NHSE,
            batch.block_tables_BM,
            batch.positions_BQ,
            batch.max_context_len,
            plans=plans,
            scales=(scales[0], scales[1]) if scales else None,
        )
        return mixed_BQAE.flatten(0, 1)
