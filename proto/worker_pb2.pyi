from baton.proto import inference_pb2 as _inference_pb2
from baton.proto import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StartingWorker(_message.Message):
    __slots__ = ("worker_id", "role", "epoch", "phase", "num_done", "num_total")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    NUM_DONE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    epoch: int
    phase: str
    num_done: int
    num_total: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., epoch: _Optional[int] = ..., phase: _Optional[str] = ..., num_done: _Optional[int] = ..., num_total: _Optional[int] = ...) -> None: ...

class StartingReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Peer(_message.Message):
    __slots__ = ("worker_id", "kv_address", "epoch")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    kv_address: str
    epoch: int
    def __init__(self, worker_id: _Optional[str] = ..., kv_address: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("attempt", "prompt_token_ids", "sampling", "decode", "num_draft_tokens", "timeout_ms", "tenant", "choice", "num_forced_tokens", "traceparent")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    NUM_FORCED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    attempt: _kv_pb2.Attempt
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.Sampling
    decode: Peer
    num_draft_tokens: int
    timeout_ms: int
    tenant: str
    choice: int
    num_forced_tokens: int
    traceparent: str
    def __init__(self, attempt: _Optional[_Union[_kv_pb2.Attempt, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.Sampling, _Mapping]] = ..., decode: _Optional[_Union[Peer, _Mapping]] = ..., num_draft_tokens: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., tenant: _Optional[str] = ..., choice: _Optional[int] = ..., num_forced_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("first_token", "done", "prompt_logprobs")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_token: FirstToken
    done: PrefillDone
    prompt_logprobs: PromptLogprobs
    def __init__(self, first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    def __init__(self, tokens: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token", "finish_reason", "queue_ms", "grant_wait_ms", "prefill_ms", "sent_ns", "received_ns", "num_cached_tokens", "logprobs", "index")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    GRANT_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    token: int
    finish_reason: str
    queue_ms: float
    grant_wait_ms: float
    prefill_ms: float
    sent_ns: int
    received_ns: int
    num_cached_tokens: int
    logprobs: _inference_pb2.TokenLogprobs
    index: int
    def __init__(self, token: _Optional[int] = ..., finish_reason: _Optional[str] = ..., queue_ms: _Optional[float] = ..., grant_wait_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., sent_ns: _Optional[int] = ..., received_ns: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., logprobs: _Optional[_Union[_inference_pb2.TokenLogprobs, _Mapping]] = ..., index: _Optional[int] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("kv_bytes_pushed", "handed_off", "kv_data_path")
    KV_BYTES_PUSHED_FIELD_NUMBER: _ClassVar[int]
    HANDED_OFF_FIELD_NUMBER: _ClassVar[int]
    KV_DATA_PATH_FIELD_NUMBER: _ClassVar[int]
    kv_bytes_pushed: int
    handed_off: bool
    kv_data_path: str
    def __init__(self, kv_bytes_pushed: _Optional[int] = ..., handed_off: bool = ..., kv_data_path: _Optional[str] = ...) -> None: ...

class WatchPrefixesRequest(_message.Message):
    __slots__ = ("epoch", "version")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class PrefixChange(_message.Message):
    __slots__ = ("after", "version", "cleared", "stored", "removed", "name_bytes", "part")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    NAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    after: int
    version: int
    cleared: bool
    stored: bytes
    removed: bytes
    name_bytes: int
    part: int
    def __init__(self, after: _Optional[int] = ..., version: _Optional[int] = ..., cleared: bool = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., name_bytes: _Optional[int] = ..., part: _Optional[int] = ...) -> None: ...

class PrefixNaming(_message.Message):
    __slots__ = ("model", "block_size", "with_mtp", "with_checkpoints", "checkpoint_interval")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    WITH_MTP_FIELD_NUMBER: _ClassVar[int]
    WITH_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    model: str
    block_size: int
    with_mtp: bool
    with_checkpoints: bool
    checkpoint_interval: int
    def __init__(self, model: _Optional[str] = ..., block_size: _Optional[int] = ..., with_mtp: bool = ..., with_checkpoints: bool = ..., checkpoint_interval: _Optional[int] = ...) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ("attempt", "prompt_token_ids", "sampling", "num_draft_tokens", "timeout_ms", "choice", "tenant", "num_forced_tokens", "traceparent", "keeps_drafts", "prefill_here", "num_queued_tokens")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_FORCED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    KEEPS_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_HERE_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt: _kv_pb2.Attempt
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.Sampling
    num_draft_tokens: int
    timeout_ms: int
    choice: int
    tenant: str
    num_forced_tokens: int
    traceparent: str
    keeps_drafts: bool
    prefill_here: bool
    num_queued_tokens: int
    def __init__(self, attempt: _Optional[_Union[_kv_pb2.Attempt, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.Sampling, _Mapping]] = ..., num_draft_tokens: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., choice: _Optional[int] = ..., tenant: _Optional[str] = ..., num_forced_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ..., keeps_drafts: bool = ..., prefill_here: bool = ..., num_queued_tokens: _Optional[int] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("tokens", "first_token", "prompt_logprobs")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    tokens: DecodeTokens
    first_token: FirstToken
    prompt_logprobs: PromptLogprobs
    def __init__(self, tokens: _Optional[_Union[DecodeTokens, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class DecodeTokens(_message.Message):
    __slots__ = ("index", "token_ids", "finish_reason", "stats", "logprobs", "start")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: str
    stats: DecodeStats
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    start: DecodeStart
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[str] = ..., stats: _Optional[_Union[DecodeStats, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., start: _Optional[_Union[DecodeStart, _Mapping]] = ...) -> None: ...

class DecodeStart(_message.Message):
    __slots__ = ("draft_ms", "transfer_ms", "landed_ns", "verification_ms", "admission_ms", "step_ms")
    DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    LANDED_NS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_MS_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    draft_ms: float
    transfer_ms: float
    landed_ns: int
    verification_ms: float
    admission_ms: float
    step_ms: float
    def __init__(self, draft_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., landed_ns: _Optional[int] = ..., verification_ms: _Optional[float] = ..., admission_ms: _Optional[float] = ..., step_ms: _Optional[float] = ...) -> None: ...

class PrefillCommands(_message.Message):
    __slots__ = ("open", "cancelled")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    open: _containers.RepeatedCompositeFieldContainer[PrefillOpen]
    cancelled: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, open: _Optional[_Iterable[_Union[PrefillOpen, _Mapping]]] = ..., cancelled: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillOpen(_message.Message):
    __slots__ = ("stream", "request")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    stream: int
    request: PrefillRequest
    def __init__(self, stream: _Optional[int] = ..., request: _Optional[_Union[PrefillRequest, _Mapping]] = ...) -> None: ...

class DecodeCommands(_message.Message):
    __slots__ = ("open", "cancelled")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    open: _containers.RepeatedCompositeFieldContainer[DecodeOpen]
    cancelled: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, open: _Optional[_Iterable[_Union[DecodeOpen, _Mapping]]] = ..., cancelled: _Optional[_Iterable[int]] = ...) -> None: ...

class DecodeOpen(_message.Message):
    __slots__ = ("stream", "request")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    stream: int
    request: AttendRequest
    def __init__(self, stream: _Optional[int] = ..., request: _Optional[_Union[AttendRequest, _Mapping]] = ...) -> None: ...

class PrefillFrame(_message.Message):
    __slots__ = ("items", "epoch")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[PrefillItem]
    epoch: int
    def __init__(self, items: _Optional[_Iterable[_Union[PrefillItem, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class PrefillItem(_message.Message):
    __slots__ = ("stream", "event", "end")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    stream: int
    event: PrefillEvent
    end: StreamEnd
    def __init__(self, stream: _Optional[int] = ..., event: _Optional[_Union[PrefillEvent, _Mapping]] = ..., end: _Optional[_Union[StreamEnd, _Mapping]] = ...) -> None: ...

class DecodeFrame(_message.Message):
    __slots__ = ("streams", "indices", "lens", "token_ids", "items", "epoch")
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    LENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    streams: _containers.RepeatedScalarFieldContainer[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    lens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    items: _containers.RepeatedCompositeFieldContainer[DecodeItem]
    epoch: int
    def __init__(self, streams: _Optional[_Iterable[int]] = ..., indices: _Optional[_Iterable[int]] = ..., lens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., items: _Optional[_Iterable[_Union[DecodeItem, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class DecodeItem(_message.Message):
    __slots__ = ("stream", "event", "end")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    stream: int
    event: DecodeEvent
    end: StreamEnd
    def __init__(self, stream: _Optional[int] = ..., event: _Optional[_Union[DecodeEvent, _Mapping]] = ..., end: _Optional[_Union[StreamEnd, _Mapping]] = ...) -> None: ...

class StreamEnd(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: str
    def __init__(self, error: _Optional[str] = ...) -> None: ...

class DecodeStats(_message.Message):
    __slots__ = ("num_verify_steps", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens", "kv_bytes_landed", "kv_bytes_landed_before_prefill_end", "handoff_ms")
    NUM_VERIFY_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_LANDED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_LANDED_BEFORE_PREFILL_END_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_MS_FIELD_NUMBER: _ClassVar[int]
    num_verify_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_emitted_tokens: int
    kv_bytes_landed: int
    kv_bytes_landed_before_prefill_end: int
    handoff_ms: float
    def __init__(self, num_verify_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_emitted_tokens: _Optional[int] = ..., kv_bytes_landed: _Optional[int] = ..., kv_bytes_landed_before_prefill_end: _Optional[int] = ..., handoff_ms: _Optional[float] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("worker_id", "role", "epoch", "address", "kv_address", "model", "layout_hash", "max_model_len", "num_draft_tokens", "inventory", "block_size", "numerics", "dtype", "kv_epoch", "rank_pids", "speculation", "prefix_naming", "max_num_seqs", "kv_bytes_per_position", "build", "kv_dtype", "clock_id", "desired_state_version", "desired_state", "desired_state_incarnation", "can_prefill")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_PIDS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    PREFIX_NAMING_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    DESIRED_STATE_VERSION_FIELD_NUMBER: _ClassVar[int]
    DESIRED_STATE_FIELD_NUMBER: _ClassVar[int]
    DESIRED_STATE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CAN_PREFILL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    epoch: int
    address: str
    kv_address: str
    model: str
    layout_hash: bytes
    max_model_len: int
    num_draft_tokens: int
    inventory: Inventory
    block_size: int
    numerics: str
    dtype: str
    kv_epoch: int
    rank_pids: _containers.RepeatedScalarFieldContainer[int]
    speculation: Speculation
    prefix_naming: PrefixNaming
    max_num_seqs: int
    kv_bytes_per_position: float
    build: str
    kv_dtype: str
    clock_id: str
    desired_state_version: int
    desired_state: DesiredState
    desired_state_incarnation: int
    can_prefill: bool
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., kv_address: _Optional[str] = ..., model: _Optional[str] = ..., layout_hash: _Optional[bytes] = ..., max_model_len: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., inventory: _Optional[_Union[Inventory, _Mapping]] = ..., block_size: _Optional[int] = ..., numerics: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_epoch: _Optional[int] = ..., rank_pids: _Optional[_Iterable[int]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., prefix_naming: _Optional[_Union[PrefixNaming, _Mapping]] = ..., max_num_seqs: _Optional[int] = ..., kv_bytes_per_position: _Optional[float] = ..., build: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., clock_id: _Optional[str] = ..., desired_state_version: _Optional[int] = ..., desired_state: _Optional[_Union[DesiredState, _Mapping]] = ..., desired_state_incarnation: _Optional[int] = ..., can_prefill: bool = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("known", "speculation", "desired_state", "wants_desired_state")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    DESIRED_STATE_FIELD_NUMBER: _ClassVar[int]
    WANTS_DESIRED_STATE_FIELD_NUMBER: _ClassVar[int]
    known: bool
    speculation: SpeculationMode
    desired_state: DesiredState
    wants_desired_state: bool
    def __init__(self, known: bool = ..., speculation: _Optional[_Union[SpeculationMode, _Mapping]] = ..., desired_state: _Optional[_Union[DesiredState, _Mapping]] = ..., wants_desired_state: bool = ...) -> None: ...

class DesiredState(_message.Message):
    __slots__ = ("version", "speculation", "max_queue_len", "scale_num_prefill", "scale_num_decode", "drains", "blamed", "incarnation", "mac")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_LEN_FIELD_NUMBER: _ClassVar[int]
    SCALE_NUM_PREFILL_FIELD_NUMBER: _ClassVar[int]
    SCALE_NUM_DECODE_FIELD_NUMBER: _ClassVar[int]
    DRAINS_FIELD_NUMBER: _ClassVar[int]
    BLAMED_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    version: int
    speculation: SpeculationMode
    max_queue_len: int
    scale_num_prefill: int
    scale_num_decode: int
    drains: _containers.RepeatedCompositeFieldContainer[DrainedIncarnation]
    blamed: _containers.RepeatedCompositeFieldContainer[BlamedRequest]
    incarnation: int
    mac: bytes
    def __init__(self, version: _Optional[int] = ..., speculation: _Optional[_Union[SpeculationMode, _Mapping]] = ..., max_queue_len: _Optional[int] = ..., scale_num_prefill: _Optional[int] = ..., scale_num_decode: _Optional[int] = ..., drains: _Optional[_Iterable[_Union[DrainedIncarnation, _Mapping]]] = ..., blamed: _Optional[_Iterable[_Union[BlamedRequest, _Mapping]]] = ..., incarnation: _Optional[int] = ..., mac: _Optional[bytes] = ...) -> None: ...

class DrainedIncarnation(_message.Message):
    __slots__ = ("worker_id", "epoch")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class BlamedRequest(_message.Message):
    __slots__ = ("fingerprint", "workers")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    workers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, fingerprint: _Optional[str] = ..., workers: _Optional[_Iterable[str]] = ...) -> None: ...

class SpeculationMode(_message.Message):
    __slots__ = ("num_draft_tokens", "auto")
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AUTO_FIELD_NUMBER: _ClassVar[int]
    num_draft_tokens: int
    auto: bool
    def __init__(self, num_draft_tokens: _Optional[int] = ..., auto: bool = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("auto", "num_draft_tokens", "limit", "method", "auto_method")
    AUTO_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    AUTO_METHOD_FIELD_NUMBER: _ClassVar[int]
    auto: bool
    num_draft_tokens: int
    limit: int
    method: str
    auto_method: bool
    def __init__(self, auto: bool = ..., num_draft_tokens: _Optional[int] = ..., limit: _Optional[int] = ..., method: _Optional[str] = ..., auto_method: bool = ...) -> None: ...

class Inventory(_message.Message):
    __slots__ = ("num_requests_waiting", "num_requests_running", "num_blocks", "num_blocks_free", "num_blocks_reserved", "num_blocks_quarantined", "num_kv_receives", "num_slots_in_use", "num_requests_held", "frames_late_dropped", "frames_corrupt", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens", "num_requests_finished", "num_requests_failed", "kv_bytes", "num_prefix_tokens", "num_prefix_hit_tokens", "num_prefix_hits", "num_blocks_cached", "num_state_checkpoints", "num_state_checkpoint_slots", "num_state_checkpoints_evicted", "num_not_finite", "num_preemptions", "num_recomputed_tokens", "num_offloaded_blocks", "num_restored_blocks", "num_host_full", "num_host_blocks_used", "transfer", "steps", "waiting", "graphs", "compute", "experts", "num_prefill_tokens_queued", "prefill_tokens_per_s", "prefill_pace", "num_local_prefills", "num_local_prefill_tokens", "local_chunk_len", "full_prefill_tokens_per_s", "grammar_seconds", "gc_seconds", "max_handoff_len")
    NUM_REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_RESERVED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_RECEIVES_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_HELD_FIELD_NUMBER: _ClassVar[int]
    FRAMES_LATE_DROPPED_FIELD_NUMBER: _ClassVar[int]
    FRAMES_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_STATE_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    NUM_STATE_CHECKPOINT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_STATE_CHECKPOINTS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    NUM_NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OFFLOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_FULL_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    GRAPHS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_QUEUED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PACE_FIELD_NUMBER: _ClassVar[int]
    NUM_LOCAL_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOCAL_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_CHUNK_LEN_FIELD_NUMBER: _ClassVar[int]
    FULL_PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GC_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_HANDOFF_LEN_FIELD_NUMBER: _ClassVar[int]
    num_requests_waiting: int
    num_requests_running: int
    num_blocks: int
    num_blocks_free: int
    num_blocks_reserved: int
    num_blocks_quarantined: int
    num_kv_receives: int
    num_slots_in_use: int
    num_requests_held: int
    frames_late_dropped: int
    frames_corrupt: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_emitted_tokens: int
    num_requests_finished: int
    num_requests_failed: int
    kv_bytes: int
    num_prefix_tokens: int
    num_prefix_hit_tokens: int
    num_prefix_hits: int
    num_blocks_cached: int
    num_state_checkpoints: int
    num_state_checkpoint_slots: int
    num_state_checkpoints_evicted: int
    num_not_finite: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_offloaded_blocks: int
    num_restored_blocks: int
    num_host_full: int
    num_host_blocks_used: int
    transfer: TransferCounts
    steps: StepCounts
    waiting: _containers.RepeatedCompositeFieldContainer[Waiting]
    graphs: GraphCounts
    compute: Compute
    experts: ExpertBalance
    num_prefill_tokens_queued: int
    prefill_tokens_per_s: float
    prefill_pace: PrefillPace
    num_local_prefills: int
    num_local_prefill_tokens: int
    local_chunk_len: int
    full_prefill_tokens_per_s: float
    grammar_seconds: float
    gc_seconds: float
    max_handoff_len: int
    def __init__(self, num_requests_waiting: _Optional[int] = ..., num_requests_running: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_blocks_free: _Optional[int] = ..., num_blocks_reserved: _Optional[int] = ..., num_blocks_quarantined: _Optional[int] = ..., num_kv_receives: _Optional[int] = ..., num_slots_in_use: _Optional[int] = ..., num_requests_held: _Optional[int] = ..., frames_late_dropped: _Optional[int] = ..., frames_corrupt: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_emitted_tokens: _Optional[int] = ..., num_requests_finished: _Optional[int] = ..., num_requests_failed: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., num_prefix_tokens: _Optional[int] = ..., num_prefix_hit_tokens: _Optional[int] = ..., num_prefix_hits: _Optional[int] = ..., num_blocks_cached: _Optional[int] = ..., num_state_checkpoints: _Optional[int] = ..., num_state_checkpoint_slots: _Optional[int] = ..., num_state_checkpoints_evicted: _Optional[int] = ..., num_not_finite: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_recomputed_tokens: _Optional[int] = ..., num_offloaded_blocks: _Optional[int] = ..., num_restored_blocks: _Optional[int] = ..., num_host_full: _Optional[int] = ..., num_host_blocks_used: _Optional[int] = ..., transfer: _Optional[_Union[TransferCounts, _Mapping]] = ..., steps: _Optional[_Union[StepCounts, _Mapping]] = ..., waiting: _Optional[_Iterable[_Union[Waiting, _Mapping]]] = ..., graphs: _Optional[_Union[GraphCounts, _Mapping]] = ..., compute: _Optional[_Union[Compute, _Mapping]] = ..., experts: _Optional[_Union[ExpertBalance, _Mapping]] = ..., num_prefill_tokens_queued: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., prefill_pace: _Optional[_Union[PrefillPace, _Mapping]] = ..., num_local_prefills: _Optional[int] = ..., num_local_prefill_tokens: _Optional[int] = ..., local_chunk_len: _Optional[int] = ..., full_prefill_tokens_per_s: _Optional[float] = ..., grammar_seconds: _Optional[float] = ..., gc_seconds: _Optional[float] = ..., max_handoff_len: _Optional[int] = ...) -> None: ...

class PrefillPace(_message.Message):
    __slots__ = ("fixed_s", "per_token_s", "draft_s")
    FIXED_S_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    fixed_s: float
    per_token_s: float
    draft_s: float
    def __init__(self, fixed_s: _Optional[float] = ..., per_token_s: _Optional[float] = ..., draft_s: _Optional[float] = ...) -> None: ...

class GraphCounts(_message.Message):
    __slots__ = ("num_captured", "failed", "num_steps_replayed", "num_steps_eager", "num_sequences_padded", "num_steps_piecewise")
    class FailedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class NumStepsEagerEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_CAPTURED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_REPLAYED_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_EAGER_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_PADDED_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_PIECEWISE_FIELD_NUMBER: _ClassVar[int]
    num_captured: int
    failed: _containers.ScalarMap[str, str]
    num_steps_replayed: int
    num_steps_eager: _containers.ScalarMap[str, int]
    num_sequences_padded: int
    num_steps_piecewise: int
    def __init__(self, num_captured: _Optional[int] = ..., failed: _Optional[_Mapping[str, str]] = ..., num_steps_replayed: _Optional[int] = ..., num_steps_eager: _Optional[_Mapping[str, int]] = ..., num_sequences_padded: _Optional[int] = ..., num_steps_piecewise: _Optional[int] = ...) -> None: ...

class ExpertBalance(_message.Message):
    __slots__ = ("balance", "num_layers_moved")
    BALANCE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_MOVED_FIELD_NUMBER: _ClassVar[int]
    balance: float
    num_layers_moved: int
    def __init__(self, balance: _Optional[float] = ..., num_layers_moved: _Optional[int] = ...) -> None: ...

class Compute(_message.Message):
    __slots__ = ("form", "why", "quantization", "num_library_refused", "library_refused", "untuned", "device", "num_kernels_starting", "num_kernels_serving", "late_kernels", "chosen")
    FORM_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    NUM_LIBRARY_REFUSED_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_REFUSED_FIELD_NUMBER: _ClassVar[int]
    UNTUNED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_KERNELS_STARTING_FIELD_NUMBER: _ClassVar[int]
    NUM_KERNELS_SERVING_FIELD_NUMBER: _ClassVar[int]
    LATE_KERNELS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    form: str
    why: str
    quantization: str
    num_library_refused: int
    library_refused: _containers.RepeatedScalarFieldContainer[str]
    untuned: _containers.RepeatedScalarFieldContainer[str]
    device: str
    num_kernels_starting: int
    num_kernels_serving: int
    late_kernels: _containers.RepeatedScalarFieldContainer[str]
    chosen: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, form: _Optional[str] = ..., why: _Optional[str] = ..., quantization: _Optional[str] = ..., num_library_refused: _Optional[int] = ..., library_refused: _Optional[_Iterable[str]] = ..., untuned: _Optional[_Iterable[str]] = ..., device: _Optional[str] = ..., num_kernels_starting: _Optional[int] = ..., num_kernels_serving: _Optional[int] = ..., late_kernels: _Optional[_Iterable[str]] = ..., chosen: _Optional[_Iterable[str]] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("reason", "num_requests")
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    num_requests: int
    def __init__(self, reason: _Optional[str] = ..., num_requests: _Optional[int] = ...) -> None: ...

class StepCounts(_message.Message):
    __slots__ = ("num_steps", "computed", "kept", "cut", "late", "failed", "step_seconds", "host_gap_seconds", "step_tokens", "step_sequences", "by_method")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HOST_GAP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    BY_METHOD_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    computed: RowCounts
    kept: RowCounts
    cut: RowCounts
    late: RowCounts
    failed: RowCounts
    step_seconds: Distribution
    host_gap_seconds: Distribution
    step_tokens: Distribution
    step_sequences: Distribution
    by_method: _containers.RepeatedCompositeFieldContainer[MethodCounts]
    def __init__(self, num_steps: _Optional[int] = ..., computed: _Optional[_Union[RowCounts, _Mapping]] = ..., kept: _Optional[_Union[RowCounts, _Mapping]] = ..., cut: _Optional[_Union[RowCounts, _Mapping]] = ..., late: _Optional[_Union[RowCounts, _Mapping]] = ..., failed: _Optional[_Union[RowCounts, _Mapping]] = ..., step_seconds: _Optional[_Union[Distribution, _Mapping]] = ..., host_gap_seconds: _Optional[_Union[Distribution, _Mapping]] = ..., step_tokens: _Optional[_Union[Distribution, _Mapping]] = ..., step_sequences: _Optional[_Union[Distribution, _Mapping]] = ..., by_method: _Optional[_Iterable[_Union[MethodCounts, _Mapping]]] = ...) -> None: ...

class MethodCounts(_message.Message):
    __slots__ = ("method", "num_steps", "num_draft_tokens", "num_accepted_tokens")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    method: str
    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    def __init__(self, method: _Optional[str] = ..., num_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ...) -> None: ...

class RowCounts(_message.Message):
    __slots__ = ("num_rows", "num_tokens", "proposed_at", "accepted_at")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_AT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_AT_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    num_tokens: int
    proposed_at: _containers.RepeatedScalarFieldContainer[int]
    accepted_at: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_rows: _Optional[int] = ..., num_tokens: _Optional[int] = ..., proposed_at: _Optional[_Iterable[int]] = ..., accepted_at: _Optional[_Iterable[int]] = ...) -> None: ...

class Distribution(_message.Message):
    __slots__ = ("bounds", "counts", "total")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    total: float
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., total: _Optional[float] = ...) -> None: ...

class TransferCounts(_message.Message):
    __slots__ = ("transfers", "bytes", "seconds", "exposed_seconds", "frames", "resent", "late_dropped", "corrupt", "quarantined_blocks", "fallbacks", "credit_stall_seconds", "paths", "transfer_times", "exposed_times", "refused")
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    RESENT_FIELD_NUMBER: _ClassVar[int]
    LATE_DROPPED_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_STALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_TIMES_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_TIMES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    transfers: int
    bytes: int
    seconds: float
    exposed_seconds: float
    frames: int
    resent: int
    late_dropped: int
    corrupt: int
    quarantined_blocks: int
    fallbacks: int
    credit_stall_seconds: float
    paths: _containers.RepeatedCompositeFieldContainer[KvPath]
    transfer_times: Distribution
    exposed_times: Distribution
    refused: int
    def __init__(self, transfers: _Optional[int] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., exposed_seconds: _Optional[float] = ..., frames: _Optional[int] = ..., resent: _Optional[int] = ..., late_dropped: _Optional[int] = ..., corrupt: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., fallbacks: _Optional[int] = ..., credit_stall_seconds: _Optional[float] = ..., paths: _Optional[_Iterable[_Union[KvPath, _Mapping]]] = ..., transfer_times: _Optional[_Union[Distribution, _Mapping]] = ..., exposed_times: _Optional[_Union[Distribution, _Mapping]] = ..., refused: _Optional[int] = ...) -> None: ...

class KvPath(_message.Message):
    __slots__ = ("kv_address", "epoch", "data_path", "why", "bytes", "transfers", "gbps", "round_trip_ms")
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DATA_PATH_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    GBPS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_MS_FIELD_NUMBER: _ClassVar[int]
    kv_address: str
    epoch: int
    data_path: str
    why: str
    bytes: int
    transfers: int
    gbps: float
    round_trip_ms: float
    def __init__(self, kv_address: _Optional[str] = ..., epoch: _Optional[int] = ..., data_path: _Optional[str] = ..., why: _Optional[str] = ..., bytes: _Optional[int] = ..., transfers: _Optional[int] = ..., gbps: _Optional[float] = ..., round_trip_ms: _Optional[float] = ...) -> None: ...
