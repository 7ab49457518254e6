"""Canaries: a runbook's own greedy requests, whose tokens must be the same before and after, on any worker.

Each round belongs to a tenant of its own, so that its prompts are computed and pushed, not found in a cache. Where
clients need a key, the tenant is the key's, and prompts of earlier rounds may be cached.
"""

import secrets
from collections.abc import Collection
from dataclasses import dataclass

from baton.client import BatonClient
from baton.core.errors import AccessRefused, BatonError, PreconditionUnmet, StepFailed
from baton.core.requests.sampling import SamplingParams
from baton.proto import inference_pb2
from baton.runbook.common.site import Site
from baton.runbook.common.steps import timed_out

PROMPTS = (
    "def main(argv=None):\n    parser = argparse.ArgumentParser(description=__doc__)\n    parser.add_argument(",
    "class Queue:\n    '''Create a queue object with a given maximum size.'''\n\n    def __init__(self, maxsize=0):\n",
    "import os\nimport sys\nimport time\n\n\ndef read_file(path, encoding='utf-8'):\n    with open(path",
)
MAX_TOKENS = 24
REQUEST_S = 30.0
LOOK_S = 5.0
NUM_TRIES = 3
RETRY_S = 1.0
PASSING = ("NoWorker", "WorkerLost", "TransferFailed")


@dataclass(frozen=True, slots=True)
class Answer:
    """One canary's tokens, and the workers that made them."""

    token_ids: tuple[int, ...]
    stats: inference_pb2.RequestStats

    @property
    def workers(self) -> tuple[str, str]:
        """Prefill and decode worker."""
        return self.stats.prefill_worker, self.stats.decode_worker


def require_client(site: Site) -> None:
    """Check before any step that canaries are admitted where they are sent, with the operator's access.

    Raises:
        PreconditionUnmet: they would be refused.
    """
    address = site.client_address
    try:
        with BatonClient(address, timeout_s=max(0.1, min(LOOK_S, site.left_s)), access=site.client_access) as client:
            client.model()
    except BatonError as error:
        if error.fields.get("grpc_code") == "UNIMPLEMENTED":
            message = f"{address} is where operators come, and canaries are clients: give --client-address, and "
            message += "--client-api-key-file if clients need a key"
        elif isinstance(error, AccessRefused):
            message = f"canaries are clients, which {address} does not let in: {error.message}; give a client's key "
            message += "with --client-api-key-file"
        else:
            return  # the runbook itself finds out what is wrong there
        raise PreconditionUnmet(message, address=address) from error


def ask(site: Site, prompt: str, *, num_tries: int = 1) -> Answer:
    """Send one canary; retry if its worker was lost or none was available.

    Raises:
        StepFailed: it got no answer.
    """
    for left in reversed(range(num_tries)):
        try:
            return _ask(site, prompt)
        except StepFailed as error:
            if not left or error.fields["cause"] not in PASSING or site.left_s < RETRY_S:
                raise
            site.found["canaries_tried_again"] = site.found.get("canaries_tried_again", 0) + 1
            site.pause(RETRY_S)
    raise AssertionError("at least one try")


def _ask(site: Site, prompt: str) -> Answer:
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    token_ids: list[int] = []
    stats = inference_pb2.RequestStats()
    try:
        access = site.client_access
        tenant = "" if access.api_key else f"canary-{secrets.token_hex(8)}"
        timeout_s = max(0.1, min(REQUEST_S, site.left_s))
        with BatonClient(site.client_address, timeout_s=timeout_s, access=access) as client:
            # A canary must exercise both workers of a pair.
            for chunk in client.generate(prompt, sampling=sampling, tenant=tenant, split_only=True):
                token_ids.extend(chunk.token_ids)
                stats = chunk.finish.stats  # of the last chunk
    except BatonError as error:
        message = f"a canary request ended with {type(error).__name__}: {error.message}"
        raise StepFailed(message, cause=type(error).__name__) from error
    return Answer(tuple(token_ids), stats)


class CanaryRuns:
    """Sends the same prompts repeatedly; the first answers are what later ones must equal.

    Args:
        site: where they are sent.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._expected: dict[str, tuple[int, ...]] = {}
        self.seen: set[str] = set()
        self.edges: set[tuple[str, str]] = set()

    def round(self) -> list[Answer]:
        """Send each prompt once.

        Raises:
            StepFailed: a canary got no answer, or other tokens than before.
        """
        answers = []
        for prompt in PROMPTS:
            answer = ask(self._site, prompt, num_tries=NUM_TRIES)
            expected = self._expected.setdefault(prompt, answer.token_ids)
            if answer.token_ids != expected:
                at = next(
                    (i for i, (a, b) in enumerate(zip(answer.token_ids, expected, strict=False)) if a != b),
                    min(len(answer.token_ids), len(expected)),
                )
                who = " and ".join(filter(None, answer.workers))
                message = f"a canary of {who} has other tokens than before, from the {at}th on"
                raise StepFailed(message, at=at, workers=list(answer.workers))
            self.seen.update(filter(None, answer.workers))
            self.edges.add(answer.workers)
            answers.append(answer)
        return answers

    def reach(self, worker_ids: Collection[str]) -> str:
        """Send rounds until each of these workers has served a canary.

        Raises:
            StepFailed: see `round`.
            OperationError: timed out.
        """
        self.seen.clear()
        num_sent = len(self.round())
        while missing := set(worker_ids) - self.seen:
            if not self._site.left_s:
                raise timed_out(f"no canary came to {', '.join(sorted(missing))}", worker_ids=sorted(missing))
            num_sent += len(self.round())
        return f"{num_sent} canaries with the tokens expected, served by {', '.join(sorted(self.seen))}"
