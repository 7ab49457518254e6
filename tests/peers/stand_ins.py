"""Modules that vLLM's tests import of vLLM and that clients of a server have no use for.

Every `vllm.*` import finds a module whose names are `MagicMock`s; the few that a test needs for real are here. A test
that checks vLLM's own classes fails against them; accepted.json says so of each.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from unittest.mock import MagicMock

from transformers import AutoTokenizer


def model_directory():
    """Of the model that is served."""
    return importlib.import_module("tests.utils").model_directory()


class _Error(Exception):
    """For `except` and `pytest.raises` clauses."""


class _ModelConfig:
    def __init__(self, *arguments, **options):
        self._size = len(AutoTokenizer.from_pretrained(model_directory()))

    def get_vocab_size(self):
        return self._size


REAL = {
    "vllm.tokenizers": {
        "get_tokenizer": lambda *arguments, **options: AutoTokenizer.from_pretrained(model_directory())
    },
    "vllm.config": {"ModelConfig": _ModelConfig},
    "vllm.exceptions": {"VLLMValidationError": _Error},
    "vllm.platforms": {"current_platform": MagicMock(**{"is_rocm.return_value": False})},
    "vllm.version": {"__version__": importlib.metadata.version("baton-pd")},  # of what is served here
    "vllm": {"envs": types.SimpleNamespace(VLLM_USE_RUST_FRONTEND=False)},
}


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name != "vllm" and not name.startswith("vllm."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = _Module(spec.name)
        module.__path__ = []
        for name, value in REAL.get(spec.name, {}).items():
            setattr(module, name, value)
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())
