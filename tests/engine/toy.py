"""A model in miniature for tests of the engine: exact integer arithmetic, paged KV, an MTP head that is often right.

Every number is an integer below 2^53 held in float64, so a result does not depend on batching by a single bit. A row
mixes the KV of *every* position it may see, weighted by position: reading one wrong, stale or missing entry changes
the mix and, through it, the logits. Logits are mostly a function of the newest token and a little of the mix, so that
the MTP head, which sees the token but another mix, predicts well without being perfect.

Hidden: [token, mix, mix >> 5]. Layers 0 and 1 are the trunk's, layer 2 is the MTP head's.
"""

import contextlib
from dataclasses import dataclass

import torch

from baton.kernels.implementation import Implementation
from baton.kvcache.layout import KVLayout
from baton.model.inputs import DecodeBatch, MixedBatch, PrefillBatch
from baton.model.vocab import WHOLE

PRIME = 65_521
NUM_LAYERS = 2


@dataclass(frozen=True)
class ToyConfig:
    vocab_size: int = 24
    max_model_len: int = 96
    num_layers: int = NUM_LAYERS
    num_kv_heads: int = 2
    head_dim: int = 1
    hidden_size: int = 3
    intermediate_size: int = 3
    model_hash: str = "toy"


@dataclass(frozen=True)
class Rows:
    """One line a row: where it stands, where it writes, which slots it may read."""

    positions_T: torch.Tensor
    slots_T: torch.Tensor
    keys_TC: torch.Tensor  # slots of positions 0, 1, ...
    visible_TC: torch.Tensor


