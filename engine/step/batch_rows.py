"""Holds which sequences a decode step runs, and what follows from that alone; rebuilt only when one of them changes.

Legend: B sequences.
"""

from dataclasses import dataclass

import numpy as np
import torch

from baton.core.draft_method import DraftMethod
from baton.core.requests.sampling import SamplingParams
from baton.engine.step.length_bounds import Ints
from baton.kernels.copies import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The decode sequences of a step, kept on host and device while the following steps run the same ones.

    Attributes:
        slots: slots of the sequences.
        slots_B: the same, int64, on the device.
        host_slots_B: the same, int64, on the host.
        sampling: sampling parameters of each.
        draft_caps: drafts that each may ever use.
        proposed_lens: drafts that each may use in this step.
        most_B: tokens each may emit in this step.
        room_B: tokens each may emit in a step with any k.
        max_drafts: drafts that the step's plan allows.
        method: draft method of sequences that have none of their own; None: no drafts.
        num_drafts: K of the step, which may be below `max_drafts` because of the sequences' caps.
        num_by_head: the most drafts that the head makes for any sequence.
        num_looked_up: the most drafts that are looked up for any sequence.
        is_looked_up_B: bool, sequences whose drafts are looked up; None if that holds for all or for none.
        keeps_mtp: the MTP head processes the emitted tokens even with K = 0, as k may rise while these sequences run.
        num_tops: number of likeliest tokens each reports; None: no log-probabilities at all.
        num_reporting: number of sequences that report log-probabilities.
        num_top: the most likeliest tokens that any of them reports.
    """

    slots: tuple[int, ...]
    slots_B: torch.Tensor
    host_slots_B: Ints
    sampling: tuple[SamplingParams, ...]
    draft_caps: tuple[int, ...]
    proposed_lens: tuple[int, ...]
    most_B: Ints
    room_B: Ints
    max_drafts: int
    method: DraftMethod | None
    num_drafts: int
    num_by_head: int
    num_looked_up: int
    is_looked_up_B: torch.Tensor | None
    keeps_mtp: bool
    num_tops: tuple[int | None, ...]
    num_reporting: int
    num_top: int

    @classmethod
    def of(
        cls,
        slots: tuple[int, ...],
        *,
        sampling: tuple[SamplingParams, ...],
        draft_caps: tuple[int, ...],
        methods: tuple[DraftMethod | None, ...],
        num_drafts: int,
        method: DraftMethod | None,
        has_mtp: bool,
        vocab_size: int,
        device: torch.device,
    ) -> "StepBatch":
        """The batch of these slots, for steps that make at most `num_drafts` drafts by `method`."""
        assert len(set(slots)) == len(slots)
        proposed_lens = tuple(min(cap, num_drafts) for cap in draft_caps)
        is_looked_up = [(own or method) is DraftMethod.NGRAM for own in methods]
        by_head, looked_up = (
            max((count for count, is_so in zip(proposed_lens, is_looked_up, strict=True) if is_so is wanted), default=0)
            for wanted in (False, True)
        )
        is_mixed = by_head > 0 and looked_up > 0
        num_tops = tuple(params.logprobs for params in sampling)
        reported = [num_top for num_top in num_tops if num_top is not None]
        return cls(
            slots=slots,
            slots_B=to_device(torch.tensor(slots, dtype=torch.int64), device),
            host_slots_B=np.array(slots, dtype=np.int64),
            sampling=sampling,
            draft_caps=draft_caps,
            proposed_lens=proposed_lens,
            most_B=np.array(proposed_lens, dtype=np.int64) + 1,
            room_B=np.array(draft_caps, dtype=np.int64) + 1,
            max_drafts=num_drafts,
            method=method,
            num_drafts=max(proposed_lens, default=0),
            num_by_head=by_head,
            num_looked_up=looked_up,
            is_looked_up_B=to_device(torch.tensor(is_looked_up), device) if is_mixed else None,
            keeps_mtp=has_mtp and max(draft_caps, default=0) > 0,
            num_tops=num_tops,
            num_reporting=len(reported),
            num_top=min(max(reported, default=0), vocab_size),
        )
