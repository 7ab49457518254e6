"""Whether a checkpoint that says its LM head is the embedding stores another one; without torch.

A fine-tune may have trained a head of its own and kept `tie_word_embeddings`. What is stored is what was trained, and
transformers 5 computes with it.
"""

import os
from collections.abc import Mapping
from dataclasses import replace

from baton.model.checkpoint.weights import StoredTensor, are_alike, open_unchanged, read_bytes
from baton.model.config import ModelConfig

HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_CHUNK_BYTES = 8 << 20


def with_stored_head(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> ModelConfig:
    """The same, untied if the checkpoint stores an LM head that is not its embedding.

    Args:
        config: of the checkpoint.
        stored: its tensors, by the table's names.

    Raises:
        ModelFileDamaged: a file was changed meanwhile.
        ModelMissing: one cannot be read.
    """
    if not config.tie_word_embeddings or not {HEAD, _EMBEDDING} <= stored.keys():
        return config
    return config if _is_same(stored[HEAD], stored[_EMBEDDING]) else replace(config, tie_word_embeddings=False)


def head_note(given: ModelConfig, served: ModelConfig) -> str | None:
    """A sentence where `with_stored_head` made `served` of `given` and they differ."""
    if given.tie_word_embeddings == served.tie_word_embeddings:
        return None
    return f"tie_word_embeddings is not followed: the {HEAD} that is stored is not the embedding, and is the head"


def _is_same(head: StoredTensor, embedding: StoredTensor) -> bool:
    """Byte for byte, as a few rows may differ; a head in float8 or another dtype is one of its own."""
    if head.is_float8 or not are_alike(head, embedding):
        return False
    one, other = bytearray(_CHUNK_BYTES), bytearray(_CHUNK_BYTES)
    descriptors = [open_unchanged(tensor.file, tensor.stamp) for tensor in (head, embedding)]
    try:
        for at in range(0, head.end - head.start, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, head.end - head.start - at)
            read_bytes(descriptors[0], head.start + at, memoryview(one)[:length], head.file)
            read_bytes(descriptors[1], embedding.start + at, memoryview(other)[:length], embedding.file)
            if one != other:  # behind `length`, both still hold what was the same before
                return False
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return True
