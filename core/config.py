"""Configuration: what an operator may set (checked once, at the border) and what a worker is given (plain values).

`ServeConfig` is the border: unknown keys and bad values are refused there, by name. Everything behind it gets frozen
dataclasses and trusts them.
"""

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from baton.core.clock import MAX_TIMEOUT_S
from baton.core.cuda_graphs import CudaGraphConfig, CudaGraphsName
from baton.core.errors import ConfigInvalid
from baton.core.inside import DeploymentSecret
from baton.core.key_spellings import RENAMED, expanded
from baton.core.kv_dtype import KVDtype
from baton.core.numerics import Numerics
from baton.core.quantization import Quantization
from baton.core.telemetry import LogFormat, TelemetryConfig
from baton.core.tls_files import TlsFiles
from baton.core.verification import (
    MADE_UP_MODES,
    DraftSampleMethod,
    VerificationConfig,
    VerificationMode,
    refuse_made_up,
)

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1", "[::1]")
DTypeName = Literal["auto", "float64", "float32", "bfloat16"]
WORKER_QUEUE_LEN = 1 << 16  # requests at one worker, against floods: what waits, waits at the router
MAX_DRAFTS = 4  # drafts per step that a deployment may be started with; `auto` chooses among 0 to so many
TransportName = Literal["auto", "zmq", "grpc", "shm", "nvlink", "nixl"]
SchedulingName = Literal["async", "sync"]
RoutingName = Literal["prefix", "least_cost", "round_robin"]
LocalPrefillName = Literal["auto", "never", "always"]
KernelsName = Literal["auto", "triton", "reference"]
LoadFormatName = Literal["auto", "safetensors", "dummy"]
DEFAULT_DRAFTS = 2  # a step, where the checkpoint has an MTP head and nothing else was asked


