"""Every text and every list of a client's message has a limit, which holds before anything is made of it."""

import pytest
from google.protobuf.descriptor import FieldDescriptor

from baton.core.errors import InvalidRequest, InvalidSampling
from baton.proto import inference_pb2
from baton.router import message_limits
from baton.router.message_limits import LIMITS, check_message, is_repeated

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
