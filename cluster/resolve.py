"""Resolves an operator's settings into each worker's: every `auto` decided, every path checked.

Nothing is started and no model is read; whatever can be refused before anything runs is refused here.
"""

import errno
import json
import os
import re
import socket
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from baton.core.config import (
    DEFAULT_DRAFTS,
    DEFAULT_LOOKED_UP,
    LOOPBACK,
    MAX_DRAFTS,
    WORKER_QUEUE_LEN,
    KVTransferConfig,
    ServeConfig,
    WorkerConfig,
)
from baton.core.errors import (
    BatonError,
    ConfigInvalid,
    ModelFileDamaged,
    ModelMissing,
    ModelUnsupported,
    PackageMissing,
    PortInUse,
)
from baton.core.kv_transports import AUTO, KV_TRANSPORTS, control_channel, one_sided_data_paths
from baton.core.telemetry.span_export import SpanFile
from baton.core.tls_files import TlsFiles

BUNDLED_MODELS = ("tiny", "tiny-pruned", "tiny-hybrid", "tiny-mla")
BUNDLED_DRAFTERS = ("tiny-eagle3",)
_SINGLE_FILE = "model.safetensors"
TEST_HOOK_VARIABLE = "BATON_TEST_HOOK"
# Tokenizers that are published without a tokenizer.json, and Python code that makes one in their directory.
_OTHER_TOKENIZERS = {
    "tiktoken.model": "from transformers.convert_slow_tokenizer import TikTokenConverter; TikTokenConverter("
    "'tiktoken.model', pattern=PATTERN, extra_special_tokens=SPECIAL_TOKENS).converted().save('tokenizer.json')",
    "tekken.json": "from transformers.integrations.mistral import convert_tekken_tokenizer; "
    "convert_tekken_tokenizer('tekken.json').save_pretrained('.')",
    "tokenizer.model": "from transformers import AutoTokenizer; "
    "AutoTokenizer.from_pretrained('.').save_pretrained('.')",
}
_OTHER_TOKENIZERS["vocab.json"] = _OTHER_TOKENIZERS["tokenizer.model"]  # and merges.txt
_OF_ITS_CODE = ", with the pattern and the special tokens, in order of their ids, of the tokenizer's code beside it"
# Names that both configurations have, but whose value for a worker is decided below, not copied.
DECIDED = frozenset(
    "dtype device enable_dp_attention gpu_memory_utilization max_num_seqs max_queue_len max_model_len host "
    "verification".split()
)
COPIED = tuple(field.name for field in fields(WorkerConfig) if field.name in {*ServeConfig.model_fields} - DECIDED)


