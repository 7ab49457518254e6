"""Refuse changes of `proto/` that break who is built against it: another release's client, router or worker.

    python scripts/check_proto.py                          # what changed since the baseline; ends with 1 at a break
    python scripts/check_proto.py --accept                 # additions become part of the baseline, at each release
    python scripts/check_proto.py --accept --reason WHY    # so does a deliberate break; the reason stays in the file

The baseline, `proto/baseline.txt`, has a line for each fact that others may rely on. A fact that is gone or differs
is a break: a field that was removed, renumbered, renamed or retyped, has another cardinality or presence, or came into
or out of a oneof; an enum's value or an RPC that was removed, an RPC of other types. New facts are none. It reads the
descriptors of the generated code, which `tests/test_proto.py` holds against the `.proto` files.
"""

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import descriptor_pb2

BASELINE = Path(__file__).resolve().parents[1] / "proto" / "baseline.txt"
HEAD = "# What others rely on in proto/*.proto; scripts/check_proto.py compares and writes it.\n"
BREAK = "# break: "
_TYPES = descriptor_pb2.FieldDescriptorProto.Type
_LABELS = {1: "one", 2: "required", 3: "many"}
Files = Sequence[descriptor_pb2.FileDescriptorProto]


@dataclass(frozen=True, slots=True)
class Surface:
    """Facts by what they are about: a message, a field by its number, an enum's value, an RPC."""

    facts: Mapping[str, str]

    @classmethod
    def of_files(cls, files: Files) -> "Surface":
        """What the descriptors say."""
        facts: dict[str, str] = {}
        for file in files:
            for message in file.message_type:
                facts |= dict(_message_facts(f"{file.package}.{message.name}", message))
            for enum in file.enum_type:
                facts |= dict(_enum_facts(f"{file.package}.{enum.name}", enum))
            for service in file.service:
                facts |= dict(_service_facts(f"{file.package}.{service.name}", service))
        return cls(facts)

    @classmethod
    def of_text(cls, text: str) -> "Surface":
        """What a baseline says."""
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return cls({key: fact for key, _, fact in (line.partition(": ") for line in lines)})

    def to_text(self) -> str:
        """A line for each fact, sorted."""
        return "".join(f"{key}: {fact}\n" for key, fact in sorted(self.facts.items()))


@dataclass(frozen=True, slots=True)
class Comparison:
    """What became of a baseline.

    Attributes:
        breaks: one line each.
        additions: keys of new facts.
    """

    breaks: tuple[str, ...]
    additions: tuple[str, ...]


def compare(before: Surface, after: Surface) -> Comparison:
    """What is gone or differs, and what is new."""
    breaks = []
    for key, fact in sorted(before.facts.items()):
        now = after.facts.get(key)
        if now is None:
            breaks.append(f"{key}: removed ({fact}){_moved(key, fact, after)}")
        elif now != fact:
            breaks.append(f"{key}: was {fact}, is {now}")
    return Comparison(tuple(breaks), tuple(sorted(after.facts.keys() - before.facts.keys())))


def current_files() -> Files:
    """Descriptors of the generated code."""
    files = []
    for path in sorted(BASELINE.parent.glob("*.proto")):
        module = importlib.import_module(f"baton.proto.{path.stem}_pb2")
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        files.append(file)
    return files


def accept(path: Path, surface: Surface, breaks: Iterable[str], reason: str) -> None:
    """Write a baseline; breaks are kept as remarks, the newest last."""
    remarks = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith(BREAK)]
    remarks += [f"{BREAK}{line}; {' '.join(reason.split())}" for line in breaks]
    path.write_text(HEAD + "".join(f"{line}\n" for line in remarks) + surface.to_text(), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and say; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--accept", action="store_true", help="make the present state the baseline")
    parser.add_argument("--reason", default="", help="why a break is meant; without one, none is accepted")
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    chosen = parser.parse_args(arguments)
    surface = Surface.of_files(current_files())
    found = compare(Surface.of_text(chosen.baseline.read_text(encoding="utf-8")), surface)
    for line in found.breaks:
        print(f"break: {line}")
    print(f"{len(found.breaks)} breaks, {len(found.additions)} additions since the baseline")
    if found.breaks and not (chosen.accept and chosen.reason.strip()):
        print("Keep what was there and add beside it; if a break is meant: --accept --reason WHY", file=sys.stderr)
        return 1
    if chosen.accept:
        accept(chosen.baseline, surface, found.breaks, chosen.reason)
    return 0


def _message_facts(name: str, message: descriptor_pb2.DescriptorProto) -> Iterator[tuple[str, str]]:
    yield f"message {name}", "map entry" if message.options.map_entry else "message"
    for field in message.field:
        oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
        words = [_LABELS[field.label], field.type_name or _TYPES.Name(field.type).removeprefix("TYPE_").lower()]
        words += ["with presence"] if field.proto3_optional else [f"of {oneof}"] if oneof else []
        yield f"field {name} {field.number}", f"{field.name}, {' '.join(words)}"
    for inner in message.nested_type:
        yield from _message_facts(f"{name}.{inner.name}", inner)
    for enum in message.enum_type:
        yield from _enum_facts(f"{name}.{enum.name}", enum)


def _enum_facts(name: str, enum: descriptor_pb2.EnumDescriptorProto) -> Iterator[tuple[str, str]]:
    yield f"enum {name}", "enum"
    for value in enum.value:
        yield f"value {name} {value.name}", str(value.number)


def _service_facts(name: str, service: descriptor_pb2.ServiceDescriptorProto) -> Iterator[tuple[str, str]]:
    yield f"service {name}", "service"
    for method in service.method:
        given = ("stream " if method.client_streaming else "") + method.input_type
        taken = ("stream " if method.server_streaming else "") + method.output_type
        yield f"rpc {name}/{method.name}", f"{given} to {taken}"


def _moved(key: str, fact: str, after: Surface) -> str:
    """Where a removed field is now, if its name is still there."""
    kind, _, place = key.partition(" ")
    if kind != "field":
        return ""
    message, name = place.rpartition(" ")[0], fact.partition(",")[0]
    same = [
        other
        for other, now in after.facts.items()
        if other.startswith(f"field {message} ") and now.startswith(f"{name},")
    ]
    return f"; renumbered to {same[0].rpartition(' ')[2]}" if same else ""


if __name__ == "__main__":
    sys.exit(main())
