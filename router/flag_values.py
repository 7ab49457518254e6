"""Values on the router's command line, each read and checked by what argparse calls; it words the refusal."""

from argparse import ArgumentTypeError

MAX_PORT = 65535


def port(text: str) -> int:
    """A port, or 0; gRPC and uvicorn would take what is beyond modulo 65536."""
    value = int(text)
    if not 0 <= value <= MAX_PORT:
        raise ArgumentTypeError(f"{value} is no port")
    return value


def positive_int(text: str) -> int:
    """1 or more."""
    value = int(text)
    if value < 1:
        raise ArgumentTypeError(f"{value} is not positive")
    return value


def count(text: str) -> int:
    """0 or more."""
    value = int(text)
    if value < 0:
        raise ArgumentTypeError(f"{value} is negative")
    return value


def deaths(text: str) -> int:
    """Of workers, before a request is blamed."""
    value = count(text)
    if value == 1:
        raise ArgumentTypeError("one death says nothing about who was there; 0, 2 or more")
    return value


def duration(text: str) -> float:
    """Seconds, 0 or more."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"{value} is no duration")
    return value


def positive_float(text: str) -> float:
    """Above 0, and finite."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"{value} is not positive")
    return value


def share(text: str) -> float:
    """0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise ArgumentTypeError(f"{value} is not in 0 ... 1")
    return value