def read_config(path: Path | None, flags: dict[str, Any]) -> ServeConfig:
    """Read the file's keys, overridden by the flags that were given.

    Raises:
        ConfigInvalid: an unknown key or a bad value, in either.
    """
    values = {} if path is None else ServeConfig.read_file(path)
    values |= {name: value for name, value in flags.items() if value is not None}
    drafts = values.get("num_speculative_tokens")
    if isinstance(drafts, str) and re.fullmatch("-?[0-9]{1,9}", drafts):
        values["num_speculative_tokens"] = int(drafts)
    return ServeConfig.from_mapping(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDirectory:
    """A model directory that has every file that serving needs."""

    path: Path
    name: str
    max_model_len: int
    num_mtp_layers: int = 0  # named by config.json; 0 if no tensor of them is stored


def find_model(model: str, *, is_dummy: bool = False) -> ModelDirectory:
    """Locate a model and check that its files exist; the loader checks their content.

    With dummy weights, config.json is enough.

    Raises:
        ModelMissing: the directory or one of its files does not exist.
        ModelFileDamaged: config.json or the weights' index is not JSON, or lacks the model's length.
        ModelUnsupported: it lacks the length, and its architecture is not served.
    """
    path = _bundled(model) if model in BUNDLED_MODELS else Path(model)
    try:
        path = path.expanduser().resolve()
        is_dir = path.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # no such user, a NUL character, too long, not readable
        raise ModelMissing(f"{model!r} is no usable path: {error}", path=model) from error
    if not is_dir:
        raise ModelMissing(f"{path} is not a directory", path=str(path))
    for name in ("config.json",) if is_dummy else ("config.json", "tokenizer.json"):
        if not _is_file(path / name):
            hint = _conversion(path) if name == "tokenizer.json" else _below(path)
            raise ModelMissing(f"{path / name} does not exist{hint}", path=str(path / name))
    if not is_dummy:
        _require_weights(path)
    config = _read_json(path / "config.json")
    text_config = config.get("text_config")
    max_model_len = (text_config if isinstance(text_config, dict) else config).get("max_position_embeddings")
    if not isinstance(max_model_len, int) or max_model_len < 2:
        if config.get("architectures"):
            _require_served(path)
        raise ModelFileDamaged(f"{path}/config.json holds no max_position_embeddings", path=str(path / "config.json"))
    return ModelDirectory(
        path=path,
        name=model if model in BUNDLED_MODELS else _name_of(path),
        max_model_len=max(max_model_len, _stretched_len(config)),
        num_mtp_layers=_num_mtp_layers(config, path, is_dummy=is_dummy),
    )


def _require_served(path: Path) -> None:
    """Have config.json refused for its architecture before it is refused for a key that other architectures leave out.

    Raises:
        BatonError: it is refused.
    """
    from baton.model.config import ModelConfig

    ModelConfig.from_directory(path, made_weights="not asked for")


def _num_mtp_layers(values: dict[str, Any], path: Path, *, is_dummy: bool) -> int:
    """MTP layers that can draft: those of config.json, unless the weights contain none of them."""
    from baton.model.checkpoint.mtp_fit import stores_mtp

    count = num_mtp_layers(values)
    try:
        return count if not count or is_dummy or stores_mtp(path) else 0
    except BatonError:  # the directory cannot be served; `checkpoint.judge` and the loader say why
        return count


def _stretched_len(values: dict[str, Any]) -> int:
    """Return `model.rope_scaling.stretched_len`; 0 for models that are refused later, when the model is judged."""
    from baton.model.config import text_values
    from baton.model.rope_scaling import stretched_len

    try:
        return stretched_len(text_values(values))
    except (ModelUnsupported, ValueError, TypeError, OverflowError):
        return 0


def _name_of(path: Path) -> str:
    """The directory's name; in Hugging Face's cache, where that is a commit, the repository's name."""
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.name


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except PermissionError as error:  # of the directory
        raise ModelMissing(f"cannot read {path}: {error.strerror}", path=str(path)) from error


def _conversion(path: Path) -> str:
    """Say how transformers makes tokenizer.json from the tokenizer file that exists instead; "" if there is none."""
    name = next((name for name in _OTHER_TOKENIZERS if _is_file(path / name)), None)
    if name is None:
        return ""
    command = _OTHER_TOKENIZERS[name]
    return f"; {name} is not read. In {path}, `{command}` writes it" + (_OF_ITS_CODE if "PATTERN" in command else "")


def _below(path: Path) -> str:
    """Name directories below that hold a config.json: a trainer's checkpoints, or snapshots in Hugging Face's cache."""
    try:
        found = sorted(str(file.parent) for below in ("*", "snapshots/*") for file in path.glob(f"{below}/config.json"))
    except OSError:
        return ""
    return f"; a model may be {' or '.join(found[:3])}" if found else ""


def _require_weights(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise ModelFileDamaged(f"{index} holds no mapping weight_map", path=str(index))
        names = set(map(str, shards.values()))
        if (path / _SINGLE_FILE).is_file() and _SINGLE_FILE not in names:
            return  # it takes precedence over shards; the loader says if it holds other tensors
        missing = sorted(name for name in names if not (path / name).is_file())
        if missing:
            raise ModelMissing(f"{path} lacks {', '.join(missing[:3])}", path=str(path), missing=missing)
    elif not any(path.glob("*.safetensors")):
        raise ModelMissing(f"{path} holds no .safetensors file", path=str(path))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelMissing(f"cannot read {path}: {error.strerror}", path=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise ModelFileDamaged(f"{path} is not JSON: {error}", path=str(path)) from error
    if not isinstance(value, dict):
        raise ModelFileDamaged(f"{path} is not a JSON object", path=str(path))
    return value


def has_gpu() -> bool:
    """Return whether this machine has a GPU's device file; quick, and says nothing about drivers."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def resolve_device(device: str) -> str:
    """Resolve `auto` to cuda where this machine has a GPU that torch can use, else to cpu."""
    if device != "auto":
        return device
    if not has_gpu():
        return "cpu"
    import torch  # slow to import, and useless without a device file

    return "cuda" if torch.cuda.is_available() else "cpu"


def visible_gpus() -> int:
    """Count the GPUs that torch can use, without initializing CUDA."""
    import torch  # slow to import

    return torch.cuda.device_count()


def resolve_dtype(dtype: str, device: str) -> str:
    """Resolve `auto` to bfloat16 on a GPU and to float32 on a CPU."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if device == "cuda" else "float32"


def transfer_config(config: ServeConfig) -> KVTransferConfig:
    """Limits of the hand-off; enables the test hook named by BATON_TEST_HOOK.

    Raises:
        ConfigInvalid: there is no hook of that name, or KV would be unencrypted where everything else is encrypted.
    """
    hook = os.environ.get(TEST_HOOK_VARIABLE, "")
    if hook not in ("", "drop_pushes"):
        raise ConfigInvalid(f"{TEST_HOOK_VARIABLE}={hook}: the only hook is drop_pushes", keys=[TEST_HOOK_VARIABLE])
    tls = kv_tls(config)
    return KVTransferConfig(
        transport=config.transport,
        digest=config.kv_digest,
        staging_mib=config.kv_staging_mib,
        curve_key_file=config.kv_curve_key_file,
        tls_cert_file=tls.cert_file,
        tls_key_file=tls.key_file,
        tls_ca_file=tls.ca_file,
        tls_server_name=tls.server_name,
        drop_pushes=hook == "drop_pushes",
    )


def kv_tls(config: ServeConfig) -> TlsFiles:
    """Certificates for hand-offs over gRPC: their own, or else the workers' (all of them or none).

    Raises:
        ConfigInvalid: there are certificates, but KV would be unencrypted without a request for that; or the transport
            does not support the given kind of KV encryption.
    """
    own = TlsFiles(
        cert_file=config.kv_tls_cert_file,
        key_file=config.kv_tls_key_file,
        ca_file=config.kv_tls_ca_file,
        server_name=config.kv_tls_server_name,
    )
    takes_tls = control_channel(config.transport).encrypted_by == "tls"
    if own != TlsFiles() and not takes_tls:
        message = "kv_tls_*: only transport grpc takes certificates; ZMQ is encrypted by kv_curve_key_file"
        raise ConfigInvalid(message, keys=["transport", "kv_curve_key_file"])
    if config.kv_curve_key_file and takes_tls:
        knows = f"transport {config.transport} knows no CURVE; it takes certificates, tls_* or kv_tls_*"
        message = f"kv_curve_key_file: {knows}"
        raise ConfigInvalid(message, keys=["transport", "kv_curve_key_file"])
    if own.is_on or config.kv_plaintext or not config.tls.is_on:
        return own
    if takes_tls:
        return config.tls
    if not config.kv_curve_key_file or any(data_path.is_clear for data_path in one_sided_data_paths(config.transport)):
        message = (
            "tls_cert_file is set, but KV would travel in clear: give kv_curve_key_file (ZMQ), or transport grpc, or "
            "say with kv_plaintext that its network is trusted"
        )
        raise ConfigInvalid(message, keys=["kv_curve_key_file", "transport", "kv_plaintext"])
    return own


def resolve_worker(
    config: ServeConfig,
    model: ModelDirectory,
    *,
    worker_id: str,
    role: str = "decode",
    host: str = "127.0.0.1",
    router_address: str = "",
    device: str | None = None,
    workers_per_gpu: int = 1,
    tp_size: int = 1,
    key: bytes = b"",
    kv_key: bytes = b"",
) -> WorkerConfig:
    """Build the plain values that one worker starts with; without `key` and `kv_key` it uses those of its process.

    Raises:
        ConfigInvalid: `max_model_len` exceeds the model's own length, or CUDA graphs or kernels are requested that a
            worker cannot have.
    """
    device = resolve_device(config.device) if device is None else device
    max_model_len = model.max_model_len if config.max_model_len is None else config.max_model_len
    if max_model_len > model.max_model_len:
        message = f"max_model_len: {max_model_len} exceeds the model's own {model.max_model_len}"
        raise ConfigInvalid(message, keys=["max_model_len"])
    if config.kernels == "triton" and device == "cpu":
        raise ConfigInvalid("kernels: triton's need a GPU, and workers compute on CPUs", keys=["kernels"])
    has_owners = config.enable_dp_attention and role == "decode"  # prefill ranks share each sequence
    graphs = config.graph_config()
    transfer = transfer_config(config)
    graphs.require_fits(device=device, max_num_seqs=config.max_num_seqs)
    return WorkerConfig(
        worker_id=worker_id,
        model_path=str(model.path),
        model_name=served_names(config, model)[0],
        num_draft_tokens=num_drafts(config, model),
        auto_drafts=leaves_k_open(config) and num_drafts(config, model) > 0,
        auto_method=config.speculative_method == "auto" and num_drafts(config, model) > 0,
        lookup=config.lookup(),
        has_head=uses_head(config, model),
        draft_path=config.draft_path and str(find_drafter(config.draft_path)),
        numerics=config.numerics,
        dtype=resolve_dtype(config.dtype, device),
        device=device,
        gpu_memory_utilization=config.gpu_memory_utilization / workers_per_gpu,
        max_num_seqs=config.max_num_seqs or 0,
        max_queue_len=max(config.max_queue_len or 0, WORKER_QUEUE_LEN),
        chunk_len=config.max_num_batched_tokens or 0,
        max_model_len=max_model_len,
        is_model_len_asked=config.max_model_len is not None,
        host=host,
        router_address=router_address,
        num_threads=config.worker_threads,
        tls=config.tls,
        host_kv_bytes=int(config.kv_offloading_size * (1 << 30)) // tp_size,
        weights="random" if config.is_dummy else "checkpoint",
        kv_dtype=config.kv_cache_dtype,
        enable_dp_attention=has_owners,
        tp_size=tp_size,
        redundant_experts=config.redundant_experts,
        verification=config.verification_config(),
        graphs=graphs,
        telemetry=config.telemetry_config(),
        transfer=replace(transfer, key=kv_key.hex()) if kv_key else transfer,
        key=key.hex(),
        **{name: getattr(config, name) for name in COPIED},
    )


def find_drafter(drafter: str) -> Path:
    """Path of a drafter's directory, or of a bundled one; its content is checked where it is read."""
    return _bundled(drafter) if drafter in BUNDLED_DRAFTERS else Path(drafter).expanduser().resolve()


def _bundled(name: str) -> Path:
    return Path(str(resources.files("baton.assets") / name))


def served_names(config: ServeConfig, model: ModelDirectory) -> tuple[str, ...]:
    """Names by which clients request the model; answers use the first."""
    return config.served_model_name or (model.name,)


def num_mtp_layers(values: dict[str, Any]) -> int:
    """MTP layers of the model that a config.json describes; 0 if it has none, or gives no number."""
    from baton.model import config

    try:
        return config.num_mtp_layers(values)
    except (TypeError, ValueError):
        return 0


def num_drafts(config: ServeConfig, model: ModelDirectory) -> int:
    """Maximum draft tokens of a step: as requested, or as the drafting method allows.

    A missing MTP head is not refused here; the loader does so if a number was requested.
    """
    asked = config.num_speculative_tokens
    if asked is not None and asked != "auto":
        return asked
    if config.speculative_method == "auto":
        return MAX_DRAFTS
    if config.speculative_method == "ngram":
        return MAX_DRAFTS if asked == "auto" else DEFAULT_LOOKED_UP
    has_head = bool(config.draft_path) or model.num_mtp_layers == 1 or config.speculative_method == "mtp"
    if config.speculative_method == "none" or not has_head:
        return 0
    return MAX_DRAFTS if asked == "auto" else DEFAULT_DRAFTS


def leaves_k_open(config: ServeConfig) -> bool:
    """Return whether measurements decide how many drafts a step makes."""
    asked = config.num_speculative_tokens
    return asked == "auto" or (asked is None and config.speculative_method != "ngram")


def uses_head(config: ServeConfig, model: ModelDirectory) -> bool:
    """Return whether a head drafts, if anything does; `auto` does without one if there is none."""
    if config.speculative_method == "auto":
        return bool(config.draft_path) or model.num_mtp_layers == 1
    return config.lookup() is None


def num_prefill(config: ServeConfig, num_gpus: int | None) -> int:
    """Number of prefill workers to start.

    Two processes that share a GPU take turns on it. One engine that computes prompts beside its decode rows is faster
    from 16 clients on, and gives the first token sooner (benchmarks/results/engine-h200.json).

    Args:
        config: configuration as given; an explicit number is used as it is.
        num_gpus: GPUs that the workers have; None: they compute on CPUs, or in a cluster whose operator places them.
    """
    if config.prefill is not None:
        return config.prefill
    num_wanted = config.tp_prefill + config.decode * config.tp_decode
    return 0 if num_gpus is not None and num_gpus < num_wanted and config.local_prefill != "never" else 1


def worker_ids(config: ServeConfig) -> dict[str, str]:
    """Worker id to role, prefill workers first; the number of prefill workers must be decided (`num_prefill`)."""
    assert config.prefill is not None
    ids = {f"prefill-{index}": "prefill" for index in range(config.prefill)}
    return ids | {f"decode-{index}": "decode" for index in range(config.decode)}


def tp_size(config: ServeConfig, role: str) -> int:
    """Number of ranks of each worker of a role."""
    return config.tp_prefill if role == "prefill" else config.tp_decode


def require_startable(config: ServeConfig) -> None:
    """Check what can be checked before anything is started: ports, files, devices, transports.

    Raises:
        ConfigInvalid: one of them is not available.
        PackageMissing: a transport needs a package that is not installed.
        PortInUse: a port is taken.
    """
    named = {key: getattr(config, key) for key in ("grpc_port", "http_port", "metrics_port", "admin_port")}
    ports = {key: port for key, port in named.items() if port is not None}
    for port in set(ports.values()) - {0}:
        keys = sorted(key for key in ports if ports[key] == port)
        if len(keys) > 1:
            raise ConfigInvalid(f"{' and '.join(keys)} are both {port}", keys=keys)
    for key, port in ports.items():
        try:
            require_port_free(config.host, port)
        except ConfigInvalid as error:
            raise ConfigInvalid(
                error.message, keys=[key if k == "port" else k for k in error.fields["keys"]]
            ) from error
    trace_file = config.telemetry_config().trace_file
    if trace_file:
        SpanFile(Path(trace_file), {}).close()
    if config.ray_address != "local":
        return  # workers are on other machines
    if config.device == "cuda" and not has_gpu() and not visible_gpus():  # WSL has GPUs without device files
        raise ConfigInvalid("device: cuda is asked for, and torch finds no GPU here", keys=["device"])
    transport = None if config.transport == AUTO else KV_TRANSPORTS[config.transport]
    if transport is not None and transport.problem:
        message = f"transport: {transport.name} cannot be had here: {transport.problem}"
        if transport.package:
            raise PackageMissing(message, package=transport.package)
        raise ConfigInvalid(message, keys=["transport"])


def reachable_host(config: ServeConfig, num_nodes: int, node_ip: str) -> str:
    """Return the host at which workers in a cluster reach the router.

    Raises:
        ConfigInvalid: workers on other nodes cannot reach it.
    """
    if num_nodes > 1 and config.host in LOOPBACK:
        message = f"host: workers on other nodes cannot reach {config.host}; use 0.0.0.0 or this node's address"
        raise ConfigInvalid(message, keys=["host"])
    return node_ip if config.host in ("0.0.0.0", "::") else config.host


def require_port_free(host: str, port: int) -> None:
    """Check that this process could listen on a port now; for port 0 only the host is checked.

    Raises:
        ConfigInvalid: `host` is no address of this machine, or this account may not listen on the port.
        PortInUse: the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Bind as gRPC does: an old connection in TIME_WAIT is no obstacle, a listener is.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (socket.gaierror, ValueError, TypeError) as error:
            raise ConfigInvalid(f"host: {host!r} does not resolve: {error}", keys=["host"]) from error
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigInvalid(f"host: {host} is no address of this machine", keys=["host"]) from error
            if error.errno == errno.EACCES:
                message = f"this account may not listen on port {port}; choose one above 1023, or 0 for a free one"
                raise ConfigInvalid(message, keys=["port"]) from error
            message = f"cannot listen on {host}:{port}: {error.strerror or error}"
            raise PortInUse(message, host=host, port=port) from error
