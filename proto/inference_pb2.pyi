from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "token_ids", "sampling", "request_id", "num_draft_tokens", "priority", "tenant", "truncate_prompt_tokens", "add_special_tokens", "split_only")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_ONLY_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    token_ids: TokenIds
    sampling: Sampling
    request_id: str
    num_draft_tokens: int
    priority: int
    tenant: str
    truncate_prompt_tokens: int
    add_special_tokens: bool
    split_only: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., request_id: _Optional[str] = ..., num_draft_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., truncate_prompt_tokens: _Optional[int] = ..., add_special_tokens: bool = ..., split_only: bool = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_p", "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "allowed_token_ids", "min_tokens", "logprobs", "prompt_logprobs", "n", "grammar", "include_stop_str_in_output", "skip_special_tokens", "top_a")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_A_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_p: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenIds]
    allowed_token_ids: TokenIds
    min_tokens: int
    logprobs: int
    prompt_logprobs: int
    n: int
    grammar: Grammar
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    top_a: float
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., min_p: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bad_words: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., allowed_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., n: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., include_stop_str_in_output: bool = ..., skip_special_tokens: bool = ..., top_a: _Optional[float] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "grammar", "json_object", "structure")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    grammar: str
    json_object: bool
    structure: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., json_object: bool = ..., structure: _Optional[str] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "top_token_ids", "top_logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class GenerateChunk(_message.Message):
    __slots__ = ("request_id", "index", "token_ids", "text", "finish", "choice", "logprobs", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    finish: Finish
    choice: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., choice: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "stats", "stop_string", "stop_token_id")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    reason: str
    stats: RequestStats
    stop_string: str
    stop_token_id: int
    def __init__(self, reason: _Optional[str] = ..., stats: _Optional[_Union[RequestStats, _Mapping]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class RequestStats(_message.Message):
    __slots__ = ("prompt_len", "output_len", "seed", "prefill_worker", "decode_worker", "ttft_ms", "tpot_ms", "num_verify_steps", "num_draft_tokens", "num_accepted_tokens", "kv_bytes_pushed", "kv_bytes_landed_before_prefill_end", "queue_ms", "grant_wait_ms", "prefill_ms", "publish_ms", "handoff_ms", "num_decode_tokens", "router_ms", "num_cached_tokens", "num_handoff_retries", "num_migrations", "num_forced_tokens", "path", "kv_data_path", "routing", "num_expected_cached_tokens", "second", "shared_clock")
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_LEN_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_VERIFY_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PUSHED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_LANDED_BEFORE_PREFILL_END_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    GRANT_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_MS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HANDOFF_RETRIES_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORCED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    KV_DATA_PATH_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPECTED_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    SHARED_CLOCK_FIELD_NUMBER: _ClassVar[int]
    prompt_len: int
    output_len: int
    seed: int
    prefill_worker: str
    decode_worker: str
    ttft_ms: float
    tpot_ms: float
    num_verify_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    kv_bytes_pushed: int
    kv_bytes_landed_before_prefill_end: int
    queue_ms: float
    grant_wait_ms: float
    prefill_ms: float
    publish_ms: float
    handoff_ms: float
    num_decode_tokens: int
    router_ms: float
    num_cached_tokens: int
    num_handoff_retries: int
    num_migrations: int
    num_forced_tokens: int
    path: str
    kv_data_path: str
    routing: str
    num_expected_cached_tokens: int
    second: SecondToken
    shared_clock: bool
    def __init__(self, prompt_len: _Optional[int] = ..., output_len: _Optional[int] = ..., seed: _Optional[int] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., num_verify_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., kv_bytes_pushed: _Optional[int] = ..., kv_bytes_landed_before_prefill_end: _Optional[int] = ..., queue_ms: _Optional[float] = ..., grant_wait_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., publish_ms: _Optional[float] = ..., handoff_ms: _Optional[float] = ..., num_decode_tokens: _Optional[int] = ..., router_ms: _Optional[float] = ..., num_cached_tokens: _Optional[int] = ..., num_handoff_retries: _Optional[int] = ..., num_migrations: _Optional[int] = ..., num_forced_tokens: _Optional[int] = ..., path: _Optional[str] = ..., kv_data_path: _Optional[str] = ..., routing: _Optional[str] = ..., num_expected_cached_tokens: _Optional[int] = ..., second: _Optional[_Union[SecondToken, _Mapping]] = ..., shared_clock: bool = ...) -> None: ...

class SecondToken(_message.Message):
    __slots__ = ("total_ms", "retry_ms", "draft_ms", "transfer_ms", "verification_ms", "admission_ms", "step_ms", "publish_ms")
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    RETRY_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_MS_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_MS_FIELD_NUMBER: _ClassVar[int]
    total_ms: float
    retry_ms: float
    draft_ms: float
    transfer_ms: float
    verification_ms: float
    admission_ms: float
    step_ms: float
    publish_ms: float
    def __init__(self, total_ms: _Optional[float] = ..., retry_ms: _Optional[float] = ..., draft_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., verification_ms: _Optional[float] = ..., admission_ms: _Optional[float] = ..., step_ms: _Optional[float] = ..., publish_ms: _Optional[float] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "add_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    add_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., add_special_tokens: bool = ...) -> None: ...

class TokenizeReply(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "max_model_len", "vocab_size", "num_draft_tokens", "numerics", "dtype", "kv_dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_model_len: int
    vocab_size: int
    num_draft_tokens: int
    numerics: str
    dtype: str
    kv_dtype: str
    def __init__(self, name: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., numerics: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ...) -> None: ...
