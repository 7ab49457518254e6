"""One decoder layer, and the trunk made of such layers.

Both are generators that stop where a layer mixes the rows of a sequence, by attention or by a gated delta net: they
yield the mixer and what it reads of each row, and are sent its output. So a pass can be computed as a whole
(`computed`), or piece by piece, with CUDA graphs that replay the pieces between two mixers.

Legend: T tokens, D hidden size, V vocabulary, A query heads, E head size, M columns of what a mixer makes.
"""

from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from baton.kernels.gemm.fp8_weight import Fp8Weight
from baton.kernels.memo import signature
from baton.kernels.moe.summands import Added
from baton.kernels.ops import Ops, Rows, plain
from baton.model.attention import Attention, AttentionInputs
from baton.model.config import ModelConfig
from baton.model.delta_net import DeltaNet
from baton.model.latent_attention import LatentAttention
from baton.model.layers import MLP, RMSNorm, WeightSource
from baton.model.moe import SparseMLP
from baton.model.state_mixer import StateMixer

R = TypeVar("R")
Mixer = Attention | StateMixer
Pieces = Generator[tuple[Mixer, tuple[torch.Tensor, ...]], Rows, R]
"""Yields a mixer and what it reads of each row, is sent what it made, [T, M], and returns what all pieces made."""


