import math

import pytest

from baton.core.clock import MonotonicClock, VirtualClock
from baton.core.config import ServeConfig
from baton.core.errors import ConfigInvalid
from baton.core.numerics import KVDtype, Numerics
from baton.core.requests.key_spellings import RENAMED
from baton.core.requests.request import SpeculationCounts
from baton.core.verification import DraftSampleMethod, VerificationConfig, VerificationMode

pytestmark = pytest.mark.fast


def test_defaults_hold():
    assert ServeConfig.from_mapping({}) == ServeConfig.from_mapping({"model": "tiny"})
    assert ServeConfig.from_mapping({"num_speculative_tokens": "auto"}).num_speculative_tokens == "auto"


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({"modle": "tiny"}, ["modle"]),
        ({"decode": 0}, ["decode"]),
        ({"prefill": -1}, ["prefill"]),
        ({"prefill": "many"}, ["prefill"]),
        ({"num_speculative_tokens": 7}, ["num_speculative_tokens"]),
        ({"num_speculative_tokens": -1}, ["num_speculative_tokens"]),
        ({"block_size": 17}, ["block_size"]),
        ({"grpc_port": 65536}, ["grpc_port"]),
        ({"transport": "pigeon"}, ["transport"]),
        ({"verification": "hope"}, ["verification"]),
        ({"draft_sample_method": "tarot"}, ["draft_sample_method"]),
        ({"draft_sample_method": "greedy"}, ["draft_sample_method", "verification"]),
        ({"batch_invariant": "exact"}, ["batch_invariant"]),
        ({"request_timeout_s": math.nan}, ["request_timeout_s"]),
        ({"request_timeout_s": math.inf}, ["request_timeout_s"]),
        ({"request_timeout_s": 0}, ["request_timeout_s"]),
        ({"gpu_memory_utilization": math.nan}, ["gpu_memory_utilization"]),
        ({"decode": 0, "other": 1}, ["decode", "other"]),
        ({"prefill": True}, ["prefill"]),
        ({"prefill": "2"}, ["prefill"]),
        ({"prefill": 2.0}, ["prefill"]),
        ({"num_speculative_tokens": True}, ["num_speculative_tokens"]),
        ({"request_timeout_s": True}, ["request_timeout_s"]),
        ({"request_timeout_s": 1e300}, ["request_timeout_s"]),
        ({"start_timeout_s": 10**400}, ["start_timeout_s"]),
        ({"kv_memory_mib": 10**23}, ["kv_memory_mib"]),
        ({"max_num_batched_tokens": 10**30}, ["max_num_batched_tokens"]),
        ({"max_model_len": 10**30}, ["max_model_len"]),
        ({"model": ""}, ["model"]),
        ({"cuda_graphs": "on"}, ["cuda_graphs"]),
        ({"cuda_graph_sizes": "1,two"}, ["cuda_graph_sizes"]),
        ({"cuda_graph_sizes": "4,2"}, ["cuda_graph_sizes"]),
        ({"cuda_graph_sizes": "0"}, ["cuda_graph_sizes"]),
        ({"cuda_graph_sizes": "1,2", "cuda_graphs": "off"}, ["cuda_graph_sizes"]),
        ({"host": ""}, ["host"]),
    ],
)
def test_bad_keys_and_values_are_all_named(values, keys):
    with pytest.raises(ConfigInvalid) as caught:
        ServeConfig.from_mapping(values)
    assert sorted(set(caught.value.fields["keys"])) == keys
    for key in keys:
        assert key in caught.value.message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": "tiny"}, "modle: no such key; did you mean model?"),
        ({"zzz": 1}, "zzz: no such key"),
        ({"num_speculative_tokens": "many"}, "num_speculative_tokens: 'many' is neither 0 ... 6 nor auto"),
        ({"num_speculative_tokens": 7}, "num_speculative_tokens: 7 is not in 0 ... 6"),
    ],
)
def test_a_slip_is_answered_in_plain_words(values, message):
    with pytest.raises(ConfigInvalid) as refused:
        ServeConfig.from_mapping(values)
    assert refused.value.message == message