class ServeConfig(BaseModel):
    """Every key of `baton serve`, its flags and its `--config` file (same names, `-` as `_`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    model: str = Field(
        "tiny",
        min_length=1,
        description="a Hugging Face model directory, or a bundled model: `tiny`, `tiny-pruned`",
    )
    prefill: int = Field(1, ge=0, le=1024, description="prefill workers; 0: decode workers compute the prompts")
    decode: int = Field(1, ge=1, le=1024, description="decode workers")
    tp_prefill: Literal[1, 2, 4, 8] = Field(1, description="ranks per prefill worker, each a GPU or a CPU process")
    tp_decode: Literal[1, 2, 4, 8] = Field(1, description="ranks per decode worker, each a GPU or a CPU process")
    tensor_parallel_size: Literal[1, 2, 4, 8] | None = Field(
        None, description="sets both tp_prefill and tp_decode, where they are not given"
    )
    served_model_name: tuple[str, ...] = Field(
        (), strict=False, max_length=64, description="names that clients may use, the first in answers"
    )
    speculative_method: Literal["auto", "mtp", "none"] = Field(
        "auto", description="auto: by the checkpoint's MTP head if it has one; mtp requires one; none never drafts"
    )
    num_speculative_tokens: int | Literal["auto"] | None = Field(
        None, description="draft tokens per step, 0 to 4; auto adapts; unset: 2 where the checkpoint has an MTP head"
    )
    speculative_config: str = Field("", description="vLLM's JSON: method and num_speculative_tokens in one value")
    verification: Literal["coupled", "rejection"] = Field(
        "coupled", description="coupled: tokens as without drafts; rejection: their law as without"
    )
    draft_sample_method: Literal["probabilistic", "greedy"] = Field(
        "probabilistic", description="with rejection: drafts drawn from the MTP head's distribution, or its likeliest"
    )
    transport: TransportName = Field("auto", description="KV data path; auto takes the best that each pair proves")
    kv_digest: bool = Field(True, description="digest KV end to end; off, sockets check crc32c instead")
    secret_file: str = Field("", description="the deployment's secret; made if not there")
    kv_curve_key_file: str = Field("", description="ZMQ key pair of the deployment: encrypts KV, admits nobody else")
    kv_tls_cert_file: str = Field("", description="with --transport grpc: certificate of this host's workers")
    kv_tls_key_file: str = Field("", description="and its private key")
    kv_tls_ca_file: str = Field("", description="who signed the certificates; peers must present one")
    kv_tls_server_name: str = Field("", description="the name in the certificates, if it is not the address")
    kv_plaintext: bool = Field(False, description="KV may go in clear beside TLS: its network is trusted")
    tls_cert_file: str = Field("", description="certificate of this host's router and workers (PEM)")
    tls_key_file: str = Field("", description="and its private key")
    tls_ca_file: str = Field("", description="who signed them; router, workers and operators must present one")
    tls_server_name: str = Field("", description="the name in the certificates, if it is not the address")
    tls_client_ca_file: str = Field("", description="with it, clients must present a certificate of this CA")
    api_keys_file: str = Field("", description="with it, clients must present a key of it: `baton keys create`")
    admin_port: int | None = Field(None, ge=0, le=65535, description="of operators and workers; 0 picks a free one")
    admin_keys_file: str = Field("", description="with it, operators must present a key of it")
    max_message_mib: int = Field(16, ge=1, le=1024, description="bytes of a request; longer ones are refused")
    max_prompt_tokens: int | None = Field(None, ge=1, le=1 << 30, description="longer prompts are refused")
    max_streams_per_connection: int | None = Field(None, ge=1, le=1 << 20, description="answers over one connection")
    max_streams_per_tenant: int | None = Field(
        None, ge=1, le=1 << 20, description="answers to one tenant at once, prompts times n"
    )
    max_queued_tokens_per_tenant: int | None = Field(None, ge=1, description="of one tenant's prompts under way")
    max_connections_per_tenant: int | None = Field(
        None, ge=1, le=1 << 20, description="of one tenant: open over HTTP, in use over gRPC"
    )
    max_header_bytes_per_tenant: int | None = Field(None, ge=1, description="of one tenant's calls under way")
    max_connections: int | None = Field(None, ge=1, le=1 << 20, description="of clients, over gRPC and HTTP each")
    scheduling: SchedulingName = Field("async", description="plan a decode step while the one before it runs, or not")
    cuda_graphs: CudaGraphsName = Field("auto", description="auto: decode steps on a GPU are replayed from CUDA graphs")
    cuda_graph_sizes: str = Field("", description="batch sizes to capture: 1,2,4; chosen by itself if empty")
    batch_invariant: bool = Field(False, description="a row's result depends on that row alone, bit for bit")
    dtype: DTypeName = Field("auto", description="auto: bfloat16 on a GPU, float32 on a CPU")
    quantization: Quantization = Field(
        Quantization.NONE, strict=False, description="none, or fp8: products by e4m3 weights, made at load"
    )
    kv_cache_dtype: KVDtype = Field(
        KVDtype.AUTO, strict=False, description="auto: KV in the dtype; fp8: in e4m3, half of bfloat16's memory"
    )
    kernels: KernelsName = Field(
        "auto", description="auto: Triton's on a GPU in bfloat16, where there are kernels for the model; else torch's"
    )
    load_format: LoadFormatName = Field("auto", description="auto: safetensors; dummy: random weights, for speed tests")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where workers compute")
    host: str = Field("127.0.0.1", min_length=1, description="address that the router's ports bind to")
    grpc_port: int = Field(50051, ge=0, le=65535, description="0 picks a free one")
    http_port: int | None = Field(None, ge=0, le=65535, description="OpenAI-compatible HTTP; 0 picks a free one")
    chat_template: str = Field("", description="for HTTP: jinja file, or chatml; else the model's own")
    allowed_origins: str = Field("", description="web pages that may call by HTTP, by commas; * is any (CORS)")
    json_whitespace: bool = Field(False, description="let answers that must be JSON have white space between tokens")
    metrics_port: int | None = Field(None, ge=0, le=65535, description="Prometheus metrics alone; 0 picks a free one")
    ray_address: str = Field("local", description="auto, local, or HOST:PORT of a running cluster")
    block_size: Literal[16, 32, 64] = Field(16, description="positions per KV block")
    kv_memory_mib: int = Field(
        256, ge=1, le=1 << 24, description="KV pool per worker; on a GPU, see --gpu-memory-utilization"
    )
    kv_staging_mib: int = Field(
        1024,
        ge=1,
        le=1 << 20,
        description="host memory before each decode worker's GPU pool; KV that comes by sockets fits in it",
    )
    kv_offloading_size: float = Field(
        0.0,
        ge=0,
        le=1 << 14,
        description="GiB of host memory per decode worker for the KV of preempted requests; 0: recompute",
    )
    overcommit: bool = Field(
        True, description="run more requests than there is KV for to their ends, and preempt when it runs out"
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=0.98, description="share of a GPU's memory that its workers may use in all: weights, KV, buffers"
    )
    max_num_seqs: int | None = Field(
        None, ge=1, le=1024, description="sequences a worker runs at once; unset: by device, model and KV pool"
    )
    max_queue_len: int | None = Field(
        None, ge=1, le=100_000, description="requests the router holds; more are refused; unset: deadlines and memory"
    )
    routing: RoutingName = Field(
        "prefix", description="prefix: least cost with what is cached where; least_cost: by load alone; round_robin"
    )
    local_prefill: LocalPrefillName = Field(
        "auto",
        description="auto: decode workers compute prompts where that costs less, or nobody else can; never; always",
    )
    canary_idle_s: float = Field(
        30.0, ge=0, le=MAX_TIMEOUT_S, description="workers from which nothing came for so long are asked; 0: never"
    )
    max_wait_s: float | None = Field(
        None,
        gt=0,
        le=MAX_TIMEOUT_S,
        description="requests that would wait longer for their turn are refused; unset: than their deadline allows",
    )
    max_num_batched_tokens: int | None = Field(
        None, ge=16, le=1 << 24, description="prompt tokens per prefill step; unset: 4096 on a GPU, 256 on a CPU"
    )
    prefix_cache: bool = Field(True, description="prefill workers keep the KV of prompts for those that begin alike")
    max_model_len: int | None = Field(
        None, ge=2, le=1 << 30, description="shorter than the model's own length, to save memory"
    )
    request_timeout_s: float = Field(
        600.0, gt=0, le=MAX_TIMEOUT_S, description="a request without a deadline gets this one"
    )
    migration: bool = Field(True, description="streams that lose a worker go on at others")
    max_migrations: int = Field(2, ge=1, le=8, description="times that one answer may move")
    migration_wait_s: float = Field(
        30.0, ge=0, le=MAX_TIMEOUT_S, description="a stream waits so long for workers to go on with"
    )
    drain_grace_s: float = Field(
        10.0, ge=0, le=MAX_TIMEOUT_S, description="streams of a drained worker may finish there within this, then move"
    )
    shutdown_grace_s: float = Field(
        25.0, ge=0, le=MAX_TIMEOUT_S, description="open streams may finish within this after SIGTERM, then they end"
    )
    quarantine_deaths: int = Field(
        2, ge=0, le=8, description="deaths of workers before a request that was there is refused; 0 refuses none"
    )
    quarantine_s: float = Field(600.0, gt=0, le=MAX_TIMEOUT_S, description="how long it is refused")
    start_timeout_s: float = Field(600.0, gt=0, le=MAX_TIMEOUT_S, description="workers must report within this")
    worker_threads: int = Field(1, ge=1, le=256, description="torch threads per worker on a CPU")
    log_format: LogFormat = Field("text", description="of every process's log: text, or json, one object a line")
    log_requests: bool = Field(False, description="log a line for each request: ids, counts and times, no content")
    trace_file: str = Field("", description="append spans to this file, OTLP as JSON lines")
    trace_endpoint: str = Field("", description="send spans to this OTLP/HTTP collector; needs baton-pd[otel]")
    trace_share: float = Field(1.0, ge=0, le=1, description="trace so many of the requests whose clients leave it open")

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> "ServeConfig":
        """Check values from flags or a file.

        Raises:
            ConfigInvalid: an unknown key, or a value out of range; all of them are named. A mode of verification that
                makes acceptance up is refused before anything else.
        """
        if values.get("verification") in MADE_UP_MODES:
            raise refuse_made_up(str(values["verification"]))
        values = expanded(values)
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            problems = dict.fromkeys(cls._problem(item) for item in error.errors())
            keys = dict.fromkeys(str(item["loc"][0]) for item in error.errors() if item["loc"])
            raise ConfigInvalid("; ".join(problems), keys=list(keys)) from error
        config._check_drafts()
        if config.quarantine_deaths == 1:
            why = "one death says nothing about who was there; 0, 2 or more"
            raise ConfigInvalid(f"quarantine_deaths: {why}", keys=["quarantine_deaths"])
        if config.chat_template and config.http_port is None:
            raise ConfigInvalid("chat_template without http_port: only HTTP has chats", keys=["chat_template"])
        if config.draft_sample_method == "greedy" and config.verification == "coupled":
            message = "draft_sample_method: coupled verification knows no other drafts; it goes with rejection"
            raise ConfigInvalid(message, keys=["draft_sample_method", "verification"])
        if not config.prefill and config.local_prefill == "never":
            message = "prefill is 0, and local_prefill never lets decode workers compute prompts: nobody would"
            raise ConfigInvalid(message, keys=["prefill", "local_prefill"])
        config.graph_config()
        config.telemetry_config().check()
        return config

    @classmethod
    def _problem(cls, item: ErrorDetails) -> str:
        where = ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            if where in RENAMED:
                return f"{where}: no such key; it is now {RENAMED[where]}"
            near = difflib.get_close_matches(where, cls.model_fields, n=1)
            return f"{where}: no such key" + (f"; did you mean {near[0]}?" if near else "")
        if item["loc"][:1] == ("num_speculative_tokens",):
            return f"num_speculative_tokens: {item['input']!r} is neither 0 ... {MAX_DRAFTS} nor auto"
        return f"{where}: {item['msg']}"

    def _check_drafts(self) -> None:
        asked = self.num_speculative_tokens
        if isinstance(asked, int) and not 0 <= asked <= MAX_DRAFTS:
            message = f"num_speculative_tokens: {asked} is not in 0 ... {MAX_DRAFTS}"
            raise ConfigInvalid(message, keys=["num_speculative_tokens"])
        if self.speculative_method == "none" and asked not in (None, 0):
            message = f"speculative_method: none makes no drafts, and num_speculative_tokens is {asked}"
            raise ConfigInvalid(message, keys=["speculative_method", "num_speculative_tokens"])

    @property
    def numerics(self) -> Numerics:
        """What `batch_invariant` chooses."""
        return Numerics.INVARIANT if self.batch_invariant else Numerics.DEFAULT

    @property
    def is_dummy(self) -> bool:
        """Whether weights are drawn at random instead of read."""
        return self.load_format == "dummy"

    def graph_config(self) -> CudaGraphConfig:
        """Which CUDA graphs a decode worker captures.

        Raises:
            ConfigInvalid: sizes that are none, or sizes without graphs.
        """
        return CudaGraphConfig.parse(self.cuda_graphs, self.cuda_graph_sizes)

    def telemetry_config(self) -> TelemetryConfig:
        """What every process logs and traces; the file's path is absolute, for each has a directory of its own."""
        trace_file = str(Path(self.trace_file).absolute()) if self.trace_file else ""
        return TelemetryConfig(
            log_format=self.log_format,
            trace_file=trace_file,
            trace_endpoint=self.trace_endpoint,
            trace_share=self.trace_share,
        )

    def verification_config(self) -> VerificationConfig:
        """How a decode worker verifies drafts."""
        return VerificationConfig(
            mode=VerificationMode(self.verification), draft_sample_method=DraftSampleMethod(self.draft_sample_method)
        )

    @property
    def tls(self) -> TlsFiles:
        """Of the router and the workers."""
        return TlsFiles(
            cert_file=self.tls_cert_file,
            key_file=self.tls_key_file,
            ca_file=self.tls_ca_file,
            server_name=self.tls_server_name,
        )

    @classmethod
    def read_file(cls, path: Path) -> dict[str, Any]:
        """The mapping in a YAML (or JSON) file, not yet checked.

        Raises:
            ConfigInvalid: the file is missing, not YAML, not a mapping, or names a key twice.
        """
        try:
            values = yaml.load(path.read_text(encoding="utf-8"), Loader=_OnceLoader)
        except OSError as error:
            raise ConfigInvalid(f"cannot read {path}: {error.strerror}", path=str(path)) from error
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigInvalid(f"{path} is not YAML: {error}", path=str(path)) from error
        except RecursionError as error:
            raise ConfigInvalid(f"{path} is nested too deeply", path=str(path)) from error
        if values is None:
            return {}
        if not isinstance(values, dict):
            raise ConfigInvalid(f"{path} holds no mapping of keys to values", path=str(path))
        return {str(key).replace("-", "_"): value for key, value in values.items()}


