"""CUDA graphs of decode steps: the bits of launched passes, no waiting, and all ranks or none."""

import functools
import gc

import pytest
import torch

from baton.core.cuda_graphs import CudaGraphConfig
from baton.core.numerics import Numerics
from baton.core.requests.tokenizer import Tokenizer
from baton.core.verification import VerificationConfig
from baton.engine.graphs.backend import CallBackend, CudaBackend
from baton.engine.graphs.graphed_step import GraphedStep
from baton.engine.graphs.key import GraphKind, GraphSizes
from baton.engine.local import LocalEngine
from baton.engine.sampling.sampler import sampling_rows
from baton.engine.speculation.verifiers import verifier_for
from baton.engine.step.batch import DecodeRows
from baton.engine.step.slots import DecodeState
from baton.engine.step.step import DecodeInputs, extend, sample
from baton.kernels.implementation import Implementation
from baton.model.loader import load_model
from baton.model.parallel import Alone
from baton.tests.e2e.conftest import TINY
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.engine import test_dealt_passes as dealt
from baton.tests.engine.driver import Driver
from baton.tests.engine.pass_matrix import PREFIXES, SIZE, Side, check_kind
from baton.tests.engine.test_tp_group import CHECKPOINT, generate, load, runner_of
from baton.tests.gpu.graph_ranks import play_dealt, use_graphs
from baton.tests.gpu.tp_group_ranks import GpuRanks
from baton.tests.model.checkpoints import write_checkpoint

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
MLA = TINY.with_name("tiny-mla")
SHAPES = {
    "dense": {"kind": "qwen3", "num_heads": 8, "num_kv_heads": 2, "tie": False},
    "moe": {"kind": "qwen3_moe"},
    "hybrid": {  # in bfloat16 by Triton kernels
        "kind": "qwen3_5", "hidden_size": 128, "head_dim": 64,
        "overrides": {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    },
}  # fmt: skip
SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.95}


@functools.cache
def tiny(dtype, numerics):
    return load_model(TINY, dtype=dtype, device=DEVICE, numerics=numerics, with_mtp=True)


@pytest.fixture
def model_of(tmp_path):
    def make(shape, dtype, numerics):
        path = write_checkpoint(tmp_path / shape, **SHAPES[shape])
        return load_model(path, dtype=dtype, device=DEVICE, numerics=numerics, with_mtp=True)

    return make


@pytest.fixture(scope="module")
def ranks():
    started = GpuRanks()
    yield started
    started.close()


def kinds_of(num_rows):
    return [kind for kind in GraphKind if kind is not GraphKind.DRAFT or num_rows == 1]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", range(1, 9))
def test_replayed_bits_are_those_launched(num_rows, dtype, shape, model_of):
    model = model_of(shape, dtype, Numerics.INVARIANT)
    for kind in kinds_of(num_rows):
        check_kind(model, CudaBackend(DEVICE, Alone()), kind, num_rows)


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", range(1, 9))
def test_default_numerics_have_the_bits_of_the_same_padded_shape(num_rows, dtype, shape, model_of):
    model = model_of(shape, dtype, Numerics.DEFAULT)
    for kind in kinds_of(num_rows):
        called, captured = Side(model), Side(model)
        graphs = [
            called.graph(kind, num_rows, CallBackend()),
            captured.graph(kind, num_rows, CudaBackend(DEVICE, Alone())),
        ]
        for prefix in PREFIXES:
            for count in range(SIZE, 0, -1):
                wanted = called.replayed(graphs[0], count, prefix)
                assert torch.equal(captured.replayed(graphs[1], count, prefix), wanted), (kind, count, prefix)
        for kv, other in zip(captured.kv(), called.kv(), strict=True):
            assert torch.equal(kv, other)


@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("k", [0, 1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "numerics"), [(torch.float32, Numerics.INVARIANT), (torch.float64, Numerics.DEFAULT)]
)
def test_the_same_tokens_and_accepted_lengths(dtype, numerics, k, scheduling):
    tokenizer = Tokenizer.from_directory(TINY)
    prompts = token_prompts(tokenizer, 12, max_len=100)
    made = []
    for graphs in (None, CudaGraphConfig(sizes=(1, 3, 5))):
        engine = LocalEngine(
            tiny(dtype, numerics),
            tokenizer,
            num_blocks=128,
            block_size=16,
            num_draft_tokens=k,
            chunk_len=48,
            max_num_sequences=5,
            scheduling=scheduling,
            graphs=graphs,
        )
        results = engine.generate(requests_for(prompts, sampled=True, num_drafts=k, max_tokens=24))
        made.append([(result.token_ids, result.counts) for result in results])
    assert made[0] == made[1]
    counts = engine.runner.graphs.counts
    assert counts.num_steps_replayed > 0
    assert not any(counts.num_steps_eager.values())
    assert not counts.failed
    has_kernels = engine.runner._model.implementation is Implementation.TRITON
    assert (counts.num_steps_piecewise > 0) == (has_kernels or numerics is Numerics.DEFAULT)
    print(f"{counts.num_captured} graphs, {counts.num_sequences_padded} sequences of padding")


