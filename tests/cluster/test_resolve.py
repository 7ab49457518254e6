"""From what an operator set to what a worker gets."""

import errno
import importlib.util
import inspect
import json
import re
import socket
from pathlib import Path

import pytest

from baton.cluster import resolve
from baton.cluster.router_process import router_command
from baton.core.config import ServeConfig
from baton.core.config_key import keys_of
from baton.core.errors import ConfigInvalid, ModelFileDamaged, ModelMissing, PackageMissing, PortInUse
from baton.core.kv_transports import TRANSPORT_NAMES, control_channel
from baton.core.numerics import Numerics
from baton.core.telemetry.telemetry import TelemetryConfig
from baton.core.tls_files import TlsFiles
from baton.model.checkpoint.fp8_scheme import read_scheme
from baton.model.checkpoint.weights import read_headers
from baton.model.config import ModelConfig
from baton.router.__main__ import parse

pytestmark = pytest.mark.fast
ENCRYPTED_BY_CURVE = [name for name in TRANSPORT_NAMES if control_channel(name).encrypted_by == "curve"]


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def test_a_model_is_known_by_its_directory(model):
    found = resolve.find_model(str(model))
    assert (found.path, found.name, found.max_model_len) == (model.resolve(), model.name, 512)


def test_what_is_bundled_has_a_name():
    assets = Path(__file__).parents[2].resolve() / "assets"
    bundled = {path.parent.name for path in assets.glob("*/config.json")}
    assert bundled == {*resolve.BUNDLED_MODELS, *resolve.BUNDLED_DRAFTERS}
    for name in resolve.BUNDLED_MODELS:
        found = resolve.find_model(name)
        assert (found.path, found.name, found.num_mtp_layers) == (assets / name, name, 1)


def test_a_nested_text_config_holds_the_length(model):
    (model / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 99}}))
    assert resolve.find_model(str(model)).max_model_len == 99


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(model, name):
    (model / name).unlink()
    with pytest.raises(ModelMissing, match=name.removeprefix("model")):
        resolve.find_model(str(model))


@pytest.mark.parametrize("name", ["tiktoken.model", "tekken.json", "tokenizer.model", "vocab.json"])
def test_a_tokenizer_of_another_kind_is_named_with_what_converts_it(model, name):
    (model / "tokenizer.json").unlink()
    (model / name).write_bytes(b"")
    with pytest.raises(
        ModelMissing, match=rf"tokenizer\.json does not exist; {re.escape(name)} is not read"
    ) as missing:
        resolve.find_model(str(model))
    (command,) = re.findall("`(.*)`", missing.value.message)
    called = {"tiktoken.model": "TikTokenConverter", "tekken.json": "convert_tekken_tokenizer"}
    assert called.get(name, "AutoTokenizer") + "(" in command.replace(".from_pretrained", "")
    assert ("pattern" in missing.value.message.partition("` writes it")[2]) == (name == "tiktoken.model")


@pytest.mark.long
def test_what_is_said_to_convert_tokenizers_is_in_transformers():
    from transformers import AutoTokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.integrations.mistral import convert_tekken_tokenizer

    wanted = ["vocab_file", "pattern", "extra_special_tokens"]
    assert [name for name in inspect.signature(TikTokenConverter).parameters if name in wanted] == wanted
    assert callable(TikTokenConverter.converted)
    assert callable(AutoTokenizer.from_pretrained)
    assert next(iter(inspect.signature(convert_tekken_tokenizer).parameters)) == "tokenizer_file"


def test_a_missing_shard_is_named(model):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelMissing) as missing:
        resolve.find_model(str(model))
    assert missing.value.fields["missing"] == ["model-2.safetensors"]


def test_shards_are_not_missed_beside_a_whole_checkpoint(model):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert resolve.find_model(str(model)).path == model.resolve()


@pytest.mark.parametrize("below", ["checkpoint-500", "snapshots/0a1b"])
def test_models_below_the_directory_are_named(below, tmp_path):
    """A trainer's output and the folder of Hugging Face's cache hold models, and are none."""
    with pytest.raises(ModelMissing, match=r"config\.json does not exist$"):
        resolve.find_model(str(tmp_path))
    (tmp_path / below).mkdir(parents=True)
    (tmp_path / below / "config.json").write_text("{}")
    with pytest.raises(ModelMissing, match=rf"config\.json does not exist; a model may be {tmp_path / below}$"):
        resolve.find_model(str(tmp_path))


@pytest.mark.parametrize("name", ["~nosuch/x", "a\0b", "x" * 5000])
def test_a_path_that_cannot_be_one_is_missing(name):
    with pytest.raises(ModelMissing):
        resolve.find_model(name)


