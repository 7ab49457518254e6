"""Moves experts between ranks while the model serves: weights cross first, then map and weights change together.

Rounds run on the executor, between the steps launched before and after them, and no step sees a map without its
weights. Received weights are staged beside the layer until the last round. Weights and maps keep their addresses, so
captured graphs stay valid. Every rank gets the same rounds and derives what each of them moves
(`kernels.moe.expert_moves`). Rank 0 decides on the maps (`expert_balancer`).

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
    """One rank's part in exchanges of experts.

    Args:
        layers: layers whose experts may move, all with the same number of experts and slots.
        communicator: of the ranks that hold them.
        executor: the runner's executor.
        on_move: called before every round, because the device is about to do work that is not a step.

    Attributes:
        maps: map of each layer once all rounds submitted so far are over.
        map_digests_L: int64, digests of the maps in effect on the device; ranks whose digests differ would add up
            different experts.
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
        self._moving: tuple[MoveExperts, ExpertMoves] | None = None  # the round that was submitted last
        self._device = layers[0].experts.down_EDI.device
        self.map_digests_L = torch.cat([_slots_of(layer).digest() for layer in layers])
        self._staged_SX = torch.empty(held.count, _most_bytes(layers), dtype=torch.uint8, device=self._device)

    @classmethod
    def of_model(
        cls, model: Model, communicator: Communicator, executor: StepExecutor, on_move: Callable[[], None]
    ) -> Optional["ExpertExchange"]:
        """The exchange for a model whose experts may move; None if there are none, or no other rank."""
        layers = _moving(model) if communicator.size > 1 else []
        return cls(layers, communicator, executor, on_move) if layers else None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._held.world_size

    def read_loads(self) -> HostFuture:
        """Tokens that each expert got in the steps launched so far, int64 [L * E]; does not wait."""
        buffer = host_buffer(len(self._layers) * self._held.num_experts, torch.int64, self._device)
        return self._executor.submit(self._loads, buffer)

    def move(self, plan: MoveExperts) -> Pending:
        """Run a round after the steps launched so far. All rounds of one map precede the first of the next.

        Returns:
            Done when this rank has sent and received what the round moves.
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
        """Send one expert to all ranks, and stage what this rank takes of theirs."""
        own_X = _bytes_of(experts, moves.given[at][self._communicator.rank] - self._held.first)
        all_RX = self._communicator.all_gather(own_X)
        for slot, (its_round, rank) in moves.taken.items():
            if its_round == at and self._is_own(slot):
                self._staged(slot, own_X.numel()).copy_(all_RX[rank])

    def _put_in_force(self, layer: SparseMLP, moves: ExpertMoves, experts: ExpertMap) -> None:
        first, changed = self._held.first, [slot for slot in moves.taken if self._is_own(slot)]
        for slot, source in moves.copied.items():  # from the weights as they were until now
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
    """Memory that an exchange needs on one rank beside the experts: staged weights, and those in transit."""
    layers = _moving(model)
    if not layers:
        return 0
    held = _held(layers[0])
    return (held.count + held.world_size + 1) * _most_bytes(layers)


def _moving(model: Model) -> list[SparseMLP]:
    return [layer for layer in model.sparse_layers if layer.slots is not None]


def _most_bytes(layers: Sequence[SparseMLP]) -> int:
    """Bytes of the largest expert of any layer."""
    return max(sum(part.numel() for part in _parts_of(layer.experts, 0)) for layer in layers)


def _slots_of(layer: SparseMLP) -> ExpertSlots:
    assert layer.slots is not None
    return layer.slots


def _held(layer: SparseMLP) -> HeldExperts:
    assert layer.experts.held is not None
    return layer.experts.held


def _parts_of(experts: Experts, place: int) -> list[torch.Tensor]:
    """The tensors of one of this rank's experts, as views, uint8 each."""
    tensors = [experts.gate_up_EJD, experts.down_EDI]
    if isinstance(experts, Fp8ExpertWeights):
        tensors += [experts.gate_up_scale, experts.down_scale]
    assert all(tensor.is_contiguous() for tensor in tensors)
    return [tensor[place].view(torch.uint8).view(-1) for tensor in tensors]


def _bytes_of(experts: Experts, place: int) -> torch.Tensor:
    """Copy of an expert as one tensor, uint8 [X]."""
    return torch.cat(_parts_of(experts, place))
