"""The numerics modes a deployment can promise (docs/sampling.md, "What is exact")."""

from enum import Enum


class Numerics(Enum):
    """How far a row's result may depend on the rows computed beside it.

    DEFAULT: the fastest correct arithmetic; results may move by rounding with the batch's shape.
    INVARIANT: a row's result depends on that row alone, bit for bit, so tokens never depend on batching, chunking or
        on which worker computed them.
    """

    DEFAULT = "default"
    INVARIANT = "invariant"
