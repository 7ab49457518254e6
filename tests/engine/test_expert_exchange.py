"""Experts cross between ranks round by round: map and weights change together, as told, and a failure is an error."""

import random

import pytest
import torch

from baton.core.errors import BatonError, WorkerLost
from baton.core.requests.sampling import SamplingParams
from baton.engine.step.executor import ThreadExecutor
from baton.engine.step.plan import MoveExperts
from baton.engine.step.runner import Runner
from baton.engine.tp.decision import Decisions
from baton.engine.tp.expert_balancer import ExpertBalancer
from baton.engine.tp.expert_exchange import ExpertExchange
from baton.kernels.moe.expert_map import balanced_map, first_map, rank_loads
from baton.kernels.moe.expert_moves import ExpertMoves
from baton.kernels.moe.expert_slots import ExpertSlots, RoutedRows
from baton.kernels.moe.gemm import Fp8ExpertWeights
from baton.kernels.sampling.decision_reference import MAX_STATE
from baton.kvcache.pool import KVPool
from baton.tests.engine.driver import Driver
from baton.tests.engine.host_guard import guarded, methods_guarded
from baton.tests.engine.moving_experts import Shuffler, load_options
from baton.tests.engine.recorder import RecorderBackend
from baton.tests.model.fp8_checkpoints import LAYOUTS, write_float8
from baton.tests.model.ranks import on_ranks
from baton.tests.model.test_expert_parallel import FAMILIES, FLOAT8, experts_of
from baton.tests.model.test_parallel import load, run

pytestmark = pytest.mark.fast


def exchange_of(model, group, **options):
    executor = ThreadExecutor()
    return ExpertExchange(model.sparse_layers, group, executor, **options), executor


def move_all(exchange, layer, experts):
    """All rounds of one layer; how many."""
    moves = ExpertMoves.between(exchange.maps[layer], experts, world_size=exchange.world_size)
    for at in range(moves.num_operations):
        exchange.move(MoveExperts(layer, experts, at))
    return moves.num_operations


def tensors_of(experts):
    values = [getattr(experts, name) for name in experts.__slots__]
    return [value for value in values if isinstance(value, torch.Tensor)]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "size", "num_redundant"), [("qwen3_moe", 2, 4), ("deepseek_v3", 4, 4)])
def test_after_any_moves_the_model_is_the_same(kind, size, num_redundant, tiny_checkpoint):
    path = tiny_checkpoint(**FAMILIES[kind])
    whole = load(path)
    wanted, _ = run(whole)

    def work(group):
        model = load(path, group, **load_options(num_redundant))
        addresses = [its.data_ptr() for layer in model.sparse_layers for its in tensors_of(layer.experts)]
        exchange, executor = exchange_of(model, group)
        shuffler, logits = Shuffler(3), []
        for _ in range(3):
            for layer, current in enumerate(exchange.maps):
                experts = shuffler([0] * model.config.num_experts, current, world_size=size)
                move_all(exchange, layer, experts)
            executor.drain()
            for layer, its, experts in zip(model.sparse_layers, experts_of(whole), exchange.maps, strict=True):
                held = layer.experts.held
                mine = list(experts[held.first : held.first + held.count])
                assert torch.equal(layer.experts.gate_up_EJD, its.gate_up_EJD[mine])
                assert torch.equal(layer.experts.down_EDI, its.down_EDI[mine])
            logits.append(run(model, group)[0])
        assert addresses == [its.data_ptr() for layer in model.sparse_layers for its in tensors_of(layer.experts)]
        executor.close()
        return logits, exchange.maps

    ranks = on_ranks(size, work)
    for logits, maps in ranks:
        assert maps == ranks[0][1]
        assert all((its - wanted).abs().max() <= 1e-9 for its in logits)


