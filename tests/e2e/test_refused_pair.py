"""Two workers whose layouts differ: the prefill worker says so in a form that the router acts on."""

import torch

from baton.core.errors import TransferFailed
from baton.tests.e2e.prompts import requests_for, token_prompts
from baton.tests.e2e.topology import Topology


def test_a_refused_incoming_names_the_pair_as_refused(load_tiny, tokenizer):
    (request,) = requests_for(token_prompts(tokenizer, 9)[8:], sampled=False, num_drafts=0)
    with (
        Topology(load_tiny(torch.float32), tokenizer) as here,
        Topology(load_tiny(torch.float64), tokenizer) as there,
    ):
        ours, here.decode = here.decode, there.decode
        error = here.generate([request])[0].error
        here.decode = ours
        assert isinstance(error, TransferFailed)
        assert "dtype" in error.fields["pair_refused"]
        here.wait_idle()
        there.wait_idle()
