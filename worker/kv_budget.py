"""How much of a GPU's memory is for KV: what its share allows, less weights and what steps need. Arithmetic alone."""

CONTEXT_BYTES = 1 << 30  # of a process: the CUDA context, libraries' workspaces, loaded kernels, captured graphs
_ACTIVATION_BYTES = 2  # of an element; kernels compute bfloat16
_LOGIT_COPIES = 4  # in float32: as computed, penalized, sorted, and their probabilities


def step_bytes(*, num_tokens: int, num_rows: int, hidden_size: int, inner_size: int, vocab_size: int) -> int:
    """What the largest step holds beside weights and KV.

    Args:
        num_tokens: of the largest step.
        num_rows: whose logits are computed together.
        hidden_size: of the model.
        inner_size: the widest activation inside a layer, of one token.
        vocab_size: of the model.
    """
    activations = num_tokens * (6 * hidden_size + 3 * inner_size) * _ACTIVATION_BYTES
    return activations + num_rows * vocab_size * 4 * _LOGIT_COPIES


def kv_bytes(*, total: int, free: int, share: float, own: int, steps: int) -> int:
    """Bytes for the KV pool of one process; 0 if there are none left.

    Args:
        total: the GPU's memory.
        free: of it now.
        share: the part of `total` that this process may use in all.
        own: what it uses already.
        steps: what its largest step will hold.
    """
    return max(0, min(int(total * share) - own, free) - steps)