@pytest.mark.long
def test_until_the_last_round_nothing_is_in_force(tiny_checkpoint):
    path = tiny_checkpoint(**FAMILIES["qwen3_moe"])
    wanted, _ = run(load(path))
    new = (4, 5, 6, 7, 0, 1, 2, 3)

    def work(group):
        model = load(path, group, **load_options(0))
        interrupted = []
        exchange, executor = exchange_of(model, group, on_move=lambda: interrupted.append(True))
        first, before = model.sparse_layers[0], [its.clone() for its in tensors_of(model.sparse_layers[0].experts)]
        assert ExpertMoves.between(exchange.maps[0], new, world_size=2).num_operations == 4
        for at in range(4):
            table = first.slots._slot_EC.flatten().tolist()
            assert table == list(range(8))
            assert exchange.maps[0] == first_map(8, 0)
            assert all(torch.equal(*its) for its in zip(tensors_of(first.experts), before, strict=True))
            assert (run(model, group)[0] - wanted).abs().max() <= 1e-9, "a step between rounds"
            exchange.move(MoveExperts(0, new, at))
            executor.drain()
        assert exchange.maps[0] == new
        assert first.slots._slot_EC.flatten().tolist() == [new.index(expert) for expert in range(8)]
        assert (run(model, group)[0] - wanted).abs().max() <= 1e-9
        executor.close()
        return len(interrupted)

    assert on_ranks(2, work) == [4, 4]


@pytest.mark.long
def test_what_was_captured_before_a_move_computes_and_counts_after_it(tiny_checkpoint):
    """A replay launches the same kernels over the same memory: no Python of ours runs in it."""
    path, sizes = tiny_checkpoint(**FAMILIES["qwen3_moe"]), (3, 8)
    x_TD = torch.randn(8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted_TD = load(path).sparse_layers[0](x_TD, may_wait=False)

    def work(group):
        model = load(path, Apart(group), **load_options(4))
        layer, backend = model.sparse_layers[0], RecorderBackend()
        exchange, executor = exchange_of(model, group)
        input_TD, made_TD = torch.zeros_like(x_TD), torch.zeros_like(x_TD)
        position_T1, is_counted_T1 = torch.zeros(8, 1, dtype=torch.int64), torch.zeros(8, 1, dtype=torch.bool)
        rows = RoutedRows(position_T1, is_counted_T1)
        [replay] = backend.capture([lambda: made_TD.copy_(layer(input_TD, may_wait=False, routed=rows))])
        assert layer.slots.load_E.eq(0).all(), "rows of padding"
        input_TD.copy_(x_TD)
        position_T1.copy_(torch.arange(8)[:, None] * 3)
        for turn, experts in enumerate(sizes):
            move_all(exchange, 0, Shuffler(experts)([0] * 8, exchange.maps[0], world_size=2))
            executor.drain()
            is_counted_T1.copy_(torch.arange(8)[:, None] < experts)
            replay()
            assert (group.all_sum(made_TD) - wanted_TD).abs().max() <= 1e-12
            assert layer.slots.load_E.sum() == sum(sizes[: turn + 1]) * model.config.num_experts_per_token
        executor.close()

    on_ranks(2, work)


class Apart:
    """A group whose ranks do not add what they make."""

    def __init__(self, group):
        self.rank, self.size, self.all_gather = group.rank, group.size, group.all_gather

    def all_sum(self, x):
        return x


@pytest.mark.long
def test_no_step_and_no_round_looks_at_what_is_on_the_device(tiny_checkpoint, monkeypatch):
    path = tiny_checkpoint(**FAMILIES["deepseek_v3"])
    for name in ("_cross", "_put_in_force", "_loads"):
        monkeypatch.setattr(ExpertExchange, name, under_guard(getattr(ExpertExchange, name)))
    place = ExpertSlots.place
    num_guarded = []

    def placed(*arguments):
        num_guarded.append(1)
        return under_guard(place)(*arguments)

    monkeypatch.setattr(ExpertSlots, "place", placed)

    def work(group):
        model = load(path, group, **load_options(4))
        exchange, executor = exchange_of(model, group)
        move_all(exchange, 0, Shuffler(1)([0] * model.config.num_experts, exchange.maps[0], world_size=2))
        loads = exchange.read_loads().get()
        run(model, group)
        executor.close()
        return loads

    with methods_guarded(monkeypatch):
        on_ranks(2, work)
    assert num_guarded


def under_guard(function):
    def guarded_function(*arguments):
        with guarded():
            return function(*arguments)

    return guarded_function


@pytest.mark.long
def test_float8_experts_move_with_their_scales(tmp_path):
    path, _ = write_float8(tmp_path, LAYOUTS["deepseek"], **FLOAT8)
    whole = experts_of(load(path, dtype=torch.bfloat16))
    assert isinstance(whole[0], Fp8ExpertWeights)

    def work(group):
        model = load(path, group, dtype=torch.bfloat16, **load_options(2))
        exchange, executor = exchange_of(model, group)
        for layer, current in enumerate(exchange.maps):
            move_all(exchange, layer, Shuffler(layer)([0] * (len(current) - 2), current, world_size=2))
        executor.drain()
        executor.close()
        for layer, its, experts in zip(model.sparse_layers, whole, exchange.maps, strict=True):
            held = layer.experts.held
            mine = list(experts[held.first : held.first + held.count])
            for found, wanted in zip(tensors_of(layer.experts), tensors_of(its), strict=True):
                assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)[mine])

    on_ranks(2, work)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.long
