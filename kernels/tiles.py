"""Arithmetic whose result for a row depends on that row alone, bit for bit: the basis of batch-invariant numerics.

Libraries choose how to split a matmul from its shape and the number of threads, so the same row may be rounded
differently beside other rows. The following was measured, and `kernels.selftest` checks it again at every start.

CPU (MKL, torch 2.13, 1 to 4 threads, up to 1024 rows): rows are padded to a multiple of 16, and K is cut into pieces
that are added in order. MKL splits longer inner sizes between threads: observed from K = 1024 on in float32, from K =
256 on in float64, where one thread changes kernels at 192 rows, too. Without AVX-512 it rounds fewer than 12 outputs
differently from more, and in float64 the last ones beyond a multiple of 12; so there are at least 48 outputs, in
float64 a multiple of 48. oneDNN's bfloat16 matmuls depend on M from K = 512 on, and with two threads on a row's place
in its tile; so bfloat16 is computed in float32.

CUDA (cuBLAS): matmuls have one fixed shape and layout, because cuBLAS picks its kernel by them: tiles of 64 rows,
pieces of 1024 outputs, 8 groups at a time, padded with zeros. So a result does not depend on how many rows, outputs or
groups are computed beside it, and ranks that hold parts of a weight round like one rank that holds all of it.

`torch.sum` and `mean` promise no order that is independent of the shape, so `ordered_sum` adds halves instead. On a
CPU, `silu`, `sigmoid` and `exp2` round differently in the vector body and the scalar tail of a loop; `exp` and the
basic operations do not.

Legend: T rows, K inner size, N outputs, G groups of one batched matmul.
"""

import torch
from torch.nn import functional

# Outputs that ranks share are cut at multiples of this; other widths are slow on a GPU.
OUTPUT_TILE = 16
# Longest inner size of one library call on a CPU.
_PIECE_LEN = {torch.float32: 256, torch.float64: 64}
# Fewest outputs of one library call on a CPU, and their required multiple.
_LEAST_OUTPUTS = 48
_OUTPUTS_MULTIPLE = {torch.float32: 1, torch.float64: 48}
# Outputs, and groups, of one library call on CUDA.
_NUM_OUTPUTS = 1024
_NUM_GROUPS = 8


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which norms, softmax and sums are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def has_cpu_rules(device: torch.device) -> bool:
    """Return whether matmuls are cut by the CPU's rules, not CUDA's; tests patch it to try CUDA's rules on a CPU."""
    return device.type == "cpu"


def row_tile(device: torch.device) -> int:
    """Return the number of rows of one tile; rows are padded with zeros to a multiple of it."""
    return 16 if has_cpu_rules(device) else 64


def pad_rows(x: torch.Tensor, tile: int, dim: int = 0) -> torch.Tensor:
    """Append zeros to `x` along `dim` to a multiple of `tile`."""
    missing = -x.shape[dim] % tile
    if missing == 0:
        return x
    return functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing])


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, which is kept with length 1, in an order that depends only on its length."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        if x.shape[-1] % 2:
            folded[..., :1] += x[..., -1:]
        x = folded
    return x


