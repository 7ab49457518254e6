"""Configuration: the keys that an operator may set, checked once here, and the plain values that a worker gets.

`ServeConfig` is the boundary: it refuses unknown keys and invalid values, by name. All code behind it gets frozen
dataclasses and trusts them.
"""

import difflib
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from baton.core.block_hash import MIN_CHECKPOINT_LEN
from baton.core.clock import MAX_TIMEOUT_S
from baton.core.config_key import config_key
from baton.core.cuda_graphs import CudaGraphConfig, CudaGraphsName
from baton.core.errors import ConfigInvalid
from baton.core.inside import DeploymentSecret
from baton.core.kv_transports import AUTO, TRANSPORT_NAMES, one_sided_data_paths
from baton.core.numerics import KVDtype, Numerics, Quantization
from baton.core.prompt_lookup import MAX_MATCH_LEN, PromptLookup
from baton.core.requests.answer_structure import ToolCallParserName
from baton.core.requests.key_spellings import RENAMED, expanded
from baton.core.telemetry.telemetry import LogFormat, TelemetryConfig
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
WORKER_QUEUE_LEN = 1 << 16  # requests at one worker, a guard against floods: requests wait at the router
CPU_NUM_SEQS = 16  # sequences per step on a CPU, unless a flag sets it
MAX_DRAFTS = 6  # maximum draft tokens per step of a deployment; `auto` chooses between 0 and this
if TYPE_CHECKING:
    TransportName = str  # one of TRANSPORT_NAMES
else:
    TransportName = Literal[TRANSPORT_NAMES]
SchedulingName = Literal["async", "sync"]
RoutingName = Literal["prefix", "least_cost", "round_robin"]
LocalPrefillName = Literal["auto", "never", "always"]
KernelsName = Literal["auto", "triton", "reference"]
LoadFormatName = Literal["auto", "safetensors", "dummy"]
DEFAULT_DRAFTS = 2  # maximum per step if the checkpoint has an MTP head and no flag says otherwise
DEFAULT_LOOKED_UP = 4  # drafts that need no pass of a head

_model, _parallel = partial(config_key, panel="Model"), partial(config_key, panel="Parallelism")
_drafts, _kv = partial(config_key, panel="Speculation"), partial(config_key, panel="KV cache")
_schedule, _ports = partial(config_key, panel="Scheduling"), partial(config_key, panel="Ports and addresses")
_limits = partial(config_key, panel="Limits and times", router=True)
_logs = partial(config_key, panel="Logging and tracing", router=True)
_security = partial(config_key, panel="Security")