@torch.inference_mode()
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_replayed_step_never_waits(sampled, k):
    model = tiny(torch.bfloat16, Numerics.DEFAULT)
    side = Side(model)
    sizes = GraphSizes(sizes=(4,), widths=(4, 8), num_draft_tokens=k, max_entries=1 << 20)
    step = GraphedStep(model, side.pool, sizes, CudaBackend(DEVICE, Alone()))
    step.capture()
    limit_B = torch.full((3,), 100, device=DEVICE)
    rows = DecodeRows(block_tables_BM=side.tables[:3, :3], limit_B=limit_B, draft_cap_B=torch.full_like(limit_B, k))
    hidden_BD = side.hidden[:3]
    state = DecodeState(
        last_token_B=side.tokens[:3, 0], draft_token_B=side.tokens[:3, 1], hidden_BD=hidden_BD, length_B=limit_B - 70
    )
    params = [request.sampling for request in requests_for([(1, 2)] * 3, sampled=True, num_drafts=k, max_tokens=9)]
    sampling = sampling_rows(params, DEVICE) if sampled else None
    verifier = verifier_for(model, VerificationConfig(), k)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            decode = DecodeInputs(state=state, rows=rows, num_drafts=k, keeps_mtp=k > 0, sampling=sampling)
            passes = step.passes(rows, k, 40)
            sampled, _ = sample(passes, decode, None, model, verifier)
            extended, _ = extend(passes, decode, sampled, None, None, model)
            state = DecodeState(
                last_token_B=sampled.state.last_token_B,
                draft_token_B=extended.draft_token if k else state.draft_token_B,
                hidden_BD=extended.hidden_D if k else state.hidden_BD,
                length_B=limit_B - 70,
            )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.counts.num_steps_replayed == 3
    assert (sampled.verified.accepted_len_B <= k).all()


def test_a_graph_that_cannot_be_captured_leaves_the_others_usable():
    """A read of the host breaks its capture, and nothing after it."""
    side = Side(tiny(torch.float32, Numerics.DEFAULT))
    backend = CudaBackend(DEVICE, Alone())
    with torch.inference_mode():
        with pytest.raises(RuntimeError):
            backend.capture([lambda: side.hidden.sum().item()])
        static = side.graph(GraphKind.VERIFY, 2, backend)
        wanted = side.eager(GraphKind.VERIFY, SIZE, 20, 2)
        assert torch.allclose(side.replayed(static, SIZE, 20), wanted, atol=1e-4)


def test_graphs_that_are_dropped_leave_a_pool_for_the_next():
    """As when another rank could not capture its own."""
    side = Side(tiny(torch.float32, Numerics.DEFAULT))
    backend = CudaBackend(DEVICE, Alone())
    with torch.inference_mode():
        for _ in range(2):
            static = side.graph(GraphKind.VERIFY, 2, backend)
            static = side.graph(GraphKind.VERIFY, 1, backend)
            wanted = side.eager(GraphKind.VERIFY, SIZE, 20, 1)
            assert torch.allclose(side.replayed(static, SIZE, 20), wanted, atol=1e-4)
            del static
            gc.collect()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("what", [None, "require", "capture"])
def test_two_gpus_replay_together_or_not_at_all(what, tiny_checkpoint, ranks):
    path = tiny_checkpoint(**CHECKPOINT)
    one = load(path, None, torch.float32, Numerics.INVARIANT, DEVICE)
    wanted = generate(runner_of(one, 2), 2, "coupled")
    (tokens, *lead), (_, *follower) = ranks.run(use_graphs, path, what)
    assert tokens == wanted
    assert lead == follower
    num_captured, failed, num_replayed, num_eager = lead
    assert len(failed) == (0 if what is None else (num_captured + len(failed)) // 2)
    assert num_replayed > 0 if what is None else num_eager > 0


REPLAYED: tuple[int, int, dict] = (
    dealt.NUM_DECODE_ONLY,
    0,
    {},
)  # steps, launched ones, graphs that could not be captured


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("dtype", "numerics"), [(torch.float64, Numerics.DEFAULT), (torch.float32, Numerics.INVARIANT)], ids=str
)
def test_two_gpus_that_sequences_are_dealt_to_replay_the_tokens_of_one(dtype, numerics, ranks):
    """Of steps in which one rank has all sequences, some, or none."""
    options = {"dtype": dtype, "numerics": numerics, "device": DEVICE, "block_size": 16}
    runner, pool = dealt.runner_of(MLA, **options)
    with torch.inference_mode():
        wanted, _ = dealt.play(Driver(runner, pool), dealt.OWNERS[1])
        runner.close()
    for how in ("launched", "captured"):
        (tokens, lead), (_, follower) = ranks.run(play_dealt, MLA, dtype, numerics, how)
        assert tokens == wanted, how
        assert lead == follower == (REPLAYED if how == "captured" else None)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_that_sequences_are_dealt_to_replay_what_kernels_make(ranks):
    """In bfloat16 by Triton kernels: the tokens of the same padded passes, launched."""
    made = {how: ranks.run(play_dealt, MLA, torch.bfloat16, Numerics.DEFAULT, how) for how in ("called", "captured")}
    for (_, lead), (_, follower) in made.values():
        assert lead == follower == REPLAYED
    assert made["captured"][0][0] == made["called"][0][0]
