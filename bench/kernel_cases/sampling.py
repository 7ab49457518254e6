"""Rows of `baton bench kernels` for sampling: verification of a mixed batch, sampling, log-probabilities, logit edits.

Logits are drawn from a normal distribution, the flattest that occurs ("flat"), or are scaled so that some hundred
tokens have most of the mass, as in a trained model ("peaked").
"""

import functools
from collections.abc import Callable, Sequence

import torch

from baton.bench.kernel_bench.case import KernelCase, Systems, TuningPoint
from baton.kernels.sampling.draft_rows import DraftRows
from baton.kernels.sampling.logit_edits import Edits, edit_rows
from baton.kernels.sampling.logprobs import logprobs_topk
from baton.kernels.sampling.rows import DrawRows, Law
from baton.kernels.sampling.sample import sample
from baton.kernels.sampling.verify import Verdict, post_verify, verify

QWEN3, QWEN35 = 151_936, 248_320
HEAD = 32_000
MIXED = (Law.MATCH, Law.MATCH, Law.REJECT, Law.REJECT, Law.BLOCK, Law.FORCE, Law.SYNTHETIC, Law.MATCH)
GREEDY_AT, PROBS_AT = (0,), (3, 4)


def cases() -> list[KernelCase]:
    """Verification, sampling, log-probabilities and logit edits by batch size; a tiny case for the bench itself."""
    found = [_verify("tiny", 2, 1, 100, (Law.MATCH,), only_gpu=False)]
    for batch in (1, 16, 64, 256):
        found.append(_verify("mixed", batch, 3, QWEN3, MIXED))
    found.append(_verify("mixed", 64, 3, QWEN35, MIXED))
    found.append(_verify("coupled", 64, 3, QWEN3, (Law.MATCH,)))
    found.append(_verify("greedy", 64, 3, QWEN3, (Law.MATCH,), temperature=0.0))
    for laws, name in (((Law.MATCH,), "coupled"), (MIXED, "mixed")):
        found.append(_verify(f"{name} top-k/p", 64, 3, QWEN3, laws, scale=4.0, top_k=50, top_p=0.9))
    found.append(_verify("coupled flat p=0.9", 64, 3, QWEN3, (Law.MATCH,), top_p=0.9))
    for batch in (1, 16, 64, 256):
        for name, scale, top_k, top_p in (
            ("flat k=50 p=0.9", 1.0, 50, 0.9),
            ("peaked k=50 p=0.9", 4.0, 50, 0.9),
            ("peaked p=0.9", 6.0, 0, 0.9),
            ("flat p=0.9", 1.0, 0, 0.9),
            ("plain", 1.0, 0, 1.0),
        ):
            found.append(_sample(name, batch, scale, top_k, top_p))
        found.append(_sample("greedy", batch, 1.0, 0, 1.0, temperature=0.0))
        found += [_logprobs(batch, num_top) for num_top in (0, 5, 20)]
    found += [_edits(64), _post(64)]
    return found


def tuning() -> list[TuningPoint]:
    """Nothing is tuned: chunks have one size for every batch, so that tokens do not depend on it."""
    return []


def _rows(device: torch.device, batch: int, temperature: float, top_k: int, top_p: float) -> DrawRows:
    place_B = torch.arange(batch, device=device)
    return DrawRows(
        temperature_B=torch.full((batch,), temperature, dtype=torch.float64, device=device),
        seed_B=place_B * 7919 + 1,
        choice_B=torch.zeros_like(place_B),
        position_B=place_B + 100,
        top_k_B=torch.full_like(place_B, top_k) if top_k else None,
        top_p_B=torch.full((batch,), top_p, dtype=torch.float64, device=device) if top_p < 1 else None,
    )


def _logits(device: torch.device, shape: Sequence[int], scale: float) -> torch.Tensor:
    return (torch.randn(*shape, device=device) * scale).to(torch.bfloat16)


