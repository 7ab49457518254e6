"""Tensor names of draft heads; see `model.draft_head` and `model.mtp`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

DRAFT_HEAD = "mtp.lm_head.weight"
D2T = "mtp.d2t"
T2D = "mtp.t2d"


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPNames:
    """How a family names the parts of its MTP head.

    Attributes:
        embedding_norm: norm of the next token's embedding.
        hidden_norm: norm of the hidden state.
        join: the weight that joins both.
        layer: the decoder layer.
        norm: norm of the layer's output.
        prefixes: names of all MTP layers, including unused ones, begin with one of these.
        copies: tensors that are stored again, and the originals; the copies are not read.
    """

    embedding_norm: str = "mtp.pre_fc_norm_embedding"
    hidden_norm: str = "mtp.pre_fc_norm_hidden"
    join: str = "mtp.fc.weight"
    layer: str = "mtp.layers.0"
    norm: str = "mtp.norm"
    prefixes: tuple[str, ...] = ("mtp.",)
    copies: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def behind_trunk(cls, num_layers: int, num_mtp_layers: int) -> "MTPNames":
        """Names of a head that is numbered as the layer after the trunk's last: DeepSeek's, GLM's."""
        layer = f"model.layers.{num_layers}"
        return cls(
            embedding_norm=f"{layer}.enorm",
            hidden_norm=f"{layer}.hnorm",
            join=f"{layer}.eh_proj.weight",
            layer=layer,
            norm=f"{layer}.shared_head.norm",
            prefixes=("mtp.", *(f"model.layers.{num_layers + index}." for index in range(num_mtp_layers))),
            copies={
                f"{layer}.embed_tokens.weight": "model.embed_tokens.weight",
                f"{layer}.shared_head.head.weight": "lm_head.weight",
            },
        )
