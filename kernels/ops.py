"""The operations whose implementation depends on numerics, device and quantization, chosen once per model.

An implementation is the torch reference, the batch-invariant reference (`kernels.tiles`), or the Triton kernels, which
fuse neighbouring operations of a layer, in either numerics. Both batch-invariant implementations keep the same promise,
each with bits of its own. Two operations sum over a dimension that a group of ranks may share: `linear_inner` and
`experts`. A model built on the operations of a group is one rank's part of the model, and contains no code for that.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from baton.core.numerics import Numerics
from baton.kernels.attention import invariant as attention_invariant
from baton.kernels.attention import paged as attention
from baton.kernels.attention.decode import attention_decode
from baton.kernels.attention.decode_plan import SplitKVPlans
from baton.kernels.attention.ordered import (
    attention_ordered_decode,
    attention_ordered_prefill,
    attention_ordered_prefill_lens,
)
from baton.kernels.attention.prefill import HEAD_DIMS, attention_prefill, attention_prefill_lens
from baton.kernels.delta_net.layer import DeltaKept, DeltaProjected, DeltaWeights, delta_layer, leaves_gates
from baton.kernels.delta_net.rows import StateRows
from baton.kernels.gemm import linear
from baton.kernels.gemm.fp8 import linear_fp8, linear_quantized, num_quantized
from baton.kernels.gemm.fp8_weight import Fp8Weight
from baton.kernels.gemm.inner_sum import ALONE, InnerSum
from baton.kernels.gemm.linear import linear_ordered
from baton.kernels.gemm.quantize_fp8 import Fp8Rows
from baton.kernels.implementation import Implementation
from baton.kernels.kv import dequantize as float8_kv
from baton.kernels.kv.write import kv_write
from baton.kernels.mla.absorb import absorb_queries, absorb_values
from baton.kernels.mla.decode import mla_decode
from baton.kernels.mla.latent_rows import absorbed_queries, absorbed_values
from baton.kernels.mla.norm_rope_write import latent_norm_rope_write, rotate_and_write
from baton.kernels.mla.prefill import mla_prefill
from baton.kernels.moe import moe, summands
from baton.kernels.moe import norm_route as moe_norm_route
from baton.kernels.moe.gemm import Fp8ExpertWeights, experts_apart
from baton.kernels.moe.norm_route import RoutedNorm
from baton.kernels.moe.select_topk import (
    MAX_BESIDE,
    MAX_CHOSEN,
    MAX_EXPERTS,
    Scoring,
    select_topk,
    select_topk_reference,
    with_shared,
)
from baton.kernels.moe.summands import Added, Summands, add_up
from baton.kernels.pointwise import rms_norm, sigmoid_gate, silu_mul
from baton.kernels.pointwise.qk_norm_rope_write import HeadNorms, LayerPool, Rotation, qk_norm_rope_write
from baton.kernels.pointwise.rope import rope
from baton.kernels.tiles import wide_dtype

AttentionDecode = Callable[..., torch.Tensor]
Choice = tuple[torch.Tensor, torch.Tensor]
Weight = torch.Tensor | Fp8Weight
Rows = torch.Tensor | Fp8Rows
Experts = moe.ExpertWeights | Fp8ExpertWeights

TRITON_DTYPES = (torch.bfloat16,)


def has_triton_form(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether Triton kernels compute a model by default, in either numerics."""
    return device.type == "cuda" and dtype in TRITON_DTYPES


def unfit_sizes(head_dim: int, hidden_size: int, num_experts: int = 0, num_chosen: int = 0) -> str:
    """Name the size of a model that the Triton kernels do not support; "" if all fit."""
    if head_dim not in HEAD_DIMS:
        return f"heads of {head_dim}"
    if hidden_size > rms_norm.MAX_LEN:
        return f"rows of {hidden_size}"
    if num_experts > MAX_EXPERTS or num_chosen > MAX_CHOSEN:
        return f"{num_chosen} of {num_experts} experts"
    return ""


def plain(rows: Rows) -> torch.Tensor:
    """Rows as they were before they were quantized, if they were."""
    if isinstance(rows, torch.Tensor):
        return rows
    assert rows.plain_TK is not None, "they were made for a GEMM with a float8 weight alone"
    return rows.plain_TK


