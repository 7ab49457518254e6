import json
import pickle
from pathlib import Path

import grpc
import pytest

from baton.core import errors
from baton.core.errors import BatonError, MalformedMessage, PromptTooLong, Retry, from_wire

pytestmark = pytest.mark.fast


def leaves(kind=BatonError):
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in leaves(child))]


@pytest.mark.parametrize("kind", leaves(), ids=lambda kind: kind.__name__)
def test_every_error_survives_the_wire_and_pickle(kind):
    error = kind('no "room" für 🎉\n', limit=3, names=["a"], nothing=None)
    wire = error.to_wire()
    assert wire.isascii()
    assert "\n" not in wire
    for copy in (from_wire(wire), pickle.loads(pickle.dumps(error))):
        assert type(copy) is kind
        assert (copy.message, copy.fields, str(copy)) == (error.message, error.fields, error.message)
    assert kind.grpc_code in grpc.StatusCode.__members__
    assert 400 <= kind.http_status < 600
    assert isinstance(kind.retry, Retry)
    assert kind.__doc__


def test_the_tree_drawn_is_the_tree():
    drawn = [line.split("──")[1].split()[0] for line in errors.__doc__.splitlines() if "──" in line]
    assert sorted(drawn) == sorted(kind.__name__ for kind in leaves()[1:])


def test_a_field_that_is_not_json_hides_nothing():
    copy = from_wire(PromptTooLong("long", path=Path("/x"), limit=2).to_wire())
    assert (type(copy), copy.fields) == (PromptTooLong, {"path": "/x", "limit": 2})


def test_a_newer_peers_error_is_a_plain_one():
    copy = from_wire(json.dumps({"error": "QuotaSpent", "message": "m", "fields": {"a": 1}}))
    assert (type(copy), copy.message, copy.fields) == (BatonError, "m", {"a": 1})


NO_ERRORS = [
    *("", "x", "[]", "3", "null", "{}"),
    '{"error": "NoWorker"}',
    '{"error": [], "message": "m", "fields": {}}',
    '{"error": "NoWorker", "message": "m", "fields": 3}',
    '{"error": "A", "message": "m", "fields": {"message": 1}}',
]


@pytest.mark.parametrize("text", NO_ERRORS)
def test_what_is_no_error_is_malformed(text):
    with pytest.raises(MalformedMessage):
        from_wire(text)
