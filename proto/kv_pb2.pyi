from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Attempt(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Control(_message.Message):
    __slots__ = ("hello", "hello_reply", "reserve", "grant", "deny", "commit", "commit_ack", "commit_nack", "credit", "lease", "abort", "abort_ack", "resume", "have", "checksum")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HELLO_REPLY_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    DENY_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_ACK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_NACK_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ABORT_ACK_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    hello_reply: HelloReply
    reserve: Reserve
    grant: Grant
    deny: Deny
    commit: Commit
    commit_ack: CommitAck
    commit_nack: CommitNack
    credit: Credit
    lease: Lease
    abort: Abort
    abort_ack: AbortAck
    resume: Resume
    have: Have
    checksum: int
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., hello_reply: _Optional[_Union[HelloReply, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., deny: _Optional[_Union[Deny, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., commit_ack: _Optional[_Union[CommitAck, _Mapping]] = ..., commit_nack: _Optional[_Union[CommitNack, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., abort_ack: _Optional[_Union[AbortAck, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., have: _Optional[_Union[Have, _Mapping]] = ..., checksum: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("model_hash", "block_size", "hash", "has_mtp", "layers")
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    HAS_MTP_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    model_hash: str
    block_size: int
    hash: bytes
    has_mtp: bool
    layers: _containers.RepeatedCompositeFieldContainer[LayerLayout]
    def __init__(self, model_hash: _Optional[str] = ..., block_size: _Optional[int] = ..., hash: _Optional[bytes] = ..., has_mtp: bool = ..., layers: _Optional[_Iterable[_Union[LayerLayout, _Mapping]]] = ...) -> None: ...

class LayerLayout(_message.Message):
    __slots__ = ("num_heads", "num_parts", "row_len", "dtype", "keep", "length", "ring", "whole")
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    ROW_LEN_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    num_heads: int
    num_parts: int
    row_len: int
    dtype: str
    keep: str
    length: int
    ring: int
    whole: bool
    def __init__(self, num_heads: _Optional[int] = ..., num_parts: _Optional[int] = ..., row_len: _Optional[int] = ..., dtype: _Optional[str] = ..., keep: _Optional[str] = ..., length: _Optional[int] = ..., ring: _Optional[int] = ..., whole: bool = ...) -> None: ...

class DataPathOffer(_message.Message):
    __slots__ = ("data_path", "raw", "shm", "nvlink", "nixl", "details")
    DATA_PATH_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    NVLINK_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    data_path: str
    raw: RawOffer
    shm: ShmOffer
    nvlink: NvlinkOffer
    nixl: NixlOffer
    details: bytes
    def __init__(self, data_path: _Optional[str] = ..., raw: _Optional[_Union[RawOffer, _Mapping]] = ..., shm: _Optional[_Union[ShmOffer, _Mapping]] = ..., nvlink: _Optional[_Union[NvlinkOffer, _Mapping]] = ..., nixl: _Optional[_Union[NixlOffer, _Mapping]] = ..., details: _Optional[bytes] = ...) -> None: ...

class RawOffer(_message.Message):
    __slots__ = ("address", "token", "listener_id")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LISTENER_ID_FIELD_NUMBER: _ClassVar[int]
    address: str
    token: bytes
    listener_id: bytes
    def __init__(self, address: _Optional[str] = ..., token: _Optional[bytes] = ..., listener_id: _Optional[bytes] = ...) -> None: ...

class PoolPlace(_message.Message):
    __slots__ = ("offset_bytes", "num_bytes", "num_blocks", "block_size", "tp_rank", "tp_size", "num_state_slots")
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_STATE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    offset_bytes: int
    num_bytes: int
    num_blocks: int
    block_size: int
    tp_rank: int
    tp_size: int
    num_state_slots: int
    def __init__(self, offset_bytes: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., tp_rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., num_state_slots: _Optional[int] = ...) -> None: ...

class ShmOffer(_message.Message):
    __slots__ = ("path", "nonce", "nonce_offset_bytes", "pools")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    NONCE_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    path: str
    nonce: bytes
    nonce_offset_bytes: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolPlace]
    def __init__(self, path: _Optional[str] = ..., nonce: _Optional[bytes] = ..., nonce_offset_bytes: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolPlace, _Mapping]]] = ...) -> None: ...

class NvlinkOffer(_message.Message):
    __slots__ = ("pools", "flags_path", "nonce", "flags_offset_bytes", "num_flags")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    FLAGS_PATH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    FLAGS_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_FLAGS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[NvlinkPool]
    flags_path: str
    nonce: bytes
    flags_offset_bytes: int
    num_flags: int
    def __init__(self, pools: _Optional[_Iterable[_Union[NvlinkPool, _Mapping]]] = ..., flags_path: _Optional[str] = ..., nonce: _Optional[bytes] = ..., flags_offset_bytes: _Optional[int] = ..., num_flags: _Optional[int] = ...) -> None: ...

class NvlinkPool(_message.Message):
    __slots__ = ("place", "ipc_handle", "device_uuid", "event_handle")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    IPC_HANDLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    EVENT_HANDLE_FIELD_NUMBER: _ClassVar[int]
    place: PoolPlace
    ipc_handle: bytes
    device_uuid: str
    event_handle: bytes
    def __init__(self, place: _Optional[_Union[PoolPlace, _Mapping]] = ..., ipc_handle: _Optional[bytes] = ..., device_uuid: _Optional[str] = ..., event_handle: _Optional[bytes] = ...) -> None: ...

class NixlOffer(_message.Message):
    __slots__ = ("agent", "metadata", "pools")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    agent: str
    metadata: bytes
    pools: _containers.RepeatedCompositeFieldContainer[NixlPool]
    def __init__(self, agent: _Optional[str] = ..., metadata: _Optional[bytes] = ..., pools: _Optional[_Iterable[_Union[NixlPool, _Mapping]]] = ...) -> None: ...

class NixlPool(_message.Message):
    __slots__ = ("place", "address", "device_id", "memory")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    place: PoolPlace
    address: int
    device_id: int
    memory: str
    def __init__(self, place: _Optional[_Union[PoolPlace, _Mapping]] = ..., address: _Optional[int] = ..., device_id: _Optional[int] = ..., memory: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "epoch", "layout", "tp_size", "tp_rank", "head_first", "head_count", "capabilities", "sent_ns", "data_paths", "host_id", "incarnation_file", "number", "challenge", "proof")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIRST_FIELD_NUMBER: _ClassVar[int]
    HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    DATA_PATHS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FILE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    version: int
    epoch: int
    layout: Layout
    tp_size: int
    tp_rank: int
    head_first: int
    head_count: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    sent_ns: int
    data_paths: _containers.RepeatedScalarFieldContainer[str]
    host_id: str
    incarnation_file: str
    number: bytes
    challenge: bytes
    proof: bytes
    def __init__(self, version: _Optional[int] = ..., epoch: _Optional[int] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., tp_size: _Optional[int] = ..., tp_rank: _Optional[int] = ..., head_first: _Optional[int] = ..., head_count: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., sent_ns: _Optional[int] = ..., data_paths: _Optional[_Iterable[str]] = ..., host_id: _Optional[str] = ..., incarnation_file: _Optional[str] = ..., number: _Optional[bytes] = ..., challenge: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("version", "epoch", "peer_epoch", "layout", "tp_size", "tp_rank", "head_first", "head_count", "capabilities", "echo_sent_ns", "receiver_ns", "refused", "offers", "host_id", "challenge", "proof")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PEER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIRST_FIELD_NUMBER: _ClassVar[int]
    HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    ECHO_SENT_NS_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_NS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    version: int
    epoch: int
    peer_epoch: int
    layout: Layout
    tp_size: int
    tp_rank: int
    head_first: int
    head_count: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    echo_sent_ns: int
    receiver_ns: int
    refused: str
    offers: _containers.RepeatedCompositeFieldContainer[DataPathOffer]
    host_id: str
    challenge: bytes
    proof: bytes
    def __init__(self, version: _Optional[int] = ..., epoch: _Optional[int] = ..., peer_epoch: _Optional[int] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., tp_size: _Optional[int] = ..., tp_rank: _Optional[int] = ..., head_first: _Optional[int] = ..., head_count: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., echo_sent_ns: _Optional[int] = ..., receiver_ns: _Optional[int] = ..., refused: _Optional[str] = ..., offers: _Optional[_Iterable[_Union[DataPathOffer, _Mapping]]] = ..., host_id: _Optional[str] = ..., challenge: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("attempt", "epoch", "prompt_len", "capacity_len", "wait_ms", "data_path", "tp_size", "peer_epoch")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_LEN_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    DATA_PATH_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PEER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    epoch: int
    prompt_len: int
    capacity_len: int
    wait_ms: int
    data_path: str
    tp_size: int
    peer_epoch: int
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., epoch: _Optional[int] = ..., prompt_len: _Optional[int] = ..., capacity_len: _Optional[int] = ..., wait_ms: _Optional[int] = ..., data_path: _Optional[str] = ..., tp_size: _Optional[int] = ..., peer_epoch: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("attempt", "epoch", "incoming_id", "credit_bytes", "lease_ms", "data_path", "blocks", "state_slot")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCOMING_ID_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    DATA_PATH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STATE_SLOT_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    epoch: int
    incoming_id: int
    credit_bytes: int
    lease_ms: int
    data_path: str
    blocks: _containers.RepeatedScalarFieldContainer[int]
    state_slot: int
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., epoch: _Optional[int] = ..., incoming_id: _Optional[int] = ..., credit_bytes: _Optional[int] = ..., lease_ms: _Optional[int] = ..., data_path: _Optional[str] = ..., blocks: _Optional[_Iterable[int]] = ..., state_slot: _Optional[int] = ...) -> None: ...

class Deny(_message.Message):
    __slots__ = ("attempt", "epoch", "reason", "detail")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[Deny.Reason]
        BUSY: _ClassVar[Deny.Reason]
        STALE: _ClassVar[Deny.Reason]
        LAYOUT: _ClassVar[Deny.Reason]
        TOO_LONG: _ClassVar[Deny.Reason]
        DATA_PATH: _ClassVar[Deny.Reason]
        NO_HELLO: _ClassVar[Deny.Reason]
    UNSPECIFIED: Deny.Reason
    BUSY: Deny.Reason
    STALE: Deny.Reason
    LAYOUT: Deny.Reason
    TOO_LONG: Deny.Reason
    DATA_PATH: Deny.Reason
    NO_HELLO: Deny.Reason
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    epoch: int
    reason: Deny.Reason
    detail: str
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., epoch: _Optional[int] = ..., reason: _Optional[_Union[Deny.Reason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class SequenceState(_message.Message):
    __slots__ = ("first_token", "draft_tokens", "hidden", "num_draws", "draft_ms")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAWS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    hidden: bytes
    num_draws: int
    draft_ms: float
    def __init__(self, first_token: _Optional[int] = ..., draft_tokens: _Optional[_Iterable[int]] = ..., hidden: _Optional[bytes] = ..., num_draws: _Optional[int] = ..., draft_ms: _Optional[float] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("epoch", "incoming_id", "attempt", "prompt_len", "num_layers", "layer_digests", "state", "prefill_end_ns", "payload_bytes", "round", "tp_rank", "tp_size", "next_seq")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCOMING_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAYER_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_END_NS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQ_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incoming_id: int
    attempt: Attempt
    prompt_len: int
    num_layers: int
    layer_digests: _containers.RepeatedScalarFieldContainer[int]
    state: SequenceState
    prefill_end_ns: int
    payload_bytes: int
    round: int
    tp_rank: int
    tp_size: int
    next_seq: int
    def __init__(self, epoch: _Optional[int] = ..., incoming_id: _Optional[int] = ..., attempt: _Optional[_Union[Attempt, _Mapping]] = ..., prompt_len: _Optional[int] = ..., num_layers: _Optional[int] = ..., layer_digests: _Optional[_Iterable[int]] = ..., state: _Optional[_Union[SequenceState, _Mapping]] = ..., prefill_end_ns: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., round: _Optional[int] = ..., tp_rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., next_seq: _Optional[int] = ...) -> None: ...

class CommitAck(_message.Message):
    __slots__ = ("epoch", "incoming_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCOMING_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incoming_id: int
    def __init__(self, epoch: _Optional[int] = ..., incoming_id: _Optional[int] = ...) -> None: ...

class LayerGap(_message.Message):
    __slots__ = ("layer", "first", "count")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    layer: int
    first: int
    count: int
    def __init__(self, layer: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class CommitNack(_message.Message):
    __slots__ = ("epoch", "incoming_id", "missing", "corrupt_layers", "round", "charged_bytes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCOMING_ID_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CHARGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incoming_id: int
    missing: _containers.RepeatedCompositeFieldContainer[LayerGap]
    corrupt_layers: _containers.RepeatedScalarFieldContainer[int]
    round: int
    charged_bytes: int
    def __init__(self, epoch: _Optional[int] = ..., incoming_id: _Optional[int] = ..., missing: _Optional[_Iterable[_Union[LayerGap, _Mapping]]] = ..., corrupt_layers: _Optional[_Iterable[int]] = ..., round: _Optional[int] = ..., charged_bytes: _Optional[int] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("epoch", "incoming_transfers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCOMING_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incoming_transfers: _containers.RepeatedCompositeFieldContainer[TransferCredit]
    def __init__(self, epoch: _Optional[int] = ..., incoming_transfers: _Optional[_Iterable[_Union[TransferCredit, _Mapping]]] = ...) -> None: ...

class TransferCredit(_message.Message):
    __slots__ = ("incoming_id", "charged_bytes")
    INCOMING_ID_FIELD_NUMBER: _ClassVar[int]
    CHARGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    incoming_id: int
    charged_bytes: int
    def __init__(self, incoming_id: _Optional[int] = ..., charged_bytes: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("epoch", "incoming_ids")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCOMING_IDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incoming_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., incoming_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("epoch", "incoming_id", "attempt", "reason", "sender_epoch", "peer_epoch")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCOMING_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SENDER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PEER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incoming_id: int
    attempt: Attempt
    reason: str
    sender_epoch: int
    peer_epoch: int
    def __init__(self, epoch: _Optional[int] = ..., incoming_id: _Optional[int] = ..., attempt: _Optional[_Union[Attempt, _Mapping]] = ..., reason: _Optional[str] = ..., sender_epoch: _Optional[int] = ..., peer_epoch: _Optional[int] = ...) -> None: ...

class AbortAck(_message.Message):
    __slots__ = ("epoch", "incoming_id", "attempt", "drained", "peer_epoch", "tp_rank", "all_ranks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCOMING_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    PEER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    ALL_RANKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incoming_id: int
    attempt: Attempt
    drained: bool
    peer_epoch: int
    tp_rank: int
    all_ranks: bool
    def __init__(self, epoch: _Optional[int] = ..., incoming_id: _Optional[int] = ..., attempt: _Optional[_Union[Attempt, _Mapping]] = ..., drained: bool = ..., peer_epoch: _Optional[int] = ..., tp_rank: _Optional[int] = ..., all_ranks: bool = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("epoch", "incoming_id", "round", "next_seq")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCOMING_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQ_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incoming_id: int
    round: int
    next_seq: int
    def __init__(self, epoch: _Optional[int] = ..., incoming_id: _Optional[int] = ..., round: _Optional[int] = ..., next_seq: _Optional[int] = ...) -> None: ...

class Have(_message.Message):
    __slots__ = ("epoch", "incoming_id", "missing", "round", "charged_bytes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCOMING_ID_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CHARGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incoming_id: int
    missing: _containers.RepeatedCompositeFieldContainer[LayerGap]
    round: int
    charged_bytes: int
    def __init__(self, epoch: _Optional[int] = ..., incoming_id: _Optional[int] = ..., missing: _Optional[_Iterable[_Union[LayerGap, _Mapping]]] = ..., round: _Optional[int] = ..., charged_bytes: _Optional[int] = ...) -> None: ...

class Packet(_message.Message):
    __slots__ = ("control", "header", "payload")
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    control: bytes
    header: bytes
    payload: bytes
    def __init__(self, control: _Optional[bytes] = ..., header: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...