@pytest.mark.parametrize("text", ['{"weight_map": ["a"]}', "{}", "[" * 100_000])
def test_a_damaged_index_is_named(model, text):
    (model / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelFileDamaged, match=r"index\.json"):
        resolve.find_model(str(model))


@pytest.mark.parametrize("drafts", ["²", "--1", "-", "", "7", "9" * 5000])
def test_a_number_of_drafts_that_is_none(drafts):
    with pytest.raises(ConfigInvalid) as invalid:
        resolve.read_config(None, {"num_speculative_tokens": drafts})
    assert set(invalid.value.fields["keys"]) == {"num_speculative_tokens"}


@pytest.mark.parametrize("host", ["nosuch.invalid", "a..b", "a\0b", "203.0.113.77", "x" * 300])
@pytest.mark.parametrize("port", [0, 40001])
def test_a_host_that_is_not_this_machine(host, port):
    with pytest.raises(ConfigInvalid) as invalid:
        resolve.require_port_free(host, port)
    assert invalid.value.fields["keys"] == ["host"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"max_position_embeddings": "long"}', "[" * 100_000])
def test_a_damaged_config_is_named(model, text):
    (model / "config.json").write_text(text)
    with pytest.raises(ModelFileDamaged, match=r"config\.json"):
        resolve.find_model(str(model))


def test_a_worker_gets_resolved_values(model):
    asked = {"batch_invariant": True, "num_speculative_tokens": 1, "device": "cpu"}
    config = ServeConfig.from_mapping({"model": str(model)} | asked)
    worker = resolve.resolve_worker(
        config, resolve.find_model(str(model)), worker_id="prefill-0", router_address="127.0.0.1:1"
    )
    assert (worker.device, worker.dtype, worker.max_model_len) == ("cpu", "float32", 512)
    assert (worker.numerics, worker.num_draft_tokens) == (Numerics.INVARIANT, 1)
    assert not worker.transfer.drop_pushes


def test_a_worker_gets_each_key_that_its_own_configuration_has_too(model):
    keys = keys_of(ServeConfig)
    for name in resolve.COPIED:  # one by one: some go without others
        key = keys[name]
        value = key.kind(key.choices[-1]) if key.choices else {bool: key.default == "off", int: 64}[key.kind]
        value = "reference" if name == "kernels" else value  # triton's need a GPU
        config = ServeConfig.from_mapping({"model": str(model), "device": "cpu", name: value})
        worker = resolve.resolve_worker(config, resolve.find_model(str(model)), worker_id="d")
        assert getattr(worker, name) == getattr(config, name) != getattr(ServeConfig(), name), name
    assert {"block_size", "kv_memory_mib", "prefix_cache", "scheduling"} < set(resolve.COPIED)


def test_every_process_is_told_what_to_log_and_trace(model, monkeypatch):
    monkeypatch.chdir(model)
    asked = {"model": str(model), "device": "cpu", "log_format": "json", "trace_file": "spans.jsonl"}
    config = ServeConfig.from_mapping(asked)
    found = resolve.find_model(str(model))
    telemetry = resolve.resolve_worker(config, found, worker_id="d").telemetry
    assert (telemetry.log_format, telemetry.trace_file) == ("json", str(model / "spans.jsonl"))
    options = parse(router_command(config, found)[4:])
    assert (options.log_format, options.trace_file, options.trace_endpoint) == ("json", telemetry.trace_file, "")
    plain = ServeConfig.from_mapping({"model": str(model), "device": "cpu"})
    assert resolve.resolve_worker(plain, found, worker_id="d").telemetry == TelemetryConfig()


def test_the_router_gets_the_ports_of_http_and_metrics_if_asked(model):
    found = resolve.find_model(str(model))
    for asked, ports in (({}, (None, None)), ({"metrics_port": 0}, (None, 0)), ({"http_port": 8000}, (8000, None))):
        options = parse(router_command(ServeConfig.from_mapping({"model": str(model), **asked}), found)[4:])
        assert (options.http_port, options.metrics_port) == ports


def test_a_chat_template_without_http_is_refused():
    with pytest.raises(ConfigInvalid, match="chat_template without http_port") as refused:
        ServeConfig.from_mapping({"chat_template": "chatml"})
    assert refused.value.fields["keys"] == ["chat_template"]
    assert ServeConfig.from_mapping({"chat_template": "chatml", "http_port": 0}).chat_template == "chatml"


def test_scheduling_is_asynchronous_unless_asked_otherwise(model):
    for asked, wanted in (({}, "async"), ({"scheduling": "sync"}, "sync"), ({"scheduling": "async"}, "async")):
        config = ServeConfig.from_mapping({"model": str(model), "device": "cpu", **asked})
        assert resolve.resolve_worker(config, resolve.find_model(str(model)), worker_id="d").scheduling == wanted
    with pytest.raises(ConfigInvalid, match="scheduling"):
        ServeConfig.from_mapping({"scheduling": "later"})


