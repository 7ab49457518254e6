"""Both cluster files pass the checks that `ray up` would run, and avoid its traps."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = ("cluster.yaml", "cluster.local.yaml")


@pytest.mark.fast
@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("ignore")
def test_ray_accepts_it(name, tmp_path, monkeypatch):
    from ray.autoscaler._private.util import prepare_config, validate_config

    monkeypatch.setenv("HOME", str(tmp_path))
    config = yaml.safe_load((ROOT / name).read_text())
    validate_config(prepare_config(config))


@pytest.mark.fast
@pytest.mark.parametrize("name", FILES)
def test_every_start_command_decides_authentication_and_ports(name):
    config = yaml.safe_load((ROOT / name).read_text())
    commands = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    assert all("RAY_AUTH_MODE=" in command for command in commands)
    starts = [command for command in commands if "ray start" in command]
    assert len(starts) == 2
    for command in starts:
        assert "ulimit -n 65536;" in command
        for flag in ("node-manager-port", "object-manager-port", "min-worker-port", "max-worker-port"):
            assert f"--{flag}=" in command


@pytest.mark.fast
def test_roles_are_resources_of_node_types():
    types = yaml.safe_load((ROOT / "cluster.yaml").read_text())["available_node_types"]
    for role in ("prefill", "decode"):
        assert types[role]["resources"][role] == types[role]["resources"]["GPU"]