@pytest.mark.parametrize("mode", ["synthetic", "force"])
def test_made_up_acceptance_is_refused_by_name(mode):
    with pytest.raises(ConfigInvalid, match="never served") as caught:
        ServeConfig.from_mapping({"verification": mode})
    assert caught.value.fields["keys"] == ["verification"]


def test_verification_of_a_deployment():
    assert ServeConfig.from_mapping({}).verification_config() == VerificationConfig()
    config = ServeConfig.from_mapping({"verification": "rejection", "draft_sample_method": "greedy"})
    wanted = VerificationConfig(mode=VerificationMode.REJECTION, draft_sample_method=DraftSampleMethod.GREEDY)
    assert config.verification_config() == wanted
    config.verification_config().require_servable()


def test_files(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("grpc-port: 0\nnum-speculative-tokens: auto\n")
    assert ServeConfig.read_file(path) == {"grpc_port": 0, "num_speculative_tokens": "auto"}
    path.write_text("")
    assert ServeConfig.read_file(path) == {}
    for bad in ("- a\n", "a: [", "3"):
        path.write_text(bad)
        with pytest.raises(ConfigInvalid, match=r"serve\.yaml"):
            ServeConfig.read_file(path)
    path.write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigInvalid):
        ServeConfig.read_file(path)
    with pytest.raises(ConfigInvalid):
        ServeConfig.read_file(tmp_path)


def test_words_and_numbers_are_those_of_yaml_1_2(tmp_path):
    path = tmp_path / "serve.yaml"
    for text, value in {
        "off": "off",
        "no": "no",
        "true": True,
        "False": False,
        "~": None,
        "": None,
        "010": 10,
        "-08": -8,
        "0o17": 15,
        "0x1F": 31,
        "1_000": 1000,
        "1e3": 1000.0,
        "-2.5E-1": -0.25,
        ".inf": math.inf,
        "1:30": "1:30",
        "2001-02-03": "2001-02-03",
        "'010'": "010",
    }.items():
        path.write_text(f"a: {text}\n")
        read = ServeConfig.read_file(path)["a"]
        assert (read, type(read)) == (value, type(value)), text
    path.write_text("cuda_graphs: off\ndecode: 010\nrequest_timeout_s: 1e3\nmigration: false\n")
    config = ServeConfig.from_mapping(ServeConfig.read_file(path))
    assert (config.cuda_graphs, config.decode, config.request_timeout_s, config.migration) == ("off", 10, 1e3, False)
    path.write_text("a: &a {b: 1}\nc: {<<: *a, d: 2}\n")
    assert ServeConfig.read_file(path)["c"] == {"b": 1, "d": 2}


def test_a_dumped_config_is_read_back():
    config = ServeConfig.from_mapping({"batch_invariant": True, "gpu_memory_utilization": 0.5, "request_timeout_s": 3})
    assert ServeConfig.from_mapping(config.model_dump(mode="json")) == config


@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        "prefill: 1\nprefill: 2\n",
        "grpc-port: 1\ngrpc_port: 1\n",
        '{"decode": 1, "decode": 1}',
        "a: " + "[" * 2000,
        "a: !!int 0x",
        "? [a]\n: 1",
    ],
    ids=range(6),
)
def test_files_that_say_a_thing_twice_or_nonsense(tmp_path, text):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigInvalid, match=r"serve\.yaml"):
        ServeConfig.read_file(path)


def test_clocks():
    clock = VirtualClock(5.0)
    clock.advance(0.5)
    assert clock.now_s() == 5.5
    with pytest.raises(AssertionError):
        clock.advance(-1)
    real = MonotonicClock()
    assert real.now_s() <= real.now_s()