class _OnceLoader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, `-` and `_` being the same; YAML itself lets the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping, if each key is there once."""
        names: set[str] = set()
        for key, _ in node.value:
            name = str(key.value).replace("-", "_")
            if name in names:
                raise yaml.constructor.ConstructorError(None, None, f"the key {name} is given twice", key.start_mark)
            names.add(name)
        return super().construct_mapping(node, deep)


def _own_kv_key() -> str:
    return DeploymentSecret.of_process().kv_key().hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Limits and times of the hand-off (design: lease 2 s, heartbeat 0.25 s)."""

    transport: TransportName = "auto"
    digest: bool = True  # of payloads, end to end; off, sockets check crc32c instead
    lease_s: float = 2.0
    heartbeat_s: float = 0.25
    num_writer_threads: int = 0  # 0: one; two for host memory without digests, as then the receiver has little to do
    writer_queue_len: int = 1024
    ring_slots: int = 1024
    max_frame_bytes: int = 8 << 20
    window_bytes: int = 64 << 20
    staging_mib: int = 1024  # host memory before a decode worker's GPU pool; a prompt that comes by sockets fits in it
    max_resends: int = 2
    commit_timeout_s: float = 5.0
    max_landing_deaths: int = 8  # of a landing process within a minute; with the last one the worker gives up
    raw_streams: int = 1  # TCP connections of the raw lane to each peer; 0: payloads go inline
    curve_key_file: str = ""  # zmq: encrypt with this key pair, admit nobody else; then there is no raw lane
    tls_cert_file: str = ""  # grpc: this worker's certificate
    tls_key_file: str = ""  # and its private key
    tls_ca_file: str = ""  # who signed the others' certificates; with it, peers must present one
    tls_server_name: str = ""  # the name in the others' certificates, if it is not their address
    key: str = field(default_factory=_own_kv_key, repr=False)  # hexadecimal; peers must prove that they know it, too
    drop_pushes: bool = False  # test hook: frames are counted as sent and thrown away


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What one worker is started with; every value resolved but those that only its device and its pool can tell.

    Where `max_num_seqs` or `chunk_len` is 0, `worker.loading` chooses (`core.step_sizes`).
    """

    worker_id: str
    model_path: str
    model_name: str
    num_draft_tokens: int
    numerics: Numerics
    dtype: str
    device: str
    block_size: int
    kv_memory_mib: int
    gpu_memory_utilization: float  # of the whole card; this worker's part of it
    max_num_seqs: int
    max_queue_len: int
    chunk_len: int
    max_model_len: int
    host: str
    router_address: str
    num_threads: int
    tls: TlsFiles = field(default_factory=TlsFiles)
    auto_drafts: bool = False  # each step's k is chosen by measurement, up to num_draft_tokens
    prefix_cache: bool = True
    overcommit: bool = True
    json_whitespace: bool = False
    host_kv_bytes: int = 0  # of one rank
    weights: str = "checkpoint"
    quantization: Quantization = Quantization.NONE
    kv_dtype: KVDtype = KVDtype.AUTO
    kernels: KernelsName = "auto"
    tp_size: int = 1
    scheduling: SchedulingName = "async"
    verification: VerificationConfig = field(default_factory=VerificationConfig)
    graphs: CudaGraphConfig = field(default_factory=CudaGraphConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    transfer: KVTransferConfig = field(default_factory=KVTransferConfig)
    key: str = field(default="", repr=False)  # hexadecimal, shared with the router alone; empty: this process makes it
