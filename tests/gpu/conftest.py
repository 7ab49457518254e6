"""Where CUDA's Python bindings are missing, what needs them is not imported; there is no GPU to test with either."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("cuda") else ["test_*.py"]
