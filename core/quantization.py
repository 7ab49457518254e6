"""How weights of products are kept (docs/kernels.md, "Float8")."""

from enum import Enum


class Quantization(Enum):
    """What a product with a weight is computed from.

    NONE: the weight in the model's dtype.
    FP8: e4m3 with a scale for each 128 x 128 block of the weight and each 128 inputs of a row (DeepSeek-V3's recipe),
        made from the checkpoint as it is loaded. Embeddings, heads, norms and routers stay as they are.
    """

    NONE = "none"
    FP8 = "fp8"
