"""The decision message on a GPU, in two launches: pack it with a digest, and compare rank 0's with one's own.

The results are bit for bit those of `kernels.sampling.decision_reference`. Messages are small (a few hundred words of
values, some ten thousand of state), so each launch is one program: no memory has to be zeroed or accumulated, and most
of the time is launch time. Batches change from step to step, so nothing is specialized on: one binary serves any shape.

64-bit multiplications must wrap, which Triton's integers do. Shapes: N words of a message, F first words, R rows of
them.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from baton.kernels.sampling.decision_reference import DIVERGED, HEAD_LEN, MAX_STATE, WEIGHT

FIRST = 512  # words of each tensor that are loaded before any is used
ROWS = 8  # times as many at once, of longer tensors
COMPARED = 1024
PACK_WARPS = 16
COMPARE_WARPS = 8

_WEIGHT = tl.constexpr(WEIGHT)
_HEAD_LEN = tl.constexpr(HEAD_LEN)
_DIVERGED = tl.constexpr(DIVERGED)


def pack(values: torch.Tensor, state: Sequence[torch.Tensor], number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the message twice, int32 [3 + values]: one to keep, and one to broadcast in place.

    Args:
        values: int64 that fit in 31 bits.
        state: at most MAX_STATE integer tensors; one that is neither contiguous nor 1-D costs a copy.
        number: number of the decision, 31 bits.
    """
    assert len(state) <= MAX_STATE
    values = values.contiguous()
    num_words = HEAD_LEN + values.numel()
    messages = torch.empty(2 * num_words, dtype=torch.int32, device=values.device)
    # The broadcast message comes first, because NCCL is faster on aligned buffers.
    decided_N, own_N = messages[:num_words], messages[num_words:]
    arguments: list[torch.Tensor | int] = []
    for tensor in state:
        # Columns of a wider table are passed as views; the list keeps copies of other tensors alive until the launch.
        flat = tensor if tensor.dim() == 1 else tensor.contiguous()
        arguments += [flat, flat.numel(), flat.stride(0) if flat.dim() == 1 else 1]
    for _ in range(MAX_STATE - len(state)):
        arguments += [values, 0, 1]
    with torch.cuda.device_of(values):
        _pack_kernel[(1,)](
            *arguments, values, values.numel(), number, own_N, decided_N, FIRST, ROWS, num_warps=PACK_WARPS
        )
    return own_N, decided_N


