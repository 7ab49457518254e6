"""How K and V are kept in the pool (docs/kernels.md, "Float8")."""

from enum import Enum


class KVDtype(Enum):
    """What an element of the KV pool is.

    AUTO: of the model's dtype.
    FP8: e4m3, one byte, times a scale of each layer's keys and one of its values: 1, unless the checkpoint holds others
        (`self_attn.k_scale`, `self_attn.v_scale`). Larger values saturate at 448 times the scale.
    """

    AUTO = "auto"
    FP8 = "fp8"

    def of(self, model_dtype: str) -> str:
        """The name of the pool's dtype for a model of one."""
        return "float8_e4m3fn" if self is KVDtype.FP8 else model_dtype