class ToyModel:
    """Has the interface of baton.model.model.Model."""

    def __init__(self, *, with_mtp=True, config=None, surprise=1.5, sharpness=3.0, d2t=None):
        self.config = config or ToyConfig()
        self.d2t_C = None if d2t is None else torch.tensor(d2t)  # tokens of a pruned draft head
        self.draft_columns_C = self.d2t_C
        self.vocab = WHOLE
        self.sampling_implementation = None  # torch chooses its tokens
        self.around = self.implementation = Implementation.REFERENCE
        self.deal = None  # every rank attends for all rows
        self.with_mtp = with_mtp
        self.surprise = surprise  # how much the mix, which the MTP head cannot know, decides
        self.sharpness = sharpness
        self.trunk_width = self.config.hidden_size
        self.sparse_layers = ()
        self.dtype = torch.float64
        self.device = torch.device("cpu")
        self.num_mtp_calls = 0

    def kv_layout(self, block_size):
        return KVLayout.of_attention(
            model_hash=self.config.model_hash,
            num_layers=NUM_LAYERS + self.with_mtp,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            block_size=block_size,
            dtype="float64",
            has_mtp=self.with_mtp,
        )

    def one_of_each_layer(self):
        """As if none were alike."""
        return contextlib.nullcontext()

    def trunk(self, token_ids_T, batch, pool, on_layer):
        assert token_ids_T.dtype == torch.int64
        assert ((token_ids_T >= 0) & (token_ids_T < self.config.vocab_size)).all()
        rows = _rows(batch, pool)
        token_T = token_ids_T.double()
        mix_T = (token_T * 7919 + 13) % PRIME
        for layer in range(NUM_LAYERS):
            mix_T = _attend(rows, layer, mix_T, pool)
            on_layer(layer)
        return torch.stack([token_T, mix_T, mix_T // 32], dim=-1)

    def mtp(self, token_ids_T, hidden_TD, batch, pool, on_layer):
        assert self.with_mtp
        assert ((token_ids_T >= 0) & (token_ids_T < self.config.vocab_size)).all()
        assert hidden_TD.shape == (len(token_ids_T), 3)
        self.num_mtp_calls += 1
        token_T = token_ids_T.double()
        mix_T = (token_T * 104_729 + hidden_TD[:, 0] * 31 + hidden_TD[:, 1] * 17) % PRIME
        mix_T = _attend(_rows(batch, pool), NUM_LAYERS, mix_T, pool)
        on_layer(NUM_LAYERS)
        return torch.stack([token_T, mix_T, mix_T // 32], dim=-1)

    def logits(self, hidden_ND):
        vocab_V = torch.arange(self.config.vocab_size, dtype=torch.float64)
        token_N1, mix_N1 = hidden_ND[:, :1], hidden_ND[:, 1:2]
        habit_NV = ((token_N1 + 1) * (vocab_V + 3) * 8191 % 257) / 257
        surprise_NV = ((mix_N1 + 1) * (vocab_V + 1) * 40_503 % 251) / 251
        return self.sharpness * (habit_NV + self.surprise * surprise_NV * (surprise_NV > 0.9))

    def draft_logits(self, hidden_ND):
        logits_NV = self.logits(hidden_ND)
        return logits_NV if self.d2t_C is None else logits_NV[:, self.d2t_C]

    def draft_to_target(self, ids):
        return ids.columns if self.d2t_C is None else self.d2t_C[ids.columns]

    def t2d(self):
        if self.d2t_C is None:
            return None
        columns = {int(token): column for column, token in enumerate(self.d2t_C)}
        return torch.tensor([columns.get(token, -1) for token in range(self.config.vocab_size)])


def _wide(rows_TC, width):
    return torch.nn.functional.pad(rows_TC, (0, width - rows_TC.shape[1]))


def _rows(batch, pool):
    if isinstance(batch, MixedBatch):
        prompts, decode = _rows(batch.prompts, pool), _rows(batch.decode, pool)
        width = max(prompts.keys_TC.shape[1], decode.keys_TC.shape[1])
        parts = [
            (rows.positions_T, rows.slots_T, _wide(rows.keys_TC, width), _wide(rows.visible_TC, width))
            for rows in (prompts, decode)
        ]
        return Rows(*map(torch.cat, zip(*parts, strict=True)))
    block_size = pool.layout.block_size
    if isinstance(batch, DecodeBatch):
        num_sequences, num_rows = batch.positions_BQ.shape
        positions_T, slots_T = batch.positions_BQ.flatten(), batch.slots_BQ.flatten()
        sequence_T = torch.arange(num_sequences).repeat_interleave(num_rows)
        context_len = batch.max_context_len
    else:
        assert isinstance(batch, PrefillBatch)
        positions_T, slots_T = batch.positions_T, batch.slots_T
        sequence_T = torch.arange(len(batch.query_lens)).repeat_interleave(torch.tensor(batch.query_lens))
        context_len = max(batch.context_lens)
        last_rows = torch.tensor(batch.query_lens).cumsum(0) - 1
        assert (positions_T[last_rows] + 1).tolist() == list(batch.context_lens)
    assert int(positions_T.max()) < context_len
    assert batch.block_tables_BM.shape[1] * block_size >= context_len
    assert int(slots_T.max()) <= pool.scratch_slot
    position_C = torch.arange(context_len)
    table_TM = batch.block_tables_BM[sequence_T]
    keys_TC = table_TM[:, position_C // block_size] * block_size + position_C % block_size
    return Rows(positions_T, slots_T, keys_TC, position_C[None] <= positions_T[:, None])


def _attend(rows, layer, mix_T, pool):
    block_size = pool.layout.block_size
    key_NHSD, value_NHSD = pool.layer(layer)
    blocks, offsets = rows.slots_T // block_size, rows.slots_T % block_size
    for head in range(2):
        key_NHSD[blocks, head, offsets, 0] = (mix_T * (head + 3)) % PRIME
        value_NHSD[blocks, head, offsets, 0] = (mix_T * (head + 11) + layer) % PRIME
    blocks, offsets = rows.keys_TC // block_size, rows.keys_TC % block_size
    weight_C = (torch.arange(rows.keys_TC.shape[1], dtype=torch.float64) * 29 + 5) % 97 + 1
    seen_TC = torch.zeros(rows.keys_TC.shape, dtype=torch.float64)
    for head in range(2):
        seen_TC = seen_TC + key_NHSD[blocks, head, offsets, 0] * (head + 2)
        seen_TC = seen_TC + value_NHSD[blocks, head, offsets, 0] * (head + 5)
    seen_TC = torch.where(rows.visible_TC, seen_TC, 0.0)
    return (mix_T * 3 + (seen_TC * weight_C).sum(dim=1)) % PRIME


class PerfectToyModel(ToyModel):
    """A toy whose MTP head is always right, if its tokens, hidden, positions and KV are.

    The mix of position i is sum(weight_j * t_j for 0 < j <= i). The head knows it twice over, as its input's mix plus
    one term and as the sum of its own KV; where the two disagree it predicts something else.
    """

    def trunk(self, token_ids_T, batch, pool, on_layer):
        rows, token_T = _rows(batch, pool), token_ids_T.double()
        mix_T = _sum_terms(rows, 0, _term(token_T, rows.positions_T), pool)
        for layer in range(NUM_LAYERS):
            on_layer(layer)
        return torch.stack([token_T, mix_T, mix_T // 32], dim=-1)

    def mtp(self, token_ids_T, hidden_TD, batch, pool, on_layer):
        rows, token_T = _rows(batch, pool), token_ids_T.double()
        term_T = _term(token_T, rows.positions_T + 1)
        by_hidden_T = (hidden_TD[:, 1] + term_T) % PRIME
        by_cache_T = _sum_terms(rows, NUM_LAYERS, term_T, pool)
        mix_T = torch.where(by_hidden_T == by_cache_T, by_hidden_T, (by_hidden_T + by_cache_T + 1) % PRIME)
        on_layer(NUM_LAYERS)
        return torch.stack([token_T, mix_T, mix_T // 32], dim=-1)


def _term(token_T, position_T):
    return torch.where(position_T > 0, (token_T + 1) * (position_T * 31 % 101 + 1), 0.0)


def _sum_terms(rows, layer, term_T, pool):
    block_size = pool.layout.block_size
    key_NHSD, _ = pool.layer(layer)
    key_NHSD[rows.slots_T // block_size, 0, rows.slots_T % block_size, 0] = term_T
    seen_TC = key_NHSD[rows.keys_TC // block_size, 0, rows.keys_TC % block_size, 0]
    return torch.where(rows.visible_TC, seen_TC, 0.0).sum(dim=1) % PRIME
