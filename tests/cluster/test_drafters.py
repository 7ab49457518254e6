"""Which drafter `baton check` and workers take, by flags; and drafters that are refused before anything is loaded."""

from pathlib import Path

import pytest

from baton.cluster.checkpoint import judge
from baton.cluster.outcome import next_step
from baton.cluster.resolve import find_drafter, find_model, read_config, resolve_worker
from baton.core.errors import ConfigInvalid

pytestmark = pytest.mark.fast
NAMED = {"draft_model": "tiny-eagle3"}
VLLMS = '{"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 3}'
TINY = Path(__file__).parents[2] / "assets" / "tiny"


def worker_of(**flags):
    config = read_config(None, {"model": "tiny", "device": "cpu", **flags})
    return resolve_worker(config, find_model(config.model), worker_id="decode-0")


@pytest.mark.parametrize(
    ("flags", "drafts", "path", "is_looked_up"),
    [
        ({}, 2, "", False),
        (NAMED, 2, "tiny-eagle3", False),
        ({**NAMED, "num_speculative_tokens": "auto"}, 6, "tiny-eagle3", False),
        ({**NAMED, "speculative_method": "eagle3", "num_speculative_tokens": 0}, 0, "tiny-eagle3", False),
        ({"speculative_method": "ngram"}, 4, "", True),
        ({"speculative_config": VLLMS}, 3, "tiny-eagle3", False),
    ],
)
def test_what_a_worker_drafts_by(flags, drafts, path, is_looked_up):
    worker = worker_of(**flags)
    assert worker.num_draft_tokens == drafts
    assert worker.draft_path == (str(TINY.with_name(path)) if path else "")
    assert (worker.lookup is not None) == is_looked_up


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"speculative_method": "eagle3"}, "draft_model names none"),
        ({"speculative_method": "ngram", "draft_model": "tiny-eagle3"}, "ngram does not use it"),
        ({"speculative_method": "none", "draft_model": "tiny-eagle3"}, "none does not use it"),
        ({"speculative_method": "mtp", "draft_model": "tiny-eagle3"}, "mtp does not use it"),
    ],
)
def test_flags_that_say_two_things_are_refused(flags, sentence):
    with pytest.raises(ConfigInvalid, match=sentence):
        worker_of(**flags)


@pytest.mark.parametrize(
    ("drafter", "sentence"),
    [
        ("nowhere", "there is no model directory"),
        (str(TINY), "is no EAGLE-3 drafter"),
        ("pickles", "holds PyTorch pickles (.bin), which run code as they load; convert them to safetensors"),
        ("pickles/config.json", "is a file; --draft-model takes the directory"),
        ("yuhuili/EAGLE3-8B", "`hf download yuhuili/EAGLE3-8B --local-dir EAGLE3-8B`, then --draft-model EAGLE3-8B"),
    ],
)
def test_check_says_why_a_drafter_cannot_be_used(drafter, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "config.json").write_text((find_drafter("tiny-eagle3") / "config.json").read_text())
    (tmp_path / "pickles" / "pytorch_model.bin").write_bytes(b"")
    config = read_config(None, {"model": "tiny", "device": "cpu", "draft_model": drafter})
    found = judge(config)
    assert [sentence in str(error) for error in found.errors] == [True]
    assert find_drafter("tiny-eagle3").is_dir()
    good = judge(read_config(None, {"model": "tiny", "device": "cpu", "draft_model": "tiny-eagle3"}))
    assert (good.errors, good.facts["drafter"]) == ([], "EAGLE-3 drafter tiny-eagle3")


def test_what_to_do_about_a_missing_directory_names_the_bundled_drafter():
    [error] = judge(read_config(None, {"model": "tiny", "device": "cpu", "draft_model": "nowhere"})).errors
    assert error.message.startswith("the drafter: there is no model directory")
    assert "--draft-model: tiny-eagle3" in next_step(error)


def test_the_weights_of_a_worker_include_its_drafters():
    facts = [
        judge(read_config(None, {"model": "tiny", "device": "cpu", "dtype": "float64", **flags})).facts
        for flags in ({"speculative_method": "none"}, NAMED)
    ]
    in_float64 = 4 * (find_drafter("tiny-eagle3") / "model.safetensors").stat().st_size / 2**30
    assert facts[1]["weight_gib"] - facts[0]["weight_gib"] == pytest.approx(in_float64, abs=0.0011)


@pytest.mark.parametrize(
    ("flags", "auto_drafts", "drafts", "has_head"),
    [
        ({}, True, 6, True),
        ({"num_speculative_tokens": "auto"}, True, 6, True),
        ({"num_speculative_tokens": 3}, False, 3, True),
        ({**NAMED}, True, 6, True),
    ],
)
def test_auto_has_every_method_that_there_is(flags, auto_drafts, drafts, has_head):
    worker = worker_of(speculative_method="auto", **flags)
    assert worker.auto_method
    assert worker.lookup is not None
    assert (worker.auto_drafts, worker.num_draft_tokens, worker.has_head) == (auto_drafts, drafts, has_head)


@pytest.mark.parametrize(
    ("flags", "auto_drafts", "drafts"),
    [
        ({}, True, 2),
        ({"draft_model": "tiny-eagle3"}, True, 2),
        ({"num_speculative_tokens": 2}, False, 2),
        ({"num_speculative_tokens": 0}, False, 0),
        ({"speculative_method": "ngram"}, False, 4),
        ({"speculative_method": "none"}, False, 0),
    ],
)
def test_how_many_drafts_is_measured_unless_it_was_said(flags, auto_drafts, drafts):
    """A head whose drafts are refused costs a third of the tokens, of which nobody would look for the reason."""
    worker = worker_of(**flags)
    assert (worker.auto_drafts, worker.num_draft_tokens) == (auto_drafts, drafts)


def test_without_the_flag_no_method_is_chosen():
    worker = worker_of()
    assert not worker.auto_method
    assert worker.lookup is None
    worker = worker_of(speculative_method="auto", num_speculative_tokens=0)
    assert not worker.auto_method