def test_a_rank_that_fails_in_a_round_ends_what_follows_at_every_rank(failing, tiny_checkpoint, monkeypatch):
    path, plain = tiny_checkpoint(**FAMILIES["qwen3_moe"]), ExpertExchange._cross

    def cross(exchange, *arguments):
        if arguments[-1] == 1:
            exchange._communicator.limit_s = 0.2  # for the one that never comes
            if exchange._communicator.rank == failing:
                raise BatonError("out of memory")
        plain(exchange, *arguments)

    monkeypatch.setattr(ExpertExchange, "_cross", cross)

    def work(group):
        exchange, executor = exchange_of(load(path, group, **load_options(0)), group)
        move_all(exchange, 0, (4, 5, 6, 7, 0, 1, 2, 3))
        with pytest.raises(BatonError) as e:
            exchange.read_loads().get()
        executor.close()
        return type(e.value)

    found = on_ranks(2, work)
    assert found[failing] is BatonError
    assert found[1 - failing] is WorkerLost


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.long
def test_a_rank_whose_experts_lie_elsewhere_must_not_go_on(layer, tiny_checkpoint):
    """Sums over the ranks would be the same everywhere, and of other experts."""
    path = tiny_checkpoint(**FAMILIES["qwen3_moe"])
    maps = (4, 5, 6, 7, 0, 1, 2, 3), (4, 5, 6, 7, 0, 1, 3, 2)

    def work(group):
        model = load(path, group, **load_options(0))
        pool = KVPool(model.kv_layout(16), 8, model.device, rank=group.rank, size=group.size)
        driver = Driver(Runner(model, pool, max_num_seqs=2, num_draft_tokens=0, communicator=group), pool)
        driver.start(0, [1, 2, 3], SamplingParams(max_tokens=8))
        exchange, digests = driver.runner.experts, []
        for experts in (maps[0], first_map(8, 0), maps[group.rank]):
            digests.append(driver.step((0,)) and exchange.map_digests_L.tolist())
            move_all(exchange, layer, experts)
        assert digests[0] == digests[2] != digests[1]
        assert digests[0][1 - layer] == digests[1][1 - layer]
        if group.rank == 0:
            driver.step((0,))
        else:
            with pytest.raises(WorkerLost, match="rank 1 of 2 diverged in the state"):
                driver.step((0,))
        driver.runner.close()

    on_ranks(2, work)


def test_a_step_of_decode_rows_and_chunks_and_moving_experts_decides_upon_all_that_the_kernel_takes(
    tiny_checkpoint, monkeypatch
):
    path, given, agree = tiny_checkpoint(**FAMILIES["qwen3_moe"]), set(), Decisions.agree

    def watched(decisions, values, state=()):
        given.add(len(state))
        return agree(decisions, values, state)

    monkeypatch.setattr(Decisions, "agree", watched)

    def work(group):
        model = load(path, group, **load_options(0))
        pool = KVPool(model.kv_layout(16), 8, model.device, rank=group.rank, size=group.size)
        driver = Driver(Runner(model, pool, max_num_seqs=2, num_draft_tokens=0, communicator=group), pool)
        driver.start(0, [1, 2, 3], SamplingParams(max_tokens=8))
        driver.place(1, [4, 5, 6], SamplingParams(max_tokens=8))
        driver.step((0,), chunks=[driver.chunk(1)])
        driver.runner.close()

    on_ranks(2, work)
    assert max(given) == MAX_STATE


