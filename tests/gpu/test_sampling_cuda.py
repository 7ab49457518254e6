"""Everything a request may ask, on a GPU: what a CPU makes of it in float64, and steps that never wait for it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import GrammarSpec, SamplingParams
from baton.core.requests.tokenizer import Tokenizer
from baton.core.verification import DraftSampleMethod, VerificationConfig, VerificationMode
from baton.engine.grammar.rows import GrammarRows, HostCopy
from baton.engine.grammar.walk import GrammarLookahead
from baton.engine.local import LocalEngine
from baton.engine.step.runner import Runner
from baton.kernels.copies import copy_to_host, host_buffer, to_device
from baton.kernels.sampling.logprobs import top_ids
from baton.kvcache.pool import KVPool
from baton.model.loader import load_model
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.test_sampling_everywhere import KINDS, check_reports, engine_of, requests_of
from baton.tests.engine.driver import Driver

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
LONG = 200_000_000  # cycles, about a tenth of a second
MORE_KINDS = {
    "bias": {"logit_bias": ((7, 5.0), (9, -100.0))},
    "bad_words": {"bad_words": ((11,), (3, 4), (265, 266, 267))},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(200, 300))},
}
MODES = {
    "coupled": VerificationConfig(),
    "synthetic": VerificationConfig.synthetic(0.8, 0.64),
    "force": VerificationConfig.force(1),
    "block": VerificationConfig(mode=VerificationMode.REJECTION),
    "by token": VerificationConfig(mode=VerificationMode.REJECTION, block=False),
    "point mass": VerificationConfig(mode=VerificationMode.REJECTION, draft_sample_method=DraftSampleMethod.GREEDY),
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_directory(TINY)


@pytest.fixture(scope="module")
def models():
    """The bundled model on the CPU and on the GPU."""
    return [
        load_model(TINY, dtype=torch.float64, device=device, numerics=Numerics.DEFAULT, with_mtp=True)
        for device in (torch.device("cpu"), CUDA)
    ]


@pytest.mark.parametrize("k", [0, 2])
def test_parameters_do_what_they_do_on_a_cpu(k, models, tokenizer):
    prompt = token_prompts(tokenizer, 9)[8][:40]
    cpu, gpu = (
        engine_of(model, tokenizer, k, chunk_len=16).generate(requests_of(prompt, KINDS | MORE_KINDS, k))
        for model in models
    )
    for result, other in zip(gpu, cpu, strict=True):
        assert result.token_ids == other.token_ids, result.key
        assert result.counts == other.counts, result.key
        check_reports(result.logprobs, other.logprobs)
        check_reports(result.prompt_logprobs, other.prompt_logprobs)


@pytest.mark.parametrize("mode", MODES)
def test_verification_does_what_it_does_on_a_cpu(mode, models, tokenizer):
    made = []
    for model in models:
        engine = LocalEngine(
            model,
            tokenizer,
            num_blocks=128,
            block_size=16,
            num_draft_tokens=2,
            chunk_len=48,
            max_num_sequences=5,
            verification=MODES[mode],
        )
        requests = requests_for(token_prompts(tokenizer, 10, max_len=60), sampled=True, num_drafts=2, max_tokens=20)
        made.append([(result.token_ids, result.counts) for result in engine.generate(requests)])
    assert made[0] == made[1]
    if mode in ("synthetic", "force"):
        assert sum(counts.num_accepted_tokens for _, counts in made[1]) > 20


def test_equal_logits_are_ordered_by_id():
    logits_NV = torch.randint(0, 5, (6, 4096), generator=torch.Generator().manual_seed(1)).double()
    logits_NV[2, 7:] = -torch.inf
    for num_top in (1, 3, 20):
        assert torch.equal(top_ids(logits_NV.to(CUDA), num_top).cpu(), top_ids(logits_NV, num_top))


class FakeState:
    """Allows tokens by their remainder, and forbids each draft above 3; remembers what it was told."""

    error = None
    is_finished = False
    is_quick = True

    def __init__(self, remainder):
        self.remainder = remainder
        self.told = []
        self.looked = []

    def begin(self, drafts):
        pass

    def found(self, drafts, patience_s):
        self.looked.append(list(drafts))
        words = np.zeros((len(drafts) + 1, 4), dtype=np.int32)
        for token in range(self.remainder, 100, 3):
            words[:, token // 32] |= np.int32(np.uint32(1 << token % 32).view(np.int32))
        num_valid = int(sum(np.cumprod([draft <= 3 for draft in drafts], dtype=int))) if len(drafts) else 0
        return GrammarLookahead(words, num_valid, len(drafts) + 1)

    def accept(self, token_ids):
        self.told.append(list(token_ids))
        return len(token_ids)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_grammars_hear_of_drafts_and_mask_logits(num_drafts):
    drafts_BK = torch.tensor([[1, 9, 2], [3, 3, 3], [5, 1, 1]])[:, :num_drafts]
    logits_BQV = torch.randn(3, num_drafts + 1, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    verified = SimpleNamespace(
        accepted_len_B=torch.tensor([0, num_drafts, 0]), token_ids_BQ=torch.arange(3 * (num_drafts + 1)).view(3, -1)
    )
    made = []
    for device in (torch.device("cpu"), CUDA):
        states = {0: FakeState(0), 1: FakeState(1)}
        for _ in range(2):  # the first time kernels are loaded, which waits
            rows = GrammarRows(states, device)
            late_BK, drafts_there_BK = torch.zeros_like(drafts_BK, device=device), drafts_BK.to(device)
            if device == CUDA:
                torch.cuda.synchronize()
                torch.cuda._sleep(LONG)
            late_BK.copy_(drafts_there_BK)
            rows.take(late_BK)
            late_BK.fill_(77)  # the copy was ordered before this
            masks = rows.masks()
            emitted = rows.emitted(
                SimpleNamespace(
                    accepted_len_B=verified.accepted_len_B.to(device), token_ids_BQ=verified.token_ids_BQ.to(device)
                )
            )
            emitted.accept()
        cap_B = torch.full((3,), num_drafts, device=device)
        made.append(
            (
                masks.apply(logits_BQV.to(device)).cpu().tolist(),
                masks.cap(cap_B).cpu().tolist(),
                [(state.looked, state.told) for state in states.values()],
            )
        )
    assert made[0] == made[1]
    assert made[1][2][1][0][-1] == [3, 3, 3][:num_drafts]


def test_a_grammar_on_the_gpu(models, tokenizer):
    pytest.importorskip("llguidance")
    made = []
    for model in models:
        requests = [
            GenerationRequest(
                key=AttemptKey(f"g{seed}", 1),
                prompt_token_ids=(5, 6, 7 + seed),
                sampling=SamplingParams(max_tokens=12, seed=seed, grammar=GrammarSpec("regex", "[a-z]{2,6}( [0-9]+)*")),
                deadline_s=1e12,
                num_draft_tokens=seed % 3,
            )
            for seed in range(6)
        ]
        made.append([result.token_ids for result in engine_of(model, tokenizer, 2).generate(requests)])
    assert made[0] == made[1]


def test_copies_of_nothing_and_of_parts():
    assert HostCopy(torch.zeros(3, 0, dtype=torch.int64, device=CUDA)).get().shape == (3, 0)
    copy_to_host(host_buffer(0, torch.int64, CUDA), torch.zeros(0, dtype=torch.int64, device=CUDA))
    assert to_device(torch.zeros(0, 3), CUDA).shape == (0, 3)
    buffer = host_buffer(100, torch.int64, CUDA)
    copy_to_host(buffer[10:20], torch.arange(10, device=CUDA))
    torch.cuda.synchronize()
    assert buffer[10:20].tolist() == list(range(10))
    assert torch.equal(to_device(torch.arange(12).view(3, 4).T, CUDA).cpu(), torch.arange(12).view(3, 4).T)


ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "cut": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
}
ALL_KINDS: dict[str, Any] = KINDS | MORE_KINDS
ASKED |= {kind: {"temperature": 1.0, **values} for kind, values in ALL_KINDS.items() if kind != "plain"}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("mode", ["coupled", "synthetic", "block"])
def test_no_step_waits_for_the_device(mode, models):
    model = models[1]
    pool = KVPool(model.kv_layout(16), 200, CUDA)
    runner = Runner(
        model, pool, max_num_seqs=len(ASKED), num_draft_tokens=2, verification=MODES[mode], eos_token_ids=(0,)
    )
    driver, hidden = Driver(runner, pool), bytes(8 * model.config.hidden_size)
    for slot, values in enumerate(ASKED.values()):
        params = SamplingParams(max_tokens=100, seed=slot, **values)
        driver.resume(slot, (1, 2, 3, 5), params, num_output=1, draft_token=6, hidden=hidden)
    slots = range(len(ASKED))
    for _ in range(2):
        driver.step(slots)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tickets = [driver.launch(slots) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ticket in tickets:
        assert all(row.token_ids for row in ticket.result().decode)
    driver.runner.close()
