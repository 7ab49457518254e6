"""The rules by which chance judges drafts, in torch: all that decides, and nothing of where the numbers come from.

Token by token: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (ICML 2023);
as a block: Sun et al., "Block Verification Accelerates Speculative Decoding" (2024). `engine.speculation.rejection` and
the reference of `kernels.sampling.verify` judge by these functions, and the kernels of `residual_triton` by the same
arithmetic; the tests enumerate laws with them.

Legend: S sequences, K drafts, Q = K + 1 prefixes, V vocabulary.
"""

import torch


def accept_chances(p_SK: torch.Tensor, q_SK: torch.Tensor) -> torch.Tensor:
    """The chance of each draft, if all before it stand: min(1, p / q); 0 where there was no draft (q = 0)."""
    return torch.where(q_SK > 0, p_SK / q_SK, 0.0).clamp(max=1.0)


def block_reach(p_SK: torch.Tensor, q_SK: torch.Tensor) -> torch.Tensor:
    """How far the target covers each prefix, float64 [S, Q]: 1 for none, then min(the one before times p / q, 1).

    Sun et al., algorithm 2 (there p_i).
    """
    reach_S = p_SK.new_ones(p_SK.shape[0])
    reaches = [reach_S]
    for place in range(p_SK.shape[1]):
        p_S, q_S = p_SK[:, place], q_SK[:, place]
        reach_S = torch.where(q_S > 0, reach_S * p_S / q_S, 0.0).clamp(max=1.0)
        reaches.append(reach_S)
    return torch.stack(reaches, dim=1)


def block_chances(reach_SQ: torch.Tensor, leftover_SK: torch.Tensor) -> torch.Tensor:
    """The chance with which each prefix of 1 ... K drafts asks to stand; the longest that does is taken.

    Sun et al., equation 4: leftover / (leftover + 1 - reach), where the leftover of prefix i is the sum of its residual
    weights. The last prefix has no draft after it, so that its leftover is its reach, and the reach its chance.
    """
    reach_SK = reach_SQ[:, 1:]
    total_SK = leftover_SK + (1.0 - reach_SK)
    # 0 / 0: a prefix with nothing missing and nothing left over; some longer one always stands.
    return torch.where(total_SK > 0, leftover_SK / total_SK, 1.0)


def longest_prefix(stands_SK: torch.Tensor) -> torch.Tensor:
    """Length of the longest prefix that stands, int64 [S]; 0 if none does."""
    length_K = torch.arange(1, stands_SK.shape[1] + 1, device=stands_SK.device)
    lengths_SK = torch.where(stands_SK, length_K, 0)
    return torch.nn.functional.pad(lengths_SK, (1, 0)).amax(dim=1)


def residual_weights(p_SV: torch.Tensor, q_SV: torch.Tensor, reach_S: torch.Tensor) -> torch.Tensor:
    """What the drafts left over of the target: max(reach p - q, 0), not normalised."""
    return (p_SV * reach_S[:, None].to(p_SV.dtype) - q_SV).clamp(min=0.0)


def pick(weights_SV: torch.Tensor, uniform_S: torch.Tensor) -> torch.Tensor:
    """Inverse of the distribution function, int64 [S]: the first id whose cumulative weight exceeds u times the sum.

    An id of weight 0 is never picked, nor one past the last of positive weight, whatever rounding does.
    """
    cumulative_SV = weights_SV.cumsum(dim=-1, dtype=torch.float64)
    threshold_S1 = uniform_S[:, None].double() * cumulative_SV[:, -1:]
    return ((cumulative_SV > threshold_S1) & (weights_SV > 0)).to(torch.int8).argmax(dim=-1)
