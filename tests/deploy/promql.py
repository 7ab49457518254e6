"""As much of PromQL as is needed to say which series an expression reads, and to refuse one that is not well formed."""

import re
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<string>"(?:[^"\\]|\\.)*")|(?P<duration>\d+(?:ms|[smhdwy])\b)|(?P<number>\d+(?:\.\d+)?)
    |(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<op>=~|!~|!=|==|<=|>=|[-+*/%^<>=])|(?P<mark>[(){}\[\],])""",
    re.VERBOSE,
)
BY = {"by", "without", "on", "ignoring", "group_left", "group_right"}
WORDS = {"and", "or", "unless", "bool", "offset"}
AGGREGATIONS = {"sum", "min", "max", "avg", "count", "topk"}
FUNCTIONS = {"rate", "increase", "delta", "histogram_quantile", "absent", "min_over_time", "max_over_time"}
RANGE_FUNCTIONS = {"rate", "increase", "delta", "min_over_time", "max_over_time"}
CLOSING = {"(": ")", "{": "}", "[": "]"}


@dataclass
class Selector:
    """One series name with its matchers: (label, operator, value)."""

    name: str
    matchers: list[tuple[str, str, str]] = field(default_factory=list)
    window: str = ""
    function: str = ""  # that it is the argument of


@dataclass
class Parsed:
    selectors: list[Selector]
    grouping: set[str]  # labels of by, on, ...


def tokens_of(text):
    at, found = 0, []
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"at {at}: {text[at : at + 20]!r}")
        if match.lastgroup != "space":
            found.append((match.lastgroup, match.group()))
        at = match.end()
    return found


def parse(text):
    """What an expression reads.

    Raises:
        ValueError: brackets do not match, a function is unknown, or a range is missing or not wanted.
    """
    tokens = tokens_of(text)
    _check_brackets(tokens)
    parsed, at = Parsed([], set()), 0
    while at < len(tokens):
        kind, value = tokens[at]
        following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        if kind == "name" and value in BY:
            names, at = _labels(tokens, at + 1)
            parsed.grouping |= names
            continue
        is_call = value in AGGREGATIONS | FUNCTIONS and following in ("(", "by", "without")
        if kind == "name" and value not in WORDS and not is_call:
            if following == "(":
                raise ValueError(f"no such function: {value}")
            before = [value for _, value in tokens[max(0, at - 2) : at]]
            selector, at = _selector(tokens, at)
            selector.function = before[0] if before[1:] == ["("] and before[0] in FUNCTIONS else ""
            if bool(selector.window) != (selector.function in RANGE_FUNCTIONS):
                raise ValueError(f"{selector.name}: {selector.function or 'no function'} and range {selector.window!r}")
            parsed.selectors.append(selector)
            continue
        at += 1
    return parsed


def _check_brackets(tokens):
    open_marks = []
    for kind, value in tokens:
        if kind == "mark" and value in CLOSING:
            open_marks.append(CLOSING[value])
        elif kind == "mark" and value != "," and (not open_marks or open_marks.pop() != value):
            raise ValueError(f"{value} closes nothing")
    if open_marks:
        raise ValueError(f"{open_marks[-1]} is missing")


def _labels(tokens, at):
    if at >= len(tokens) or tokens[at][1] != "(":
        raise ValueError("labels in brackets are missing")
    names = set()
    at += 1
    while tokens[at][1] != ")":
        if tokens[at][0] == "name":
            names.add(tokens[at][1])
        at += 1
    return names, at + 1


def _selector(tokens, at):
    selector = Selector(tokens[at][1])
    at += 1
    if at < len(tokens) and tokens[at][1] == "{":
        at += 1
        while tokens[at][1] != "}":
            (_, label), (_, operator), (kind, value) = tokens[at : at + 3]
            if operator not in ("=", "!=", "=~", "!~") or kind != "string":
                raise ValueError(f"{selector.name}: no matcher: {label} {operator} {value}")
            selector.matchers.append((label, operator, value[1:-1]))
            at += 3
            if tokens[at][1] == ",":
                at += 1
        at += 1
    if at < len(tokens) and tokens[at][1] == "[":
        if tokens[at + 1][0] != "duration":
            raise ValueError(f"{selector.name}: a range of {tokens[at + 1][1]}")
        selector.window = tokens[at + 1][1]
        at += 3
    return selector, at
