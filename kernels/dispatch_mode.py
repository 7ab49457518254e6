"""A base class for modes that see every torch operation on this thread, which does not import Dynamo."""

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """Base class; subclasses define in `__torch_dispatch__` what they do with an operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because hiding the dispatch from Dynamo would first import Dynamo, which takes seconds."""
        return False
