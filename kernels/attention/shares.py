"""How attention over paged KV is divided where sequences are of different lengths: by work, on the device.

A *share* is what one program takes: a run of tiles of all sequences, one after the other. All shares are of the same
length, the one that makes as many as are wanted, whatever the sequences' lengths. What a share has of one sequence is a
*piece*. The lengths are on the device, so the division is made there, by one small kernel; the host knows how many
shares there are, which is the grid. A division holds for every layer of a pass, which attends to the same positions:
`SplitKVPlans` keeps it from layer to layer. It refuses to keep anything longer than its pass: lengths may change.

Legend: B sequences, Q rows of each, E = B + 1.
"""

from dataclasses import dataclass

import torch

from baton.kernels.attention import split_kv_plan_triton as attention_split_kv_plan_triton


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """What a plan is made from, beside lengths.

    Attributes:
        tile: positions of a tile.
        num_shares: of one KV head and one tile of rows.
        max_context_len: bound of every length.
    """

    tile: int
    num_shares: int
    max_context_len: int


def division(*, slots: int, num_programs: int, tile: int, max_context_len: int) -> Division:
    """As many shares as give every one of `slots` one, if `num_programs` programs take each."""
    return Division(tile=tile, num_shares=max(1, slots // num_programs), max_context_len=max_context_len)


class SplitKVPlans:
    """The plans of one pass over the same sequences: made by the layer that comes first, used by all."""

    def __init__(self) -> None:
        self._made: list[tuple[torch.Tensor, torch.Tensor | None, Division, torch.Tensor]] = []

    def find(self, lens: torch.Tensor, starts_E: torch.Tensor | None, wanted: Division) -> torch.Tensor:
        """The plan for sequences of these lengths; another tensor has another plan, whatever is in it.

        Args:
            lens: positions of rows [B, Q], whose largest ends a sequence; with `starts_E` context lengths [B].
            starts_E: where the rows of each sequence begin; one without rows has no length.
            wanted: how it is divided.
        """
        for known_lens, known_starts, known, plan in self._made:
            if known_lens is lens and known_starts is starts_E and known == wanted:
                return plan
        plan = make_plan(lens, starts_E, wanted)
        self._made.append((lens, starts_E, wanted, plan))
        return plan


def make_plan(lens: torch.Tensor, starts_E: torch.Tensor | None, wanted: Division) -> torch.Tensor:
    """One plan, as `attention_split_kv_plan_triton.plan_kernel` says; never waits for the device."""
    return attention_split_kv_plan_triton.launch_plan(
        lens, starts_E, tile=wanted.tile, num_shares=wanted.num_shares, max_context_len=wanted.max_context_len
    )
