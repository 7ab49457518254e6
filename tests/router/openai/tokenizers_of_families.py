"""Small tokenizers as those of the families are made: their special tokens, and what their post-processors add.

Each reads bytes; what differs is what `tokenizers` is told beside that.
"""

from functools import cache

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from baton.core.requests.answer_structure import DEEPSEEK_TAGS, KIMI_TAGS, CallForm
from baton.core.requests.tokenizer import Tokenizer, _byte_characters

LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
DEEPSEEK = ("<eos>", *DEEPSEEK_TAGS)
KIMI = ("<|im_end|>", *KIMI_TAGS)
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def of_bytes(special=(), added=(), bos="", *, ends=(), is_llama_3=False):
    """Bytes are tokens; then the special ones, then those that are added and not special. `bos` is put before texts."""
    fast = FastTokenizer(models.BPE(vocab={one: at for at, one in enumerate(_byte_characters())}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(list(special))
    fast.add_tokens(list(added))
    steps = [processors.ByteLevel(trim_offsets=False)] if is_llama_3 else []
    if bos:
        steps.append(processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, fast.token_to_id(bos))]))
    if steps:
        fast.post_processor = processors.Sequence(steps)
    return Tokenizer(fast, tuple(map(fast.token_to_id, ends)))


@cache
def llama():
    """Llama 3: BOS by one of two post-processors."""
    ends = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    return of_bytes(LLAMA, bos=LLAMA[0], ends=ends, is_llama_3=True)


@cache
def mistral():
    """Mistral's newer ones, Magistral among them: the words of a call and of a thought are special tokens."""
    return of_bytes(MISTRAL, bos="<s>", ends=("</s>",))


@cache
def sentencepiece():
    """Llama 2 and older Mistral: a mark for spaces, put before the text, and a token for each byte."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}, "▁": 259}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    fast.add_special_tokens(["<s>", "</s>"])
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(fast, (2,))


@cache
def qwen():
    """Qwen: no BOS; the tags of a call are added tokens, and not special ones."""
    return of_bytes(QWEN, ("<tool_call>", "</tool_call>", "<think>", "</think>"), ends=("<|im_end|>",))


@cache
def glm():
    """GLM-4.5: the tags of calls, keys and values are added tokens, and not special ones."""
    tags = ("<think>", "</think>", "/nothink", *CallForm.GLM45.marks)
    return of_bytes(("<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>"), tags, ends=("<|user|>",))


@cache
def deepseek():
    """DeepSeek: the tags of calls are added tokens; those of a thought, too."""
    return of_bytes(DEEPSEEK[:1], (*DEEPSEEK[1:], "<think>", "</think>"), ends=DEEPSEEK[:1])


@cache
def kimi():
    """Kimi-K2: the tags of calls are special tokens."""
    return of_bytes(KIMI, ends=KIMI[:1])
