"""Decides which drafts of a batch are accepted, and the token after them, in at most four launches.

The verification laws, and what is drawn from what, are those of `engine.speculation.verify`,
`engine.speculation.rejection` and `engine.speculation.verifiers`; a batch may mix them. A draft is accepted if it
matches the target's own choice (its likeliest token, or its draw by Gumbel noise), or by rejection sampling (Leviathan
et al., 2023; as a block: Sun et al., 2024), or because a benchmark prescribes it. The launches are the scan; the bounds
of top-k, top-p and min-p, if any sequence may have them; sums of residual probabilities, if any drafts were drawn from
probabilities; and the decision. Nothing waits for the device, and the host knows the number of launches.

A token is the same whatever the batch, its place in it, and the number of drafts. A GPU's choice can differ from the
reference's only where its logarithm of a float64, rounded to float32, differs, or where a sum of float32 exponentials
falls on the other side of a border (some 1e-7 of it).

Legend: B sequences, K drafts, Q = K + 1 rows, R = B Q rows, V vocabulary, N rows of draft probabilities, C columns of
the draft head, E edited rows.
"""

from dataclasses import dataclass
from typing import Final

import torch

from baton.kernels.arguments import require, require_tensor
from baton.kernels.implementation import Implementation, uses_triton
from baton.kernels.sampling.draft_rows import (
    DraftRows,
    accept_chances,
    block_chances,
    block_reach,
    longest_prefix,
    pick,
    residual_weights,
)
from baton.kernels.sampling.kept_tokens import kept
from baton.kernels.sampling.noise import SYNTHETIC_SEED, Purpose, gumbel, uniform
from baton.kernels.sampling.rows import LOGITS, MIN_TEMPERATURE, DrawRows, EditedRows, Law, require_logits

NOT_FINITE: Final = 1 << 30  # flag added to a length that is reported to the host