class ServeConfig(BaseModel):
    """Every key of `baton serve`, its flags and its `--config` file (same names, `-` as `_`).

    The flags, their help and docs/flags.md are made from these declarations, in this order.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    model: str = _model(
        "tiny",
        "Hugging Face directory, or a bundled model: tiny, tiny-pruned, tiny-hybrid, tiny-mla",
        metavar="dir",
        vllm="--model",
        min_length=1,
    )
    served_model_name: tuple[str, ...] = _model(
        (),
        "model name for clients; repeat it for aliases, answers have the first",
        unset="the directory's",
        metavar="name",
        vllm="--served-model-name",
        strict=False,
        max_length=64,
    )
    load_format: LoadFormatName = _model(
        "auto", "dummy makes random weights, for speed tests", vllm="--load-format", router=True
    )
    dtype: DTypeName = _model("auto", "auto is bfloat16 on a GPU, float32 on a CPU", vllm="--dtype")
    quantization: Quantization = _model(
        Quantization.NONE,
        "weight quantization; fp8 (e4m3) quantizes while loading",
        vllm="--quantization",
        strict=False,
    )
    max_model_len: int | None = _model(
        None,
        "shorter than the model's own length saves memory",
        unset="the model's own",
        metavar="tokens",
        vllm="--max-model-len",
        ge=2,
        le=1 << 30,
    )
    device: Literal["auto", "cpu", "cuda"] = _model("auto", "where workers compute")
    kernels: KernelsName = _model("auto", "auto is triton on a GPU in bfloat16 where the model has kernels")
    batch_invariant: bool = _model(
        False, "a row's result depends on that row alone, bit for bit", vllm="VLLM_BATCH_INVARIANT"
    )

    prefill: int | None = _parallel(
        None,
        "prefill workers; 0: decode workers compute the prompts",
        unset="1; 0 where GPUs are too few for one of its own",
        metavar="workers",
        ge=0,
        le=1024,
    )
    decode: int = _parallel(1, "decode workers", ge=1, le=1024)
    tensor_parallel_size: Literal[1, 2, 4, 8] | None = _parallel(
        None, "ranks per worker, where --tp-prefill or --tp-decode says nothing else", vllm="--tensor-parallel-size"
    )
    tp_prefill: Literal[1, 2, 4, 8] = _parallel(1, "ranks per prefill worker, each a GPU or a CPU process")
    tp_decode: Literal[1, 2, 4, 8] = _parallel(1, "ranks per decode worker, each a GPU or a CPU process")
    enable_expert_parallel: bool = _parallel(
        False, "give each rank whole experts instead of a slice of every expert", vllm="--enable-expert-parallel"
    )
    enable_dp_attention: bool = _parallel(
        False, "MLA models: keep each sequence's KV and attention on one rank of its decode worker"
    )
    enable_eplb: bool = _parallel(
        False, "move whole experts between ranks by load, while serving", vllm="--enable-eplb"
    )
    num_redundant_experts: int = _parallel(
        0,
        "extra copies of hot experts per layer, with --enable-eplb",
        vllm="--eplb-config (num_redundant_experts)",
        ge=0,
        le=4096,
    )
    eplb_step_interval: int = _parallel(
        3000,
        "steps between two readings of the experts' load",
        metavar="steps",
        vllm="--eplb-config (step_interval)",
        ge=1,
        le=1 << 30,
    )
    worker_threads: int = _parallel(1, "torch threads per worker on a CPU", ge=1, le=256)
    ray_address: str = _parallel("local", "local starts a private Ray; auto or HOST:PORT joins one", metavar="address")

    speculative_method: Literal["auto", "mtp", "eagle3", "ngram", "none"] | None = _drafts(
        None,
        "ngram looks up drafts in the text so far; auto picks ngram, the head or none by measurement",
        unset="by --draft-model or MTP head, if any",
        vllm="--speculative-config (method)",
    )
    num_speculative_tokens: int | Literal["auto"] | None = _drafts(
        None,
        "draft tokens per step, 0 to 6, or auto: as measured",
        unset="up to 2 by a head, as measured; 4 by ngram; else 0",
        metavar="tokens",
        vllm="--speculative-config (num_speculative_tokens)",
    )
    draft_model: str = _drafts(
        "",
        "an EAGLE-3 drafter of the model, as published, or the bundled one of tiny: tiny-eagle3",
        metavar="directory",
        vllm="--speculative-config (model)",
    )
    speculative_config: str = _drafts(
        "", 'as in vLLM: {"method": "mtp", "num_speculative_tokens": 2}', metavar="JSON", vllm="--speculative-config"
    )
    prompt_lookup_max: int = _drafts(
        4,
        "ngram: compare up to this many last tokens",
        metavar="tokens",
        ge=1,
        le=MAX_MATCH_LEN,
        vllm="--speculative-config (prompt_lookup_max)",
    )
    prompt_lookup_min: int = _drafts(
        2,
        "ngram: at least this many last tokens must match",
        metavar="tokens",
        ge=1,
        le=MAX_MATCH_LEN,
        vllm="--speculative-config (prompt_lookup_min)",
    )
    verification: Literal["coupled", "rejection"] = _drafts(
        "coupled", "coupled keeps the tokens of decoding without drafts, rejection only their distribution"
    )
    draft_sample_method: Literal["probabilistic", "greedy"] = _drafts(
        "probabilistic",
        "under rejection: drafts drawn from the MTP head's distribution, or its likeliest; ngram draws none",
        vllm="--speculative-config (draft_sample_method)",
    )

    gpu_memory_utilization: float = _kv(
        0.9,
        "share of each GPU's memory for weights, KV and buffers",
        metavar="share",
        vllm="--gpu-memory-utilization",
        gt=0,
        le=0.98,
    )
    kv_memory_mib: int = _kv(256, "KV pool per worker on a CPU", metavar="MiB", ge=1, le=1 << 24)
    kv_staging_mib: int = _kv(
        1024,
        "host memory for KV on its way to a GPU by sockets; a prompt's KV must fit",
        metavar="MiB",
        ge=1,
        le=1 << 20,
    )
    kv_cache_dtype: KVDtype = _kv(
        KVDtype.AUTO,
        "auto is the dtype; fp8 is e4m3, half of bfloat16's memory",
        vllm="--kv-cache-dtype",
        strict=False,
    )
    block_size: Literal[16, 32, 64] = _kv(16, "positions per KV block", vllm="--block-size")
    prefix_cache: bool = _kv(True, "reuse the KV of prompts with a common prefix", vllm="--enable-prefix-caching")
    state_checkpoint_interval: int = _kv(
        0,
        "recurrent models: checkpoint the state every so many prompt tokens; 0: at the end and where prompts diverge",
        metavar="tokens",
        vllm="--mamba-block-size",
        ge=0,
        le=1 << 20,
    )
    kv_offloading_size: float = _kv(
        0.0,
        "host memory per decode worker for preempted KV; 0: recompute",
        metavar="GiB",
        vllm="--kv-offloading-size",
        ge=0,
        le=1 << 14,
    )
    overcommit: bool = _kv(True, "admit more requests than the KV cache can finish; preempt when it is full")
    transport: TransportName = _kv("auto", "how KV travels; auto takes the best that each pair of workers proves")
    kv_digest: bool = _kv(True, "digest KV end to end; off, sockets check crc32c instead")

    max_num_seqs: int | None = _schedule(
        None,
        "sequences a worker runs at once",
        unset="by device, model and KV pool",
        vllm="--max-num-seqs",
        ge=1,
        le=1024,
    )
    max_num_batched_tokens: int | None = _schedule(
        None,
        "prompt tokens per prefill step",
        unset="GPU 4096, 8192 with many experts; CPU 256",
        metavar="tokens",
        vllm="--max-num-batched-tokens",
        ge=16,
        le=1 << 24,
    )
    scheduling: SchedulingName = _schedule(
        "async", "async plans a decode step while the one before it runs", vllm="--async-scheduling"
    )
    cuda_graphs: CudaGraphsName = _schedule(
        "auto", "auto replays steps on a GPU from CUDA graphs, with chunks in pieces", vllm="--enforce-eager (off)"
    )
    cuda_graph_sizes: str = _schedule(
        "", "batch sizes to capture: 1,2,4", unset="by itself", metavar="sizes", vllm="--cudagraph-capture-sizes"
    )
    routing: RoutingName = _schedule(
        "prefix", "prefix counts cached prefixes in the cost; least_cost ignores caches", router=True
    )
    local_prefill: LocalPrefillName = _schedule(
        "auto",
        "let decode workers compute prompts; auto: where that is cheaper, or no prefill worker can",
        router=True,
    )

    host: str = _ports(
        "127.0.0.1",
        "address that the router's ports bind to",
        metavar="address",
        vllm="--host",
        router=True,
        min_length=1,
    )
    grpc_port: int = _ports(50051, "gRPC; 0 picks a free one", metavar="port", ge=0, le=65535)
    http_port: int | None = _ports(
        None,
        "HTTP, OpenAI's and Anthropic's APIs; 0 picks a free one",
        unset="none",
        metavar="port",
        vllm="--port",
        router=True,
        ge=0,
        le=65535,
    )
    metrics_port: int | None = _ports(
        None, "Prometheus metrics alone; 0 picks a free one", unset="none", metavar="port", router=True, ge=0, le=65535
    )
    chat_template: str = _ports(
        "",
        "for HTTP: jinja file, or chatml",
        unset="the model's own",
        metavar="file",
        vllm="--chat-template",
        router=True,
    )
    tool_call_parser: ToolCallParserName = _ports(
        "auto",
        "form of tool calls; auto: the one its chat template shows",
        vllm="--tool-call-parser",
        router=True,
    )
    json_whitespace: bool = _ports(False, "allow white space in JSON answers")
    allowed_origins: str = _ports(
        "",
        "comma-separated origins that may call over HTTP (CORS); * allows any",
        unset="none",
        metavar="origins",
        vllm="--allowed-origins",
        router=True,
    )

    max_queue_len: int | None = _limits(
        None,
        "most requests the router holds; it refuses more",
        unset="by deadlines and memory",
        ge=1,
        le=100_000,
    )
    max_wait_s: float | None = _limits(
        None,
        "refuse requests that would wait longer",
        unset="their deadline",
        metavar="seconds",
        gt=0,
        le=MAX_TIMEOUT_S,
    )
    request_timeout_s: float = _limits(
        600.0, "deadline of a request that has none", metavar="seconds", gt=0, le=MAX_TIMEOUT_S
    )
    shutdown_grace_s: float = _limits(
        25.0,
        "grace for open streams after SIGTERM",
        metavar="seconds",
        vllm="--shutdown-timeout",
        ge=0,
        le=MAX_TIMEOUT_S,
    )
    start_timeout_s: float = _limits(
        600.0, "time limit for workers to report", router=False, metavar="seconds", gt=0, le=MAX_TIMEOUT_S
    )
    canary_idle_s: float = _limits(
        30.0,
        "probe workers idle for this long with a request; 0: never",
        metavar="seconds",
        ge=0,
        le=MAX_TIMEOUT_S,
    )
    migration: bool = _limits(True, "continue streams on other workers when theirs is lost")
    max_migrations: int = _limits(2, "most migrations of one answer", ge=1, le=8)
    migration_wait_s: float = _limits(
        30.0, "how long a stream waits for workers to continue on", metavar="seconds", ge=0, le=MAX_TIMEOUT_S
    )
    drain_grace_s: float = _limits(
        10.0,
        "migrate streams of a drained worker after this",
        metavar="seconds",
        ge=0,
        le=MAX_TIMEOUT_S,
    )
    quarantine_deaths: int = _limits(
        2, "refuse a request present at this many worker deaths (2 or more); 0 disables", ge=0, le=8
    )
    quarantine_s: float = _limits(
        600.0, "how long such a request is refused", metavar="seconds", gt=0, le=MAX_TIMEOUT_S
    )

    log_format: LogFormat = _logs("text", "log format of every process; json writes one object per line")
    log_requests: bool = _logs(
        False, "log one line per request: ids, counts and times, no content", vllm="--enable-log-requests"
    )
    trace_file: str = _logs("", "append spans to this file: OTLP as JSON lines", metavar="file")
    trace_endpoint: str = _logs(
        "",
        "send spans to this OTLP/HTTP collector; needs baton-pd[otel]",
        metavar="URL",
        vllm="--otlp-traces-endpoint",
    )
    trace_share: float = _logs(
        1.0, "share of requests to trace if the client does not decide", metavar="share", ge=0, le=1
    )

    secret_file: str = _security(
        "", "the deployment's secret; made if not there", unset="another one at each start", metavar="file"
    )
    kv_curve_key_file: str = _security(
        "", "ZMQ key pair of the deployment: encrypts KV, admits no other peer", metavar="file"
    )
    kv_tls_cert_file: str = _security(
        "", "with --transport grpc: certificate of this host's workers (PEM)", metavar="file"
    )
    kv_tls_key_file: str = _security("", "private key of --kv-tls-cert-file (PEM)", metavar="file")
    kv_tls_ca_file: str = _security("", "CA of the certificates that peers must present", metavar="file")
    kv_tls_server_name: str = _security(
        "", "the name in the workers' certificates, if it is not the address", metavar="name"
    )
    kv_plaintext: bool = _security(False, "KV may go in clear beside TLS: its network is trusted")
    tls_cert_file: str = _security(
        "", "certificate of this host's router and workers (PEM)", metavar="file", vllm="--ssl-certfile", router=True
    )
    tls_key_file: str = _security(
        "", "private key of --tls-cert-file (PEM)", metavar="file", vllm="--ssl-keyfile", router=True
    )
    tls_ca_file: str = _security(
        "", "CA of the certificates that router, workers and operators must present", metavar="file", router=True
    )
    tls_server_name: str = _security(
        "", "the name in the certificates, if it is not the address", metavar="name", router=True
    )
    tls_client_ca_file: str = _security(
        "", "with it, clients must present a certificate of this CA", metavar="file", vllm="--ssl-ca-certs", router=True
    )
    api_keys_file: str = _security(
        "", "with it, clients must present a key of it: baton keys create", metavar="file", router=True
    )
    admin_port: int | None = _security(
        None,
        "of operators and workers; 0 picks a free one",
        unset="the gRPC port",
        metavar="port",
        router=True,
        ge=0,
        le=65535,
    )
    admin_keys_file: str = _security("", "with it, operators must present a key of it", metavar="file", router=True)
    max_message_mib: int = _security(
        16, "size of a request; larger ones are refused", metavar="MiB", router=True, ge=1, le=1024
    )
    max_prompt_tokens: int | None = _security(
        None,
        "longer prompts are refused",
        unset="what the model takes",
        metavar="tokens",
        router=True,
        ge=1,
        le=1 << 30,
    )
    max_streams_per_connection: int | None = _security(
        None, "answers over one connection at once", unset="no limit", router=True, ge=1, le=1 << 20
    )
    max_streams_per_tenant: int | None = _security(
        None, "answers to one tenant at once, prompts times n", unset="no limit", router=True, ge=1, le=1 << 20
    )
    max_queued_tokens_per_tenant: int | None = _security(
        None, "of one tenant's prompts under way", unset="no limit", metavar="tokens", router=True, ge=1
    )
    max_connections_per_tenant: int | None = _security(
        None, "of one tenant: open over HTTP, in use over gRPC", unset="no limit", router=True, ge=1, le=1 << 20
    )
    max_header_bytes_per_tenant: int | None = _security(
        None, "headers of one tenant's calls under way", unset="no limit", metavar="bytes", router=True, ge=1
    )
    max_connections: int | None = _security(
        None, "of clients, over gRPC and HTTP each", unset="half the open-file limit", router=True, ge=1, le=1 << 20
    )

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> "ServeConfig":
        """Check values from flags or a file.

        Raises:
            ConfigInvalid: there are unknown keys or values out of range; the error names all of them. A verification
                mode that fakes acceptance is refused before anything else.
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
        config.lookup()
        config._check_experts()
        config._check_dp_attention()
        config._check_checkpoints()
        if config.quarantine_deaths == 1:
            why = "one death says nothing about who was there; 0, 2 or more"
            raise ConfigInvalid(f"quarantine_deaths: {why}", keys=["quarantine_deaths"])
        if config.chat_template and config.http_port is None:
            raise ConfigInvalid("chat_template without http_port: only HTTP has chats", keys=["chat_template"])
        if config.tool_call_parser != "auto" and config.http_port is None:
            raise ConfigInvalid("tool_call_parser without http_port: only HTTP has chats", keys=["tool_call_parser"])
        if config.draft_sample_method == "greedy" and config.verification == "coupled":
            message = "draft_sample_method: coupled verification knows no other drafts; it goes with rejection"
            raise ConfigInvalid(message, keys=["draft_sample_method", "verification"])
        if config.speculative_method == "none" and config.verification == "rejection":
            message = "verification: rejection is asked for, and speculative_method none makes no drafts to verify"
            raise ConfigInvalid(message, keys=["verification", "speculative_method"])
        if config.prefill == 0 and config.local_prefill == "never":
            message = "prefill is 0, and local_prefill never lets decode workers compute prompts: no worker would"
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

    @property
    def draft_path(self) -> str:
        """Directory of the drafter in use; empty if none is."""
        return self.draft_model if self.speculative_method in (None, "auto", "eagle3") else ""

    @property
    def redundant_experts(self) -> int | None:
        """Additional copies of experts that a layer's ranks hold; None: no expert moves."""
        return self.num_redundant_experts if self.enable_eplb else None

    def _check_experts(self) -> None:
        if self.enable_eplb and not self.enable_expert_parallel:
            message = "enable_eplb: only whole experts move between ranks, and enable_expert_parallel is not set"
            raise ConfigInvalid(message, keys=["enable_eplb", "enable_expert_parallel"])
        if self.num_redundant_experts and not self.enable_eplb:
            message = "num_redundant_experts: copies are placed by load, and enable_eplb is not set"
            raise ConfigInvalid(message, keys=["num_redundant_experts", "enable_eplb"])

    def _check_dp_attention(self) -> None:
        if not self.enable_dp_attention:
            return
        reached = self.transport == AUTO or all(path.has_owners for path in one_sided_data_paths(self.transport))
        refused = {
            "transport": self.prefill != 0 and not reached and f"{self.transport} does not write one rank's pool alone",
            "draft_model": self.draft_path and "a drafter attends over heads, of which each rank has a part",
        }
        for key, why in refused.items():
            if why:
                raise ConfigInvalid(f"enable_dp_attention: {why}; leave out {key}", keys=["enable_dp_attention", key])

    def _check_checkpoints(self) -> None:
        asked = self.state_checkpoint_interval
        if asked and not self.prefix_cache:
            message = "state_checkpoint_interval: it says where cached prefixes end, and prefix_cache is off"
            raise ConfigInvalid(message, keys=["state_checkpoint_interval", "prefix_cache"])
        if asked and (asked % self.block_size or asked < MIN_CHECKPOINT_LEN):
            least = f"block_size {self.block_size}, {MIN_CHECKPOINT_LEN} or more"
            message = f"state_checkpoint_interval: {asked} is neither 0 nor a multiple of {least}"
            raise ConfigInvalid(message, keys=["state_checkpoint_interval", "block_size"])

    def _check_drafts(self) -> None:
        asked = self.num_speculative_tokens
        if self.speculative_method == "eagle3" and not self.draft_model:
            message = "speculative_method: eagle3 drafts by a drafter, and draft_model names none"
            raise ConfigInvalid(message, keys=["speculative_method", "draft_model"])
        if self.draft_model and not self.draft_path:
            message = f"draft_model: speculative_method {self.speculative_method} does not use it"
            raise ConfigInvalid(message, keys=["draft_model", "speculative_method"])
        if isinstance(asked, int) and not 0 <= asked <= MAX_DRAFTS:
            message = f"num_speculative_tokens: {asked} is not in 0 ... {MAX_DRAFTS}"
            raise ConfigInvalid(message, keys=["num_speculative_tokens"])
        if self.speculative_method == "none" and asked not in (None, 0):
            message = f"speculative_method: none makes no drafts, and num_speculative_tokens is {asked}"
            raise ConfigInvalid(message, keys=["speculative_method", "num_speculative_tokens"])

    def lookup(self) -> PromptLookup | None:
        """Settings of prompt lookup; None if drafts are never looked up.

        Raises:
            ConfigInvalid: the maximum is less than the minimum.
        """
        if self.speculative_method not in ("ngram", "auto"):
            return None
        return PromptLookup(min_match_len=self.prompt_lookup_min, max_match_len=self.prompt_lookup_max)

    @property
    def numerics(self) -> Numerics:
        """The numerics that `batch_invariant` selects."""
        return Numerics.INVARIANT if self.batch_invariant else Numerics.DEFAULT

    @property
    def is_dummy(self) -> bool:
        """Whether weights are drawn at random instead of read."""
        return self.load_format == "dummy"

    def graph_config(self) -> CudaGraphConfig:
        """Which CUDA graphs a decode worker captures.

        Raises:
            ConfigInvalid: sizes are invalid, or given without graphs.
        """
        return CudaGraphConfig.parse(self.cuda_graphs, self.cuda_graph_sizes)

    def telemetry_config(self) -> TelemetryConfig:
        """What every process logs and traces, with an absolute file path: each process has its own directory."""
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
        """TLS files of the router and the workers."""
        return TlsFiles(
            cert_file=self.tls_cert_file,
            key_file=self.tls_key_file,
            ca_file=self.tls_ca_file,
            server_name=self.tls_server_name,
        )

    @classmethod
    def read_file(cls, path: Path) -> dict[str, Any]:
        """Read the mapping in a YAML (or JSON) file, without checking its values.

        Raises:
            ConfigInvalid: the file is missing, not YAML, not a mapping, or has a duplicate key.
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


# YAML 1.2's scalars, plus merges, binary numbers and `1_000` from 1.1, which mean nothing else in 1.2.
_SCALARS: Final = {
    "null": ("~|null|Null|NULL|", ("~", "n", "N", "")),
    "bool": ("true|True|TRUE|false|False|FALSE", tuple("tTfF")),
    "int": ("[-+]?(0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)", tuple("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        tuple("-+.0123456789"),
    ),
    "merge": ("<<", ("<",)),
}


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Build PyYAML's patterns of plain scalars, by their first character."""
    found: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for name, (form, firsts) in _SCALARS.items():
        for first in firsts:
            found.setdefault(first, []).append((f"tag:yaml.org,2002:{name}", re.compile(f"(?:{form})$")))
    return found


