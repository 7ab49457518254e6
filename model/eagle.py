"""An EAGLE-3 drafter: one decoder layer over (next token, hidden state) pairs, beside the trunk that it drafts for.

Entry i joins token t_{i+1} with the hidden state of position i, has position i, and predicts t_{i+2}. The first entry
takes the drafter's `fc` of the inputs of three trunk layers; a chained draft takes the drafter's own output, before its
norm. Source: see `eagle_config`.

Legend: T entries, D hidden size.
"""

from collections.abc import Sequence

import torch

from baton.kernels.ops import Ops
from baton.model.attention import Attention, AttentionInputs
from baton.model.decoder import Pieces, computed
from baton.model.eagle_config import LAYER, EagleConfig
from baton.model.layers import MLP, RMSNorm, WeightSource


class EagleHead:
    """The drafter's layer. Its KV is the pool layer after the trunk's last.

    Args:
        source: weights of its own checkpoint.
        config: its own config.
        layer: its pool layer.
        ops: the trunk's.
        embedding_VD: the trunk's; used unless the checkpoint has a different one.
    """

    def __init__(
        self, source: WeightSource, config: EagleConfig, layer: int, ops: Ops, embedding_VD: torch.Tensor
    ) -> None:
        sizes, eps = config.sizes, config.sizes.rms_norm_eps
        self.embedding_VD = embedding_VD
        if "embed_tokens.weight" in source.stored:
            own_VD = source.take("embed_tokens.weight")
            self.embedding_VD = embedding_VD if torch.equal(own_VD, embedding_VD) else own_VD
        self.join_DX = source.take("fc.weight")
        self.embedding_norm = RMSNorm(source, f"{LAYER}.input_layernorm", eps, ops)
        self.hidden_norm = RMSNorm(source, f"{LAYER}.hidden_norm", eps, ops)
        self.attention = Attention(source, f"{LAYER}.self_attn", layer, sizes, ops)
        self.mlp_norm = RMSNorm(source, f"{LAYER}.post_attention_layernorm", eps, ops)
        self.mlp = MLP.take(source, f"{LAYER}.mlp", ops)
        self.norm = RMSNorm(source, "norm", eps, ops)
        self._norms_before_residual = config.norms_before_residual
        self._ops = ops

    def join(self, aux: Sequence[torch.Tensor]) -> torch.Tensor:
        """The hidden state for a first entry, [T, D], from the inputs of the tapped trunk layers, [T, D] each."""
        return self._ops.linear(torch.cat(list(aux), dim=-1), self.join_DX)

    def __call__(self, token_ids_T: torch.Tensor, hidden_TD: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """[T, D] before the drafter's norm: input of its logits, and the hidden state of a chained entry."""
        return computed(self._pieces(self.embedding_VD[token_ids_T], hidden_TD, inputs), inputs)

    def _pieces(
        self, embedded_TD: torch.Tensor, hidden_TD: torch.Tensor, inputs: AttentionInputs
    ) -> Pieces[torch.Tensor]:
        normed_TD = self.hidden_norm(hidden_TD)
        x_TD = normed_TD if self._norms_before_residual else hidden_TD
        pair_TX = torch.cat([self.embedding_norm(embedded_TD), normed_TD], dim=-1)
        query_TAE, gate_TAE = self.attention.project(pair_TX, inputs)
        mixed_TQ = yield self.attention, (query_TAE,)
        mixed_TD = self.attention.join(mixed_TQ, gate_TAE)
        normed, x_TD = self.mlp_norm.read_by(self.mlp.reader_of(len(x_TD)), x_TD, mixed_TD)
        return x_TD + self.mlp(normed, may_wait=inputs.may_wait)
