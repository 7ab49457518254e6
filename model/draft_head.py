"""A draft head over fewer tokens than the target's vocabulary, and the tables between the two kinds of ids.

The MTP head then proposes only the tokens that are drafted most; which these are affects what is accepted, never what
is emitted. Names are EAGLE-3's under the MTP prefix: `mtp.lm_head.weight` [C, D], `mtp.d2t` int64 [C], `mtp.t2d` (not
read, it follows from d2t); config.json says `draft_vocab_size`. Source: Li et al., "EAGLE-3" (2025).

Legend: C columns of the draft head, V vocabulary.
"""

from dataclasses import dataclass

import torch

from baton.core.errors import ModelUnsupported
from baton.model.draft_names import D2T

D2T_FORMS = ("absolute", "offset")


@dataclass(frozen=True, slots=True)
class HeadIds:
    """Columns of the draft head, int64 of any shape; `Model.draft_to_target` maps them to tokens."""

    columns: torch.Tensor


def normalise_d2t(d2t_C: torch.Tensor, vocab_size: int, form: str | None, *, name: str = D2T) -> torch.Tensor:
    """The token of each column, int64 [C].

    Args:
        d2t_C: what the checkpoint holds.
        vocab_size: V.
        form: "absolute" (token = d2t[column]), "offset" (token = column + d2t[column], what EAGLE-3 publishes), or None
            if config.json does not say; then the only form that makes sense.
        name: the tensor's name in the checkpoint.

    Raises:
        ModelUnsupported: a token is out of range or has two columns, or both forms make sense and none is named.
    """
    readings = {"absolute": d2t_C, "offset": d2t_C + torch.arange(len(d2t_C), device=d2t_C.device)}
    if form is not None:
        if form not in readings:
            raise _refusal(f"d2t_form = {form!r} is not one of {', '.join(D2T_FORMS)}", form)
        problem = _problem(readings[form], vocab_size)
        if problem:
            raise _refusal(f"{name}, read as {form}, {problem}", form)
        return readings[form]
    problems = {reading: _problem(table, vocab_size) for reading, table in readings.items()}
    sound = [reading for reading, problem in problems.items() if not problem]
    if len(sound) == 2 and not torch.equal(readings["absolute"], readings["offset"]):
        raise _refusal(f"{name} could hold absolute ids or offsets: config.json must say which by d2t_form", None)
    if not sound:
        why = "; ".join(f"read as {reading}, it {problem}" for reading, problem in problems.items())
        raise _refusal(f"{name} is no table of tokens: {why}", None)
    return readings[sound[0]]


def columns_in_order(head_CD: torch.Tensor, d2t_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A head and its table, sorted by token, so that the first of tied columns is the lowest token."""
    if bool((d2t_C[1:] > d2t_C[:-1]).all()):
        return head_CD, d2t_C
    order_C = d2t_C.argsort()
    return head_CD[order_C], d2t_C[order_C]


def invert_d2t(d2t_C: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The column of each token, int32 [V]; -1 if the draft head has none."""
    t2d_V = torch.full((vocab_size,), -1, dtype=torch.int32, device=d2t_C.device)
    t2d_V[d2t_C] = torch.arange(len(d2t_C), dtype=torch.int32, device=d2t_C.device)
    return t2d_V


def spaced_d2t(num_columns: int, vocab_size: int) -> torch.Tensor:
    """Evenly spaced tokens: the table used with random weights."""
    return torch.arange(num_columns) * vocab_size // num_columns


def _problem(table_C: torch.Tensor, vocab_size: int) -> str:
    """What is wrong with a table; "" if nothing."""
    outside_N = table_C[(table_C < 0) | (table_C >= vocab_size)]
    if len(outside_N):
        return f"holds {int(outside_N[0])}, and the vocabulary is 0 ... {vocab_size - 1}"
    num_different = len(table_C.unique())
    if num_different != len(table_C):
        return f"holds only {num_different} different tokens in {len(table_C)} places"
    return ""


def _refusal(message: str, form: str | None) -> ModelUnsupported:
    return ModelUnsupported(message, option="d2t_form", value=form)
