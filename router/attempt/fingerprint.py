"""What makes two requests the same one for the question whether it kills workers: prompt and parameters. Pure.

The seed is left out: a server draws one for who gives none, and what breaks a worker is rarely a draw. So are the
tenant and the client's name for the request.
"""

import hashlib
import json
from array import array

from baton.core.requests.request import GenerationRequest

DIGEST_BYTES = 12


def fingerprint(request: GenerationRequest) -> str:
    """Hex digits that name a client's request; the same for each of its answers."""
    values = request.sampling.as_data()
    for name in ("seed", "prompt_logprobs"):  # the second differs between the answers of one request
        del values[name]
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(json.dumps([values, request.num_draft_tokens], sort_keys=True).encode())
    digest.update(array("Q", request.prompt_token_ids).tobytes())
    return digest.hexdigest()
