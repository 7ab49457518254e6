"""Values on the router's command line that are no keys of `ServeConfig`, checked by what argparse calls."""

from argparse import ArgumentTypeError

MAX_PORT = 65535


def port(text: str) -> int:
    """A port, or 0; gRPC and uvicorn would take what is beyond modulo 65536."""
    value = int(text)
    if not 0 <= value <= MAX_PORT:
        raise ArgumentTypeError(f"{value} is no port")
    return value


def count(text: str) -> int:
    """0 or more."""
    value = int(text)
    if value < 0:
        raise ArgumentTypeError(f"{value} is negative")
    return value