class _OnceLoader(yaml.SafeLoader):
    """Loads YAML 1.2's words and numbers; PyYAML's 1.1 reads `off` as false, `010` as 8 and `1e3` as text.

    It refuses a mapping with a duplicate key, where `-` and `_` are the same; YAML itself lets the last one win.
    """

    yaml_implicit_resolvers = _resolvers()

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Convert an integer; it is decimal unless a letter follows the leading 0."""
        text = str(self.construct_scalar(node)).replace("_", "")
        return int(text, 0 if text.lstrip("+-")[:2].lower() in ("0x", "0o", "0b") else 10)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build the mapping if no key is duplicated."""
        names: set[str] = set()
        for key, _ in node.value:
            name = str(key.value).replace("-", "_")
            if name in names:
                raise yaml.constructor.ConstructorError(None, None, f"the key {name} is given twice", key.start_mark)
            names.add(name)
        return super().construct_mapping(node, deep)


_OnceLoader.add_constructor("tag:yaml.org,2002:int", _OnceLoader.construct_yaml_int)


def _own_kv_key() -> str:
    return DeploymentSecret.of_process().kv_key().hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Limits and times of the hand-off (design: lease 2 s, heartbeat 0.25 s)."""

    transport: TransportName = "auto"
    digest: bool = True  # of payloads, end to end; when off, sockets check crc32c instead
    lease_s: float = 2.0
    heartbeat_s: float = 0.25
    num_writer_threads: int = 0  # 0: one; two for host memory without digests, when the receiver has little to do
    writer_queue_len: int = 1024
    ring_slots: int = 1024
    max_frame_bytes: int = 8 << 20
    window_bytes: int = 64 << 20
    staging_mib: int = 1024  # host memory before a decode worker's GPU pool; a prompt's KV sent by sockets must fit
    max_resends: int = 2
    commit_timeout_s: float = 5.0
    max_receiver_deaths: int = 8  # of a KV receiver process within a minute; at the last one the worker gives up
    raw_streams: int = 1  # TCP connections of the raw data path to each peer
    curve_key_file: str = ""  # zmq: encrypt with this key pair and refuse other peers; disables the raw data path
    tls_cert_file: str = ""  # grpc: this worker's certificate
    tls_key_file: str = ""  # private key of tls_cert_file
    tls_ca_file: str = ""  # CA of the peers' certificates; if set, peers must present one
    tls_server_name: str = ""  # name in the peers' certificates, if it is not their address
    key: str = field(default_factory=_own_kv_key, repr=False)  # hex; peers must prove that they know it too
    drop_pushes: bool = False  # test hook: frames are counted as sent, then dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Configuration of one worker; all values are resolved except those that depend on its device and its pool.

    Where `max_num_seqs` or `chunk_len` is 0, `worker.loading` chooses (`StepSizes`).
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
    gpu_memory_utilization: float  # share of the whole card for this worker
    max_num_seqs: int
    max_queue_len: int
    chunk_len: int
    max_model_len: int
    host: str
    router_address: str
    num_threads: int
    is_model_len_asked: bool = False  # if not, a KV pool too small for the model's length shortens it
    tls: TlsFiles = field(default_factory=TlsFiles)
    auto_drafts: bool = False  # choose each step's k by measurement, up to num_draft_tokens
    auto_method: bool = False  # choose the method that makes drafts, or none, by measurement
    lookup: PromptLookup | None = None  # settings of prompt lookup; None: a draft head makes drafts
    has_head: bool = True  # whether a head makes drafts: the checkpoint's own, or `draft_path`
    draft_path: str = ""  # directory of an EAGLE-3 drafter; empty: the checkpoint's own draft head
    prefix_cache: bool = True
    state_checkpoint_interval: int = 0  # tokens; 0: no checkpoints along a prompt
    overcommit: bool = True
    json_whitespace: bool = False
    host_kv_bytes: int = 0  # per rank
    weights: str = "checkpoint"
    quantization: Quantization = Quantization.NONE
    kv_dtype: KVDtype = KVDtype.AUTO
    kernels: KernelsName = "auto"
    tp_size: int = 1
    enable_expert_parallel: bool = False  # among this worker's ranks
    enable_dp_attention: bool = False  # likewise; decode workers only
    redundant_experts: int | None = None  # additional copies per layer; None: no expert moves
    eplb_step_interval: int = 3000
    scheduling: SchedulingName = "async"
    verification: VerificationConfig = field(default_factory=VerificationConfig)
    graphs: CudaGraphConfig = field(default_factory=CudaGraphConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    transfer: KVTransferConfig = field(default_factory=KVTransferConfig)
    key: str = field(default="", repr=False)  # hex, shared with the router only; empty: derived by this process
