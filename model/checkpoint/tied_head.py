"""Whether a checkpoint whose config ties the LM head to the embedding stores another LM head; without torch.

A fine-tune may have trained its own head and kept `tie_word_embeddings`. The stored head is the trained one, and
transformers 5 uses it.
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
    """The config, untied if the checkpoint stores an LM head that differs from its embedding.

    Args:
        config: of the checkpoint.
        stored: its tensors, by the table's names.

    Raises:
        ModelFileDamaged: a file was changed meanwhile.
        ModelMissing: a file cannot be read.
    """
    if not config.tie_word_embeddings or not {HEAD, _EMBEDDING} <= stored.keys():
        return config
    return config if _is_same(stored[HEAD], stored[_EMBEDDING]) else replace(config, tie_word_embeddings=False)


def head_note(given: ModelConfig, served: ModelConfig) -> str | None:
    """A sentence for the log if `with_stored_head` untied the head."""
    if given.tie_word_embeddings == served.tie_word_embeddings:
        return None
    return f"tie_word_embeddings is not followed: the {HEAD} that is stored is not the embedding, and is the head"


def _is_same(head: StoredTensor, embedding: StoredTensor) -> bool:
    """Whether both are equal byte for byte, as only a few rows may differ; another dtype counts as different."""
    if head.is_float8 or not are_alike(head, embedding):
        return False
    one, other = bytearray(_CHUNK_BYTES), bytearray(_CHUNK_BYTES)
    descriptors = [open_unchanged(tensor.file, tensor.stamp) for tensor in (head, embedding)]
    try:
        for at in range(0, head.end - head.start, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, head.end - head.start - at)
            read_bytes(descriptors[0], head.start + at, memoryview(one)[:length], head.file)
            read_bytes(descriptors[1], embedding.start + at, memoryview(other)[:length], embedding.file)
            if one != other:  # past `length`, both still hold the same earlier bytes
                return False
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return True
