"""How large a worker's steps are where nobody chose it: by its device, its model and its KV pool. Arithmetic alone.

An operator's number is taken as it is. Everything else has a sentence that says why, for `baton doctor --address`.
"""

from dataclasses import dataclass

CPU_NUM_SEQS = 16
CPU_NUM_TOKENS = 256
GPU_NUM_SEQS = 256  # a decode step of so many is bound by reading KV, no longer by reading weights
GPU_NUM_TOKENS = 4096  # measured: 8B prompts beside 64 streams, first token and tok/s as with 2048 or better
MIN_GPU_NUM_SEQS = 8
TYPICAL_LEN = 1024  # positions that a sequence is expected to hold
_LOGIT_SHARE = 0.1  # of a worker's memory, at most, for the logits of a step
_LOGIT_BYTES = 16  # float32: as computed, penalized, sorted, and their probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What a worker computes on.

    Attributes:
        kind: `cpu` or `cuda`.
        num_bytes: this worker's part of a GPU's memory; 0 on a CPU.
    """

    kind: str
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """What was chosen, and why.

    Attributes:
        max_num_seqs: sequences at once.
        max_num_batched_tokens: prompt tokens of a prefill step.
        why: a sentence for each; `worker.loading` adds one for the KV pool.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    why: tuple[str, ...]

    def fitted(self, *, asked_seqs: int, kind: str, pool_len: int, max_model_len: int) -> "StepSizes":
        """The same with no more sequences than a GPU's pool holds at a typical length; a number asked for stays.

        Args:
            asked_seqs: by the operator; 0: not at all.
            kind: of the device.
            pool_len: positions of the pool.
            max_model_len: of a sequence.
        """
        if asked_seqs or kind != "cuda":
            return self
        length = min(max_model_len, TYPICAL_LEN)
        held = max(MIN_GPU_NUM_SEQS, pool_len // length // 8 * 8)
        if held >= self.max_num_seqs:
            return self
        why = f"max_num_seqs {held}: the KV pool holds {pool_len} positions, {length} for each"
        return StepSizes(max_num_seqs=held, max_num_batched_tokens=self.max_num_batched_tokens, why=(why, self.why[1]))


def choose(
    *, asked_seqs: int, asked_tokens: int, device: DeviceFacts, vocab_size: int, num_rows_per_seq: int
) -> StepSizes:
    """Sizes before there is a pool; see `StepSizes.fitted` for those after.

    Args:
        asked_seqs: max_num_seqs by the operator; 0: not at all.
        asked_tokens: max_num_batched_tokens likewise.
        device: of the worker.
        vocab_size: of the model.
        num_rows_per_seq: whose logits a step computes, of each sequence.
    """
    seqs, why_seqs = _num_seqs(asked_seqs, device, vocab_size * num_rows_per_seq * _LOGIT_BYTES)
    tokens = asked_tokens or (GPU_NUM_TOKENS if device.kind == "cuda" else CPU_NUM_TOKENS)
    why_tokens = "asked for" if asked_tokens else f"the default of a {'GPU' if device.kind == 'cuda' else 'CPU'}"
    return StepSizes(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        why=(f"max_num_seqs {seqs}: {why_seqs}", f"max_num_batched_tokens {tokens}: {why_tokens}"),
    )


def _num_seqs(asked: int, device: DeviceFacts, logit_bytes: int) -> tuple[int, str]:
    if asked:
        return asked, "asked for"
    if device.kind != "cuda":
        return CPU_NUM_SEQS, "the default of a CPU"
    fitting = int(device.num_bytes * _LOGIT_SHARE) // logit_bytes // 8 * 8
    if fitting >= GPU_NUM_SEQS:
        return GPU_NUM_SEQS, "the default of a GPU"
    seqs = max(MIN_GPU_NUM_SEQS, fitting)
    return seqs, f"logits of a step may take {_LOGIT_SHARE:.0%} of {device.num_bytes / (1 << 30):.1f} GiB"
