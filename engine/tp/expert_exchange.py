"""One rank's part in moving experts between ranks while the model serves: weights cross, then map and weights change.

Rounds are work of the executor, so they lie between the steps launched before and after them, and no step sees a map
without its weights. What crosses waits beside the layer until the last round. Weights and maps keep their addresses:
captured graphs hold. Every rank is told the same rounds, and knows by itself what each of them carries
(`kernels.moe.expert_moves`). Which map it is to be is rank 0's to say (`expert_balancer`).

Legend: L layers with experts, E experts, S slots of a rank, X bytes of an expert.
"""

from collections.abc import Callable, Sequence
from typing import Optional

import torch

from baton.engine.step.executor import Pending, StepExecutor
from baton.engine.step.host_future import HostFuture
from baton.engine.step.plan import MoveExperts
from baton.kernels.copies import host_buffer
from baton.kernels.moe.expert_map import ExpertMap, first_map
from baton.kernels.moe.expert_moves import ExpertMoves
from baton.kernels.moe.expert_slots import ExpertSlots
from baton.kernels.moe.gemm import Fp8ExpertWeights
from baton.kernels.moe.held_experts import HeldExperts
from baton.kernels.ops import Experts
from baton.model.model import Model
from baton.model.moe import SparseMLP
from baton.model.parallel import Communicator


class ExpertExchange:
    """One rank's.

    Args:
        layers: whose experts may move, of as many experts and slots each.
        communicator: of the ranks that hold them.
        executor: of the runner.
        on_move: called ahead of every round: the device is about to have work that is no step.

    Attributes:
        maps: of each layer, once all rounds that were given are over.
        map_digests_L: int64, of the maps in force on the device; ranks whose differ would add up other experts.
    """

    def __init__(
        self,
        layers: Sequence[SparseMLP],
        communicator: Communicator,
        executor: StepExecutor,
        on_move: Callable[[], None] = lambda: None,
    ) -> None:
        held = _held(layers[0])
        assert all(_held(layer) == held for layer in layers)
        assert (held.world_size, held.first) == (communicator.size, communicator.rank * held.count)
        self.maps: list[ExpertMap] = [first_map(held.num_experts, held.num_redundant) for _ in layers]
        self._layers = layers
        self._held = held
        self._communicator = communicator
        self._executor = executor
        self._on_move = on_move
        self._moving: tuple[MoveExperts, ExpertMoves] | None = None  # the round that was given last
        self._device = layers[0].experts.down_EDI.device
        self.map_digests_L = torch.cat([_slots_of(layer).digest() for layer in layers])
        self._staged_SX = torch.empty(held.count, _most_bytes(layers), dtype=torch.uint8, device=self._device)

    @classmethod
    def of_model(
        cls, model: Model, communicator: Communicator, executor: StepExecutor, on_move: Callable[[], None]
    ) -> Optional["ExpertExchange"]:
        """Of the layers of a model whose experts may move; None if there are none, or no other rank."""
        layers = _moving(model) if communicator.size > 1 else []
        return cls(layers, communicator, executor, on_move) if layers else None

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self._held.world_size

    def read_loads(self) -> HostFuture:
        """Tokens that each expert got in the steps launched until now, int64 [L * E]; nothing waits for it."""
        buffer = host_buffer(len(self._layers) * self._held.num_experts, torch.int64, self._device)
        return self._executor.submit(self._loads, buffer)

    def move(self, plan: MoveExperts) -> Pending:
        """Carry out a round, behind the steps launched so far. The first of a map follows the last of another.

        Returns:
            Done when this rank has given and taken what the round carries.
        """
        moves = self._moves_of(plan)
        is_last = plan.round + 1 == moves.num_operations
        if is_last:
            self.maps[plan.layer] = plan.experts
        self._moving = None if is_last else (plan, moves)
        layer = self._layers[plan.layer]

        def exchange() -> None:
            if moves.given:
                self._cross(layer.experts, moves, plan.round)
            if is_last:
                self._put_in_force(layer, moves, plan.experts)
                self.map_digests_L[plan.layer : plan.layer + 1] = _slots_of(layer).digest()

        self._on_move()
        return self._executor.run(exchange)

    def _moves_of(self, plan: MoveExperts) -> ExpertMoves:
        if plan.round == 0:
            assert self._moving is None, "an exchange begins in the middle of another"
            return ExpertMoves.between(self.maps[plan.layer], plan.experts, world_size=self.world_size)
        assert self._moving is not None, "an exchange goes on that did not begin"
        last, moves = self._moving
        assert (last.layer, last.experts, last.round + 1) == (plan.layer, plan.experts, plan.round)
        return moves

    def _cross(self, experts: Experts, moves: ExpertMoves, at: int) -> None:
        """Give one expert to all ranks, and keep what this one takes of theirs."""
        own_X = _bytes_of(experts, moves.given[at][self._communicator.rank] - self._held.first)
        all_RX = self._communicator.all_gather(own_X)
        for slot, (its_round, rank) in moves.taken.items():
            if its_round == at and self._is_own(slot):
                self._staged(slot, own_X.numel()).copy_(all_RX[rank])

    def _put_in_force(self, layer: SparseMLP, moves: ExpertMoves, experts: ExpertMap) -> None:
        first, changed = self._held.first, [slot for slot in moves.taken if self._is_own(slot)]
        for slot, source in moves.copied.items():  # of weights as they were until now
            if self._is_own(slot):
                changed.append(slot)
                own_X = _bytes_of(layer.experts, source - first)
                self._staged(slot, own_X.numel()).copy_(own_X)
        for slot in changed:
            parts = _parts_of(layer.experts, slot - first)
            staged_X = self._staged(slot, sum(part.numel() for part in parts))
            for part, values in zip(parts, staged_X.split([part.numel() for part in parts]), strict=True):
                part.copy_(values)
        _slots_of(layer).put(experts)

    def _staged(self, slot: int, num_bytes: int) -> torch.Tensor:
        return self._staged_SX[slot - self._held.first, :num_bytes]

    def _is_own(self, slot: int) -> bool:
        return self._held.first <= slot < self._held.first + self._held.count

    def _loads(self) -> torch.Tensor:
        return torch.cat([_slots_of(layer).load_E for layer in self._layers])