def computed(pieces: Pieces[R], inputs: AttentionInputs) -> R:
    """Run all pieces and the mixers between them. Calls `inputs.on_layer` for each pool layer once it is written."""
    try:
        mixer, read = next(pieces)
        while True:
            mixer, read = pieces.send(mixer.mix(read, inputs))
    except StopIteration as end:
        result: R = end.value
        return result


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); a gated delta net may take the place of attention.

    A layer does not add its MLP's output: the next norm does, in one pass over the rows. `attention_ops` are for
    attention, which sums nothing over ranks if rows are distributed over them; `ops` are for everything else.
    """

    def __init__(
        self, source: WeightSource, prefix: str, layer: int, config: ModelConfig, ops: Ops, attention_ops: Ops
    ) -> None:
        eps = config.rms_norm_eps
        plus_one, pool_layer = config.has_plus_one_norms, config.pool_layer(layer)
        self.attention_norm = RMSNorm(source, f"{prefix}.input_layernorm", eps, ops, plus_one=plus_one)
        self.attention: Mixer = (
            DeltaNet(source, f"{prefix}.linear_attn", pool_layer, config, ops)
            if layer in config.delta_layers
            else (Attention if config.latent is None else LatentAttention)(
                source, f"{prefix}.self_attn", pool_layer, config, attention_ops
            )
        )
        self.mlp_norm = RMSNorm(source, f"{prefix}.post_attention_layernorm", eps, ops, plus_one=plus_one)
        self.mlp: MLP | SparseMLP = (
            SparseMLP(source, prefix, config, ops)
            if config.is_sparse(layer)
            else MLP.take(source, f"{prefix}.mlp", ops)
        )

    def pieces(
        self, x_TD: torch.Tensor, added_TD: Added | None, inputs: AttentionInputs
    ) -> Pieces[tuple[torch.Tensor, Added]]:
        """Rows x + added (x alone if None) -> rows, and what is to be added to them, all [T, D]."""
        if isinstance(self.attention, StateMixer):
            normed, x_TD = self.attention_norm.read_by(self.attention.reader, x_TD, added_TD, keep=True)
            out_TX = yield self.attention, self.attention.project(normed, inputs.state_rows)
            mixed_TD = self.attention.join(plain(out_TX))
        elif inputs.dealt is None:
            normed, x_TD = self.attention_norm.read_by(self.attention.reader, x_TD, added_TD)
            query_TAE, gate_TAE = self.attention.project(normed, inputs)
            mixed_TQ = yield self.attention, (query_TAE,)
            mixed_TD = self.attention.join(mixed_TQ, gate_TAE)
        else:
            normed_TD, x_TD = self.attention_norm.of_sum(x_TD, added_TD)
            mixed_TD = normed_TD[:0]
            if not inputs.dealt.is_idle:
                query_TAE, gate_TAE = self.attention.project(inputs.dealt.own(normed_TD), inputs)
                mixed_TQ = yield self.attention, (query_TAE,)
                mixed_TD = self.attention.join(mixed_TQ, gate_TAE)
            mixed_TD = inputs.dealt.shared(mixed_TD)
        mlp, may_wait, routed = self.mlp, inputs.may_wait, inputs.routed
        if isinstance(mlp, SparseMLP) and (made := mlp.route(self.mlp_norm, x_TD, mixed_TD)) is not None:
            choice = made.weight_TK, made.expert_TK
            return made.sum_TD, mlp(made.rows_TD, may_wait=may_wait, routed=routed, choice=choice)
        is_sparse = isinstance(mlp, SparseMLP)
        normed, x_TD = self.mlp_norm.read_by(mlp.reader_of(len(x_TD)), x_TD, mixed_TD, keep=is_sparse)
        return x_TD, mlp(normed, may_wait=may_wait, routed=routed)


class Decoder:
    """Embedding, layers, final norm."""

    def __init__(self, source: WeightSource, config: ModelConfig, ops: Ops, attention_ops: Ops) -> None:
        self.embedding_VD = source.take("model.embed_tokens.weight")
        self.layers = [
            DecoderLayer(source, f"model.layers.{layer}", layer, config, ops, attention_ops)
            for layer in range(config.num_layers)
        ]
        self.norm = RMSNorm(source, "model.norm", config.rms_norm_eps, ops, plus_one=config.has_plus_one_norms)
        self._ops = ops
        self._aux_layers: Collection[int] = ()
        self._skipped_layers: Collection[int] = ()
        self._never_skipped: frozenset[int] = frozenset()
        self._join: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None

    def tap(self, layers: Collection[int], join: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> None:
        """Let every pass append `join`, applied to the inputs of these layers, to its hidden states."""
        self._aux_layers, self._join = layers, join

    def alike_layers(self) -> set[int]:
        """Layers that launch the same kernels as an earlier one, and whose inputs nothing taps."""
        kinds: set[Hashable] = set()
        alike: set[int] = set()
        # What is left to each layer's first norm to add up, and to the final one: nothing, or what experts made.
        added = [(), *(tuple(_traits(layer.mlp, set())) * isinstance(layer.mlp, SparseMLP) for layer in self.layers)]
        for index, layer in enumerate(self.layers):
            # The final norm, or an MLP's, launches the same, unless a float8 GEMM reads this one.
            is_read, is_tapped = isinstance(layer.attention.reader, Fp8Weight), index in self._aux_layers
            kind = is_read and (index == 0, not is_tapped and added[index]), *_traits(layer, set())
            if kind in kinds and not is_tapped:
                alike.add(index)
            kinds.add(kind)
        # Norms that are computed add what the layers before them made.
        for index in range(len(self.layers), 0, -1):
            computed_before = max(set(range(index)) - alike)
            if index not in alike and added[computed_before + 1] != added[index]:
                alike.discard(index - 1)
        return alike

    def never_skip(self, layers: Collection[int]) -> None:
        """Let `one_of_each_layer` compute these layers, too."""
        self._never_skipped = frozenset(layers)

    @contextmanager
    def one_of_each_layer(self) -> Iterator[None]:
        """Let passes skip layers like an earlier one: they launch the same kernels, but compute something else."""
        self._skipped_layers = self.alike_layers() - self._never_skipped
        try:
            yield
        finally:
            self._skipped_layers = ()

    def pieces(self, token_ids_T: torch.Tensor, inputs: AttentionInputs) -> Pieces[torch.Tensor]:
        """Hidden states after the final norm, [T, D], with the tapped columns appended."""
        x_TD = self.embedding_VD[token_ids_T]
        added_TD: Added | None = None
        aux: list[torch.Tensor] = []
        for index, layer in enumerate(self.layers):
            if index in self._skipped_layers:
                continue
            if index in self._aux_layers:
                added_TD = None if added_TD is None else self._ops.added_up(added_TD)
                aux.append(x_TD if added_TD is None else x_TD + added_TD)
            x_TD, added_TD = yield from layer.pieces(x_TD, added_TD, inputs)
        hidden_TD = self.norm.of_sum(x_TD, added_TD)[0]
        return hidden_TD if self._join is None else torch.cat([hidden_TD, self._join(aux)], dim=-1)


def _traits(owner: Any, met: set[int]) -> Iterator[Hashable]:
    """Everything that a layer holds on which its launches depend; integers only number it."""
    if isinstance(owner, torch.Tensor):
        yield signature(owner)
    elif owner is None or isinstance(owner, (bool, float, str)):
        yield owner
    elif isinstance(owner, (list, tuple)):
        for held in owner:
            yield from _traits(held, met)
    elif type(owner).__module__.startswith("baton.") and not isinstance(owner, Ops) and id(owner) not in met:
        met.add(id(owner))
        yield type(owner).__qualname__
        for name in (*getattr(type(owner), "__slots__", ()), *getattr(owner, "__dict__", ())):
            yield name
            yield from _traits(getattr(owner, name), met)
