"""Sizes that the Triton kernels of latent attention support; readable without torch, as `baton check` needs."""

LATENT_DIMS = (16, 32, 64, 128, 256, 512)
TURNED_DIMS = (16, 32, 64)
HEAD_DIMS = (16, 32, 64, 128)  # of columns without RoPE, and of values


def unfit_latents(latent_dim: int, turned_dim: int) -> str:
    """Name the unsupported size of latent rows; "" if all fit."""
    if latent_dim not in LATENT_DIMS:
        return f"latents of {latent_dim}"
    return "" if turned_dim in TURNED_DIMS else f"latents beside {turned_dim} turned columns"


def unfit_heads(nope_dim: int, value_dim: int) -> str:
    """Name the unsupported size of heads; "" if all fit."""
    wrong = next((dim for dim in (nope_dim, value_dim) if dim not in HEAD_DIMS), 0)
    return f"heads of {wrong} over latents" if wrong else ""


def unfit_latent_sizes(latent_dim: int, turned_dim: int, nope_dim: int, value_dim: int) -> str:
    """Name the unsupported size of a model; "" if all fit."""
    return unfit_latents(latent_dim, turned_dim) or unfit_heads(nope_dim, value_dim)
