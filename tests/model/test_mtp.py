"""The MTP head against a reference without paging, over a prompt and in chained drafts."""

import pytest
import torch

from baton.core.numerics import Numerics
from baton.tests.model.harness import Paged, prompt
from baton.tests.model.test_logits import CASES, CONFIGURATIONS


@pytest.mark.long
@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_entries_over_a_prompt(name, dtype, numerics, tiny_checkpoint, load, reference, check_logits):
    path = tiny_checkpoint(**CONFIGURATIONS[name])
    model, truth = load(path, dtype, numerics), reference(path, dtype)
    ids = prompt(62)
    wanted = truth.lm_head(truth.mtp(ids[1:], truth.hidden(ids)[:-1]))
    for chunk_len in (61, 1, 7, 16, 48):
        paged = Paged(model)
        hidden = paged.prefill(ids)[:-1]
        parts = [(0, start, min(start + chunk_len, 61)) for start in range(0, 61, chunk_len)]
        out = [paged.mtp(ids[s + 1 : e + 1], hidden[s:e], paged.prefill_batch([(q, s, e)])) for q, s, e in parts]
        check_logits("MTP head", paged.logits(torch.cat(out)), wanted)


@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.long
def test_chained_drafts(name, dtype, numerics, tiny_checkpoint, load, reference, check_logits):
    """Each further entry takes a drafted token and the head's own output, as one decode row."""
    path = tiny_checkpoint(**CONFIGURATIONS[name])
    model, truth = load(path, dtype, numerics), reference(path, dtype)
    ids = prompt(50)
    paged = Paged(model)
    hidden = paged.prefill(ids)[:-1]
    out = paged.mtp(ids[1:], hidden, paged.prefill_batch([(0, 0, 49)]))[-1:]
    next_ids, true_hidden = ids[1:], truth.hidden(ids)[:-1]
    for draft in range(5):
        true_out = truth.mtp(next_ids, true_hidden)[-1:]
        true_logits = truth.lm_head(true_out)
        check_logits("MTP head", paged.logits(out), true_logits)
        token = true_logits.argmax(dim=-1)
        next_ids, true_hidden = torch.cat([next_ids, token]), torch.cat([true_hidden, true_out])
        out = paged.mtp(token, out, paged.decode_batch([0], [49 + draft], 1, bound=100))


@pytest.mark.fast
def test_a_model_loaded_without_its_head_has_none(tiny_checkpoint, load):
    path = tiny_checkpoint()
    model = load(path, with_mtp=False)
    assert model.kv_layout(16).num_layers == model.config.num_layers
    assert (model.kv_layout(16).has_mtp, load(path).kv_layout(16).has_mtp) == (False, True)
    assert load(path).kv_layout(16).num_layers == model.config.num_layers + 1
    paged = Paged(model)
    with pytest.raises(AssertionError, match="without a draft head"):
        paged.mtp(prompt(3), torch.zeros(3, 32), paged.prefill_batch([(0, 0, 3)]))


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.long
def test_chained_drafts_of_each_family(kind, tiny_checkpoint, load, reference, check_logits):
    """The families whose checkpoints may have a head."""
    path = tiny_checkpoint(kind=kind)
    model, truth, ids = load(path, torch.float64), reference(path, torch.float64), prompt(40)
    paged = Paged(model)
    hidden = paged.prefill(ids)[:-1]
    out = paged.mtp(ids[1:], hidden, paged.prefill_batch([(0, 0, 39)]))
    wanted = truth.mtp(ids[1:], truth.hidden(ids)[:-1])
    check_logits("MTP head", paged.logits(out), truth.lm_head(wanted))
    token = truth.lm_head(wanted[-1:]).argmax(dim=-1)
    chained = paged.mtp(token, out[-1:], paged.decode_batch([0], [39], 1, bound=80))
    wanted = truth.mtp(torch.cat([ids[1:], token]), torch.cat([truth.hidden(ids)[:-1], wanted[-1:]]))[-1:]
    check_logits("MTP head", paged.logits(chained), truth.lm_head(wanted))
