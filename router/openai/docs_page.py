"""`/docs`: the OpenAPI document as one page, for people. It loads nothing from elsewhere and runs nothing."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{background:#8882;padding:.1em .3em;border-radius:3px}summary{cursor:pointer;margin:.4rem 0}"
    "table{border-collapse:collapse;margin:.5rem 0 1rem}"
    "td,th{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0}"
)


def docs_page(document: Mapping[str, Any]) -> str:
    """The page of an OpenAPI document."""
    info = document["info"]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])}</title>",
        f"<style>{_STYLE}</style>",
        f"<h1>{escape(info['title'])}</h1><p>{escape(info['summary'])}.",
        'For programs: <a href="openapi.json">openapi.json</a>.</p>',
    ]
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts += _operation(path, method, operation, schemas)
    return "\n".join([*parts, "</html>\n"])


def _operation(path: str, method: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    yield f"<details><summary><code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}</summary>"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None:
        schema = schemas[body["schema"]["$ref"].rpartition("/")[2]]
        needed = schema.get("required", ())
        yield "<table><tr><th>parameter<th>type<th>"
        for name, about in schema["properties"].items():
            note = "required" if name in needed else about.get("description", "")
            yield f"<tr><td><code>{escape(name)}</code><td>{escape(_kind(about))}<td>{escape(note)}"
        yield "</table>"
    yield "<table>"
    for status, reply in operation["responses"].items():
        yield f"<tr><td>{escape(status)}<td>{escape(reply['description'])}"
    yield "</table></details>"


def _kind(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(kind for kind in map(_kind, schema["anyOf"]) if kind != "null")
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", ""))
