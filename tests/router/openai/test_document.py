"""What docs/openai.md says is backed by tests that exist, and every parameter that is refused has its reason."""

import json
import re
from pathlib import Path

import pytest

from baton.core.errors import InvalidRequest
from baton.router.openai.chat_request import ChatRequest
from baton.router.openai.completion_request import CompletionRequest
from baton.router.openai.options import HARMLESS, REFUSED

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "openai.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in DOCUMENT.partition("## Parameters")[2].partition("## Errors")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| parameter")
]


def test_every_row_names_what_backs_it():
    tests = [*(ROOT / "tests/router/openai").glob("test_*.py"), ROOT / "tests/e2e/test_openai.py"]
    names = {name for path in tests for name in re.findall(r"def (test_\w+)", path.read_text())}
    files = {path.name for path in (*tests, *(ROOT / "router" / "openai").glob("*.py"))}
    assert len(ROWS) >= 30
    for row in ROWS:
        assert len(row) == 4, row
        backing = re.findall(r"`([\w.]+)`", row[3])
        assert row[3] == "the same" or backing, row
        assert set(backing) <= names | files, row


def test_every_field_of_a_request_is_in_the_document():
    fields = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    assert sorted(name for name in fields if f"`{name}`" not in DOCUMENT and f"`{name}:" not in DOCUMENT) == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_is_refused_unless_it_asks_for_nothing(name):
    nothing, why = REFUSED[name]
    kind = CompletionRequest if name not in CompletionRequest.model_fields else ChatRequest
    body = {"messages": [{"role": "user", "content": "x"}]} if kind is ChatRequest else {"prompt": "x"}
    for value in nothing:
        kind.model_validate_json(json.dumps(body | {name: value})).refuse_unbuilt()
    with pytest.raises(InvalidRequest) as refused:
        kind.model_validate_json(json.dumps(body | {name: {"some": "thing"}})).refuse_unbuilt()
    assert refused.value.fields["field"] == name
    assert why in refused.value.message


def test_what_changes_nothing_is_not_told_of():
    asked = CompletionRequest.model_validate_json(json.dumps({"prompt": "x", "new": 1} | dict.fromkeys(HARMLESS, "x")))
    asked.refuse_unbuilt()
    assert asked.ignored() == ["new"]
