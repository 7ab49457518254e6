"""One pass over fixed buffers: padded, replayed, and bit for bit the pass that is launched."""

import pytest
import torch

from baton.core.numerics import KVDtype, Numerics
from baton.engine.graphs.backend import CallBackend
from baton.engine.graphs.graphed_step import StaticPass
from baton.engine.graphs.key import GraphKey, GraphKind
from baton.kernels.dispatch_mode import DispatchMode
from baton.kernels.implementation import Implementation
from baton.model.loader import load_model
from baton.tests.engine.pass_matrix import LARGE, SIZE, Side, check_kind
from baton.tests.engine.recorder import RecorderBackend

KINDS = [(GraphKind.VERIFY, 1), (GraphKind.VERIFY, 3), (GraphKind.DRAFT, 1), (GraphKind.DRAFT_PREFILL, 3)]
SHAPES = {
    "dense": {"kind": "qwen3", "num_heads": 8, "num_kv_heads": 2, "tie": False},
    "moe": {"kind": "qwen3_moe"},
    "shared expert": {"kind": "qwen2_moe"},
    "hybrid": {"kind": "qwen3_5"},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model_of(tiny_checkpoint):
    def load(shape="dense", dtype=torch.float32, numerics=Numerics.INVARIANT, **options):
        path, cpu = tiny_checkpoint(**SHAPES[shape]), torch.device("cpu")
        return load_model(path, dtype=dtype, device=cpu, numerics=numerics, with_mtp=True, **options)

    return load


@pytest.mark.long
@pytest.mark.parametrize(("kind", "num_rows"), KINDS)
def test_replayed_bits_are_those_launched(kind, num_rows, model_of):
    check_kind(model_of(), RecorderBackend(), kind, num_rows, num_sequences=(1, 3, 4), prefixes=(0, 15, LARGE))


@pytest.mark.fast
@pytest.mark.parametrize(("kind", "num_rows"), [(GraphKind.VERIFY, 3), (GraphKind.DRAFT_PREFILL, 2)])
@pytest.mark.long
def test_replayed_passes_read_and_write_their_sequences_state(kind, num_rows, model_of):
    """State slots come by the buffers, and padding has scratch's: all state afterwards is that of launched passes."""
    check_kind(model_of("hybrid"), RecorderBackend(), kind, num_rows, num_sequences=(1, 3, 4), prefixes=(0, 15))


@pytest.mark.parametrize(("kind", "num_rows"), [(GraphKind.VERIFY, 3), (GraphKind.DRAFT, 1)])
def test_replayed_bits_of_float8_kv_are_those_launched(kind, num_rows, model_of):
    model = model_of(dtype=torch.bfloat16, kv_dtype=KVDtype.FP8)
    check_kind(model, RecorderBackend(), kind, num_rows, num_sequences=(1, 4), prefixes=(0, 15))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", range(1, 9))
def test_replayed_bits_are_those_launched_everywhere(num_rows, dtype, shape, model_of):
    # With a sparse model a CPU sorts tokens by expert in these numerics, on the host: nothing to record.
    backend = RecorderBackend() if shape == "dense" else CallBackend()
    for kind in GraphKind:
        if kind is not GraphKind.DRAFT or num_rows == 1:
            check_kind(model_of(shape, dtype), backend, kind, num_rows)


@pytest.mark.fast
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.long
def test_default_numerics_agree_in_float64(shape, model_of):
    model = model_of(shape, torch.float64, Numerics.DEFAULT)
    eager, graphed = Side(model), Side(model)
    with torch.inference_mode():
        static = graphed.graph(GraphKind.VERIFY, 3, RecorderBackend())
        for count in (4, 2, 1):
            wanted = eager.eager(GraphKind.VERIFY, count, 17, 3)
            assert (graphed.replayed(static, count, 17) - wanted).abs().max() < 1e-12


@pytest.mark.fast
def test_padding_is_written_anew_by_every_replay(model_of):
    """A smaller batch after a larger one writes nothing where the larger one's last sequences were."""
    side = Side(model_of())
    with torch.inference_mode():
        static = side.graph(GraphKind.VERIFY, 2, RecorderBackend())
        side.replayed(static, SIZE, 20)
        others = [kv[side.tables[1:].flatten()].clone() for kv in side.kv()]
        for kv in side.kv():
            kv[side.tables[1:].flatten()] = others[0].new_full((), 7.0)  # they have a new owner
        side.replayed(static, 1, 20)
        for kv in side.kv():
            assert (kv[side.tables[1:].flatten()] == 7.0).all()


class Writes(DispatchMode):
    """How often a tensor is written."""

    def __init__(self, tensor):
        super().__init__()
        self._place = tensor.untyped_storage().data_ptr()
        self.num = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = kwargs.get("out", args[0] if args else None)
        if function._schema.is_mutable and isinstance(target, torch.Tensor):
            self.num += target.untyped_storage().data_ptr() == self._place
        return function(*args, **kwargs)


@pytest.mark.fast
def test_only_rows_that_had_a_sequence_are_padded(model_of):
    """One write for what a replay is given; a second one only where the replay before was larger."""
    side = Side(model_of())
    with torch.inference_mode():
        static = side.graph(GraphKind.VERIFY, 2, CallBackend())
        padding = static._padding_BC.clone()
        assert torch.equal(static._numbers_BC, padding)
        for count, num_writes in ((2, 1), (2, 1), (1, 2), (1, 1), (4, 1), (3, 2), (1, 2), (SIZE, 1), (1, 2)):
            with Writes(static._numbers_BC) as writes:
                side.replayed(static, count, 20)
            assert writes.num == num_writes, count
            assert torch.equal(static._numbers_BC[count:], padding[count:])


@pytest.mark.fast
def test_hidden_states_of_padding_reach_nobody(model_of):
    side = Side(model_of())
    with torch.inference_mode():
        static = side.graph(GraphKind.DRAFT, 1, RecorderBackend())
        wanted = side.replayed(static, 2, 20).clone()
        static._hidden_TD[2:] = torch.nan
        assert torch.equal(side.replayed(static, 2, 20), wanted)
        assert wanted.shape == (2, side.model.config.hidden_size)


@pytest.mark.fast
def test_a_batch_beyond_the_graph_is_a_programmers_error(model_of):
    side = Side(model_of())
    with torch.inference_mode():
        narrow = side.graph(GraphKind.VERIFY, 2, CallBackend(), size=2, width=1)
        for count, prefix in ((3, 2), (2, 20)):
            with pytest.raises(AssertionError):
                side.replayed(narrow, count, prefix)


@pytest.mark.fast
def test_kernels_need_no_memory_for_the_blocks_of_a_table(model_of):
    """A graph over long contexts is refused for memory only where K and V of all tables are copied: by torch."""
    needed = {}
    for implementation in (Implementation.TRITON, Implementation.REFERENCE):
        model = model_of(dtype=torch.bfloat16, numerics=Numerics.DEFAULT, implementation=implementation)
        pool = Side(model).pool
        keys = [GraphKey(GraphKind.VERIFY, 1, SIZE, width) for width in (16, 8192)]
        needed[implementation] = [StaticPass(key, model, pool).num_bytes for key in keys]
    least, most = needed[Implementation.TRITON]
    assert 0 < least == most
    assert needed[Implementation.REFERENCE][1] > 100 * needed[Implementation.REFERENCE][0]
