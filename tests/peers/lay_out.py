"""Lays vLLM's tests out beside our fixture: `python lay_out.py SOURCE WORK`.

WORK gets `tests/` with the chosen files of SOURCE, `tests/utils.py` (ours), `vllm/` (stand-ins) and the pytest plugin.
"""

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
FILES = (
    "entrypoints/conftest.py",
    "entrypoints/openai/completion/test_completion.py",
    "entrypoints/openai/chat_completion/test_chat.py",
    "entrypoints/openai/chat_completion/test_chat_completion.py",
    "entrypoints/openai/chat_completion/test_completion_with_function_calling.py",
    "entrypoints/openai/chat_completion/test_include_reasoning.py",
    "entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py",
    "entrypoints/openai/chat_completion/test_logprob_token_ids.py",
    "entrypoints/openai/chat_completion/test_chat_echo.py",
    "entrypoints/openai/chat_completion/test_batched_chat_completions.py",
    "entrypoints/openai/chat_completion/test_root_path.py",
    "entrypoints/openai/chat_completion/test_enable_force_include_usage.py",
    "entrypoints/openai/test_chunked_prompt.py",
    "entrypoints/openai/test_return_token_ids.py",
    "entrypoints/openai/test_return_tokens_as_ids.py",
    "entrypoints/openai/responses/conftest.py",
    "entrypoints/openai/responses/test_simple.py",
    "entrypoints/anthropic/test_messages.py",
    "entrypoints/serve/instrumentator/test_basic.py",
    "entrypoints/serve/tokenize/test_tokenization.py",
    "tool_use/test_tool_calls.py",
    "tool_use/test_chat_completions.py",
    "tool_use/test_parallel_tool_calls.py",
    "tool_use/conftest.py",
    "tool_use/utils.py",
)

# Others import from it what only serves their tests of vLLM's classes.
IMPORTED = "entrypoints/openai/chat_completion/test_serving_chat.py"
STAND_IN = """
from unittest.mock import MagicMock


def __getattr__(name):
    if name.startswith(("__", "pytest")):
        raise AttributeError(name)
    return MagicMock(name=name)
"""


def lay_out(source, work):
    tests = work / "tests"
    for name in FILES:
        if not (source / "tests" / name).exists():
            raise SystemExit(f"{name} is not in this version of vLLM")
        target = tests / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / "tests" / name, target)
    (tests / IMPORTED).write_text(STAND_IN)
    for folder in {parent for path in tests.rglob("*.py") for parent in path.parents if parent.is_relative_to(tests)}:
        (folder / "__init__.py").touch()
    shutil.copy(HERE / "server.py", tests / "utils.py")
    shutil.copy(HERE / "plugin.py", work / "peers_plugin.py")
    shutil.copy(HERE / "stand_ins.py", work / "peers_stand_ins.py")
    shutil.copy(HERE / "accepted.json", work / "accepted.json")
    (work / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]), Path(sys.argv[2]))
