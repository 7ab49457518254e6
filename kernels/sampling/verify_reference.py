"""Verification in torch, one sequence after the other, as plainly as it can be said: what the kernels must give.

Chances, cuts and draws are those of `draft_chances`, `kept_tokens` and `noise`, by which the engine's verifiers judge
whole batches in torch; float32 logits are counted from the row's largest.

Legend: B sequences, K drafts, Q = K + 1 rows, V vocabulary.
"""

import torch

from baton.kernels.sampling.choice import MIN_TEMPERATURE, ChoiceRows, EditedRows, Law
from baton.kernels.sampling.draft_chances import (
    accept_chances,
    block_chances,
    block_reach,
    longest_prefix,
    pick,
    residual_weights,
)
from baton.kernels.sampling.draft_rows import DraftRows
from baton.kernels.sampling.kept_tokens import kept
from baton.kernels.sampling.noise import SYNTHETIC_SEED, Purpose, gumbel, uniform


def verify_reference(
    logits_BQV: torch.Tensor,
    rows: ChoiceRows,
    drafts: DraftRows | None,
    edited: EditedRows | None,
    counts_Q: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, Q] and accepted lengths [B], int64; without drafts each sequence has one row."""
    num_sequences, num_rows, _ = logits_BQV.shape
    token_ids_BQ = torch.zeros(num_sequences, num_rows, dtype=torch.int64, device=logits_BQV.device)
    accepted_len_B = token_ids_BQ.new_zeros(num_sequences)
    for sequence in range(num_sequences):
        step = _Sequence(sequence, logits_BQV, rows, drafts, edited)
        if step.law is Law.IDLE:
            continue
        accepted, last = step.verdict()
        token_ids_BQ[sequence, :accepted] = torch.tensor(step.drafts[:accepted], dtype=torch.int64)
        token_ids_BQ[sequence, accepted] = last
        accepted_len_B[sequence] = accepted
        if counts_Q is not None:
            counts_Q[accepted] += 1
    return token_ids_BQ, accepted_len_B


class _Sequence:
    """One sequence of a step."""

    def __init__(
        self,
        sequence: int,
        logits_BQV: torch.Tensor,
        rows: ChoiceRows,
        drafts: DraftRows | None,
        edited: EditedRows | None,
    ) -> None:
        self._sequence, self._logits_BQV, self._rows, self._all, self._edited = (
            sequence, logits_BQV, rows, drafts, edited,
        )  # fmt: skip
        self.law = Law.MATCH if drafts is None else Law(int(drafts.law_B[sequence]))
        self.drafts: list[int] = [] if drafts is None else drafts.ids_BK[sequence].tolist()
        self._temperature = float(rows.temperature_B[sequence])
        there = [draft >= 0 for draft in self.drafts]
        self._usable = there.index(False) if False in there else len(there)
        if drafts is not None:
            self._usable = max(0, min(self._usable, int(drafts.cap_B[sequence])))

    def verdict(self) -> tuple[int, int]:
        """Drafts that stand, and the token after them."""
        if self.law in (Law.REJECT, Law.BLOCK) and self._temperature > 0:
            return self._by_chance()
        if self.law in (Law.FORCE, Law.SYNTHETIC):
            accepted = self._made_up()
            return accepted, self._choice(accepted)
        for place in range(self._usable):
            choice = self._choice(place)
            if choice != self.drafts[place]:
                return place, choice
        return self._usable, self._choice(self._usable)

    def _logits(self, place: int) -> torch.Tensor:
        row = self._sequence * self._logits_BQV.shape[1] + place
        if self._edited is not None and int(self._edited.place_R[row]) >= 0:
            return self._edited.logits_EV[int(self._edited.place_R[row])]
        return self._logits_BQV[self._sequence, place].float()

    def _processed(self, place: int) -> torch.Tensor:
        """What may be drawn, float32 [V], of largest 0; -inf where something cut it off."""
        rows, at = self._rows, self._sequence
        logits_V = self._logits(place)
        scaled_V = (logits_V - logits_V.max()) / max(self._temperature, MIN_TEMPERATURE)
        if rows.min_p_B is not None:
            floor = rows.min_p_B[at].double().log().float()
            scaled_V = scaled_V.masked_fill(scaled_V < floor, -torch.inf)
        top_k = 0 if rows.top_k_B is None else int(rows.top_k_B[at])
        top_p = 1.0 if rows.top_p_B is None else float(rows.top_p_B[at])
        return truncated(scaled_V, top_k, top_p)

    def _choice(self, place: int) -> int:
        if self._temperature <= 0:
            return int(self._logits(place).argmax())
        scaled_V = self._processed(place)
        noise_1V = gumbel(*self._key(place), Purpose.SAMPLE, len(scaled_V), scaled_V.dtype)
        return int((scaled_V + noise_1V[0]).argmax())

    def _key(self, place: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, only = self._rows, slice(self._sequence, self._sequence + 1)
        return rows.seed_B[only], rows.choice_B[only], rows.position_B[only] + place

    def _uniforms(self, count: int, purpose: Purpose) -> list[float]:
        seed_1, choice_1, position_1 = self._key(0)
        if purpose is Purpose.SYNTHETIC:
            seed_1, choice_1 = torch.full_like(seed_1, SYNTHETIC_SEED), torch.full_like(seed_1, self._sequence)
        draws: list[float] = uniform(seed_1, choice_1, position_1, purpose, count)[0].tolist()
        return draws

    def _made_up(self) -> int:
        assert self._all is not None
        if self.law is Law.FORCE:
            return min(self._all.forced_len, self._usable)
        assert self._all.rates_K is not None
        rates = self._all.rates_K.tolist()
        draws = self._uniforms(len(self.drafts), Purpose.SYNTHETIC)
        return _prefix([draws[place] < rates[place] for place in range(self._usable)])

    def _proposal(self, place: int) -> torch.Tensor:
        """Q of the draft after `place` others, float32 [V]; zeros where there is none."""
        vocab_size = self._logits_BQV.shape[2]
        q_V = torch.zeros(vocab_size, device=self._logits_BQV.device)
        if place >= self._usable:
            return q_V
        assert self._all is not None
        row = -1 if self._all.probs_row_B is None else int(self._all.probs_row_B[self._sequence])
        if row < 0:
            q_V[self.drafts[place]] = 1.0
            return q_V
        assert self._all.probs_NKC is not None
        q_C, t2d_V = self._all.probs_NKC[row, place], self._all.t2d_V
        return q_C if t2d_V is None else q_C[t2d_V.long().clamp(min=0)].masked_fill(t2d_V < 0, 0.0)

    def _by_chance(self) -> tuple[int, int]:
        usable = self._usable
        p_1QV = torch.stack([self._processed(place).softmax(dim=-1) for place in range(usable + 1)])[None]
        q_1QV = torch.stack([self._proposal(place) for place in range(usable + 1)])[None]
        at_1K1 = torch.tensor(self.drafts[:usable], dtype=torch.int64, device=p_1QV.device)[None, :, None]
        p_1K, q_1K = (x_1QV[:, :usable].gather(2, at_1K1)[..., 0].double() for x_1QV in (p_1QV, q_1QV))
        draws = self._uniforms(len(self.drafts), Purpose.ACCEPT)[:usable]
        draw_1K = torch.tensor([draws], dtype=torch.float64, device=p_1K.device)
        reach_1Q = torch.ones_like(p_1QV[..., 0], dtype=torch.float64)
        if self.law is Law.BLOCK and self._has_probs():
            reach_1Q = block_reach(p_1K, q_1K)
            left_1QV = residual_weights(p_1QV[0], q_1QV[0], reach_1Q[0])[None]
            chances_1K = block_chances(reach_1Q, left_1QV[:, 1:].sum(dim=-1, dtype=torch.float64))
            accepted = int(longest_prefix(draw_1K < chances_1K))
        else:
            accepted = _prefix((draw_1K < accept_chances(p_1K, q_1K))[0].tolist())
        p_1V, q_1V, reach_1 = (x[:, accepted] for x in (p_1QV, q_1QV, reach_1Q))
        weights_1V = residual_weights(p_1V, q_1V, reach_1)
        if not weights_1V.sum() > 0:
            weights_1V = p_1V
        last_draw = self._uniforms(1, Purpose.RESIDUAL)[0]
        return accepted, int(pick(weights_1V, torch.tensor([last_draw], dtype=torch.float64, device=p_1V.device)))

    def _has_probs(self) -> bool:
        assert self._all is not None
        return self._all.probs_row_B is not None and int(self._all.probs_row_B[self._sequence]) >= 0


def truncated(scaled_V: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The k likeliest tokens, of these the smallest set whose probability reaches p; -inf where others were."""
    if top_k <= 0 and top_p >= 1.0:
        return scaled_V
    sorted_V, order_V = scaled_V.sort(descending=True, stable=True)
    top_k_1, top_p_1 = scaled_V.new_tensor([top_k]).long(), scaled_V.new_tensor([top_p], dtype=torch.float64)
    keep_V = kept(sorted_V[None, None], top_k_1, top_p_1, len(scaled_V))[0, 0]
    return torch.full_like(scaled_V, -torch.inf).scatter(0, order_V, sorted_V.masked_fill(~keep_V, -torch.inf))


def _prefix(stands: list[bool]) -> int:
    return stands.index(False) if False in stands else len(stands)
