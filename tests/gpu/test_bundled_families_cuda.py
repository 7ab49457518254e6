"""The bundled models of other families on a GPU, by the kernels and graphs that serve them."""

from importlib import resources
from pathlib import Path

import pytest
import torch

from baton.core.numerics import Numerics
from baton.core.requests.tokenizer import Tokenizer
from baton.kernels.implementation import Implementation
from baton.model.loader import load_model
from baton.tests.e2e.prompts import requests_for
from baton.tests.e2e.test_state_prefixes import accepted, hits_of
from baton.tests.e2e.topology import Topology

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
SHARED = (0, 16, 40, 64, 100, 144, 180)


def path_of(name):
    return Path(str(resources.files("baton.assets") / name))


def prompts(words):
    """A, B, A with others between, which begin alike by 0 to 90 %."""
    text = words.encode(Path(__file__).read_text() * 2)
    base = text[:200]
    forks = [base[:shared] + text[300 + shared : 500] for shared in SHARED]
    return [tuple(one) for one in (base, *forks, base, forks[3], base[:130], base)]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_state_behind_cached_prefixes_and_drafts_gives_the_same_tokens(k, sampled):
    """Batch-invariant bfloat16: cached, drafted, in chunks and many at once are what each is alone and uncached."""
    words = Tokenizer.from_directory(path_of("tiny-hybrid"))
    model = load_model(
        path_of("tiny-hybrid"), dtype=torch.bfloat16, device=CUDA, numerics=Numerics.INVARIANT, with_mtp=True
    )

    def asked(num_drafts, tag):
        return requests_for(prompts(words), sampled=sampled, num_drafts=num_drafts, max_tokens=40, tag=tag)

    wanted = []
    for request in asked(0, "plain"):  # each in a pool of its own, so that nothing is cached
        with Topology(model, words, num_prefill=0, num_drafts=0, scheduling="sync", max_num_seqs=2) as topology:
            wanted.append(topology.finish(topology.start_local(request)).token_ids)
    options = {"num_drafts": k, "scheduling": "async", "chunk_len": 48, "max_num_seqs": 6}
    with Topology(model, words, num_prefill=0, **options) as topology:
        alone = [topology.finish(topology.start_local(request)) for request in asked(k, "a")]
        running = [topology.start_local(request) for request in asked(k, "b")]
        together = [topology.finish(one) for one in running]
        topology.wait_idle()
        assert hits_of(*topology.decode) >= len(SHARED)
    for outcomes in (alone, together):
        assert [outcome.token_ids for outcome in outcomes] == wanted
    if k:
        _, num_drafts, num_accepted = map(sum, zip(*(accepted(one) for one in together), strict=True))
        assert num_accepted > 0.25 * num_drafts  # of four sampled ones 0.41 stand


@pytest.mark.parametrize("name", ["tiny-hybrid", "tiny-mla"])
def test_drafts_of_a_trained_head_stand(name):
    """By Triton kernels in default numerics: text goes on as trained, or drafts would not agree with the trunk."""
    words = Tokenizer.from_directory(path_of(name))
    model = load_model(path_of(name), dtype=torch.bfloat16, device=CUDA, numerics=Numerics.DEFAULT, with_mtp=True)
    assert model.implementation is Implementation.TRITON
    options = {"num_drafts": 1, "scheduling": "async", "max_num_seqs": 8}
    with Topology(model, words, num_prefill=0, **options) as topology:  # kernels are compiled, within no lease
        for request in requests_for(prompts(words), sampled=False, num_drafts=1, max_tokens=64, tag="warm"):
            topology.finish(topology.start_local(request))
    with Topology(model, words, num_prefill=1, **options) as topology:
        running = [
            topology.start(request)
            for request in requests_for(prompts(words), sampled=False, num_drafts=1, max_tokens=64, tag="x")
        ]
        outcomes = [topology.finish(one) for one in running]
    _, num_drafts, num_accepted = map(sum, zip(*(accepted(one) for one in outcomes), strict=True))
    assert num_drafts > 200
    assert num_accepted > 0.7 * num_drafts