def _drafts(device: torch.device, batch: int, num_drafts: int, vocab_size: int, laws: Sequence[Law]) -> DraftRows:
    law_B = torch.tensor([laws[place % len(laws)] for place in range(batch)], dtype=torch.int32)
    by_chance = any(law in (Law.REJECT, Law.BLOCK) for law in laws)
    cap_B = torch.full((batch,), num_drafts, device=device)
    rates_K = torch.full((num_drafts,), 0.8, dtype=torch.float64, device=device)
    if not by_chance:
        ids_BK = torch.randint(0, vocab_size, (batch, num_drafts), device=device)
        return DraftRows(
            ids_BK=ids_BK,
            cap_B=cap_B,
            law_B=law_B.to(device),
            rates_K=rates_K if Law.SYNTHETIC in laws else None,  # as in serving, which passes rates for this law only
            forced_len=num_drafts if Law.FORCE in laws else 0,
        )
    d2t_C = torch.arange(HEAD, device=device) * vocab_size // HEAD
    t2d_V = torch.full((vocab_size,), -1, device=device).index_copy(0, d2t_C, torch.arange(HEAD, device=device)).int()
    has_probs = [place % len(laws) in PROBS_AT for place in range(batch)]
    row_B = torch.tensor([sum(has_probs[:place]) if has else -1 for place, has in enumerate(has_probs)])
    return DraftRows(
        ids_BK=d2t_C[torch.randint(0, HEAD, (batch, num_drafts), device=device)],
        forced_len=num_drafts,
        by_chance=True,
        probs_NKC=torch.rand(max(1, sum(has_probs)), num_drafts, HEAD, device=device).softmax(dim=-1),
        probs_row_B=row_B.to(torch.int32).to(device),
        t2d_V=t2d_V,
        cap_B=cap_B,
        law_B=law_B.to(device),
        rates_K=rates_K,
    )


def _verify(
    name: str,
    batch: int,
    num_drafts: int,
    vocab_size: int,
    laws: Sequence[Law],
    *,
    temperature: float = 1.0,
    scale: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    only_gpu: bool = True,
) -> KernelCase:
    def prepare(device: torch.device, num_sets: int) -> Systems:
        rows = _rows(device, batch, temperature, top_k, top_p)
        if len(laws) > 1:
            is_greedy_B = torch.tensor([place % len(laws) in GREEDY_AT for place in range(batch)], device=device)
            rows.temperature_B.masked_fill_(is_greedy_B, 0.0)
        ours: list[Callable[[], object]] = []
        torchs: list[Callable[[], object]] = []
        for _ in range(num_sets):
            logits_BQV = _logits(device, (batch, num_drafts + 1, vocab_size), scale)
            drafts = _drafts(device, batch, num_drafts, vocab_size, laws)
            counts_Q = torch.zeros(num_drafts + 1, dtype=torch.int64, device=device)
            ours.append(functools.partial(verify, logits_BQV, rows, drafts, counts_Q=counts_Q))
            torchs.append(functools.partial(_torch_verify, logits_BQV, drafts))
        return {"ours": ours, "torch": torchs}

    row_bytes = vocab_size * 2
    num_bytes = batch * (num_drafts + 1) * row_bytes
    for place in range(batch):
        law = laws[place % len(laws)]
        is_probable = place % len(laws) in PROBS_AT
        if is_probable:  # the rows of all drafts once more, or of the one that falls; and what these were drawn from
            num_bytes += (num_drafts if law is Law.BLOCK else 1) * (row_bytes + HEAD * 4)
    return KernelCase(
        kernel="verify",
        shape=f"{name} B={batch} k={num_drafts} V={vocab_size}",
        num_bytes=num_bytes,
        is_read=True,
        set_bytes=num_bytes,
        prepare=prepare,
        only_gpu=only_gpu,
    )


def _torch_verify(logits_BQV: torch.Tensor, drafts: DraftRows) -> object:
    """Compute only the coupled or greedy part in plain torch: noise, an argmax, and the prefix."""
    noise_BQV = torch.empty_like(logits_BQV, dtype=torch.float32).exponential_().log_().neg_()
    choice_BQ = (logits_BQV.float() + noise_BQV).argmax(dim=-1)
    return (choice_BQ[:, :-1] == drafts.ids_BK).to(torch.int64).cumprod(dim=1).sum(dim=1)