def test_graphs_are_for_gpus_and_fit_the_worker(model):
    def resolved(device, **asked):
        config = ServeConfig.from_mapping({"model": str(model), "max_num_seqs": 8, **asked})
        return resolve.resolve_worker(config, resolve.find_model(str(model)), worker_id="d", device=device).graphs

    assert resolved("cpu").mode == resolved("cuda").mode == "auto"
    assert resolved("cuda", cuda_graphs="off").mode == "off"
    assert resolved("cuda", cuda_graph_sizes="1,2,8").sizes == (1, 2, 8)
    with pytest.raises(ConfigInvalid, match="the device is cpu"):
        resolved("cpu", cuda_graph_sizes="1")
    with pytest.raises(ConfigInvalid, match="cuda_graph_sizes: 9 exceeds max_num_seqs, 8"):
        resolved("cuda", cuda_graph_sizes="1,9")


def test_dtype_follows_the_device():
    assert resolve.resolve_dtype("auto", "cuda") == "bfloat16"
    assert resolve.resolve_dtype("auto", "cpu") == "float32"
    assert resolve.resolve_dtype("float64", "cuda") == "float64"


def test_workers_that_share_a_gpu_share_its_memory(model):
    config = ServeConfig.from_mapping({"model": str(model), "gpu_memory_utilization": 0.8})
    worker = resolve.resolve_worker(
        config, resolve.find_model(str(model)), worker_id="d", device="cuda", workers_per_gpu=2
    )
    assert worker.gpu_memory_utilization == pytest.approx(0.4)


def test_a_length_beyond_the_model_is_refused(model):
    config = ServeConfig.from_mapping({"model": str(model), "max_model_len": 513, "device": "cpu"})
    with pytest.raises(ConfigInvalid, match="513"):
        resolve.resolve_worker(config, resolve.find_model(str(model)), worker_id="d")


def test_the_test_hook_drops_pushes_and_no_other_is_known(monkeypatch):
    monkeypatch.setenv(resolve.TEST_HOOK_VARIABLE, "drop_pushes")
    assert resolve.transfer_config(ServeConfig()).drop_pushes
    monkeypatch.setenv(resolve.TEST_HOOK_VARIABLE, "drop_everything")
    with pytest.raises(ConfigInvalid):
        resolve.transfer_config(ServeConfig())


@pytest.mark.parametrize(
    ("num_gpus", "values", "expected"),
    [
        (None, {}, 1),  # CPUs
        (1, {}, 0),
        (2, {}, 1),
        (2, {"decode": 2}, 0),
        (3, {"decode": 2}, 1),
        (4, {"tp_decode": 4}, 0),
        (8, {"tp_decode": 4, "tp_prefill": 4}, 1),
        (1, {"prefill": 1}, 1),
        (8, {"prefill": 0}, 0),
        (1, {"local_prefill": "never"}, 1),
        (None, {"enable_dp_attention": True}, 1),
        (2, {"enable_dp_attention": True, "tp_decode": 2}, 0),
        (3, {"enable_dp_attention": True, "tp_decode": 2}, 1),
    ],
)
def test_gpus_without_room_for_prefill_workers_have_none(num_gpus, values, expected):
    assert resolve.num_prefill(ServeConfig.from_mapping(values), num_gpus) == expected


