"""Stand-ins that let the deployment be tested without a model: worker shells, a router, a model directory."""

import json
import os
import sys
import threading
import time
from pathlib import Path

STUB_ROUTER = Path(__file__).with_name("stub_router.py")


def write_model_directory(path: Path, max_model_len: int = 256) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": max_model_len}))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


def stub_router_command(config, model):
    return [sys.executable, str(STUB_ROUTER), str(config.grpc_port)]


class StubShell:
    """Heartbeats like a worker, serves nothing."""

    def __init__(self, config):
        import grpc

        from baton.proto import worker_pb2, worker_pb2_grpc

        self._config = config
        self._epoch = time.time_ns()
        self._start()
        channel = grpc.insecure_channel(config.router_address)
        stub = worker_pb2_grpc.MembershipStub(channel)
        state = worker_pb2.WorkerState(worker_id=config.worker_id, role="prefill", epoch=self._epoch)

        def beat():
            while True:
                try:
                    stub.Heartbeat(state, timeout=1)
                except grpc.RpcError:
                    pass
                time.sleep(0.1)

        threading.Thread(target=beat, daemon=True).start()

    def _start(self):
        pass

    def ready(self):
        environment = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
        found = {"worker_id": self._config.worker_id, "epoch": self._epoch, "pid": os.getpid()}
        return found | {"nice": os.nice(0)} | environment

    def pid(self):
        return os.getpid()

    def shutdown(self):
        pass


class RefusingShell(StubShell):
    def __init__(self, config):
        from baton.core.errors import ModelTensorMissing

        raise ModelTensorMissing("model.safetensors lacks lm_head.weight", tensors=["lm_head.weight"])


class MisconfiguredShell(StubShell):
    def __init__(self, config):
        from baton.core.errors import ConfigInvalid

        raise ConfigInvalid("kv_memory_mib: holds no block", keys=["kv_memory_mib"])


class DyingShell(StubShell):
    def __init__(self, config):
        os._exit(3)


class SlowShell(StubShell):
    def __init__(self, config):
        time.sleep(60)


class HeldShell(StubShell):
    """Loads until a file beside its model is there, and reports that."""

    def _start(self):
        from baton.worker.start_report import StartReport

        role = self._config.worker_id.partition("-")[0]
        with StartReport(self._config, role, self._epoch) as on_phase:
            on_phase("weights", 45, 100)
            while not Path(self._config.model_path, "may_start").exists():
                time.sleep(0.01)


class ProbingShell(StubShell):
    """Says what the names of our folders resolve to inside an actor."""

    def ready(self):
        import importlib.util

        from transformers import Qwen3ForCausalLM

        found = {}
        for name in ("kernels", "proto"):
            spec = importlib.util.find_spec(name)
            found[name] = "" if spec is None else str(spec.origin or list(spec.submodule_search_locations))
        return super().ready() | found | {"transformers": Qwen3ForCausalLM.__module__}


def stub_shell():
    return StubShell


def refusing_shell():
    return RefusingShell


def misconfigured_shell():
    return MisconfiguredShell


def dying_shell():
    return DyingShell


def slow_shell():
    return SlowShell


def held_shell():
    return HeldShell


def probing_shell():
    return ProbingShell
