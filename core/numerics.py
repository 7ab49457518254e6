"""Which numbers are stored and computed: numerics, the KV cache's dtype, quantization."""

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
        """Name of the pool's dtype for a model of this dtype."""
        return "float8_e4m3fn" if self is KVDtype.FP8 else model_dtype


class Quantization(Enum):
    """What a GEMM with a weight is computed from.

    NONE: the weight in the model's dtype.
    FP8: e4m3 with a scale for each 128 x 128 block of the weight and each 128 inputs of a row (DeepSeek-V3's recipe),
        made from the checkpoint as it is loaded. Embeddings, heads, norms and routers stay as they are.
    """

    NONE = "none"
    FP8 = "fp8"


class Numerics(Enum):
    """How far a row's result may depend on the rows computed beside it.

    DEFAULT: the fastest correct arithmetic; results may move by rounding with the batch's shape.
    INVARIANT: a row's result depends on that row alone, bit for bit, so tokens never depend on batching, chunking or
        on which worker computed them.
    """

    DEFAULT = "default"
    INVARIANT = "invariant"
