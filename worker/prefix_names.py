"""How a worker names the blocks of a prompt, and which prompts have names at all."""

from baton.core.block_hash import block_hashes
from baton.core.requests.request import GenerationRequest
from baton.kvcache.layout import KVLayout
from baton.proto import worker_pb2


class PrefixNames:
    """Names of prompts' blocks.

    Args:
        layout: of the worker's pool.
        with_mtp: an MTP head's entries are in it.
        enabled: an operator wants prefixes kept.
    """

    def __init__(self, layout: KVLayout, *, with_mtp: bool, enabled: bool) -> None:
        # A recurrent state is that of its last position alone: it cannot be cut to a shorter prompt.
        self.naming: worker_pb2.PrefixNaming | None = None  # what the router makes the same names with
        if enabled and not layout.has_state:
            self.naming = worker_pb2.PrefixNaming(
                model=layout.model_hash, block_size=layout.block_size, with_mtp=with_mtp
            )

    def of(self, request: GenerationRequest) -> tuple[bytes, ...]:
        """Names of the full blocks of its prompt; none if it shares nothing."""
        # Log-probabilities of the prompt need every position computed.
        if self.naming is None or request.sampling.prompt_logprobs is not None:
            return ()
        return block_hashes(
            request.prompt_token_ids,
            model=self.naming.model,
            tenant=request.tenant,
            block_size=self.naming.block_size,
            with_mtp=self.naming.with_mtp,
        )
