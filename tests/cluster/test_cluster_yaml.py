"""Both cluster files pass the checks that `ray up` would run, and avoid its traps."""

import re
from pathlib import Path

import pytest
import yaml

from baton.cluster.deployment import SECRETS
from baton.cluster.ray.certificates import TLS_VARIABLES

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


@pytest.mark.fast
@pytest.mark.parametrize("name", FILES)
def test_tokens_reach_every_node_and_no_two_modes_meet(name):
    config = yaml.safe_load((ROOT / name).read_text())
    assert "~/.baton" in config["file_mounts"]
    modes = set()
    for command in config["head_start_ray_commands"] + config["worker_start_ray_commands"]:
        modes |= {word for word in command.split() if word.startswith("RAY_AUTH_MODE=")}
        if "ray start" in command:
            assert "RAY_AUTH_TOKEN_PATH=~/.baton/ray_token" in command.split()
    assert modes == {"RAY_AUTH_MODE=token"}


@pytest.mark.fast
@pytest.mark.parametrize("name", FILES)
def test_every_host_makes_its_certificate_before_it_starts_ray_with_it(name):
    config = yaml.safe_load((ROOT / name).read_text())
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        begun, _, start = config[key][-1].partition(" && ")
        *module, secrets, into = begun.rpartition("; ")[2].split()
        assert module == "python -P -m baton.cluster.ray.certificates issue".split()
        assert secrets in config["file_mounts"]
        words = dict(word.split("=", 1) for word in start.split() if "=" in word)
        files = (f"{into}/cert.pem", f"{into}/key.pem", f"{into}/ca.pem")
        assert {name: words[name] for name in TLS_VARIABLES} == dict(zip(TLS_VARIABLES, ("1", *files), strict=True))


@pytest.mark.fast
@pytest.mark.parametrize("name", FILES)
def test_what_knows_no_token_is_off(name):
    config = yaml.safe_load((ROOT / name).read_text())
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        words = dict(word.split("=", 1) for word in config[key][-1].split() if "=" in word)
        assert words["RAY_enable_metrics_collection"] == "0"
        assert words["AUTOSCALER_METRIC_PORT"] == "-1"


@pytest.mark.fast
@pytest.mark.parametrize("name", FILES)
def test_the_head_keeps_what_it_knows_in_redis_and_starts_the_workers(name):
    config = yaml.safe_load((ROOT / name).read_text())
    *before, start = config["head_start_ray_commands"]
    words = dict(word.split("=", 1) for word in start.split() if "=" in word)
    port = words["RAY_REDIS_ADDRESS"].rpartition(":")[2]
    (redis,) = [command for command in before if "redis-server " in command]
    assert f" --port 0 --tls-port {port} " in redis and "--appendonly yes" in redis
    # It asks for a certificate that only this account has; a password would be in the head's command line.
    assert "umask 077" in redis and "--tls-ca-cert-file cert.pem" in redis and "tls-auth-clients" not in redis
    assert words["RAY_REDIS_ADDRESS"].startswith("rediss://")
    assert words["RAY_REDIS_CLIENT_KEY"] == "~/.baton_redis/key.pem"
    assert not words["RAY_REDIS_ADDRESS"].endswith(words["--port"]), "6379 is Ray's own"
    assert words["RAY_external_storage_namespace"]
    # Without it `ray up` starts no worker, and nobody starts Ray again on a node that was lost.
    assert words["--autoscaling-config"] == "~/ray_bootstrap_config.yaml"


@pytest.mark.fast
@pytest.mark.parametrize("name", FILES)
def test_workers_wait_for_a_head_that_is_gone(name):
    config = yaml.safe_load((ROOT / name).read_text())
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        words = dict(word.split("=", 1) for word in config[key][-1].split() if "=" in word)
        assert int(words["RAY_gcs_rpc_server_reconnect_timeout_s"]) >= 3600
        assert words["RAY_worker_niceness"] == "0"


@pytest.mark.fast
@pytest.mark.parametrize("name", FILES)
def test_no_port_is_given_twice(name):
    config = yaml.safe_load((ROOT / name).read_text())
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        words = [word.split("=", 1) for word in config[key][-1].split() if word.startswith("--") and "=" in word]
        ports = [int(value) for flag, value in words if flag.endswith("port")]
        assert len(ports) == len(set(ports)) >= 7


@pytest.mark.fast
def test_hosts_of_ones_own_are_scaled_by_the_first_autoscaler():
    start = yaml.safe_load((ROOT / "cluster.local.yaml").read_text())["head_start_ray_commands"][-1]
    assert "RAY_enable_autoscaler_v2=0" in start.split()


@pytest.mark.fast
def test_every_host_of_ones_own_declares_its_roles_and_the_head_may_have_one():
    config = yaml.safe_load((ROOT / "cluster.local.yaml").read_text())
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert "--resources=\"$(cat /etc/baton/resources.json 2>/dev/null || echo '{}')\"" in config[key][-1]


@pytest.mark.fast
@pytest.mark.parametrize("name", FILES)
def test_nothing_is_kept_in_a_folder_whose_change_restarts_ray_everywhere(name):
    """Ray's autoscaler runs the start commands again on each host if a mounted folder has changed on the head."""
    config = yaml.safe_load((ROOT / name).read_text())
    mounted = [Path(path).expanduser() for path in config["file_mounts"]]
    starts = " ".join(config["head_start_ray_commands"] + config["worker_start_ray_commands"])
    written = [SECRETS, *(Path(path).expanduser() for path in re.findall(r"(?:issue \S+|cd|--dir) (~/[\w.]+)", starts))]
    assert len(written) >= 4
    assert not [path for path in written if any(path.is_relative_to(folder) for folder in mounted)]
