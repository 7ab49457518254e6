"""The multi-token-prediction head: one decoder layer over (next token, hidden state) pairs.

Entry i joins token t_{i+1} with the hidden state of position i, stands at position i, and predicts t_{i+2}. The first
entry takes the trunk's hidden state after its final norm; a chained draft takes this head's own output. Source:
DeepSeek-V3 report, section 2.2, in the published form of Qwen3-Next and Qwen3.5.

Legend: T entries, D hidden size.
"""

import torch

from baton.kernels.ops import Ops
from baton.model.attention import AttentionInputs
from baton.model.config import ModelConfig
from baton.model.decoder import DecoderLayer, computed
from baton.model.layers import RMSNorm, WeightSource


class MTPHead:
    """Its KV is the pool layer after the trunk's last. Embedding and lm_head are the trunk's."""

    def __init__(self, source: WeightSource, config: ModelConfig, ops: Ops, embedding_VD: torch.Tensor) -> None:
        eps, plus_one = config.rms_norm_eps, config.has_plus_one_norms
        self.embedding_norm = RMSNorm(source, "mtp.pre_fc_norm_embedding", eps, ops, plus_one=plus_one)
        self.hidden_norm = RMSNorm(source, "mtp.pre_fc_norm_hidden", eps, ops, plus_one=plus_one)
        self.join_DX = source.take("mtp.fc.weight")
        self.layer = DecoderLayer(source, "mtp.layers.0", config.num_layers, config, ops)
        self.norm = RMSNorm(source, "mtp.norm", eps, ops, plus_one=plus_one)
        self._embedding_VD = embedding_VD
        self._ops = ops

    def __call__(self, token_ids_T: torch.Tensor, hidden_TD: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """[T, D] after the head's norm: logits of t_{i+2}, and the hidden state of a chained entry."""
        embedded_TD = self._embedding_VD[token_ids_T]
        pair_TX = torch.cat([self.embedding_norm(embedded_TD), self.hidden_norm(hidden_TD)], dim=-1)
        x_TD = self._ops.linear(pair_TX, self.join_DX)
        return self.norm.of_sum(*computed(self.layer.pieces(x_TD, None, inputs), inputs))[0]