def _sample(name: str, batch: int, scale: float, top_k: int, top_p: float, *, temperature: float = 1.0) -> KernelCase:
    def prepare(device: torch.device, num_sets: int) -> Systems:
        rows = _rows(device, batch, temperature, top_k, top_p)
        logits = [_logits(device, (batch, QWEN3), scale) for _ in range(num_sets)]
        return {
            "ours": [functools.partial(sample, x, rows) for x in logits],
            "torch": [functools.partial(_torch_sample, x, top_k, top_p) for x in logits],
        }

    num_bytes = batch * QWEN3 * 2
    return KernelCase(
        kernel="sample",
        shape=f"{name} B={batch} V={QWEN3}",
        num_bytes=num_bytes,
        is_read=True,
        set_bytes=num_bytes,
        prepare=prepare,
    )


def _torch_sample(logits_BV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Sample by sorting, as libraries do without a kernel."""
    logits_BV = logits_BV.float()
    order_BV = None
    if top_k or top_p < 1:
        logits_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
        if top_k:
            logits_BV[:, top_k:] = -torch.inf
        p_BV = logits_BV.softmax(dim=-1)
        logits_BV = logits_BV.masked_fill(p_BV.cumsum(dim=-1) - p_BV >= top_p, -torch.inf)
    race_BV = logits_BV - torch.empty_like(logits_BV).exponential_().log_()
    found_B1 = race_BV.argmax(dim=-1, keepdim=True)
    return found_B1 if order_BV is None else order_BV.gather(1, found_B1)


def _logprobs(count: int, num_top: int) -> KernelCase:
    def prepare(device: torch.device, num_sets: int) -> Systems:
        token_N = torch.randint(0, QWEN3, (count,), device=device)
        logits = [_logits(device, (count, QWEN3), 2.0) for _ in range(num_sets)]
        return {
            "ours": [functools.partial(logprobs_topk, x, token_N, num_top) for x in logits],
            "torch": [functools.partial(_torch_logprobs, x, token_N, num_top) for x in logits],
        }

    num_bytes = count * QWEN3 * 2
    return KernelCase(
        kernel="logprobs_topk",
        shape=f"N={count} K={num_top} V={QWEN3}",
        num_bytes=num_bytes,
        is_read=True,
        set_bytes=num_bytes,
        prepare=prepare,
    )


def _torch_logprobs(logits_NV: torch.Tensor, token_N: torch.Tensor, num_top: int) -> object:
    logprobs_NV = logits_NV.float().log_softmax(dim=-1)
    if num_top:
        return logprobs_NV.topk(num_top)
    chosen_N1 = logprobs_NV.gather(1, token_N[:, None])
    return chosen_N1, (logprobs_NV > chosen_N1).sum(dim=1)


def _edits(batch: int) -> KernelCase:
    def prepare(device: torch.device, num_sets: int) -> Systems:
        edits = Edits(
            sequence_P=torch.arange(batch, device=device),
            drafts_BK=torch.zeros(batch, 0, dtype=torch.int64, device=device),
            penalties_P3=torch.tensor([[1.1, 0.1, 0.1]], dtype=torch.float64, device=device).repeat(batch, 1),
            counts_NX=torch.zeros(batch, QWEN3, dtype=torch.int32, device=device),
            in_prompt_NX=torch.zeros(batch, QWEN3, dtype=torch.bool, device=device),
            slot_P=torch.arange(batch, device=device),
        )
        logits = [_logits(device, (batch, 1, QWEN3), 2.0) for _ in range(num_sets)]
        return {"ours": [functools.partial(edit_rows, x, edits) for x in logits]}

    num_bytes = batch * QWEN3 * (2 + 4 + 1 + 4)
    return KernelCase(
        kernel="edit_rows", shape=f"penalties B={batch} V={QWEN3}", num_bytes=num_bytes, set_bytes=num_bytes,
        prepare=prepare,
    )  # fmt: skip


def _post(batch: int) -> KernelCase:
    def prepare(device: torch.device, num_sets: int) -> Systems:
        verdict = Verdict(
            torch.zeros(batch, 4, dtype=torch.int64, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
        )
        length_B = torch.ones(batch, dtype=torch.int64, device=device)
        logits_BQV = torch.zeros(batch, 4, 1, dtype=torch.bfloat16, device=device)
        return {"ours": [lambda: post_verify(verdict, length_B, logits_BQV) for _ in range(num_sets)]}

    num_bytes = batch * 8 * 10
    return KernelCase(
        kernel="post_verify", shape=f"B={batch} k=3", num_bytes=num_bytes, set_bytes=num_bytes, prepare=prepare
    )  # fmt: skip
