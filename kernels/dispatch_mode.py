"""What sees every operation of torch on this thread, made without Dynamo."""

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """Subclasses say in `__torch_dispatch__` what they do with an operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: what hides the dispatch from Dynamo imports Dynamo first, which takes seconds."""
        return False