def test_worker_ids_name_role_and_number():
    config = ServeConfig.from_mapping({"prefill": 2, "decode": 1})
    assert resolve.worker_ids(config) == {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode"}


CERTIFICATES = {
    "tls_cert_file": "host.pem",
    "tls_key_file": "host.key",
    "tls_ca_file": "ca.pem",
    "tls_server_name": "x",
}


@pytest.mark.parametrize(
    ("values", "files"),
    [
        ({}, TlsFiles()),
        ({"transport": "grpc"}, TlsFiles()),
        (
            {"transport": "grpc"} | CERTIFICATES,
            TlsFiles(cert_file="host.pem", key_file="host.key", ca_file="ca.pem", server_name="x"),
        ),
        ({"kv_tls_cert_file": "own", "transport": "grpc"} | CERTIFICATES, TlsFiles(cert_file="own")),
        ({"kv_curve_key_file": "key"} | CERTIFICATES, TlsFiles()),
        ({"kv_plaintext": True} | CERTIFICATES, TlsFiles()),
        ({"kv_plaintext": True, "transport": "grpc"} | CERTIFICATES, TlsFiles()),
    ],
)
def test_kv_is_encrypted_where_all_else_is(values, files):
    assert resolve.kv_tls(ServeConfig.from_mapping(values)) == files


@pytest.mark.parametrize("transport", ENCRYPTED_BY_CURVE)
@pytest.mark.parametrize("with_tls", [False, True])
@pytest.mark.parametrize("name", ["cert_file", "ca_file", "server_name"])
def test_certificates_for_kv_that_its_transport_does_not_take_are_refused(transport, with_tls, name):
    """Nothing else would use them: KV would go in clear though somebody has said how to encrypt it."""
    values = {f"kv_tls_{name}": "own", "transport": transport} | (CERTIFICATES if with_tls else {})
    with pytest.raises(ConfigInvalid, match="only transport grpc takes certificates"):
        resolve.kv_tls(ServeConfig.from_mapping(values))


@pytest.mark.parametrize("with_tls", [False, True])
def test_a_curve_key_is_refused_where_kv_goes_over_grpc(with_tls):
    values = {"kv_curve_key_file": "key", "transport": "grpc"} | (CERTIFICATES if with_tls else {})
    with pytest.raises(ConfigInvalid, match="knows no CURVE"):
        resolve.kv_tls(ServeConfig.from_mapping(values))


@pytest.mark.parametrize("transport", ENCRYPTED_BY_CURVE)
def test_kv_in_clear_beside_certificates_is_refused(transport):
    key = {"kv_curve_key_file": "key"} if transport == "nixl" else {}  # which encrypts what nixl does not carry
    config = ServeConfig.from_mapping({"transport": transport} | key | CERTIFICATES)
    with pytest.raises(ConfigInvalid, match="kv_plaintext") as error:
        resolve.transfer_config(config)
    assert "kv_curve_key_file" in error.value.fields["keys"]


def taken_port():
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    return listening


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"grpc_port": 7000, "http_port": 7000}, ConfigInvalid, "grpc_port and http_port are both 7000"),
        ({"trace_file": "/nowhere/spans"}, ConfigInvalid, "trace_file: cannot write /nowhere/spans"),
        ({"device": "cuda"}, ConfigInvalid, "device: cuda is asked for, and torch finds no GPU here"),
        ({"transport": "nvlink"}, ConfigInvalid, "transport: nvlink cannot be had here: no GPU"),
        ({"transport": "nixl"}, PackageMissing, r"transport: nixl cannot be had here: install baton-pd\[nixl\]"),
    ],
    ids=str,
)
def test_what_this_machine_cannot_have_is_said_before_anything_starts(monkeypatch, values, error, message):
    monkeypatch.setattr(resolve, "has_gpu", lambda: False)
    monkeypatch.setattr(resolve, "visible_gpus", lambda: 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = ServeConfig.from_mapping({"model": "tiny", "grpc_port": 0, **values})
    with pytest.raises(error, match=message):
        resolve.require_startable(config)


def test_ports_that_are_taken_or_not_for_this_account_are_named_with_their_keys(monkeypatch):
    with taken_port() as listening:
        config = ServeConfig.from_mapping({"model": "tiny", "grpc_port": 0, "http_port": listening.getsockname()[1]})
        with pytest.raises(PortInUse, match="Address already in use"):
            resolve.require_startable(config)

    def bind(self, address):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(resolve.socket, "socket", type("Socket", (socket.socket,), {"bind": bind}))
    config = ServeConfig.from_mapping({"model": "tiny", "grpc_port": 80})
    with pytest.raises(ConfigInvalid, match="may not listen on port 80; choose one above 1023") as refused:
        resolve.require_startable(config)
    assert refused.value.fields["keys"] == ["grpc_port"]


def test_a_gpu_that_torch_finds_without_a_device_file_is_one(monkeypatch):
    monkeypatch.setattr(resolve, "has_gpu", lambda: False)
    monkeypatch.setattr(resolve, "visible_gpus", lambda: 1)
    resolve.require_startable(ServeConfig.from_mapping({"model": "tiny", "grpc_port": 0, "device": "cuda"}))


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", lambda path: resolve.find_model(str(path), is_dummy=True)),
        ("config.json", ModelConfig.from_directory),
        ("hf_quant_config.json", lambda path: read_scheme({}, path)),
        ("model.safetensors.index.json", resolve.find_model),
        ("model.safetensors.index.json", read_headers),
    ],
)
def test_a_file_that_cannot_be_read_is_not_called_damaged(monkeypatch, tmp_path, name, read):
    def read_text(path, encoding):
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return found(path, encoding)

    for file in ("config.json", "tokenizer.json", "hf_quant_config.json", "model.safetensors.index.json"):
        (tmp_path / file).write_text('{"max_position_embeddings": 512}')
    found = Path.read_text
    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(ModelMissing, match=rf"cannot read .*{name}: Permission denied"):
        read(tmp_path)
