"""Every text and every list of a client's message has a limit, which holds before anything is made of it."""

from types import SimpleNamespace

import pytest
from google.protobuf.descriptor import FieldDescriptor

from baton.core.errors import InvalidRequest, InvalidSampling
from baton.proto import inference_pb2
from baton.router.access import message_limits
from baton.router.access.message_limits import LIMITS, check_message, is_repeated

pytestmark = pytest.mark.fast
ASKED = (inference_pb2.GenerateRequest, inference_pb2.TokenizeRequest, inference_pb2.GetModelRequest)


def paths(descriptor, above=""):
    for field in descriptor.fields:
        path = above + field.name
        if is_repeated(field) or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            yield path
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            yield from paths(field.message_type, f"{path}.")


def test_every_text_and_every_list_of_a_message_stands_in_the_table():
    found = {path for kind in ASKED for path in paths(kind.DESCRIPTOR)}
    assert found == set(LIMITS)


def test_a_repeated_field_is_known_to_every_protobuf():
    """By `is_repeated` from 6 on, by its label before; 7 has no label, and that of a field with both is not read."""
    fields = inference_pb2.Sampling.DESCRIPTOR.fields_by_name
    assert is_repeated(fields["stop"])
    assert is_repeated(fields["bad_words"])
    assert is_repeated(fields["logit_bias"])
    for name in ("temperature", "n", "grammar"):
        assert is_repeated(fields[name]) is False
    for is_one in (True, False):
        assert is_repeated(SimpleNamespace(is_repeated=is_one)) is is_one
    assert is_repeated(SimpleNamespace(label=FieldDescriptor.LABEL_REPEATED)) is True
    for label in (FieldDescriptor.LABEL_OPTIONAL, FieldDescriptor.LABEL_REQUIRED):
        assert is_repeated(SimpleNamespace(label=label)) is False
    with pytest.raises(AttributeError):  # neither: no silent "no"
        is_repeated(SimpleNamespace())


def test_what_a_message_holds_too_much_of_is_named():
    message = inference_pb2.GenerateRequest(text="a")
    check_message(message)
    message.sampling.stop.extend(["a"] * 17)
    with pytest.raises(InvalidSampling, match="stop has 17 entries; at most 16"):
        check_message(message)
    words = inference_pb2.Sampling(bad_words=[inference_pb2.TokenIds(ids=range(33))])
    with pytest.raises(InvalidSampling, match="bad_words has 33"):
        check_message(words, "sampling.")
    with pytest.raises(InvalidRequest, match="request_id has 129 characters"):
        check_message(inference_pb2.GenerateRequest(request_id="a" * 129))


def test_a_field_that_the_table_lacks_is_no_silent_pass(monkeypatch):
    monkeypatch.setattr(message_limits, "LIMITS", {})
    with pytest.raises(KeyError):
        check_message(inference_pb2.GenerateRequest(text="a"))
