"""Every field of every body has a limit: a new one without fails here, before a client finds it."""

import pytest
from pydantic import BaseModel

from baton.core.errors import InvalidRequest
from baton.router.openai.limits import LIGHT_ITEMS, LIGHT_NUMBERS, MAX_CONTAINERS, check_shape, is_light
from baton.router.openai.options import Wire
from baton.router.openai.understand import KINDS

pytestmark = pytest.mark.fast
BOUNDED = ("str", "list", "dict")


def unbounded(schema, definitions, place, seen):
    """Places of texts, lists and objects without `max_length` in pydantic's own description of a model."""
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if kind == "definition-ref":
        name = schema["schema_ref"]
        if name not in seen:
            seen.add(name)
            yield from unbounded(definitions[name], definitions, place, seen)
        return
    if kind in BOUNDED and schema.get("max_length") is None:
        yield place
    if kind == "model-fields":
        for name, field in schema["fields"].items():
            yield from unbounded(field, definitions, f"{place}.{name}", seen)
        return
    for key, value in schema.items():
        if key in ("schema", "items_schema", "values_schema", "keys_schema"):
            yield from unbounded(value, definitions, place, seen)
        elif key == "choices":
            for choice in value:
                yield from unbounded(choice[0] if isinstance(choice, tuple) else choice, definitions, place, seen)


def places(model):
    schema = model.__pydantic_core_schema__
    definitions = {}
    if schema["type"] == "definitions":
        definitions = {one["ref"]: one for one in schema["definitions"]}
        schema = schema["schema"]
    return list(unbounded(schema, definitions, model.__name__, set()))


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_list_and_object_of_a_body_has_a_limit(kind):
    assert places(KINDS[kind][0]) == []


def test_a_field_without_a_limit_is_found():
    class Part(Wire):
        names: list[int] | None = None

    class Body(Wire):
        text: str | None = None
        parts: list[Part] | None = None
        free: dict[str, int] | None = None

    assert places(Body) == ["Body.text", "Body.parts", "Body.parts.names", "Body.free", "Body.free"]


def test_all_bodies_are_made_of_parts_that_are_walked():
    def every(model):
        return {model}.union(*map(every, model.__subclasses__()))

    known = {name for name in (each.__name__ for each in every(Wire)) if not name.startswith("Wire")}
    assert set(KINDS) <= known and all(issubclass(each, BaseModel) for each in every(Wire))


def test_a_body_is_light_by_what_is_outside_and_inside_its_texts():
    assert is_light(b'{"prompt":"a"}')
    assert is_light(b'{"prompt":[' + b"1," * 1023 + b"1]}"), "an ordinary prompt of token ids"
    assert not is_light(b'{"prompt":[' + b"1," * (LIGHT_NUMBERS + 1) + b"1]}")
    assert not is_light(b'{"prompt":[' + b'"a",' * (LIGHT_ITEMS + 1) + b'"a"]}')
    assert not is_light(b'{"prompt":"' + b"{" * 100 + b'"}')  # a guess, by which it is read elsewhere


def test_too_many_objects_are_refused_wherever_they_are_and_text_is_not_counted():
    check_shape(b'{"prompt":"' + b'[\\"{' * MAX_CONTAINERS + b'"}')
    with pytest.raises(InvalidRequest, match="objects and arrays"):
        check_shape(b'{"anything":[' + b"[]," * MAX_CONTAINERS + b'"\\"[[[" ]}')
