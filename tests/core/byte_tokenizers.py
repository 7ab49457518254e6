"""Small tokenizers for tests of text: of bytes and words of bytes, and of the kind that only the library can decode."""

from functools import cache

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from baton.core.requests.tokenizer import Tokenizer, _byte_characters

EOS, SECOND_EOS, SPECIAL, ADDED = 256, 257, 258, 259
WORDS = (b"return", b"et\xc3", b"\xa9\xe2\x82", b"\xacab", b"a\x80b", b"\xed\xa0", b"\xf0\x90", b"\xef\xbf\xbd")
NUM_TOKENS = ADDED + 1 + len(WORDS)


@cache
def byte_tokenizer():
    """Token b < 256 is the byte b; then two ends, a special and an added token, and words of bytes."""
    characters = _byte_characters()
    vocab = {character: byte for byte, character in enumerate(characters)}
    vocab |= {"<eos>": EOS, "<end>": SECOND_EOS, "<|tag|>": SPECIAL, "é x": ADDED}
    vocab |= {"".join(characters[byte] for byte in word): ADDED + 1 + at for at, word in enumerate(WORDS)}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<eos>", "<end>", "<|tag|>"])
    fast.add_tokens(["é x"])
    return Tokenizer(fast, (EOS, SECOND_EOS))


@cache
def fallback_tokenizer():
    """As converted from SentencePiece: words with a mark for the space before, and a token for each byte."""
    vocab = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    for word in ("▁", "a", "b", "▁a", "ab", "é", "▁é"):
        vocab[word] = len(vocab)
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    fast.add_special_tokens(["</s>"])
    return Tokenizer(fast, (1,))