def compare(own_N: torch.Tensor, decided_N: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the values if the messages are equal, otherwise `DIVERGED` everywhere.

    Args:
        own_N: int32 [3 + values], contiguous.
        decided_N: the same.
        values: int64.
    """
    assert len(own_N) == len(decided_N)
    values = values.contiguous()
    result = torch.empty_like(values)
    with torch.cuda.device_of(values):
        _compare_kernel[(1,)](
            own_N, decided_N, len(own_N), values, result, values.numel(), COMPARED, num_warps=COMPARE_WARPS
        )
    return result


def warm_up(device: torch.device) -> None:
    """Compile and load both kernels, so that no step waits for that."""
    values = torch.zeros(1, dtype=torch.int64, device=device)
    own_N, decided_N = pack(values, (), 0)
    compare(own_N, decided_N, values)


@triton.jit
def _load(words, count, stride, place):  # noqa: ANN001, ANN202
    """The words at the places, int64; 0 beyond the last, which weighs nothing."""
    return tl.load(words + place.to(tl.int64) * stride, mask=place < count, other=0).to(tl.int64)


@triton.jit
def _weigh(word, place):  # noqa: ANN001, ANN202
    """Words times the weights of their places in the whole state, as `digest_weights` has them."""
    value = (place + 1).to(tl.int64) * _WEIGHT
    return word * ((value ^ (value >> 31)) * _WEIGHT | 1)


@triton.jit
def _add_rest(total_F, words, count, stride, before, F: tl.constexpr, R: tl.constexpr):  # noqa: ANN001, ANN202
    """Add a tensor's words from the F-th on, R * F at a time; `before` are those of the tensors before it."""
    place_RF = tl.arange(0, R)[:, None] * F + tl.arange(0, F)[None, :]
    for start in range(F, count, R * F):
        word_RF = _load(words, count, stride, start + place_RF)
        total_F += tl.sum(_weigh(word_RF, before + start + place_RF), axis=0)
    return total_F


@triton.jit
def _pack_values(values, num_values, own, decided, F: tl.constexpr) -> None:  # noqa: ANN001
    for start in range(0, num_values, F):
        place_F = start + tl.arange(0, F)
        value_F = tl.load(values + place_F, mask=place_F < num_values, other=0).to(tl.int32)
        tl.store(own + _HEAD_LEN + place_F, value_F, mask=place_F < num_values)
        tl.store(decided + _HEAD_LEN + place_F, value_F, mask=place_F < num_values)


@triton.jit(do_not_specialize=[*range(3 * MAX_STATE + 5)])
def _pack_kernel(
    words_0,  # noqa: ANN001
    count_0: tl.int32,
    stride_0: tl.int32,
    words_1,  # noqa: ANN001
    count_1: tl.int32,
    stride_1: tl.int32,
    words_2,  # noqa: ANN001
    count_2: tl.int32,
    stride_2: tl.int32,
    words_3,  # noqa: ANN001
    count_3: tl.int32,
    stride_3: tl.int32,
    words_4,  # noqa: ANN001
    count_4: tl.int32,
    stride_4: tl.int32,
    words_5,  # noqa: ANN001
    count_5: tl.int32,
    stride_5: tl.int32,
    words_6,  # noqa: ANN001
    count_6: tl.int32,
    stride_6: tl.int32,
    words_7,  # noqa: ANN001
    count_7: tl.int32,
    stride_7: tl.int32,
    words_8,  # noqa: ANN001
    count_8: tl.int32,
    stride_8: tl.int32,
    words_9,  # noqa: ANN001
    count_9: tl.int32,
    stride_9: tl.int32,
    values,  # noqa: ANN001
    num_values: tl.int32,
    number: tl.int32,
    own,  # noqa: ANN001
    decided,  # noqa: ANN001
    F: tl.constexpr,
    R: tl.constexpr,
) -> None:
    """The first words of all tensors are under way together: in most steps that is all but the block tables."""
    place_F = tl.arange(0, F)
    word_0F = _load(words_0, count_0, stride_0, place_F)
    word_1F = _load(words_1, count_1, stride_1, place_F)
    word_2F = _load(words_2, count_2, stride_2, place_F)
    word_3F = _load(words_3, count_3, stride_3, place_F)
    word_4F = _load(words_4, count_4, stride_4, place_F)
    word_5F = _load(words_5, count_5, stride_5, place_F)
    word_6F = _load(words_6, count_6, stride_6, place_F)
    word_7F = _load(words_7, count_7, stride_7, place_F)
    word_8F = _load(words_8, count_8, stride_8, place_F)
    word_9F = _load(words_9, count_9, stride_9, place_F)
    _pack_values(values, num_values, own, decided, F)
    end_0 = count_0
    end_1 = end_0 + count_1
    end_2 = end_1 + count_2
    end_3 = end_2 + count_3
    end_4 = end_3 + count_4
    end_5 = end_4 + count_5
    end_6 = end_5 + count_6
    end_7 = end_6 + count_7
    end_8 = end_7 + count_8
    total_F = _weigh(word_0F, place_F) + _weigh(word_1F, end_0 + place_F)
    total_F += _weigh(word_2F, end_1 + place_F) + _weigh(word_3F, end_2 + place_F)
    total_F += _weigh(word_4F, end_3 + place_F) + _weigh(word_5F, end_4 + place_F)
    total_F += _weigh(word_6F, end_5 + place_F) + _weigh(word_7F, end_6 + place_F)
    total_F += _weigh(word_8F, end_7 + place_F) + _weigh(word_9F, end_8 + place_F)
    total_F = _add_rest(total_F, words_0, count_0, stride_0, 0, F, R)
    total_F = _add_rest(total_F, words_1, count_1, stride_1, end_0, F, R)
    total_F = _add_rest(total_F, words_2, count_2, stride_2, end_1, F, R)
    total_F = _add_rest(total_F, words_3, count_3, stride_3, end_2, F, R)
    total_F = _add_rest(total_F, words_4, count_4, stride_4, end_3, F, R)
    total_F = _add_rest(total_F, words_5, count_5, stride_5, end_4, F, R)
    total_F = _add_rest(total_F, words_6, count_6, stride_6, end_5, F, R)
    total_F = _add_rest(total_F, words_7, count_7, stride_7, end_6, F, R)
    total_F = _add_rest(total_F, words_8, count_8, stride_8, end_7, F, R)
    total_F = _add_rest(total_F, words_9, count_9, stride_9, end_8, F, R)
    digest = tl.sum(total_F)
    low, high = digest.to(tl.int32), (digest >> 32).to(tl.int32)
    for message in tl.static_range(2):
        words = own if message == 0 else decided
        tl.store(words, number)
        tl.store(words + 1, low)
        tl.store(words + 2, high)


@triton.jit(do_not_specialize=["own", "decided", "num_words", "values", "result", "num_values"])
def _compare_kernel(
    own,  # noqa: ANN001
    decided,  # noqa: ANN001
    num_words: tl.int32,
    values,  # noqa: ANN001
    result,  # noqa: ANN001
    num_values: tl.int32,
    C: tl.constexpr,
) -> None:
    """The first values are loaded before the messages are compared; in most steps that is all."""
    place_C = tl.arange(0, C)
    value_C = tl.load(values + place_C, mask=place_C < num_values, other=0)
    differ_C = tl.zeros([C], dtype=tl.int32)
    for start in range(0, num_words, C):
        mask_C = start + place_C < num_words
        own_C = tl.load(own + start + place_C, mask=mask_C, other=0)
        differ_C |= (own_C != tl.load(decided + start + place_C, mask=mask_C, other=0)).to(tl.int32)
    is_other = tl.max(differ_C) > 0
    tl.store(result + place_C, tl.where(is_other, _DIVERGED, value_C), mask=place_C < num_values)
    for start in range(C, num_values, C):
        mask_C = start + place_C < num_values
        value_C = tl.load(values + start + place_C, mask=mask_C, other=0)
        tl.store(result + start + place_C, tl.where(is_other, _DIVERGED, value_C), mask=mask_C)
