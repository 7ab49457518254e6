"""A layer's gated delta net: projections, convolution, recurrence, gated norm, output projection.

Source: Yang et al. 2024; transformers `Qwen3_5GatedDeltaNet` and `Qwen3NextGatedDeltaNet`, whose projections are
interleaved by key heads. The work between the projections (`kernels.delta_net.layer`) is rounded once. A rank of a
group holds a range of key heads with all that belongs to them.

Legend: T tokens, D hidden size, B sequences, L rows of each, H key heads (of this rank), G value heads of one, K and V
sizes of their heads, X channels of a key head, M = H G V.
"""

import torch

from baton.kernels.delta_net.delta_net import DeltaState
from baton.kernels.delta_net.layer import DeltaKept, DeltaProjected, DeltaWeights, StateGates
from baton.kernels.delta_net.rows import StateRows
from baton.kernels.ops import Ops, Rows, Weight, plain
from baton.kvcache.pool import KVPool
from baton.model.config import ModelConfig
from baton.model.delta_sizes import POOL_LAYERS
from baton.model.layers import WeightSource, joined
from baton.model.state_mixer import StateMixer
from baton.model.tensor_spec import delta_linears


class DeltaNet(StateMixer):
    """The gated delta net of one layer, whose state is in three pool layers from `layer` on.

    Attributes:
        mixed_XD: weight for queries, keys, values and output gates.
        gates_XD: weight for the state's gates.
        both_XD: both weights in one, of which the two are views, because a GEMM with few outputs takes as long as its
            launch. None: one is float8.
    """

    def __init__(self, source: WeightSource, prefix: str, layer: int, config: ModelConfig, ops: Ops) -> None:
        sizes = config.delta_net
        assert sizes is not None
        self._sizes = sizes
        self._is_interleaved = config.has_interleaved_delta_net
        mixed, out = delta_linears(config, prefix)
        gates = ("ba",) if self._is_interleaved else ("b", "a")
        self.mixed_XD = source.take_linear(*mixed)
        self.gates_XD = source.take(*(f"{prefix}.in_proj_{part}.weight" for part in gates))
        self.both_XD = joined(self.mixed_XD, self.gates_XD)
        if self.both_XD is not None:
            self.mixed_XD, self.gates_XD = self.both_XD.tensor_split([-len(self.gates_XD)])
        a_log_HG, dt_bias_HG = (
            source.take_wide(f"{prefix}.{name}").unflatten(0, (-1, sizes.num_values)) for name in ("A_log", "dt_bias")
        )
        conv_XW = source.take_wide(*(f"{prefix}.conv1d[{part}].weight" for part in "qkv"))[:, 0]
        self.weights = DeltaWeights(
            conv_HWX=self._by_key_head(conv_XW).mT.contiguous(),
            a_log_HG=a_log_HG,
            dt_bias_HG=dt_bias_HG,
            norm_V=source.take_wide(f"{prefix}.norm.weight"),
            eps=config.rms_norm_eps,
        )
        self.out_DX = source.take_linear(*out)
        self._ops = ops
        num_heads = len(a_log_HG)
        self.pool_layers = range(layer, layer + POOL_LAYERS)
        self.read_lens = num_heads * 2 * (sizes.key_dim + sizes.values_len), num_heads * 2 * sizes.num_values
        self.made_len = num_heads * sizes.values_len

    @property
    def reader(self) -> Weight:
        """The weight of the GEMM that reads the rows given to `project`; without `both_XD` another one does, too."""
        return self.mixed_XD if self.both_XD is None else self.both_XD

    def project(self, x_TD: Rows, rows: tuple[StateRows, ...]) -> tuple[torch.Tensor, ...]:
        """What the mixer reads of each row: queries, keys, values and output gates [T, X], and the state's gates.

        Instead of the latter, the gates' weight and the rows given, if `carry` multiplies them without a launch.
        """
        if self.both_XD is None:
            mixed_TX = self._ops.linear(x_TD, self.mixed_XD)
            if self._ops.leaves_gates(rows):
                return mixed_TX, self.gates_XD, plain(x_TD)
            return mixed_TX, self._ops.linear(x_TD, self.gates_XD)
        return self._ops.linear(x_TD, self.both_XD).tensor_split([-len(self.gates_XD)], dim=1)

    def stored(self, pool: KVPool) -> tuple[torch.Tensor, ...]:
        """The tensors of this layer alone that `carry` needs: what its sequences keep, of all slots, and weights."""
        conv_NHRX, tail_NHRY, state_NHRZ = (pool.blocks(layer)[:, :, 0] for layer in self.pool_layers)
        weights = self.weights
        own = weights.conv_HWX, weights.a_log_HG, weights.dt_bias_HG, weights.norm_V
        return conv_NHRX, tail_NHRY, state_NHRZ[:, :, 0], *own

    def carry(
        self, read: tuple[torch.Tensor, ...], stored: tuple[torch.Tensor, ...], rows: tuple[StateRows, ...]
    ) -> torch.Tensor:
        """Carry the rows into their sequences' states -> [T, H G V]. Never waits for the device."""
        conv_NHRX, tail_NHRY, state_NHZ, conv_HWX, a_log_HG, dt_bias_HG, norm_V = stored
        weights = DeltaWeights(
            conv_HWX=conv_HWX, a_log_HG=a_log_HG, dt_bias_HG=dt_bias_HG, norm_V=norm_V, eps=self.weights.eps
        )
        kept = DeltaKept(conv_NHRX, DeltaState(tail_NHRY, state_NHZ))
        return self._ops.delta_layer(self._projected(*read), weights, kept, rows)

    def join(self, out_TM: torch.Tensor) -> torch.Tensor:
        """Output projection, [T, H G V] -> [T, D]."""
        return self._ops.linear_inner(out_TM, self.out_DX)

    def _projected(
        self, mixed_TX: torch.Tensor, gates_TX: torch.Tensor, x_TD: torch.Tensor | None = None
    ) -> DeltaProjected:
        """Views of the GEMM outputs' rows; with `x_TD`, of the gates' weight instead of its output."""
        sizes, num_heads = self._sizes, len(self.weights.a_log_HG)
        lengths = [sizes.key_dim, sizes.key_dim, sizes.values_len, sizes.values_len]
        if self._is_interleaved:
            query_THK, key_THK, value_THX, z_THX = mixed_TX.unflatten(1, (num_heads, -1)).split(lengths, dim=2)
        else:
            parts_TX = mixed_TX.split([num_heads * length for length in lengths], dim=1)
            query_THK, key_THK, value_THX, z_THX = (part_TX.unflatten(1, (num_heads, -1)) for part_TX in parts_TX)
        dim = 1 if x_TD is None else 0
        lens, which = ((num_heads, 2, -1), 1) if self._is_interleaved else ((2, num_heads, -1), 0)
        b, a = gates_TX.unflatten(dim, lens).unbind(dim + which)
        return DeltaProjected(
            query_THK=query_THK,
            key_THK=key_THK,
            value_THX=value_THX,
            z_THGV=z_THX.unflatten(2, (sizes.num_values, -1)),
            b_THG=b if x_TD is None else None,
            a_THG=a if x_TD is None else None,
            gates=None if x_TD is None else StateGates(x_TD, b, a),
        )

    def _by_key_head(self, rows_XN: torch.Tensor) -> torch.Tensor:
        """[X of all key heads, N], all queries, then all keys, then all values -> [H, X, N]."""
        sizes = self._sizes
        num_heads = len(rows_XN) // (2 * sizes.key_dim + sizes.values_len)
        keys = num_heads * sizes.key_dim
        parts = rows_XN.tensor_split([keys, 2 * keys])
        return torch.cat([part.unflatten(0, (num_heads, -1)) for part in parts], dim=1)
