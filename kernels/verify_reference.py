"""Verification in torch, one sequence after the other, as plainly as it can be said: what the kernels must give.

The arithmetic is the engine's: float32 logits counted from the row's largest, noise of float64 rounded to float32,
masses of top-p as whole numbers, chances in float64.

Legend: B sequences, K drafts, Q = K + 1 rows, V vocabulary.
"""

import torch

from baton.kernels import noise
from baton.kernels.choice import MIN_TEMPERATURE, ChoiceRows, EditedRows, Law
from baton.kernels.draft_rows import DraftRows


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
        number_V = torch.arange(len(scaled_V), device=scaled_V.device)
        seed, choice, position = self._key(place)
        return int((scaled_V + noise.gumbels(number_V, seed, choice, position, noise.SAMPLE)).argmax())

    def _key(self, place: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, at = self._rows, self._sequence
        return rows.seed_B[at], rows.choice_B[at], rows.position_B[at] + place

    def _uniforms(self, count: int, purpose: int) -> list[float]:
        number_K = torch.arange(count, device=self._rows.seed_B.device)
        seed, choice, position = self._key(0)
        if purpose == noise.SYNTHETIC:
            seed, choice = torch.full_like(seed, noise.SYNTHETIC_SEED), torch.full_like(seed, self._sequence)
        draws: list[float] = noise.uniforms(number_K, seed, choice, position, purpose).tolist()
        return draws

    def _made_up(self) -> int:
        assert self._all is not None
        if self.law is Law.FORCE:
            return min(self._all.forced_len, self._usable)
        assert self._all.rates_K is not None
        rates = self._all.rates_K.tolist()
        draws = self._uniforms(len(self.drafts), noise.SYNTHETIC)
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
        p_QV = [self._processed(place).softmax(dim=-1) for place in range(self._usable + 1)]
        q_QV = [self._proposal(place) for place in range(self._usable + 1)]
        draws = self._uniforms(len(self.drafts), noise.ACCEPT)
        has_probs = self._all is not None and self._all.probs_row_B is not None
        is_block = self.law is Law.BLOCK and has_probs and int(self._all.probs_row_B[self._sequence]) >= 0  # type: ignore[union-attr,index]
        accepted, reach, reached = 0, 1.0, 1.0
        for place in range(self._usable):
            p, q = float(p_QV[place][self.drafts[place]]), float(q_QV[place][self.drafts[place]])
            if not is_block:
                if accepted == place and draws[place] < (min(p / q, 1.0) if q > 0 else 0.0):
                    accepted = place + 1
                continue
            reach = min(reach * p / q, 1.0) if q > 0 else 0.0
            rest = float((p_QV[place + 1] * reach - q_QV[place + 1]).clamp(min=0).sum(dtype=torch.float64))
            total = rest + (1.0 - reach)
            if draws[place] < (rest / total if total > 0 else 1.0):
                accepted, reached = place + 1, reach
        weight_V = (p_QV[accepted] * reached - q_QV[accepted]).clamp(min=0)
        if not weight_V.sum() > 0:
            weight_V = p_QV[accepted]
        return accepted, _drawn(weight_V, self._uniforms(1, noise.RESIDUAL)[0])


def truncated(scaled_V: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The k likeliest tokens, of these the smallest set whose probability reaches p; -inf where others were."""
    if top_k <= 0 and top_p >= 1.0:
        return scaled_V
    sorted_V, order_V = scaled_V.sort(descending=True, stable=True)
    num_kept = len(scaled_V) if top_k <= 0 else min(top_k, len(scaled_V))
    if top_p < 1.0:
        num_bits = 62 - (len(scaled_V) - 1).bit_length()
        mass_K = (sorted_V[:num_kept].double().exp() * 2.0**num_bits).round().to(torch.int64)
        reached_K = mass_K.cumsum(dim=0)
        num_kept = int(((reached_K - mass_K).double() < top_p * reached_K[-1].double()).sum())
    return torch.full_like(scaled_V, -torch.inf).index_copy(0, order_V[:num_kept], sorted_V[:num_kept])


def _prefix(stands: list[bool]) -> int:
    return stands.index(False) if False in stands else len(stands)


def _drawn(weight_V: torch.Tensor, draw: float) -> int:
    """The first token whose cumulative weight exceeds its part of the sum."""
    reached_V = weight_V.double().cumsum(dim=0)
    return int(((reached_V > draw * reached_V[-1]) & (weight_V > 0)).to(torch.int8).argmax())
