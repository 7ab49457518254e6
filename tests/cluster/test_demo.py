"""The demo is Baton's first promise: it runs, and it fails when the hand-off does."""

import json
import os
import subprocess
import sys

import pytest


def run_demo(**environment):
    command = [sys.executable, "-P", "-m", "baton.cluster", "demo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | environment)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.ray
def test_it_gives_the_tokens_of_one_process_and_leaves_nothing():
    code, data, err = run_demo()
    assert code == 0, err
    assert data["ok"]
    assert [request["identical"] for request in data["requests"]] == [True] * 3
    assert max(request["prompt_len"] for request in data["requests"]) >= 512
    assert not any(data["held"].values())


@pytest.mark.ray
@pytest.mark.slow
def test_it_fails_when_pushes_are_dropped():
    code, data, _ = run_demo(BATON_TEST_HOOK="drop_pushes")
    assert code == 1
    assert not data["ok"]
