"""On a GPU: an engine whose tokens kernels choose gives what torch chooses from the same logits, and never waits."""

import pytest
import torch

from baton.core.cuda_graphs import CudaGraphConfig
from baton.core.numerics import Numerics
from baton.core.requests.sampling import SamplingParams
from baton.core.verification import DraftSampleMethod, VerificationConfig, VerificationMode
from baton.engine.local import LocalEngine
from baton.engine.speculation.kernel_verifier import KernelVerifier
from baton.engine.step.runner import Runner
from baton.kernels.implementation import Implementation
from baton.kvcache.pool import KVPool
from baton.model.loader import load_model
from baton.scripts.model_shape import write_shape
from baton.tests.engine.driver import Driver
from baton.tests.engine.toy_engine import letters_tokenizer, request_of

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
VOCAB = 4096
REJECTION = VerificationMode.REJECTION
MODES = {
    "coupled": VerificationConfig(),
    "block": VerificationConfig(mode=REJECTION),
    "by token": VerificationConfig(mode=REJECTION, block=False),
    "point mass": VerificationConfig(mode=REJECTION, draft_sample_method=DraftSampleMethod.GREEDY),
    "synthetic": VerificationConfig.synthetic(0.8, 0.64),
    "force": VerificationConfig.force(1),
}
ASKED = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"temperature": 1.0, "logit_bias": ((3, 2.0), (5, -4.0)), "logprobs": 3},
    {"temperature": 0.9, "bad_words": ((11,), (3, 4)), "top_p": 0.95},
    {"temperature": 1.1, "allowed_token_ids": tuple(range(40, 90)), "logprobs": 0},
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    sizes = {"num_hidden_layers": 2, "vocab_size": VOCAB, "eos_token_id": 500, "max_position_embeddings": 512}
    return write_shape("qwen3-0.6b", tmp_path_factory.mktemp("shape"), **sizes)


@pytest.fixture
def model(path):
    return load_model(
        path, dtype=torch.bfloat16, device=CUDA, numerics=Numerics.DEFAULT, with_mtp=True, random_seed=3
    )  # fmt: skip


def generate(model, verification, graphs):
    engine = LocalEngine(
        model,
        letters_tokenizer(eos_token_ids=(500,), size=VOCAB),
        num_blocks=200,
        block_size=16,
        num_draft_tokens=2,
        chunk_len=64,
        max_num_sequences=len(ASKED),
        verification=verification,
        graphs=graphs,
    )
    requests = [
        request_of([at, 7, 2], seed=at, max_tokens=24, ignore_eos=True, **asked) for at, asked in enumerate(ASKED)
    ]
    return engine.generate(requests), engine.runner._verifier


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_torch(mode, model):
    made = []
    for form in (Implementation.TRITON, None):
        assert form is None or model.sampling_implementation is form
        model.sampling_implementation = form
        for graphs in (None, CudaGraphConfig(sizes=(4, len(ASKED)))):
            results, verifier = generate(model, MODES[mode], graphs)
            assert isinstance(verifier, KernelVerifier) == (form is not None)
            made.append([(result.token_ids, result.counts) for result in results])
    # A graph is padded, and rounds otherwise than a step that is launched as it comes: each beside its own.
    assert made[0] == made[2]
    assert made[1] == made[3]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("mode", ["coupled", "block", "synthetic"])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_no_step_waits_for_the_device(mode, num_drafts, model):
    pool = KVPool(model.kv_layout(16), 200, CUDA)
    options = {"num_draft_tokens": 2, "verification": MODES[mode], "eos_token_ids": (500,)}
    driver = Driver(Runner(model, pool, max_num_seqs=len(ASKED), **options), pool)
    hidden = bytes(model.config.hidden_size * 2)
    for slot, asked in enumerate(ASKED):
        params = SamplingParams(max_tokens=100, seed=slot, **asked)
        driver.resume(slot, (1, 2, 3, 5), params, num_output=1, draft_token=6, hidden=hidden)
    slots = range(len(ASKED))
    for _ in range(2):  # the first time kernels are compiled and loaded, which waits
        driver.step(slots, num_drafts=num_drafts)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tickets = [driver.launch(slots, num_drafts=num_drafts) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ticket in tickets:
        assert all(row.token_ids for row in ticket.result().decode)
    driver.runner.close()
