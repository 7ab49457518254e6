"""The check for breaking changes of `proto/`: it finds every planted one, names it, and lets additions pass."""

import re
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
try:
    import check_proto  # type: ignore[import-not-found]
finally:
    sys.path.remove(str(ROOT / "scripts"))

Field = descriptor_pb2.FieldDescriptorProto


def files():
    return {file.name.rpartition("/")[2]: file for file in check_proto.current_files()}


def message(found, file, name):
    return next(one for one in found[file].message_type if one.name == name)


def field(found, file, name, number):
    return next(one for one in message(found, file, name).field if one.number == number)


def remove_field(found):
    fields = message(found, "inference.proto", "GenerateRequest").field
    del fields[[one.name for one in fields].index("tenant")]


def reuse_a_number(found):
    remove_field(found)
    message(found, "inference.proto", "GenerateRequest").field.add(name="other", number=7, type=9, label=1)


def remove_a_value(found):
    enum = message(found, "kv.proto", "Deny").enum_type[0]
    del enum.value[2]


def remove_an_rpc(found):
    del found["admin.proto"].service[0].method[1]


def drop_optional(found):
    moved = field(found, "inference.proto", "Sampling", 1)
    moved.proto3_optional = False
    moved.ClearField("oneof_index")


def leave_a_oneof(found):
    field(found, "inference.proto", "GenerateRequest", 2).ClearField("oneof_index")


BREAKS = {
    "field removed": (remove_field, r"field baton.v1.GenerateRequest 7: removed \(tenant, one string\)$"),
    "number reused": (reuse_a_number, "field baton.v1.GenerateRequest 7: was tenant, one string, is other"),
    "renumbered": (
        lambda found: setattr(field(found, "inference.proto", "Finish", 1), "number", 9),
        "field baton.v1.Finish 1: removed .*; renumbered to 9",
    ),
    "renamed": (
        lambda found: setattr(field(found, "inference.proto", "Finish", 1), "name", "why"),
        "was reason, one string, is why, one string",
    ),
    "retyped": (
        lambda found: setattr(field(found, "inference.proto", "Finish", 1), "type", Field.TYPE_BYTES),
        "was reason, one string, is reason, one bytes",
    ),
    "of another message": (
        lambda found: setattr(field(found, "inference.proto", "Finish", 2), "type_name", ".baton.v1.Model"),
        "is stats, one .baton.v1.Model",
    ),
    "one to many": (
        lambda found: setattr(field(found, "inference.proto", "Finish", 1), "label", Field.LABEL_REPEATED),
        "is reason, many string",
    ),
    "no presence any more": (drop_optional, "was max_tokens, one int32 with presence, is max_tokens, one int32"),
    "out of its oneof": (leave_a_oneof, "was text, one string of prompt, is text, one string"),
    "message removed": (
        lambda found: found["inference.proto"].message_type.remove(message(found, "inference.proto", "Finish")),
        "message baton.v1.Finish: removed",
    ),
    "value removed": (remove_a_value, "value baton.v1.Deny.Reason .*: removed"),
    "value renumbered": (
        lambda found: setattr(message(found, "kv.proto", "Deny").enum_type[0].value[1], "number", 77),
        "value baton.v1.Deny.Reason .*: was 1, is 77",
    ),
    "rpc removed": (remove_an_rpc, "rpc baton.v1.Admin/Inventory: removed"),
    "rpc answers something else": (
        lambda found: setattr(found["admin.proto"].service[0].method[0], "output_type", ".baton.v1.Model"),
        "rpc baton.v1.Admin/Status: was .* is .baton.v1.StatusRequest to .baton.v1.Model",
    ),
    "rpc streams": (
        lambda found: setattr(found["admin.proto"].service[0].method[0], "server_streaming", True),
        "to stream .baton.v1.StatusReply",
    ),
    "service removed": (lambda found: found["admin.proto"].ClearField("service"), "service baton.v1.Admin: removed"),
}


def surface(found):
    return check_proto.Surface.of_files(list(found.values()))


@pytest.mark.parametrize("name", BREAKS)
def test_a_planted_break_is_found_and_named(name):
    change, says = BREAKS[name]
    found = files()
    before = surface(found)
    change(found)
    breaks = check_proto.compare(before, surface(found)).breaks
    assert any(re.search(says, line) for line in breaks), breaks


def test_additions_pass():
    found = files()
    before = surface(found)
    message(found, "inference.proto", "GenerateRequest").field.add(name="new", number=99, type=9, label=1)
    message(found, "kv.proto", "Deny").enum_type[0].value.add(name="NEW", number=99)
    found["inference.proto"].message_type.add(name="New")
    found["admin.proto"].service[0].method.add(name="New", input_type=".baton.v1.New", output_type=".baton.v1.New")
    compared = check_proto.compare(before, surface(found))
    assert not compared.breaks
    assert len(compared.additions) == 4


def test_a_baseline_reads_as_it_was_written():
    whole = surface(files())
    assert len(whole.facts) > 500
    assert check_proto.Surface.of_text(whole.to_text()) == whole


def test_nothing_that_was_promised_is_broken(capsys):
    """If this fails: the change breaks deployed peers. `scripts/check_proto.py --help` says what to do."""
    assert check_proto.main([]) == 0, capsys.readouterr().out


def test_a_break_is_accepted_only_with_a_reason_which_stays(tmp_path, capsys):
    path = tmp_path / "baseline.txt"
    whole = surface(files()).to_text()
    path.write_text(whole + "field baton.v1.Gone 1: name, one string\n")
    arguments = ["--baseline", str(path)]
    assert check_proto.main(arguments) == 1
    assert "break: field baton.v1.Gone 1: removed" in capsys.readouterr().out
    assert check_proto.main([*arguments, "--accept"]) == 1
    assert check_proto.main([*arguments, "--accept", "--reason", " "]) == 1
    assert "Gone" in path.read_text().splitlines()[-1]
    assert check_proto.main([*arguments, "--accept", "--reason", "nobody ever\nset it"]) == 0
    assert "# break: field baton.v1.Gone 1: removed (name, one string); nobody ever set it" in path.read_text()
    assert check_proto.main(arguments) == 0
    assert check_proto.main([*arguments, "--accept"]) == 0
    assert "nobody ever set it" in path.read_text()