def exchange_bytes(model: Model) -> int:
    """What an exchange of a model's experts takes beside them at one rank: what waits, and what crosses at a time."""
    layers = _moving(model)
    if not layers:
        return 0
    held = _held(layers[0])
    return (held.count + held.world_size + 1) * _most_bytes(layers)


def _moving(model: Model) -> list[SparseMLP]:
    return [layer for layer in model.sparse_layers if layer.slots is not None]


def _most_bytes(layers: Sequence[SparseMLP]) -> int:
    """Of an expert of any layer."""
    return max(sum(part.numel() for part in _parts_of(layer.experts, 0)) for layer in layers)


def _slots_of(layer: SparseMLP) -> ExpertSlots:
    assert layer.slots is not None
    return layer.slots


def _held(layer: SparseMLP) -> HeldExperts:
    assert layer.experts.held is not None
    return layer.experts.held


def _parts_of(experts: Experts, place: int) -> list[torch.Tensor]:
    """What an expert of this rank is made of: views of its tensors, uint8 each."""
    tensors = [experts.gate_up_EJD, experts.down_EDI]
    if isinstance(experts, Fp8ExpertWeights):
        tensors += [experts.gate_up_scale, experts.down_scale]
    assert all(tensor.is_contiguous() for tensor in tensors)
    return [tensor[place].view(torch.uint8).view(-1) for tensor in tensors]


def _bytes_of(experts: Experts, place: int) -> torch.Tensor:
    """The same as one tensor of its own, uint8 [X]."""
    return torch.cat(_parts_of(experts, place))