def test_speculation_is_conserved():
    counts = SpeculationCounts()
    counts.add_step(num_proposed=2, num_accepted=1, num_emitted=2)
    counts.add_step(num_proposed=2, num_accepted=2, num_emitted=2)  # a stop cut the bonus token
    assert (counts.num_draft_tokens, counts.num_accepted_tokens, counts.num_rejected_tokens) == (4, 3, 1)
    assert (counts.num_verify_steps, counts.num_emitted_tokens) == (2, 4)
    for bad in ((1, 2, 2), (2, 1, 3), (2, 1, 0)):
        with pytest.raises(AssertionError):
            counts.add_step(num_proposed=bad[0], num_accepted=bad[1], num_emitted=bad[2])


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"tensor_parallel_size": 4}, {"tp_prefill": 4, "tp_decode": 4}),
        ({"tensor_parallel_size": 4, "tp_prefill": 2}, {"tp_prefill": 2, "tp_decode": 4}),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": KVDtype.FP8}),
        ({"load_format": "dummy"}, {"is_dummy": True}),
        ({"load_format": "safetensors"}, {"is_dummy": False}),
        ({"batch_invariant": True}, {"numerics": Numerics.INVARIANT}),
        ({}, {"numerics": Numerics.DEFAULT, "num_speculative_tokens": None, "speculative_method": None}),
        ({"served_model_name": "a"}, {"served_model_name": ("a",)}),
        ({"served_model_name": ["a", "b"]}, {"served_model_name": ("a", "b")}),
        (
            {"speculative_config": '{"method": "mtp", "num_speculative_tokens": 3}'},
            {"speculative_method": "mtp", "num_speculative_tokens": 3},
        ),
        (
            {
                "speculative_config": {"method": "deepseek_mtp", "num_speculative_tokens": 1},
                "num_speculative_tokens": 1,
            },
            {"speculative_method": "mtp", "num_speculative_tokens": 1, "speculative_config": ""},
        ),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5}},
            {
                "speculative_method": "ngram",
                "num_speculative_tokens": 4,
                "prompt_lookup_max": 5,
                "prompt_lookup_min": 2,
            },
        ),
    ],
)
def test_vllms_spellings_mean_the_same(values, wanted):
    config = ServeConfig.from_mapping(values)
    assert {key: getattr(config, key) for key in wanted} == wanted
    assert ServeConfig.from_mapping(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("values", "keys", "message"),
    [
        ({"speculative_config": "{"}, ["speculative_config"], "not JSON"),
        ({"speculative_config": "[1]"}, ["speculative_config"], "not a JSON object"),
        ({"speculative_config": '{"model": "x/eagle"}'}, ["speculative_config"], "model: no key of mtp"),
        (
            {"speculative_config": '{"prompt_lookup_max": 4}'},
            ["speculative_config"],
            "prompt_lookup_max: no key of mtp",
        ),
        ({"speculative_config": '{"method": "medusa"}'}, ["speculative_config"], "method 'medusa'"),
        (
            {"speculative_method": "ngram", "prompt_lookup_min": 5},
            ["prompt_lookup_max", "prompt_lookup_min"],
            "5 is more than prompt_lookup_max, 4",
        ),
        ({"prompt_lookup_max": 17}, ["prompt_lookup_max"], "prompt_lookup_max"),
        (
            {"speculative_config": '{"num_speculative_tokens": 3}', "num_speculative_tokens": 2},
            ["num_speculative_tokens", "speculative_config"],
            "it says num_speculative_tokens = 3",
        ),
        (
            {"speculative_method": "none", "num_speculative_tokens": 2},
            ["num_speculative_tokens", "speculative_method"],
            "makes no drafts",
        ),
        (
            {"speculative_method": "none", "verification": "rejection"},
            ["speculative_method", "verification"],
            "makes no drafts to verify",
        ),
    ],
)
def test_a_speculation_that_is_not_here_is_refused(values, keys, message):
    with pytest.raises(ConfigInvalid, match=message) as refused:
        ServeConfig.from_mapping(values)
    assert sorted(refused.value.fields["keys"]) == keys


