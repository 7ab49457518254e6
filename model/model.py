"""A loaded model, as the engine uses it. One device, inference only; run it under `torch.inference_mode`.

With partial weights and operations that sum over a group (`model.parallel`), it is one rank's part of the model: its
trunk and MTP head return the whole model's results, its pool holds the rank's KV heads, and its logits are those of the
rank's tokens, given by `vocab` (`model.vocab`).

Legend: T tokens, N rows, D hidden size, V vocabulary, W tokens of this rank (all, unless the vocabulary is cut), C
columns of the draft head.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager

import torch

from baton.core.numerics import Numerics
from baton.kernels.gemm.inner_sum import ALONE, InnerSum
from baton.kernels.implementation import Implementation
from baton.kernels.moe.expert_slots import RoutedRows
from baton.kernels.ops import Ops
from baton.kernels.pointwise.rope import rope_angles, rope_inverse_frequencies
from baton.kvcache.layout import KVLayout
from baton.kvcache.pool import DTYPE_NAMES, KVPool
from baton.model.attention import AttentionInputs
from baton.model.config import ModelConfig
from baton.model.dealt_rows import DealtBatch, DealtRows, PassBatch, RowDeal
from baton.model.decoder import Decoder, Pieces, computed
from baton.model.delta_net import DeltaNet
from baton.model.draft_head import HeadIds, columns_in_order, invert_d2t
from baton.model.draft_names import DRAFT_HEAD
from baton.model.eagle import EagleHead
from baton.model.eagle_config import EAGLE_HEAD, EagleConfig
from baton.model.inputs import DecodeBatch, positions_of, slots_of
from baton.model.layers import WeightSource
from baton.model.moe import SparseMLP
from baton.model.mtp import MTPHead
from baton.model.state_mixer import StateMixer, state_rows
from baton.model.vocab import WHOLE, CutVocab, Vocab


class Model:
    """Trunk, lm_head and optionally a draft head: the checkpoint's MTP head, or an EAGLE-3 drafter.

    With `d2t_C` the draft head proposes only those tokens.

    Attributes:
        with_mtp: there is a draft head, of either kind.
        trunk_width: columns of the trunk's output: D, plus D if a drafter's hidden state is appended.
        implementation: what computes it: Triton kernels or the torch reference.
        around: which implementation of the kernels places rows in the pool.
        sampling_implementation: which implementation of the kernels may sample from its raw logits; None: torch
            samples.
        kv_dtype: how a pool for it stores K and V.
        why_no_triton: why Triton does not compute it, in words; "" if it does, or if no reason was given.
        vocab: the tokens of this rank.
        state_mixer: its first layer with a recurrent state, with the sizes of all; None: it has no such layer.
        deal: how rows are distributed over ranks that attend; None: each rank attends for all rows.
        d2t_C: the tokens of a pruned draft head, ascending; None if it has all tokens.
        draft_columns_C: places of the `draft_logits` among this rank's W; None if the head has all tokens.
    """

    def __init__(
        self,
        source: WeightSource,
        config: ModelConfig,
        numerics: Numerics,
        *,
        with_mtp: bool,
        inner: InnerSum = ALONE,
        eagle: tuple[WeightSource, EagleConfig] | None = None,
        d2t_C: torch.Tensor | None = None,
        vocab: Vocab = WHOLE,
        deal: RowDeal | None = None,
        implementation: Implementation = Implementation.REFERENCE,
        why_no_triton: str = "",
    ) -> None:
        self.config = config
        self.dtype = source.dtype
        self.kv_dtype = source.kv_dtype
        self.device = source.device
        self.numerics = numerics
        self.with_mtp = with_mtp or eagle is not None
        self.trunk_width = config.hidden_size
        self.implementation = implementation
        self.why_no_triton = why_no_triton
        self._ops = Ops(numerics, inner, implementation)
        attention_ops = self._ops if deal is None else Ops(numerics, implementation=implementation)
        self.deal = deal
        self._decoder = Decoder(source, config, self._ops, attention_ops)
        mixers = (layer.attention for layer in self._decoder.layers)
        self.state_mixer = next((mixer for mixer in mixers if isinstance(mixer, StateMixer)), None)
        embedding_VD = self._decoder.embedding_VD
        self._mtp: MTPHead | EagleHead | None = None
        self._eagle: EagleConfig | None = None
        if with_mtp:
            self._mtp = MTPHead(source, config, self._ops, attention_ops, embedding_VD)
        elif eagle is not None:
            self._mtp = EagleHead(*eagle, config.pool_layer(config.num_layers), self._ops, embedding_VD)
            self._eagle = eagle[1]
            self._decoder.tap(eagle[1].aux_layers, self._mtp.join)
            self.trunk_width *= 2
        self._moves_experts = any(layer.slots is not None for layer in self.sparse_layers)
        self.vocab = vocab
        # The kernels read whole rows, and sum float32 in an order that may depend on other requests' options.
        has_kernels = implementation is Implementation.TRITON and numerics is Numerics.DEFAULT and not vocab.is_cut
        self.sampling_implementation: Implementation | None = implementation if has_kernels else None
        # Bits around the model need not agree: torch does this if it computes the model, as Triton may not work here.
        is_torch = implementation is Implementation.REFERENCE
        self.around = Implementation.REFERENCE if is_torch else Implementation.AUTO
        self._lm_head_WD = self._take_lm_head(source)
        self.d2t_C: torch.Tensor | None = None
        self.draft_columns_C: torch.Tensor | None = None
        self._draft_head_CD = self._lm_head_WD
        if d2t_C is not None:
            head_CD = source.take(DRAFT_HEAD) if eagle is None else eagle[0].take(EAGLE_HEAD)
            self._draft_head_CD = self._own_columns(head_CD, d2t_C)
        self._t2d_V: torch.Tensor | None = None
        self._turns = _Turns(config, self.dtype, self.device)
        self._draft_turns = self._turns
        if self._eagle is not None:
            self._draft_turns = _Turns(self._eagle.sizes, self.dtype, self.device)

    @property
    def num_pools(self) -> int:
        """Number of KV pools: one per rank if each rank attends for its own sequences, else one (`RankBlocks`)."""
        return 1 if self.deal is None else self.deal.size

    def trunk(
        self, token_ids_T: torch.Tensor, batch: PassBatch, pool: KVPool, on_layer: Callable[[int], None]
    ) -> torch.Tensor:
        """[T, trunk_width]: hidden states after the final norm, and a drafter's inputs from this pass beside them.

        Calls `on_layer(layer)` right after a layer's KV is written.
        """
        inputs = self._inputs(self._turns, batch, pool, on_layer)
        return computed(self._decoder.pieces(token_ids_T, inputs), inputs)

    def trunk_pieces(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, slots_T: torch.Tensor, pool: KVPool
    ) -> Pieces[torch.Tensor]:
        """The trunk of T tokens of any sequences, without the mixers: see `decoder.Pieces`. Never waits.

        Args:
            token_ids_T: int64.
            positions_T: int64, position of each token in its sequence.
            slots_T: int64, flat pool slot its KV is written to.
            pool: the pool.
        """
        rows = DecodeBatch(  # one row each; only attention reads the tables
            positions_BQ=positions_T[:, None],
            slots_BQ=slots_T[:, None],
            block_tables_BM=slots_T[:, None],
            max_context_len=1,
        )
        angles = self._turns.angles(positions_T)
        routed = self._routed(positions_T, slots_T, pool)
        inputs = AttentionInputs(rows, slots_T, pool, *angles, _ignore_layer, routed=routed)
        return self._decoder.pieces(token_ids_T, inputs)

    def alike_layers(self) -> set[int]:
        """See `Decoder.alike_layers`."""
        return self._decoder.alike_layers()

    def never_skip(self, layers: Collection[int]) -> None:
        """See `Decoder.never_skip`."""
        self._decoder.never_skip(layers)

    def one_of_each_layer(self) -> AbstractContextManager[None]:
        """See `Decoder.one_of_each_layer`."""
        return self._decoder.one_of_each_layer()

    def mtp(
        self,
        token_ids_T: torch.Tensor,
        hidden_TD: torch.Tensor,
        batch: PassBatch,
        pool: KVPool,
        on_layer: Callable[[int], None],
    ) -> torch.Tensor:
        """Entries of the draft head, [T, D]; entry i has the token after position i and the hidden state of i.

        Args:
            token_ids_T: int64.
            hidden_TD: output of the trunk, or of this function.
            batch: positions of the entries.
            pool: the model's pool.
            on_layer: see `trunk`.
        """
        assert self._mtp is not None, "the model was loaded without a draft head"
        hidden_TD = hidden_TD[:, -self.config.hidden_size :]
        return self._mtp(token_ids_T, hidden_TD, self._inputs(self._draft_turns, batch, pool, on_layer))

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, W] from the trunk's output, in the model's dtype; float32 if that is narrower and torch samples."""
        logits_NW = self._head(hidden_ND[:, : self.config.hidden_size], self._lm_head_WD)
        return self.vocab.close_padding(logits_NW) if isinstance(self.vocab, CutVocab) else logits_NW

    def draft_logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, C] over the columns of the draft head, as `logits`; of a pruned head, only this rank's columns."""
        if self.d2t_C is None:
            return self.logits(hidden_ND)
        hidden_ND = self._mtp.norm(hidden_ND) if isinstance(self._mtp, EagleHead) else hidden_ND
        return self._head(hidden_ND, self._draft_head_CD)

    def draft_to_target(self, ids: HeadIds) -> torch.Tensor:
        """The tokens of draft head columns, int64 of the same shape."""
        return ids.columns if self.d2t_C is None else self.d2t_C[ids.columns]

    def t2d(self) -> torch.Tensor | None:
        """The column of each token, int32 [V], -1 for none; None if columns are tokens. Built on first use."""
        if self._t2d_V is None and self.d2t_C is not None:
            self._t2d_V = invert_d2t(self.d2t_C, self.config.vocab_size)
        return self._t2d_V

    @property
    def ops(self) -> Ops:
        """The operations of its layers, including its draft head."""
        return self._ops

    @property
    def sparse_layers(self) -> tuple[SparseMLP, ...]:
        """MLPs with experts: of the trunk's layers in order, then of its MTP head."""
        layers = [*self._decoder.layers, *([self._mtp.layer] if isinstance(self._mtp, MTPHead) else [])]
        return tuple(layer.mlp for layer in layers if isinstance(layer.mlp, SparseMLP))

    @property
    def drafter_config(self) -> EagleConfig | None:
        """Config of its EAGLE-3 drafter, if it has one."""
        return self._eagle

    def kv_layout(self, block_size: int) -> KVLayout:
        """Layout of a pool for this model; the MTP layer is the last."""
        dtype = DTYPE_NAMES[self.dtype]
        kv_dtype = self.kv_dtype.of(dtype)
        config, own_head = self.config, self.with_mtp and self._eagle is None
        more = () if self._eagle is None else (self._eagle.kv_layer(kv_dtype),)
        layers = (*config.kv_layers(config.num_layers + own_head, kv_dtype, dtype), *more)
        return KVLayout(model_hash=config.model_hash, layers=layers, block_size=block_size, has_mtp=self.with_mtp)

    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of every kind of GEMM, for `kernels.selftest.check_invariance`."""
        config = self.config
        hidden, queries = config.hidden_size, config.num_heads * config.value_dim
        num_each = 2 if config.has_output_gate else 1
        shapes = {(hidden, queries)}
        if config.latent is None:
            shapes.add((num_each * queries + 2 * config.num_kv_heads * config.head_dim, hidden))
        else:
            query, rank = config.num_heads * config.latent.query_dim, config.latent.query_rank
            shapes.add(((rank or query) + config.latent.row_len, hidden))
            shapes |= {(query, rank)} if rank else set()
        if config.delta_net is not None:
            delta = config.delta_net
            values = delta.num_value_heads * delta.value_dim
            mixed, gates = 2 * (delta.num_key_heads * delta.key_dim + values), 2 * delta.num_value_heads
            nets = [layer.attention for layer in self._decoder.layers if isinstance(layer.attention, DeltaNet)]
            are_one = all(net.both_XD is not None for net in nets)
            shapes |= {(mixed + gates, hidden)} if are_one else {(mixed, hidden), (gates, hidden)}
            shapes.add((hidden, values))
        shapes.add((config.vocab_size, hidden))
        if len(config.sparse_layers) < config.num_layers:
            shapes |= {(2 * config.intermediate_size, hidden), (hidden, config.intermediate_size)}
        if config.num_experts:
            shapes |= {(2 * config.moe_intermediate_size, hidden), (hidden, config.moe_intermediate_size)}
            shared = 2 * config.shared_expert_size
            are_one = all(mlp.both_ND is not None for mlp in self.sparse_layers)
            num_logits = len(self.sparse_layers[0].router_XD)
            shapes.add((shared + num_logits if are_one else num_logits, hidden))
            shapes |= {(shared, hidden)} if shared and not are_one else set()
        if config.shared_expert_size:
            shapes.add((hidden, config.shared_expert_size))
        if self._eagle is not None:
            own = self._eagle.sizes
            heads = own.num_heads * own.head_dim
            shapes |= {(heads + 2 * own.num_kv_heads * own.head_dim, 2 * hidden), (hidden, heads), (hidden, 3 * hidden)}
            shapes |= {(2 * own.intermediate_size, hidden), (hidden, own.intermediate_size)}
        elif self.with_mtp:
            shapes.add((hidden, 2 * hidden))
        if self.d2t_C is not None:
            shapes.add((len(self.d2t_C), hidden))
        return tuple(sorted(shapes))

    def _take_lm_head(self, source: WeightSource) -> torch.Tensor:
        """This rank's rows of the head, [W, D]. A tied head shares the embeddings' memory, except for padding."""
        is_tied = self.config.tie_word_embeddings
        head = self._decoder.embedding_VD if is_tied else source.take("lm_head.weight")
        if not isinstance(self.vocab, CutVocab):
            return head
        return self.vocab.own_rows(head) if is_tied else self.vocab.pad_rows(head)

    def _own_columns(self, head_CD: torch.Tensor, d2t_C: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a pruned head, in token order."""
        head_CD, self.d2t_C = columns_in_order(head_CD, d2t_C)
        if not isinstance(self.vocab, CutVocab):
            self.draft_columns_C = self.d2t_C
            return head_CD
        first, stop = self.vocab.first, self.vocab.first + self.vocab.num_ids
        is_own_C = (self.d2t_C >= first) & (self.d2t_C < stop)
        self.draft_columns_C = self.d2t_C[is_own_C] - first
        return head_CD[is_own_C]

    def _head(self, hidden_ND: torch.Tensor, head_XD: torch.Tensor) -> torch.Tensor:
        logits_NX = self._ops.linear(hidden_ND, head_XD)
        return logits_NX.float() if logits_NX.dtype.itemsize < 4 and self.sampling_implementation is None else logits_NX

    def _inputs(
        self, turns: "_Turns", batch: PassBatch, pool: KVPool, on_layer: Callable[[int], None]
    ) -> AttentionInputs:
        dealt = None
        if isinstance(batch, DealtBatch):
            dealt, batch = batch.rows, batch.own
        rows = () if self.state_mixer is None else state_rows(batch, pool)
        positions_T, slots_T = positions_of(batch), slots_of(batch)
        angles, routed = turns.angles(positions_T), self._routed(positions_T, slots_T, pool, dealt)
        return AttentionInputs(batch, slots_T, pool, *angles, on_layer, state_rows=rows, routed=routed, dealt=dealt)

    def _routed(
        self, positions_T: torch.Tensor, slots_T: torch.Tensor, pool: KVPool, dealt: DealtRows | None = None
    ) -> RoutedRows | None:
        """What layers with moving experts need about rows; if rows are distributed, ranks exchange it."""
        if not self._moves_experts:
            return None
        is_counted_T = slots_T < pool.scratch_slot
        if dealt is not None:
            own_T2 = torch.stack([positions_T, is_counted_T.long()], dim=1)
            positions_T, is_counted_T = dealt.shared(own_T2).unbind(dim=1)
        return RoutedRows(positions_T[:, None], is_counted_T[:, None])


class _Turns:
    """Rotary angles of a model's positions."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        cpu = torch.device("cpu")  # so that rounding is the same for every device
        inverse_F = rope_inverse_frequencies(config.rotary_dim, config.rope_theta, dtype, cpu)
        self._inverse_F = config.rope.scale(inverse_F, config.rope_theta).to(device)
        self._factor = config.rope.attention_factor

    def angles(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, [T, F]."""
        cos_TF, sin_TF = rope_angles(positions_T, self._inverse_F)
        return (cos_TF, sin_TF) if self._factor == 1 else (cos_TF * self._factor, sin_TF * self._factor)


def _ignore_layer(layer: int) -> None:
    """Do nothing: the caller runs attention between the pieces, so it knows which layers were written."""
