"""The kernels that choose tokens, compiled and loaded before the first step, so that no stream waits for it.

Those that every deployment launches sooner or later: of greedy and sampled sequences, top-k and top-p, for each number
of drafts and for the one token of a prompt. Rarer ones (min-p, edits, log-probabilities) are compiled when they are
first asked for, once for each machine.

Legend: B sequences, K draft tokens, Q = K + 1 rows, V vocabulary, C columns of the draft head.
"""

import torch

from baton.core.sampling import SamplingParams
from baton.engine.kernel_choice import choice_rows, draw, next_token
from baton.engine.sampler import SamplingRows, sampling_rows
from baton.engine.verify import DraftIds, DraftLaw, DraftProbs, Verifier, VerifyInputs
from baton.kernels.implementation import Implementation
from baton.kernels.verify import Verdict, post_verify
from baton.model.model import Model

_GREEDY, _PLAIN = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
_BATCHES = (
    (_GREEDY, _GREEDY),
    (_GREEDY, _PLAIN),
    (_GREEDY, SamplingParams(temperature=1.0, top_k=20)),
    (_GREEDY, SamplingParams(temperature=1.0, top_p=0.9)),
)


def is_needed(model: Model) -> bool:
    """Whether there is anything to compile."""
    return model.choosing is Implementation.TRITON and model.device.type == "cuda"


@torch.inference_mode()
def warm_up_prompts(model: Model) -> None:
    """For the first token of a prompt, and its first draft."""
    for params in _BATCHES:
        sampling = sampling_rows(params, model.device)
        position_B = torch.arange(len(params), device=model.device)
        next_token(model, _logits(model, len(params), 1)[:, 0], sampling, position_B)


@torch.inference_mode()
def warm_up_steps(model: Model, verifier: Verifier, num_draft_tokens: int) -> None:
    """For steps with up to so many drafts, and for their drafts."""
    warm_up_prompts(model)
    if num_draft_tokens and model.d2t_C is not None:
        _draft(model)
    for params in _BATCHES:
        sampling = sampling_rows(params, model.device)
        for num_drafts in range(num_draft_tokens + 1):
            _step(model, verifier, sampling, len(params), num_drafts)


def _draft(model: Model) -> None:
    """The likeliest token of a pruned head."""
    assert model.choosing is not None
    assert model.d2t_C is not None
    logits_BC = torch.zeros(1, len(model.d2t_C), dtype=model.dtype, device=model.device)
    rows = choice_rows(None, torch.zeros(1, dtype=torch.int64, device=model.device))
    draw(logits_BC, rows, None, None, model.choosing)


def _step(model: Model, verifier: Verifier, sampling: SamplingRows | None, num_sequences: int, num_drafts: int) -> None:
    position_B = torch.arange(num_sequences, device=model.device)
    ids_BK = position_B.new_zeros(num_sequences, num_drafts)
    assert model.choosing is not None
    probs = None
    if verifier.draft_law is DraftLaw.SAMPLED and num_drafts and sampling is not None:
        t2d_V, vocab_size = model.t2d(), model.config.vocab_size
        num_columns = vocab_size if model.d2t_C is None else len(model.d2t_C)
        shape = sampling.num_sampled, num_drafts, num_columns
        probs = DraftProbs(torch.zeros(shape, dtype=torch.float32, device=model.device), t2d_V)
    verified = verifier.verify(
        VerifyInputs(
            drafts=DraftIds(ids_BK),
            draft_probs=probs,
            target_logits_BQV=_logits(model, num_sequences, num_drafts + 1),
            sampling=sampling,
            rows=choice_rows(sampling, position_B),
            position_B=position_B,
            draft_cap_B=torch.full_like(position_B, num_drafts),
        )
    )
    verdict = Verdict(verified.token_ids_BQ, verified.accepted_len_B)
    post_verify(verdict, position_B, implementation=model.choosing)


def _logits(model: Model, num_sequences: int, num_rows: int) -> torch.Tensor:
    shape = num_sequences, num_rows, model.config.vocab_size
    return torch.zeros(shape, dtype=model.dtype, device=model.device)
