"""What public functions of this room say of arguments that do not fit: before anything is allocated or launched."""

from collections.abc import Sequence

import torch

from baton.core.errors import KernelArgumentInvalid


def require(holds: bool, argument: str, message: str) -> None:
    """Refuse `argument` with `message` unless it holds.

    Raises:
        KernelArgumentInvalid: it does not.
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
    """Refuse a tensor of another shape (None: any length), dtype or device.

    Raises:
        KernelArgumentInvalid: it is one; the message names the argument, what it is and what it must be.
    """
    fits = tensor.dim() == len(shape) and all(
        wanted is None or length == wanted for length, wanted in zip(tensor.shape, shape, strict=False)
    )
    wanted = ["any" if length is None else length for length in shape]
    require(fits, argument, f"has shape {list(tensor.shape)}, not {wanted}")
    names = " or ".join(str(dtype) for dtype in dtypes)
    require(tensor.dtype in dtypes, argument, f"is {tensor.dtype}, not {names}")
    require(device is None or tensor.device == device, argument, f"is on {tensor.device}, not {device}")


def require_rows(argument: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose last dimension is not contiguous.

    Raises:
        KernelArgumentInvalid: it is strided.
    """
    require(tensor.shape[-1] <= 1 or tensor.stride(-1) == 1, argument, "the last dimension must be contiguous")