class Ops:
    """One implementation of all operations; the functions of that name in `baton.kernels` document shapes and sources.

    Args:
        numerics: whether rows must be independent of each other.
        inner: how ranks share inner dimensions.
        implementation: TRITON or REFERENCE.

    Attributes:
        rechoose: function that overwrites the weights and experts that a router selected; None, as always when answers
            matter, keeps them. Benchmarks set it, before anything is captured.
    """

    def __init__(
        self,
        numerics: Numerics,
        inner: InnerSum = ALONE,
        implementation: Implementation = Implementation.REFERENCE,
    ) -> None:
        assert implementation is not Implementation.AUTO
        self.numerics = numerics
        self.implementation = implementation
        self.rechoose: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        self._inner = inner
        self._is_invariant = invariant = numerics is Numerics.INVARIANT
        self._is_fused = implementation is Implementation.TRITON
        # To the same bits, but batch-invariant numerics rest on one launch for any number of rows.
        self._leaves_sums = self._is_fused and not invariant and inner.num_ranks == 1
        self._linear = linear.linear_invariant if invariant else linear.linear
        self._linear_inner = inner.linear_invariant if invariant else inner.linear
        self._route = moe.route_invariant if invariant else moe.route
        self._experts = partial(moe.experts_invariant if invariant else moe.experts, inner=inner)
        self._attention_prefill = (
            attention_invariant.attention_prefill_invariant if invariant else attention.attention_prefill
        )
        self._attention_decode: AttentionDecode = (
            attention_invariant.attention_decode_invariant if invariant else attention.attention_decode
        )
        if self._is_fused:
            self._linear = partial(linear_ordered if invariant else linear.linear_fast, implementation=implementation)
            self._linear_inner = self._linear_inner_ordered if invariant else self._linear_inner_fast

    @property
    def is_invariant(self) -> bool:
        """Whether a row depends on itself alone."""
        return self._is_invariant

    def linear(self, x_TK: Rows, weight: Weight) -> torch.Tensor:
        """Compute X W^T, [T, N]."""
        if isinstance(weight, Fp8Weight):
            return self._linear_fp8(x_TK, weight)
        return self._linear(plain(x_TK), weight)

    def linear_wide(self, x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """Compute X W^T, [T, N] in the wide dtype, from rows and a weight that either dtype holds exactly."""
        assert not (self._is_fused and self._is_invariant), "the loader refuses such models here"
        if self._is_fused and x_TK.dtype == weight_NK.dtype:
            return linear.linear_wide(x_TK, weight_NK, implementation=self.implementation)
        wide = wide_dtype(x_TK.dtype)
        return self._linear(x_TK.to(wide), weight_NK.to(wide))

    def linear_inner(self, x_TK: Rows, weight: Weight) -> torch.Tensor:
        """Compute the same where this rank has a part of the inner dimension: parts are added over the ranks."""
        if isinstance(weight, Fp8Weight):
            return self._inner.add_ranks(self._linear_fp8(x_TK, weight))
        return self._linear_inner(plain(x_TK), weight)

    def rms_norm(self, x: torch.Tensor, weight_D: torch.Tensor, eps: float, *, plus_one: bool = False) -> torch.Tensor:
        """Normalise over the last dimension; with `plus_one` the weight is 1 + w."""
        if self._is_fused and x.dim() == 2:
            form = self.implementation
            return rms_norm.rms_norm_fused(x, weight_D, eps, plus_one=plus_one, implementation=form).rows
        norm = rms_norm.rms_norm_invariant if self._is_invariant else rms_norm.rms_norm
        return norm(x, weight_D, eps, plus_one=plus_one)

    def add_rms_norm(
        self, x: torch.Tensor, added: Added, weight_D: torch.Tensor, eps: float, *, plus_one: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + added, and the sum itself, rounded to the dtype of `x` before it is normalised."""
        if self._is_fused:
            made = rms_norm.rms_norm_fused(
                x, weight_D, eps, residual_TD=added, plus_one=plus_one, implementation=self.implementation
            )
            assert made.sum_TD is not None
            return made.rows, made.sum_TD
        total = x + self.added_up(added)
        return self.rms_norm(total, weight_D, eps, plus_one=plus_one), total

    def norm_read_by(
        self,
        reader: Weight | None,
        x_TD: torch.Tensor,
        added_TD: Added | None,
        weight_D: torch.Tensor,
        eps: float,
        *,
        plus_one: bool = False,
        keep: bool = False,
    ) -> tuple[Rows, torch.Tensor]:
        """The same for the GEMM of `reader`: quantized, if that would take a launch for it.

        With `keep`, others read the norm, too, as it is without `reader`.
        """
        num_padded = self._num_quantized(len(x_TD), reader)
        if num_padded is not None:
            assert isinstance(reader, Fp8Weight)
            made = rms_norm.rms_norm_fused(
                x_TD, weight_D, eps,
                residual_TD=added_TD, plus_one=plus_one, num_padded=num_padded, ue8m0=reader.ue8m0, keep=keep,
                implementation=self.implementation,
            )  # fmt: skip
            assert made.scale_GR is not None
            rows = Fp8Rows(made.rows, made.scale_GR, len(x_TD), made.kept_TD)
            return rows, x_TD if made.sum_TD is None else made.sum_TD
        if added_TD is None:
            return self.rms_norm(x_TD, weight_D, eps, plus_one=plus_one), x_TD
        return self.add_rms_norm(x_TD, added_TD, weight_D, eps, plus_one=plus_one)

    def norm_route(
        self,
        x_TD: torch.Tensor,
        added_TD: torch.Tensor,
        weight_D: torch.Tensor,
        eps: float,
        router_XD: torch.Tensor,
        num_experts: int,
        num_chosen: int,
        *,
        plus_one: bool = False,
        renormalise: bool = False,
        has_shared: bool = False,
    ) -> RoutedNorm | None:
        """Return the norm of x + added, the sum, and the choice of experts; None: they take launches of their own."""
        may = self._is_fused and not self._is_invariant and len(x_TD) >= moe_norm_route.LEAST_TOKENS
        if not may or not moe_norm_route.fits(len(x_TD), router_XD, num_experts, num_chosen):
            return None
        made = moe_norm_route.norm_route(
            x_TD, added_TD, weight_D, eps, router_XD, num_chosen,
            num_experts=num_experts, plus_one=plus_one, renormalise=renormalise, has_shared=has_shared,
            implementation=self.implementation,
        )  # fmt: skip
        self._rechosen(made.weight_TK, made.expert_TK, num_chosen)
        return made

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Compute the activation of SwiGLU."""
        if self._is_fused and gate_up.dim() == 2:
            return silu_mul.silu_mul_fused(gate_up, implementation=self.implementation).rows
        gate = silu_mul.silu_mul_invariant if self._is_invariant else silu_mul.silu_mul
        return gate(gate_up)

    def silu_mul_read_by(self, reader: Weight, gate_up_TJ: torch.Tensor) -> Rows:
        """The same for the GEMM of `reader`, which alone reads it: quantized, if that would take a launch for it."""
        num_padded = self._num_quantized(len(gate_up_TJ), reader)
        if num_padded is None:
            return self.silu_mul(gate_up_TJ)
        assert isinstance(reader, Fp8Weight)
        made = silu_mul.silu_mul_fused(
            gate_up_TJ, num_padded=num_padded, ue8m0=reader.ue8m0, implementation=self.implementation
        )
        assert made.scale_GR is not None
        return Fp8Rows(made.rows, made.scale_GR, len(gate_up_TJ))

    def gate_output(self, mixed_TQ: torch.Tensor, gate_TAE: torch.Tensor) -> torch.Tensor:
        """Multiply attention outputs by the sigmoid of their gates, [T, A * E]."""
        if self._is_fused:
            return sigmoid_gate.gate_output(mixed_TQ, gate_TAE, implementation=self.implementation)
        return sigmoid_gate.gate_output_reference(mixed_TQ, gate_TAE)

    def add_shared(self, mixed_TD: Added, shared_TD: torch.Tensor, gate_T1: torch.Tensor | None) -> Added:
        """Add the outputs of routed and shared experts, the latter times the sigmoid of its gate's logits if any."""
        if isinstance(mixed_TD, Summands):
            return replace(mixed_TD, shared_TD=shared_TD, gate_T1=gate_T1)
        if self._is_fused:
            return sigmoid_gate.add_shared(mixed_TD, shared_TD, gate_T1, implementation=self.implementation)
        return sigmoid_gate.add_shared_reference(mixed_TD, shared_TD, gate_T1)

    def added_up(self, added_TD: Added) -> torch.Tensor:
        """What a layer adds, as one tensor, for what is no norm."""
        if isinstance(added_TD, torch.Tensor):
            return added_TD
        return add_up(added_TD, implementation=self.implementation)

    def qk_norm_rope_write(
        self,
        qkv_TX: torch.Tensor,
        norms: HeadNorms | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        slots_T: torch.Tensor,
        pool: LayerPool,
        bias_X: torch.Tensor | None = None,
        *,
        gated: bool = False,
    ) -> torch.Tensor:
        """Return queries [T, Q, D], normalised and rotated; write keys (likewise) and values to their pool slots.

        Args:
            qkv_TX: query, key and value heads side by side.
            norms: norms of queries and keys; None: they are not normalised.
            angles: cosines and sines of each token, [T, F]; the first 2 F columns of heads are rotated.
            slots_T: slot of each token; rows that pad a batch share the scratch block's slots.
            pool: pool of the layer.
            bias_X: bias added to the GEMM's rows first.
            gated: whether each query head is followed by its gate, which is left where it is.
        """
        _, num_kv, _, head_dim = pool.key_NHSD.shape
        num_query = (qkv_TX.shape[1] // head_dim - 2 * num_kv) // (2 if gated else 1)
        if self._is_fused:
            rotation = Rotation(dim=2 * angles[0].shape[1], tables=angles)
            return qk_norm_rope_write(
                qkv_TX, norms, rotation, slots_T, pool,
                num_query=num_query, bias_X=bias_X, gated=gated, implementation=self.implementation,
            )  # fmt: skip
        qkv_TX = qkv_TX if bias_X is None else qkv_TX + bias_X
        heads_TXD = qkv_TX.unflatten(1, (-1, head_dim))
        query_TQD, key_THD, value_THD = heads_TXD.tensor_split([-2 * num_kv, -num_kv], dim=1)
        query_TQD = query_TQD[:, ::2] if gated else query_TQD
        if norms is not None:
            query_TQD = self.rms_norm(query_TQD, norms.query_D, norms.eps, plus_one=norms.plus_one)
            key_THD = self.rms_norm(key_THD, norms.key_D, norms.eps, plus_one=norms.plus_one)
        self._write(rope(key_THD, *angles), value_THD, slots_T, pool)
        return rope(query_TQD, *angles)

    def latent_norm_rope_write(
        self,
        query_TAE: torch.Tensor,
        latent_TC: torch.Tensor,
        turning_TR: torch.Tensor,
        norm: tuple[torch.Tensor, float],
        angles: tuple[torch.Tensor, torch.Tensor],
        slots_T: torch.Tensor,
        rows_NSX: torch.Tensor,
        *,
        interleaved: bool,
    ) -> torch.Tensor:
        """Write each token's latent, normalised, and rotated key columns as a row of the pool -> rotated queries.

        Queries [T, A, E] may be rotated where they are; `norm` is the latents' weight and epsilon.
        """
        if self._is_fused:
            return latent_norm_rope_write(
                query_TAE, latent_TC, turning_TR, norm, angles, slots_T, rows_NSX,
                interleaved=interleaved, implementation=self.implementation,
            )  # fmt: skip
        latent_TC = self.rms_norm(latent_TC, *norm)
        return rotate_and_write(query_TAE, latent_TC, turning_TR, angles, slots_T, rows_NSX, interleaved=interleaved)

    def attention_prefill(
        self,
        query_TAD: torch.Tensor,
        key_NHSD: torch.Tensor,
        value_NHSD: torch.Tensor,
        block_tables_BM: torch.Tensor,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        on_device: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        plans: SplitKVPlans | None = None,
        scales: float8_kv.Scales | None = None,
    ) -> torch.Tensor:
        """Compute attention of concatenated chunks -> [T, A, D]; `scales` are those of float8 KV.

        Lengths are on the host. If they are on the device already, `on_device` gives the chunks' starts [B + 1] and
        context lengths [B], so that they are not sent again for each layer. `plans` are those of the pass, for all its
        layers.
        """
        arguments = (query_TAD, key_NHSD, value_NHSD, block_tables_BM)
        if not self._is_fused:
            if scales is None:
                return self._attention_prefill(*arguments, query_lens, context_lens)
            kv_NHSD = (key_NHSD, value_NHSD)
            return float8_kv.attend_prefill(
                self._attention_prefill, query_TAD, kv_NHSD, scales, block_tables_BM, query_lens, context_lens
            )
        if self._is_invariant:
            assert scales is None, "the loader refuses float8 KV here"
            if on_device is None:
                return attention_ordered_prefill_lens(
                    *arguments, query_lens, context_lens, implementation=self.implementation
                )
            return attention_ordered_prefill(*arguments, *on_device, implementation=self.implementation)
        fused = {"implementation": self.implementation, **_named(scales)}
        if on_device is None:
            return attention_prefill_lens(*arguments, query_lens, context_lens, **fused)
        longest = max(query_lens, default=0)
        return attention_prefill(*arguments, *on_device, max_query_len=longest, plans=plans, **fused)

    def attention_decode(
        self,
        query_BQAD: torch.Tensor,
        key_NHSD: torch.Tensor,
        value_NHSD: torch.Tensor,
        block_tables_BM: torch.Tensor,
        positions_BQ: torch.Tensor,
        max_context_len: int,
        *,
        plans: SplitKVPlans | None = None,
        scales: float8_kv.Scales | None = None,
    ) -> torch.Tensor:
        """Compute attention of Q rows of each of B sequences -> [B, Q, A, D]; `scales` are those of float8 KV.

        `plans` are those of the pass, for all its layers.
        """
        arguments = (query_BQAD, key_NHSD, value_NHSD, block_tables_BM, positions_BQ, max_context_len)
        if self._is_fused and self._is_invariant:
            assert scales is None, "the loader refuses float8 KV here"
            return attention_ordered_decode(*arguments, implementation=self.implementation)
        if self._is_fused:
            return attention_decode(*arguments, plans=plans, implementation=self.implementation, **_named(scales))
        if scales is None:
            return self._attention_decode(*arguments)
        kv_NHSD = (key_NHSD, value_NHSD)
        return float8_kv.attend_decode(
            self._attention_decode, query_BQAD, kv_NHSD, scales, block_tables_BM, positions_BQ, max_context_len
        )

    def leaves_gates(self, rows: Sequence[StateRows]) -> bool:
        """Whether a gated delta net's convolution computes the state's gates itself, from the rows they are made of."""
        return self._is_fused and not self._is_invariant and bool(rows) and leaves_gates(rows)

    def delta_layer(
        self, x: DeltaProjected, weights: DeltaWeights, kept: DeltaKept, rows: Sequence[StateRows]
    ) -> torch.Tensor:
        """Compute a gated delta net between its projections, [T, H G V]; decode steps are alike in all numerics."""
        return delta_layer(x, weights, kept, rows, invariant=self._is_invariant, implementation=self.implementation)

    def mla_prefill(
        self,
        query_TAE: torch.Tensor,
        rows_NSX: torch.Tensor,
        expand_AYC: torch.Tensor,
        block_tables_BM: torch.Tensor,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        *,
        nope_dim: int,
        scale: float,
        plans: SplitKVPlans | None = None,
    ) -> torch.Tensor:
        """Compute head values [T, A, V] of concatenated chunks over latent rows; `scale` is the factor of scores.

        Torch uses the absorbed form, as for decode rows: a row's bits must not depend on which of them it is.
        """
        if self._is_fused:
            assert not self._is_invariant, "the loader refuses such models here"
            return mla_prefill(
                query_TAE, rows_NSX, expand_AYC, block_tables_BM, query_lens, context_lens,
                nope_dim=nope_dim, softmax_scale=scale, plans=plans, implementation=self.implementation,
            )  # fmt: skip
        query_TAX, rows_N1SX = self._absorbed_queries(query_TAE, expand_AYC, nope_dim), rows_NSX[:, None]
        mixed_TAX = self._attention_prefill(
            query_TAX, rows_N1SX, rows_N1SX, block_tables_BM, query_lens, context_lens, scale=scale
        )
        return absorbed_values(mixed_TAX, expand_AYC[:, nope_dim:], invariant=self._is_invariant)

    def mla_decode(
        self,
        query_BQAE: torch.Tensor,
        rows_NSX: torch.Tensor,
        expand_AYC: torch.Tensor,
        block_tables_BM: torch.Tensor,
        positions_BQ: torch.Tensor,
        max_context_len: int,
        *,
        nope_dim: int,
        scale: float,
        reader: Weight | None = None,
    ) -> Rows:
        """Compute the same for Q rows of each of B sequences in the absorbed form, rows [B * Q, A * V].

        They are as the GEMM of `reader` takes them, which alone reads them: quantized, if that would take a launch.
        """
        query_TAE, (key_ANC, value_AVC) = query_BQAE.flatten(0, 1), expand_AYC.tensor_split([nope_dim], dim=1)
        if not self._is_fused:
            query_TAX = self._absorbed_queries(query_TAE, expand_AYC, nope_dim)
            rows_N1SX = rows_NSX[:, None]
            mixed_BQAX = self._attention_decode(
                query_TAX.unflatten(0, positions_BQ.shape), rows_N1SX, rows_N1SX, block_tables_BM, positions_BQ,
                max_context_len, scale=scale,
            )  # fmt: skip
            return absorbed_values(mixed_BQAX.flatten(0, 1), value_AVC, invariant=self._is_invariant).flatten(1)
        assert not self._is_invariant, "the loader refuses such models here"
        query_TAX = absorb_queries(query_TAE, key_ANC, implementation=self.implementation)
        mixed_BQAC = mla_decode(
            query_TAX.unflatten(0, positions_BQ.shape), rows_NSX, block_tables_BM, positions_BQ, max_context_len,
            latent_dim=expand_AYC.shape[2], softmax_scale=scale, implementation=self.implementation,
        )  # fmt: skip
        num_padded = self._num_quantized(len(query_TAE), reader)
        ue8m0 = isinstance(reader, Fp8Weight) and reader.ue8m0
        made = absorb_values(
            mixed_BQAC.flatten(0, 1), value_AVC,
            num_padded=num_padded, ue8m0=ue8m0, implementation=self.implementation,
        )  # fmt: skip
        return made.rows if made.scale_GR is None else Fp8Rows(made.rows, made.scale_GR, len(query_TAE))

    def _absorbed_queries(self, query_TAE: torch.Tensor, expand_AYC: torch.Tensor, nope_dim: int) -> torch.Tensor:
        nope_TAN, turned_TAP = query_TAE.tensor_split([nope_dim], dim=2)
        return absorbed_queries(nope_TAN, turned_TAP, expand_AYC[:, :nope_dim], invariant=self._is_invariant)

    def route(
        self,
        logits_TE: torch.Tensor,
        num_chosen: int,
        renormalise: bool,
        *,
        has_shared: bool = False,
        gate_T1: torch.Tensor | None = None,
    ) -> Choice:
        """Select experts: weights [T, K] in the wide dtype, and experts [T, K], most probable first.

        With `has_shared` expert E follows as one choice more, whose weight is the sigmoid of `gate_T1`, else 1.
        """
        if self._is_fused:
            made = select_topk(
                logits_TE, num_chosen, renormalise=renormalise,
                has_shared=has_shared, gate_T1=gate_T1, implementation=self.implementation,
            )  # fmt: skip
        else:
            made = self._route(logits_TE, num_chosen, renormalise)
            made = with_shared(*made, logits_TE.shape[1], gate_T1) if has_shared else made
        return self._rechosen(*made, num_chosen)

    def route_and_gate(
        self,
        logits_TE: torch.Tensor,
        num_chosen: int,
        renormalise: bool,
        gate_up_TJ: torch.Tensor,
        reader: Weight,
    ) -> tuple[Choice, Rows]:
        """Select experts as `route`, and compute an activation as `silu_mul_read_by`: few rows in one launch."""
        num_tokens, double = gate_up_TJ.shape
        if not self._is_fused or isinstance(reader, Fp8Weight) or num_tokens > MAX_BESIDE:
            made = self.route(logits_TE, num_chosen, renormalise)
            return made, self.silu_mul_read_by(reader, gate_up_TJ)
        inner_TI = gate_up_TJ.new_empty(num_tokens, double // 2)
        made = select_topk(
            logits_TE, num_chosen, renormalise=renormalise, beside=(gate_up_TJ, inner_TI),
            implementation=self.implementation,
        )  # fmt: skip
        return self._rechosen(*made, num_chosen), inner_TI

    def route_by_sigmoid(
        self,
        logits_TE: torch.Tensor,
        num_chosen: int,
        renormalise: bool,
        bias_E: torch.Tensor,
        groups: tuple[int, int],
        scaling: float,
        *,
        has_shared: bool = False,
    ) -> Choice:
        """Select experts by sigmoid plus bias, within the groups that are kept: see `select_topk`."""
        if self._is_fused:
            made = select_topk(
                logits_TE, num_chosen, scoring=Scoring.SIGMOID, renormalise=renormalise, bias_E=bias_E,
                num_groups=groups[0], num_kept_groups=groups[1], scaling=scaling,
                has_shared=has_shared, implementation=self.implementation,
            )  # fmt: skip
        else:
            made = select_topk_reference(logits_TE, num_chosen, True, renormalise, bias_E, groups, scaling)
            made = with_shared(*made, logits_TE.shape[1], None) if has_shared else made
        return self._rechosen(*made, num_chosen)

    def _rechosen(self, weight_TK: torch.Tensor, expert_TK: torch.Tensor, num_chosen: int) -> Choice:
        """Overwrite the choice of routed experts if a benchmark wants to; a shared expert stays the last one."""
        if self.rechoose is not None:
            self.rechoose(weight_TK[:, :num_chosen], expert_TK[:, :num_chosen])
        return weight_TK, expert_TK

    def experts(
        self,
        x_TD: torch.Tensor,
        weight_TK: torch.Tensor,
        expert_TK: torch.Tensor,
        weights: Experts,
        may_wait: bool,
    ) -> Added:
        """Compute the MoE output, [T, D]; in steps of few tokens the next norm adds it up.

        The host may wait for a CUDA device only if `may_wait`.
        """
        if not self._is_fused and not isinstance(weights, Fp8ExpertWeights):
            return self._experts(x_TD, weight_TK, expert_TK, weights, may_wait)
        out_dtype = x_TD.dtype if self._inner.num_ranks == 1 else torch.float32
        mixed_TD = experts_apart(
            x_TD, weight_TK, expert_TK, weights,
            out_dtype=out_dtype, invariant=self._is_invariant, implementation=self.implementation,
        )  # fmt: skip
        if isinstance(mixed_TD, Summands):
            num_tokens, num_chosen = expert_TK.shape
            may_leave = self._leaves_sums and weights.held is None
            if may_leave and summands.waits(num_tokens, num_chosen, x_TD.shape[1]):
                return mixed_TD
            mixed_TD = add_up(mixed_TD, out_dtype=out_dtype, implementation=self.implementation)
        return self._inner.add_ranks(mixed_TD).to(x_TD.dtype)

    @staticmethod
    def _write(key_THD: torch.Tensor, value_THD: torch.Tensor, slots_T: torch.Tensor, pool: LayerPool) -> None:
        """Write K and V in torch, in float8 if the pool has scales."""
        keys, values = pool.key_NHSD, pool.value_NHSD
        if pool.scales is not None:
            rows = [float8_kv.in_float8(x_THD, s) for x_THD, s in zip((key_THD, value_THD), pool.scales, strict=True)]
            key_THD, value_THD, keys, values = map(float8_kv.as_bytes, (*rows, keys, values))
        kv_write(key_THD, value_THD, slots_T, keys, values)

    def _linear_inner_ordered(self, x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """Compute it in the order of `InnerSum.linear_invariant`, for any number of ranks."""
        count = self._inner.num_slices(x_TK.shape[1])
        dtype = x_TK.dtype if self._inner.num_ranks == 1 else torch.float32
        part_TN = linear_ordered(x_TK, weight_NK, num_slices=count, out_dtype=dtype, implementation=self.implementation)
        return self._inner.add_ranks(part_TN).to(x_TK.dtype)

    def _linear_inner_fast(self, x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        return self._inner.add_ranks(linear.linear_fast(x_TK, weight_NK, implementation=self.implementation))

    def _num_quantized(self, num_rows: int, reader: Weight | None) -> int | None:
        """Number of rows, with padding, if what makes them is to quantize them for a GEMM; None: it is not."""
        if not self._is_fused or not isinstance(reader, Fp8Weight):
            return None
        return num_quantized(num_rows, reader, invariant=self._is_invariant, implementation=self.implementation)

    def _linear_fp8(self, x_TK: Rows, weight: Fp8Weight) -> torch.Tensor:
        if isinstance(x_TK, Fp8Rows):
            return linear_quantized(x_TK, weight, invariant=self._is_invariant, implementation=self.implementation)
        return linear_fp8(x_TK, weight, invariant=self._is_invariant, implementation=self.implementation)


def _named(scales: float8_kv.Scales | None) -> dict[str, Any]:
    """Scales as keyword arguments of the kernels."""
    return {} if scales is None else {"key_scale": scales[0], "value_scale": scales[1]}
