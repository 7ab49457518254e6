"""Multi-head latent attention over rows of a paged pool, in two forms that are equal except for rounding.

A position stores one row for all heads: its normalised latent, and the key columns that RoPE has rotated. *Expanded*,
as the model is defined: keys and values of each head are computed from every row, and heads attend to them. *Absorbed*:
the key up-projection is multiplied into the queries and the value up-projection into the outputs, so that heads attend
to the stored rows directly (`kernels.attention`, with one KV head that is also its own value).

The torch reference absorbs for chunks and decode rows alike. A step mixes both, and a row's bits must not depend on
which of them it is; one form guarantees that for free, with the attention that other models use. The Triton kernels
absorb for decode rows only (`kernels.mla.decode`): absorbing would cost a prompt up to 3.4 times the FLOPs in
attention, so chunks use the expanded form (`kernels.mla.prefill`).

Source: DeepSeek-V2 (2024), section 2.1; transformers `DeepseekV3Attention`.
Legend: T tokens, A query heads (of this rank), N columns of a query without RoPE, R columns with RoPE, C length of a
latent, V columns of a value, X = C + R elements of a row, J and K outputs and inputs of a matmul, L rows of a context,
M blocks of a table, S positions per block.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from baton.kernels.tiles import matmul_rows


def write_rows(row_TX: torch.Tensor, slots_T: torch.Tensor, rows_NSX: torch.Tensor) -> None:
    """Write row t to flat slot `slots_T[t]` (int64, block * S + offset); padding rows share the scratch slot."""
    block_size = rows_NSX.shape[1]
    rows_NSX[slots_T // block_size, slots_T % block_size] = row_TX.to(rows_NSX.dtype)


def matmul_by_head(
    x_TAK: torch.Tensor, weight_AJK: torch.Tensor, *, invariant: bool, num_more: int = 0
) -> torch.Tensor:
    """Multiply each head's columns by the head's own matrix, x W^T, [T, A, J + more] in the dtype of x.

    The result is contiguous, as later operations need it, without another copy; the last `num_more` columns of each
    head are not written. If `invariant`, a row depends on itself alone, bit for bit, whatever rows and heads are
    computed beside it.
    """
    num_columns = weight_AJK.shape[1]
    whole_TAJ = x_TAK.new_empty(*x_TAK.shape[:2], num_columns + num_more)
    out_TAJ = whole_TAJ[..., :num_columns]
    if invariant:
        heads = [matmul_rows(x_TK, weight_JK) for x_TK, weight_JK in zip(x_TAK.unbind(1), weight_AJK, strict=True)]
        out_TAJ.copy_(torch.stack(heads, dim=1))
    else:
        torch.bmm(x_TAK.transpose(0, 1), weight_AJK.transpose(1, 2), out=out_TAJ.transpose(0, 1))
    return whole_TAJ


def absorbed_queries(
    nope_TAN: torch.Tensor, turned_TAR: torch.Tensor, key_ANC: torch.Tensor, *, invariant: bool
) -> torch.Tensor:
    """Multiply the key up-projection into the queries, [T, A, X]."""
    num_turned = turned_TAR.shape[2]
    query_TAX = matmul_by_head(nope_TAN, key_ANC.transpose(1, 2), invariant=invariant, num_more=num_turned)
    query_TAX[..., -num_turned:] = turned_TAR
    return query_TAX


def absorbed_values(mixed_TAX: torch.Tensor, value_AVC: torch.Tensor, *, invariant: bool) -> torch.Tensor:
    """Multiply the value up-projection into the attention outputs over rows, [T, A, V]."""
    latent_TAC = mixed_TAX[..., : value_AVC.shape[2]]
    return matmul_by_head(latent_TAC, value_AVC, invariant=invariant)


def attend_expanded(
    query_TAE: torch.Tensor,
    rows_NSX: torch.Tensor,
    key_ANC: torch.Tensor,
    value_AVC: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Compute attention of concatenated chunks in the expanded form, [T, A, V]; queries are [nope | turned].

    The last row of sequence b is at position context_lens[b] - 1. This is the definition that tests compare the
    absorbed form with.
    """
    outputs, row, latent_dim = [], 0, key_ANC.shape[2]
    for table_M, query_len, context_len in zip(block_tables_BM, query_lens, context_lens, strict=True):
        num_blocks = -(-context_len // rows_NSX.shape[1])
        row_LX = rows_NSX[table_M[:num_blocks]].flatten(0, 1)[:context_len]
        latent_LC, turned_LR = row_LX.tensor_split([latent_dim], dim=1)
        nope_ALN = torch.einsum("lc,anc->aln", latent_LC, key_ANC)
        value_ALV = torch.einsum("lc,avc->alv", latent_LC, value_AVC)
        key_ALE = torch.cat([nope_ALN, turned_LR.expand(len(key_ANC), -1, -1)], dim=-1)
        query_AQE = query_TAE[row : row + query_len].transpose(0, 1)
        position_Q = torch.arange(context_len - query_len, context_len, device=query_TAE.device)
        mask_QL = torch.arange(context_len, device=query_TAE.device) <= position_Q[:, None]
        mixed_AQV = functional.scaled_dot_product_attention(
            query_AQE[None], key_ALE[None], value_ALV[None], attn_mask=mask_QL, scale=scale
        )[0]
        outputs.append(mixed_AQV.transpose(0, 1))
        row += query_len
    return torch.cat(outputs)
