"""Argument checks of this package's public functions, made before anything is allocated or launched.

Messages are built only for arguments that do not fit, because a step checks some hundred tensors that do.
"""

from collections.abc import Sequence

import torch

from baton.core.errors import KernelArgumentInvalid


def require(holds: bool, argument: str, message: str) -> None:
    """Refuse `argument` with `message` unless `holds`.

    Raises:
        KernelArgumentInvalid: `holds` is false.
    """
    if not holds:
        raise KernelArgumentInvalid(f"{argument}: {message}", argument=argument)


def require_tensor(
    argument: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Refuse a tensor with another shape (None: any length), dtype or device.

    Raises:
        KernelArgumentInvalid: the tensor differs; the message names the argument, what it is and what it must be.
    """
    lengths = tensor.shape
    fits = len(lengths) == len(shape)
    if fits:
        for length, wanted in zip(lengths, shape, strict=True):
            if wanted is not None and length != wanted:
                fits = False
    if not fits:
        lengths_wanted = ["any" if length is None else length for length in shape]
        require(False, argument, f"has shape {list(lengths)}, not {lengths_wanted}")
    if tensor.dtype not in dtypes:
        require(False, argument, f"is {tensor.dtype}, not {' or '.join(str(dtype) for dtype in dtypes)}")
    if device is not None and tensor.device != device:
        require(False, argument, f"is on {tensor.device}, not {device}")


def require_rows(argument: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose last dimension is not contiguous.

    Raises:
        KernelArgumentInvalid: the last dimension is strided.
    """
    require(tensor.shape[-1] <= 1 or tensor.stride(-1) == 1, argument, "the last dimension must be contiguous")
