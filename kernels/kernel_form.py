"""A specialization of a Triton kernel as data, from which a process without a GPU can compile it."""

import hashlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triton import compile as compile_source
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import get_cache_key, get_cache_manager

_MAX_FILE_NAME_LEN = 150  # Triton's limit for a cached file's name without its ending


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelForm:
    """Everything that Triton's compilation of a kernel depends on.

    Attributes:
        module: module of the kernel.
        name: name of the kernel in its module.
        kernel_key: Triton's hash of the kernel's text and of all that it calls. It depends on the order in which a
            process has met kernels, so a process that compiles for another one uses the other one's hash.
        signature: Triton's type of each argument.
        constants: constants by position.
        attributes: divisibility of arguments by position.
        options: Triton's options.
        target: kind of GPU.
    """

    module: str
    name: str
    kernel_key: str
    signature: Mapping[str, Any]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]
    target: GPUTarget

    @classmethod
    def asked(cls, function: Any, what: Mapping[str, Any], target: GPUTarget) -> "KernelForm | None":
        """Build it from what Triton passes to its `jit_cache_hook`; None if the module lacks the kernel by that name.

        Args:
            function: kernel: the hook's `fn`.
            what: the hook's `compile`.
            target: target of the launch.
        """
        kernel: Any = function.jit_function
        is_there = getattr(importlib.import_module(function.module), function.name, None) is kernel
        if not is_there:
            return None
        options = json.loads(what["specialization_data"])["options"]
        return cls(
            module=function.module,
            name=function.name,
            kernel_key=kernel.cache_key,
            signature=what["signature"],
            constants=what["constants"],
            attributes=what["configs"][0],
            options={name: tuple(value) if isinstance(value, list) else value for name, value in options.items()},
            target=target,
        )

    def source(self) -> Any:
        """Source object that Triton compiles."""
        kernel = getattr(importlib.import_module(self.module), self.name)
        kernel.hash = self.kernel_key
        kind = GluonASTSource if kernel.is_gluon() else ASTSource
        return kind(kernel, dict(self.signature), dict(self.constants), dict(self.attributes))

    def is_cached(self) -> bool:
        """Return whether Triton's cache has it."""
        source, backend = self.source(), make_backend(self.target)
        key = get_cache_key(
            source, backend, backend.parse_options(dict(self.options)), get_cache_invalidating_env_vars()
        )
        name = f"{source.name[:_MAX_FILE_NAME_LEN]}.json"
        found = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name)
        return name in (found or {})

    def compile(self) -> None:
        """Compile it into Triton's cache if it is missing there, and its C launcher where Triton compiles one.

        Raises:
            Exception: whatever Triton raises.
        """
        source = self.source()
        compiled = compile_source(source, target=self.target, options=dict(self.options))
        if self.target.backend == "cuda" and hasattr(
            nvidia, "make_launcher"
        ):  # up to Triton 3.6 launchers are C, one per signature
            nvidia.CudaLauncher(source, compiled.metadata)
