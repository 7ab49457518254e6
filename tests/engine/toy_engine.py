"""The toy model inside a LocalEngine, with a tokenizer of one letter a token."""

import itertools

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.core.requests.tokenizer import Tokenizer
from baton.engine.local import LocalEngine
from baton.tests.engine.toy import ToyModel

EOS = 23
_keys = itertools.count()


def letters_tokenizer(eos_token_ids=(EOS,), size=24):
    fast = FastTokenizer(models.WordLevel({chr(ord("a") + at): at for at in range(size)}, unk_token="a"))
    fast.decoder = decoders.Fuse()
    return Tokenizer(fast, eos_token_ids)


def toy_engine(model=None, *, num_blocks=40, block_size=4, k=2, chunk_len=16, max_num_sequences=4, **options):
    return LocalEngine(
        model or ToyModel(),
        letters_tokenizer(),
        num_blocks=num_blocks,
        block_size=block_size,
        num_draft_tokens=k,
        chunk_len=chunk_len,
        max_num_sequences=max_num_sequences,
        **options,
    )


def request_of(prompt, *, k=2, deadline_s=float("inf"), **sampling):
    return GenerationRequest(
        key=AttemptKey(f"r{next(_keys)}", 1),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**sampling),
        deadline_s=deadline_s,
        num_draft_tokens=k,
    )