def matmul_rows(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """Compute `x @ weight.T` -> [T, N] in the dtype of `x`; a row depends on itself alone."""
    return matmul_rows_wide(x_TK, weight_NK).to(x_TK.dtype)


def matmul_rows_wide(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """Compute the same in the wide dtype; on a CPU without rounding to the dtype of `x` first."""
    num_rows = x_TK.shape[0]
    tile = row_tile(x_TK.device)
    padded_TK = pad_rows(x_TK, tile)
    wide = wide_dtype(x_TK.dtype)
    if not has_cpu_rules(x_TK.device):
        return matmul_fixed(padded_TK, weight_NK, tile)[:num_rows].to(wide)
    padded_TK = padded_TK.to(wide)
    num_outputs = weight_NK.shape[0]
    if num_outputs < _LEAST_OUTPUTS:
        return _matmul_pieces(padded_TK, pad_rows(weight_NK, _LEAST_OUTPUTS))[:num_rows, :num_outputs]
    rest = num_outputs % _OUTPUTS_MULTIPLE[wide]
    out_TN = _matmul_pieces(padded_TK, weight_NK[: num_outputs - rest])
    if rest > 0:  # recompute them together with earlier outputs, to have enough columns
        last_TN = _matmul_pieces(padded_TK, weight_NK[-_LEAST_OUTPUTS:])
        out_TN = torch.cat([out_TN, last_TN[:, -rest:]], dim=1)
    return out_TN[:num_rows]


def _matmul_pieces(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """Compute `x @ weight.T` -> [T, N] on a CPU, in the wide dtype of `x`, with K in pieces that are added in order."""
    piece = _PIECE_LEN[x_TK.dtype]
    out_TN = functional.linear(x_TK[:, :piece], weight_NK[:, :piece].to(x_TK.dtype))
    for start in range(piece, x_TK.shape[1], piece):
        cut = slice(start, start + piece)
        out_TN += functional.linear(x_TK[:, cut], weight_NK[:, cut].to(x_TK.dtype))
    return out_TN


def matmul_fixed(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, tile: int, num_outputs: int = _NUM_OUTPUTS
) -> torch.Tensor:
    """Compute `x @ weight.T` -> [T, N] by matmuls [tile, K] x [K, num_outputs] only; T is a multiple of the tile."""
    if x_TK.shape[0] == 0:
        return x_TK.new_empty(0, weight_NK.shape[0])
    # Contiguous, because a slice of the inner dimension would keep the stride of the whole.
    pieces = [pad_rows(piece_NK, num_outputs).contiguous() for piece_NK in weight_NK.split(num_outputs)]
    tiles = [part_TK.contiguous() for part_TK in x_TK.split(tile)]
    rows = [torch.cat([functional.linear(part_TK, piece_NK) for piece_NK in pieces], dim=1) for part_TK in tiles]
    return torch.cat(rows)[:, : weight_NK.shape[0]]


def matmul_slices(x_TK: torch.Tensor, weight_NK: torch.Tensor, num_slices: int) -> torch.Tensor:
    """Multiply equal slices of K, [num_slices, T, N] in the wide dtype; each row and slice depends on itself alone."""
    length = x_TK.shape[1] // num_slices
    if not has_cpu_rules(x_TK.device):
        cuts = [slice(start, start + length) for start in range(0, x_TK.shape[1], length)]
        return torch.stack([matmul_rows_wide(x_TK[:, cut], weight_NK[:, cut]) for cut in cuts])
    wide = wide_dtype(x_TK.dtype)
    left_CTK = pad_rows(x_TK, row_tile(x_TK.device)).to(wide).unflatten(1, (num_slices, length)).transpose(0, 1)
    num_outputs = weight_NK.shape[0]
    padded_NK = pad_rows(weight_NK, _LEAST_OUTPUTS) if num_outputs < _LEAST_OUTPUTS else weight_NK
    right_CKN = padded_NK.to(wide).unflatten(1, (num_slices, length)).permute(1, 2, 0)
    return matmul_groups(left_CTK, right_CKN, num_slices)[:, : x_TK.shape[0], :num_outputs]


def matmul_groups(left_GTK: torch.Tensor, right_GKN: torch.Tensor, num_fixed_groups: int) -> torch.Tensor:
    """Batched matmul [G, T, N]; T is a multiple of the tile, G of `num_fixed_groups`, both operands wide.

    On CUDA this is `matmul_groups_fixed`.
    """
    tile = row_tile(left_GTK.device)
    assert left_GTK.shape[1] % tile == 0
    assert left_GTK.shape[0] % num_fixed_groups == 0
    if has_cpu_rules(left_GTK.device):
        piece = _PIECE_LEN[left_GTK.dtype]
        out_GTN = torch.bmm(left_GTK[:, :, :piece], right_GKN[:, :piece])
        for start in range(piece, left_GTK.shape[2], piece):
            cut = slice(start, start + piece)
            out_GTN += torch.bmm(left_GTK[:, :, cut], right_GKN[:, cut])
        return out_GTN
    return matmul_groups_fixed(left_GTK, right_GKN, tile)


def matmul_groups_fixed(
    left_GTK: torch.Tensor, right_GKN: torch.Tensor, tile: int, num_groups: int = _NUM_GROUPS
) -> torch.Tensor:
    """Batched matmul [G, T, N] by calls [num_groups, tile, K] x [num_groups, K, N] only."""
    missing = -left_GTK.shape[0] % num_groups
    padded_GTK = functional.pad(left_GTK, [0, 0, 0, 0, 0, missing]) if missing else left_GTK
    padded_GKN = functional.pad(right_GKN, [0, 0, 0, 0, 0, missing]) if missing else right_GKN
    rows = []
    for part_GTK, part_GKN in zip(padded_GTK.split(num_groups), padded_GKN.split(num_groups), strict=True):
        fixed_GKN = part_GKN.contiguous()
        tiles = [torch.bmm(tile_GTK.contiguous(), fixed_GKN) for tile_GTK in part_GTK.split(tile, dim=1)]
        rows.append(torch.cat(tiles, dim=1))
    return torch.cat(rows)[: left_GTK.shape[0]]
