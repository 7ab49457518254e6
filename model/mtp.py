"""The multi-token-prediction head: one decoder layer over (next token, hidden state) pairs.

Entry i joins token t_{i+1} with the hidden state of position i, has position i, and predicts t_{i+2}. The first entry
takes the trunk's hidden state after its final norm; a chained draft takes this head's own output. Source: DeepSeek-V3
report, section 2.2, in the published forms of DeepSeek-V3, GLM-4.5, Qwen3-Next and Qwen3.5, which differ only in names.

Legend: T entries, D hidden size.
"""

import torch

from baton.kernels.ops import Ops
from baton.model.attention import AttentionInputs
from baton.model.config import ModelConfig
from baton.model.decoder import DecoderLayer, computed
from baton.model.layers import RMSNorm, WeightSource


class MTPHead:
    """The MTP head. Its KV is the pool layer after the trunk's last. Embedding and lm_head are the trunk's."""

    def __init__(
        self, source: WeightSource, config: ModelConfig, ops: Ops, attention_ops: Ops, embedding_VD: torch.Tensor
    ) -> None:
        eps, plus_one, names = config.rms_norm_eps, config.has_plus_one_norms, config.mtp_names
        self.embedding_norm = RMSNorm(source, names.embedding_norm, eps, ops, plus_one=plus_one)
        self.hidden_norm = RMSNorm(source, names.hidden_norm, eps, ops, plus_one=plus_one)
        self.join_DX = source.take(names.join)
        self.layer = DecoderLayer(source, names.layer, config.num_layers, config, ops, attention_ops)
        self.norm = RMSNorm(source, names.norm, eps, ops, plus_one=plus_one)
        self._embedding_VD = embedding_VD
        self._ops = ops

    def __call__(self, token_ids_T: torch.Tensor, hidden_TD: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """[T, D] after the head's norm: input of the logits of t_{i+2}, and the hidden state of a chained entry."""
        embedded_TD = self._embedding_VD[token_ids_T]
        pair_TX = torch.cat([self.embedding_norm(embedded_TD), self.hidden_norm(hidden_TD)], dim=-1)
        x_TD = self._ops.linear(pair_TX, self.join_DX)
        return self.norm.of_sum(*computed(self.layer.pieces(x_TD, None, inputs), inputs))[0]