def verify_reference(
    logits_BQV: torch.Tensor,
    rows: DrawRows,
    drafts: DraftRows | None,
    edited: EditedRows | None,
    counts_Q: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [B, Q] and accepted lengths [B], int64; without drafts each sequence has one row."""
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
        rows: DrawRows,
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
        """Return the number of accepted drafts, and the token after them."""
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
        """Logits that may be sampled, float32 [V], with maximum 0; -inf where a cut removed a token."""
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
        """Proposal distribution q of the draft at `place`, float32 [V]; zeros if there is none."""
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
    """Keep the k likeliest tokens, of these the smallest set whose probability reaches p; others become -inf."""
    if top_k <= 0 and top_p >= 1.0:
        return scaled_V
    sorted_V, order_V = scaled_V.sort(descending=True, stable=True)
    top_k_1, top_p_1 = scaled_V.new_tensor([top_k]).long(), scaled_V.new_tensor([top_p], dtype=torch.float64)
    keep_V = kept(sorted_V[None, None], top_k_1, top_p_1, len(scaled_V))[0, 0]
    return torch.full_like(scaled_V, -torch.inf).scatter(0, order_V, sorted_V.masked_fill(~keep_V, -torch.inf))


def _prefix(stands: list[bool]) -> int:
    return stands.index(False) if False in stands else len(stands)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Tokens that a step emits.

    Attributes:
        token_ids_BQ: int64, 0 past `accepted_len_B`.
        accepted_len_B: int64, number of accepted drafts; one token more is emitted.
    """

    token_ids_BQ: torch.Tensor
    accepted_len_B: torch.Tensor


@dataclass(frozen=True, slots=True)
class NextStep:
    """State of sequences after a step.

    Attributes:
        last_token_B: int64, newest token.
        length_B: int64, tokens of the sequence.
        last_row_B: int64, row (of R) whose hidden state the last token was sampled from.
        told_len_B: int64, length reported to the host: see `told_lengths`.
    """

    last_token_B: torch.Tensor
    length_B: torch.Tensor
    last_row_B: torch.Tensor
    told_len_B: torch.Tensor


def told_lengths(accepted_len_B: torch.Tensor, logits_BQV: torch.Tensor) -> torch.Tensor:
    """Accepted lengths, int64 [B], with `NOT_FINITE` added where a token was sampled from non-finite numbers.

    One logit of a row is enough to tell: a hidden state with a NaN or an infinity makes every logit NaN. If ranks share
    a vocabulary, a rank without tokens of its own has -inf there.
    """
    row_Q = torch.arange(logits_BQV.shape[1], device=logits_BQV.device)
    is_chosen_from_BQ = row_Q <= accepted_len_B[:, None]
    is_wrong_B = (is_chosen_from_BQ & ~(logits_BQV[:, :, 0] < torch.inf)).any(dim=1)
    return torch.where(is_wrong_B, accepted_len_B + NOT_FINITE, accepted_len_B)


def verify(
    logits_BQV: torch.Tensor,
    rows: DrawRows,
    drafts: DraftRows,
    *,
    edited: EditedRows | None = None,
    counts_Q: torch.Tensor | None = None,
    implementation: Implementation = Implementation.AUTO,
) -> Verdict:
    """Decide which drafts are accepted, and the token after them; see the module.

    Args:
        logits_BQV: bfloat16 or float32; row q follows the first q drafts. Rows past a sequence's last usable draft may
            contain anything.
        rows: sampling parameters of each sequence.
        drafts: drafts to verify.
        edited: rows whose logits are replaced.
        counts_Q: int64 counters by accepted length, to which this step's sequences are added; idle ones are not.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit; the message names it.
    """
    require_logits(logits_BQV)
    num_sequences, num_rows, vocab_size = logits_BQV.shape
    device = logits_BQV.device
    rows.require_fits(num_sequences, device)
    drafts.require_fits(num_sequences, num_rows, vocab_size, device)
    if edited is not None:
        edited.require_fits(num_sequences * num_rows, vocab_size, device)
    if counts_Q is not None:
        require_tensor("counts_Q", counts_Q, (num_rows,), (torch.int64,), device)
        require(counts_Q.is_contiguous(), "counts_Q", "must be contiguous")
    if not uses_triton(device, implementation):
        return Verdict(*verify_reference(logits_BQV, rows, drafts, edited, counts_Q))
    token_ids_BQ = torch.empty(num_sequences, num_rows, dtype=torch.int64, device=device)
    accepted_len_B = torch.empty(num_sequences, dtype=torch.int64, device=device)
    if num_sequences:
        from baton.kernels.sampling.verify_triton import launch

        launch(logits_BQV, rows, drafts, edited, counts_Q, token_ids_BQ, accepted_len_B)
    return Verdict(token_ids_BQ, accepted_len_B)


def post_verify(
    verdict: Verdict,
    length_B: torch.Tensor,
    logits_BQV: torch.Tensor,
    *,
    implementation: Implementation = Implementation.AUTO,
) -> NextStep:
    """Compute the next step's inputs, and what is reported to the host, in one launch.

    Args:
        verdict: result of the step.
        length_B: int64, lengths before the step.
        logits_BQV: logits of the model; the reference also takes float64. Some columns of each row are enough.
        implementation: implementation to use.

    Raises:
        KernelArgumentInvalid: an argument does not fit; the message names it.
    """
    token_ids_BQ, accepted_len_B = verdict.token_ids_BQ, verdict.accepted_len_B
    device = token_ids_BQ.device
    require_tensor("token_ids_BQ", token_ids_BQ, (None, None), (torch.int64,))
    num_sequences, num_rows = token_ids_BQ.shape
    require(num_rows > 0, "token_ids_BQ", "has no row")
    require(token_ids_BQ.is_contiguous(), "token_ids_BQ", "must be contiguous")
    for name, tensor in (("accepted_len_B", accepted_len_B), ("length_B", length_B)):
        require_tensor(name, tensor, (num_sequences,), (torch.int64,), device)
        require(tensor.is_contiguous(), name, "must be contiguous")
    dtypes = LOGITS if uses_triton(device, implementation) else (*LOGITS, torch.float64)
    require_tensor("logits_BQV", logits_BQV, (num_sequences, num_rows, None), dtypes, device)
    require(logits_BQV.shape[2] > 0, "logits_BQV", "has no column")
    if not uses_triton(device, implementation):
        row_B = torch.arange(num_sequences, device=device) * num_rows + accepted_len_B
        told_len_B = told_lengths(accepted_len_B, logits_BQV)
        return NextStep(token_ids_BQ.flatten()[row_B], length_B + accepted_len_B + 1, row_B, told_len_B)
    results = [torch.empty(num_sequences, dtype=torch.int64, device=device) for _ in range(4)]
    if num_sequences:
        from baton.kernels.sampling.verify_triton import launch_after

        launch_after(token_ids_BQ, accepted_len_B, length_B, logits_BQV, results)
    return NextStep(*results)
