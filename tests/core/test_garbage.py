"""The collector of a process that serves, in a process of its own: what it says holds for all that is in it."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.fast

PROGRAM = """
import gc, json
from baton.core import garbage

class Node:
    def __init__(self, other=None):
        self.other = other

loaded = [Node(at) for at in range(50_000)]
forgotten = Node(); forgotten.other = forgotten; del forgotten
before = garbage.collected_s()
garbage.begin_to_serve()
after, num_frozen, threshold = garbage.collected_s(), gc.get_freeze_count(), gc.get_threshold()
looked_at = len(gc.get_objects())
garbage.begin_to_serve()
first = Node(); first.other = Node(first); del first
found = gc.collect()
print(json.dumps([before, after, garbage.collected_s(), num_frozen, looked_at, threshold, found, len(gc.callbacks)]))
"""


def test_what_is_loaded_is_left_out_and_what_comes_later_is_not():
    ran = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, check=True, text=True)
    before, after, later, num_frozen, looked_at, threshold, found, num_callbacks = json.loads(ran.stdout)
    assert before == 0 < after < later
    assert num_frozen > 50_000 > 1_000 > looked_at
    assert threshold == [20_000, 10, 20]
    assert found >= 2, "a cycle made since is found"
    assert num_callbacks == 1, "counted once, however often it is called"
