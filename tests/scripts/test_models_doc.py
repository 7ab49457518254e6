"""docs/models.md is what the tests prove, and the script says so when it is not."""

import pytest

from baton.scripts import models_doc


@pytest.fixture(scope="module")
def ids():
    return models_doc.collected()


def test_the_page_is_what_the_tests_prove(ids, monkeypatch):
    monkeypatch.setattr(models_doc, "collected", lambda: ids)
    assert models_doc.PAGE.read_text() == models_doc.page()


def test_a_test_that_is_gone_takes_its_cell_along(ids):
    [feature] = [feature for feature in models_doc.FEATURES if feature.name == "FP8"]
    for kind in ("mixtral", "qwen2"):
        assert models_doc.is_proved(feature, kind, ids)
        assert not models_doc.is_proved(feature, kind, [test for test in ids if f"-{kind}-" not in test])


@pytest.mark.fast
def test_every_refusal_names_what_it_refuses():
    for what, changes in models_doc.REFUSED:
        sentence = models_doc.refusal(changes)
        assert len(sentence) > 20, what
        assert "DIR" in sentence or "max-model-len" in sentence