def test_rounds_out_of_order_are_no_exchange(tiny_checkpoint):
    path, new = tiny_checkpoint(**FAMILIES["qwen3_moe"]), (4, 5, 6, 7, 0, 1, 2, 3)

    def work(group):
        exchange, executor = exchange_of(load(path, group, **load_options(0)), group)
        with pytest.raises(AssertionError):
            exchange.move(MoveExperts(0, new, 1))
        exchange.move(MoveExperts(0, new, 0))
        for wrong in (MoveExperts(0, new, 0), MoveExperts(1, new, 1), MoveExperts(0, new, 2)):
            with pytest.raises(AssertionError):
                exchange.move(wrong)
        executor.close()

    on_ranks(2, work)


class Told:
    """An exchange that does nothing but remember; its loads are read when the test says so."""

    def __init__(self, maps):
        self.maps, self.loads, self.is_done, self.told, self.num_readings = maps, None, False, [], 0
        self.world_size = 2

    def read_loads(self):
        self.num_readings += 1
        return self

    def get(self):
        return torch.tensor(self.loads)

    def move(self, plan):
        moves = ExpertMoves.between(self.maps[plan.layer], plan.experts, world_size=2)
        self.told.append(plan)
        if plan.round + 1 == moves.num_operations:
            self.maps[plan.layer] = plan.experts


def steps(exchange, balancer, count):
    """What came before each of so many steps: nothing, or a layer's round."""
    made = []
    for _ in range(count):
        plan = balancer.before_step()
        made.append(None if plan is None else (plan.layer, plan.round))
        if plan is not None:
            exchange.move(plan)
    return made


def test_a_balancer_moves_what_is_worth_it_one_round_ahead_of_a_step():
    exchange = Told([first_map(4, 0)] * 3)
    balancer = ExpertBalancer(exchange, 5)
    exchange.loads = [[7, 7, 7, 7], [0] * 4, [0] * 4]  # before the first step
    assert steps(exchange, balancer, 7) == [None] * 7
    assert exchange.num_readings == 1, "the one before is not over"
    exchange.is_done = True
    assert steps(exchange, balancer, 3) == [None] * 3
    assert balancer.balance is None
    exchange.is_done = False
    assert steps(exchange, balancer, 1) == [None]
    assert exchange.num_readings == 2
    exchange.loads, exchange.is_done = [[17, 17, 8, 8], [5, 5, 5, 5], [9, 9, 0, 0]], True
    assert balancer.balance is None
    made = steps(exchange, balancer, 4)
    assert made == [(0, 0), None, (2, 0), None], "layer 1 stays as it is"
    loads = [[10, 10, 1, 1], [5, 5, 5, 5], [9, 9, 0, 0]]
    assert balancer.balance == (11 + 10 + 9) / (20 + 10 + 18)
    assert exchange.maps == [balanced_map(its, first_map(4, 0), world_size=2) for its in loads]
    assert exchange.maps[1] == first_map(4, 0)
    assert balancer.num_moved == 2
    assert [max(rank_loads(its, at, world_size=2)) for its, at in zip(loads, exchange.maps, strict=True)] == [11, 10, 9]
    exchange.loads = [[27, 27, 9, 9], [10] * 4, [18, 18, 0, 0]]
    steps(exchange, balancer, 10)
    assert balancer.balance == 1.0
    assert balancer.num_moved == 2


def test_any_interval_and_any_maps_are_told_in_order():
    for seed in range(20):
        draw = random.Random(seed)
        exchange = Told([first_map(8, 4)] * 3)
        exchange.loads, exchange.is_done = [[0] * 8] * 3, True
        steps(exchange, ExpertBalancer(exchange, draw.randint(1, 9), Shuffler(seed)), 80)
        begun = None
        for plan in exchange.told:
            assert plan.round == 0 or begun == (plan.layer, plan.experts, plan.round - 1)
            begun = plan.layer, plan.experts, plan.round
        assert len(exchange.told) > 20
