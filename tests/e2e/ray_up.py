"""`ray up` of cluster.local.yaml on hosts of one machine, as an operator does it, and its end."""

import os
import subprocess
from pathlib import Path

import yaml

from baton.cluster.ray import certificates as ray_certificates

ROOT = Path(__file__).parents[2]
UP_S = 240.0
INSTALL_S = 900.0


def filled_in(hosts, head, workers, directory, dist=None):
    """The shipped file with addresses, key and token.

    Args:
        dist: folder that `make wheelhouse` filled; without it hosts run this checkout, and nothing is installed.
    """
    config = yaml.safe_load((ROOT / "cluster.local.yaml").read_text())
    config["provider"] |= {"head_ip": hosts[head].address, "worker_ips": [hosts[name].address for name in workers]}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(hosts.keys / "id_ed25519")}
    config["min_workers"] = config["max_workers"] = len(workers)
    token = Path(directory) / "ray_secrets"
    ray_certificates.make(token)
    assert config["file_mounts"] == {"~/.baton": "./ray_secrets", "~/.baton_dist": "./dist"}
    config["file_mounts"] = {"~/.baton": str(token)}
    if dist is None:
        config["setup_commands"] = ["python -c 'import baton.cluster'"]
    else:
        config["file_mounts"]["~/.baton_dist"] = str(dist)
    path = Path(directory) / "cluster.local.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def ray(directory, *arguments, timeout_s=UP_S):
    """Ray's own command, on the operator's machine, with a home of its own."""
    home = Path(directory) / "home"
    home.mkdir(exist_ok=True)
    environment = os.environ | {"HOME": str(home), "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(["ray", *arguments], capture_output=True, text=True, timeout=timeout_s, env=environment)
    if done.returncode:
        raise RuntimeError(f"ray {' '.join(arguments)}: {done.stdout[-6000:]}\n{done.stderr[-3000:]}")
    return done.stdout