@pytest.mark.parametrize(
    ("values", "keys", "message"),
    [
        ({"enable_eplb": True}, ["enable_eplb", "enable_expert_parallel"], "only whole experts move"),
        ({"num_redundant_experts": 2}, ["enable_eplb", "num_redundant_experts"], "copies are placed by load"),
        (
            {"num_redundant_experts": 2, "enable_expert_parallel": True},
            ["enable_eplb", "num_redundant_experts"],
            "enable_eplb is not set",
        ),
        ({"eplb_step_interval": 0}, ["eplb_step_interval"], "greater than or equal to 1"),
    ],
)
def test_experts_that_could_not_move_are_refused(values, keys, message):
    with pytest.raises(ConfigInvalid, match=message) as refused:
        ServeConfig.from_mapping(values)
    assert sorted(refused.value.fields["keys"]) == keys


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"transport": "nvlink"}, "nvlink does not write one rank's pool alone"),
        ({"prefill": 2, "transport": "nixl"}, "nixl does not write one rank's pool alone"),
        ({"draft_model": "tiny-eagle3"}, "a drafter attends over heads"),
    ],
)
def test_what_does_not_go_with_attention_of_ranks_own_is_refused_by_name(values, message):
    key = list(values)[-1]
    with pytest.raises(ConfigInvalid, match=f"^enable_dp_attention: .*{message}.*; leave out {key}$") as refused:
        ServeConfig.from_mapping(values | {"enable_dp_attention": True})
    assert refused.value.fields["keys"] == ["enable_dp_attention", key]
    ServeConfig.from_mapping(values)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"prefill": 0},
        {"prefill": 2, "local_prefill": "never"},
        {"prefill": 0, "transport": "nvlink"},
        {"prefill": 1, "transport": "shm"},
        {"prefill": 1, "transport": "tcp"},
        {"prefill": 1, "transport": "zmq"},
        {"prefill": 1, "transport": "grpc"},
        {"enable_expert_parallel": True},
        {"cuda_graphs": "off"},
        {"cuda_graph_sizes": "1,2"},
        {"enable_expert_parallel": True, "enable_eplb": True, "num_redundant_experts": 4},
        {"speculative_method": "ngram", "draft_model": ""},
    ],
)
def test_what_goes_with_attention_of_ranks_own(values):
    assert ServeConfig.from_mapping(values | {"enable_dp_attention": True}).enable_dp_attention


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"state_checkpoint_interval": 100}, "100 is neither 0 nor a multiple of block_size 16, 64 or more"),
        ({"state_checkpoint_interval": 48}, "48 is neither"),
        ({"state_checkpoint_interval": 96, "block_size": 64}, "multiple of block_size 64"),
        ({"state_checkpoint_interval": 512, "prefix_cache": False}, "prefix_cache is off"),
    ],
)
def test_an_interval_of_checkpoints_that_cannot_be_is_refused(values, message):
    with pytest.raises(ConfigInvalid, match=f"^state_checkpoint_interval: .*{message}"):
        ServeConfig.from_mapping(values)


@pytest.mark.parametrize(("interval", "block_size"), [(0, 16), (64, 64), (96, 32), (1 << 20, 64)])
def test_an_interval_of_checkpoints_is_whole_blocks(interval, block_size):
    values = {"state_checkpoint_interval": interval, "block_size": block_size}
    assert ServeConfig.from_mapping(values).state_checkpoint_interval == interval


def test_copies_of_experts_are_none_where_experts_stay():
    whole = {"enable_expert_parallel": True}
    assert ServeConfig.from_mapping(whole).redundant_experts is None
    assert ServeConfig.from_mapping(whole | {"enable_eplb": True}).redundant_experts == 0
    assert ServeConfig.from_mapping(whole | {"enable_eplb": True, "num_redundant_experts": 4}).redundant_experts == 4


def test_some_worker_computes_the_prompts():
    assert ServeConfig.from_mapping({"prefill": 0}).prefill == 0
    with pytest.raises(ConfigInvalid, match="no worker would") as refused:
        ServeConfig.from_mapping({"prefill": 0, "local_prefill": "never"})
    assert refused.value.fields["keys"] == ["prefill", "local_prefill"]


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_a_renamed_key_says_its_new_name(old):
    with pytest.raises(ConfigInvalid) as refused:
        ServeConfig.from_mapping({old: 1})
    assert refused.value.message == f"{old}: no such key; it is now {RENAMED[old]}"
    assert RENAMED[old] in ServeConfig.model_fields
