from baton.proto import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("model", "version", "uptime_s", "num_requests_running", "num_requests_finished", "num_requests_failed", "num_tokens_streamed", "workers", "refused_pairs", "num_handoff_retries", "num_retries_refused", "retry_tokens", "num_migrations", "quarantined", "max_queue_len", "scale", "local_prefill", "num_requests_refused", "starting")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_STREAMED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PAIRS_FIELD_NUMBER: _ClassVar[int]
    NUM_HANDOFF_RETRIES_FIELD_NUMBER: _ClassVar[int]
    NUM_RETRIES_REFUSED_FIELD_NUMBER: _ClassVar[int]
    RETRY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_LEN_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    uptime_s: float
    num_requests_running: int
    num_requests_finished: int
    num_requests_failed: int
    num_tokens_streamed: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    refused_pairs: _containers.RepeatedCompositeFieldContainer[RefusedPair]
    num_handoff_retries: int
    num_retries_refused: int
    retry_tokens: float
    num_migrations: int
    quarantined: _containers.RepeatedCompositeFieldContainer[Quarantined]
    max_queue_len: int
    scale: ScaleRequest
    local_prefill: LocalPrefill
    num_requests_refused: int
    starting: _containers.RepeatedCompositeFieldContainer[_worker_pb2.StartingWorker]
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., num_requests_running: _Optional[int] = ..., num_requests_finished: _Optional[int] = ..., num_requests_failed: _Optional[int] = ..., num_tokens_streamed: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., refused_pairs: _Optional[_Iterable[_Union[RefusedPair, _Mapping]]] = ..., num_handoff_retries: _Optional[int] = ..., num_retries_refused: _Optional[int] = ..., retry_tokens: _Optional[float] = ..., num_migrations: _Optional[int] = ..., quarantined: _Optional[_Iterable[_Union[Quarantined, _Mapping]]] = ..., max_queue_len: _Optional[int] = ..., scale: _Optional[_Union[ScaleRequest, _Mapping]] = ..., local_prefill: _Optional[_Union[LocalPrefill, _Mapping]] = ..., num_requests_refused: _Optional[int] = ..., starting: _Optional[_Iterable[_Union[_worker_pb2.StartingWorker, _Mapping]]] = ...) -> None: ...

class LocalPrefill(_message.Message):
    __slots__ = ("mode", "num_choices", "only_way")
    class NumChoicesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MODE_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    ONLY_WAY_FIELD_NUMBER: _ClassVar[int]
    mode: str
    num_choices: _containers.ScalarMap[str, int]
    only_way: bool
    def __init__(self, mode: _Optional[str] = ..., num_choices: _Optional[_Mapping[str, int]] = ..., only_way: bool = ...) -> None: ...

class RefusedPair(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker", "reason")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    reason: str
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("state", "alive", "heartbeat_age_s", "num_epochs", "draining", "num_streams", "unfit", "unfit_reason")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    UNFIT_FIELD_NUMBER: _ClassVar[int]
    UNFIT_REASON_FIELD_NUMBER: _ClassVar[int]
    state: _worker_pb2.WorkerState
    alive: bool
    heartbeat_age_s: float
    num_epochs: int
    draining: bool
    num_streams: int
    unfit: bool
    unfit_reason: str
    def __init__(self, state: _Optional[_Union[_worker_pb2.WorkerState, _Mapping]] = ..., alive: bool = ..., heartbeat_age_s: _Optional[float] = ..., num_epochs: _Optional[int] = ..., draining: bool = ..., num_streams: _Optional[int] = ..., unfit: bool = ..., unfit_reason: _Optional[str] = ...) -> None: ...

class Quarantined(_message.Message):
    __slots__ = ("fingerprint", "workers", "left_s")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    workers: _containers.RepeatedScalarFieldContainer[str]
    left_s: float
    def __init__(self, fingerprint: _Optional[str] = ..., workers: _Optional[_Iterable[str]] = ..., left_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id", "grace_ms", "undo")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    grace_ms: int
    undo: bool
    def __init__(self, worker_id: _Optional[str] = ..., grace_ms: _Optional[int] = ..., undo: bool = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("draining", "num_streams")
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    num_streams: int
    def __init__(self, draining: bool = ..., num_streams: _Optional[int] = ...) -> None: ...

class ClearQuarantineRequest(_message.Message):
    __slots__ = ("fingerprint",)
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    def __init__(self, fingerprint: _Optional[str] = ...) -> None: ...

class ClearQuarantineReply(_message.Message):
    __slots__ = ("num_cleared",)
    NUM_CLEARED_FIELD_NUMBER: _ClassVar[int]
    num_cleared: int
    def __init__(self, num_cleared: _Optional[int] = ...) -> None: ...

class InventoryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InventoryReply(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ...) -> None: ...

class SetSpeculationRequest(_message.Message):
    __slots__ = ("mode",)
    MODE_FIELD_NUMBER: _ClassVar[int]
    mode: _worker_pb2.SpeculationMode
    def __init__(self, mode: _Optional[_Union[_worker_pb2.SpeculationMode, _Mapping]] = ...) -> None: ...

class SetSpeculationReply(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerSpeculation]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerSpeculation, _Mapping]]] = ...) -> None: ...

class WorkerSpeculation(_message.Message):
    __slots__ = ("worker_id", "speculation", "error")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    speculation: _worker_pb2.Speculation
    error: str
    def __init__(self, worker_id: _Optional[str] = ..., speculation: _Optional[_Union[_worker_pb2.Speculation, _Mapping]] = ..., error: _Optional[str] = ...) -> None: ...

class RestartRequest(_message.Message):
    __slots__ = ("worker_id", "epoch")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class RestartReply(_message.Message):
    __slots__ = ("ending",)
    ENDING_FIELD_NUMBER: _ClassVar[int]
    ending: bool
    def __init__(self, ending: bool = ...) -> None: ...

class SetAdmissionRequest(_message.Message):
    __slots__ = ("max_queue_len",)
    MAX_QUEUE_LEN_FIELD_NUMBER: _ClassVar[int]
    max_queue_len: int
    def __init__(self, max_queue_len: _Optional[int] = ...) -> None: ...

class SetAdmissionReply(_message.Message):
    __slots__ = ("max_queue_len", "previous", "num_in_flight")
    MAX_QUEUE_LEN_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    max_queue_len: int
    previous: int
    num_in_flight: int
    def __init__(self, max_queue_len: _Optional[int] = ..., previous: _Optional[int] = ..., num_in_flight: _Optional[int] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("num_prefill", "num_decode")
    NUM_PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_FIELD_NUMBER: _ClassVar[int]
    num_prefill: int
    num_decode: int
    def __init__(self, num_prefill: _Optional[int] = ..., num_decode: _Optional[int] = ...) -> None: ...

class ScaleReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
