"""What may go wrong with one system of one row, so that it is named in the result and the other rows are measured.

A list of types on purpose: what nobody thought of ends the process that measures, which its supervisor reports.
"""

import subprocess
from typing import Any

from triton.errors import TritonError

from baton.core.errors import BatonError

ERRORS = (
    BatonError,
    TritonError,
    RuntimeError,  # torch's own, of memory and of devices too
    ValueError,
    TypeError,
    AssertionError,
    LookupError,
    AttributeError,
    ArithmeticError,
    ImportError,
    SyntaxError,
    OSError,
    subprocess.SubprocessError,
)
MAX_MESSAGE_LEN = 600


def failure_of(error: BaseException) -> dict[str, Any]:
    """Its type and the beginning of what it says."""
    return {"error": type(error).__name__, "message": str(error)[:MAX_MESSAGE_LEN]}
