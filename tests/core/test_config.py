import math

import pytest

from baton.core.clock import MonotonicClock, VirtualClock
from baton.core.config import ServeConfig
from baton.core.errors import ConfigInvalid
from baton.core.request import SpeculationCounts
from baton.core.verification import DraftSampleMethod, VerificationConfig, VerificationMode

pytestmark = pytest.mark.fast


def test_defaults_hold():
    assert ServeConfig.from_mapping({}) == ServeConfig.from_mapping({"model": "tiny", "mtp": 2})
    assert ServeConfig.from_mapping({"mtp": "auto"}).mtp == "auto"


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({"modle": "tiny"}, ["modle"]),
        ({"prefill": 0}, ["prefill"]),
        ({"prefill": "many"}, ["prefill"]),
        ({"mtp": 5}, ["mtp"]),
        ({"mtp": -1}, ["mtp"]),
        ({"block_size": 17}, ["block_size"]),
        ({"grpc_port": 65536}, ["grpc_port"]),
        ({"transport": "pigeon"}, ["transport"]),
        ({"verification": "hope"}, ["verification"]),
        ({"draft_sample_method": "tarot"}, ["draft_sample_method"]),
        ({"draft_sample_method": "greedy"}, ["draft_sample_method", "verification"]),
        ({"numerics": "exact"}, ["numerics"]),
        ({"request_timeout_s": math.nan}, ["request_timeout_s"]),
        ({"request_timeout_s": math.inf}, ["request_timeout_s"]),
        ({"request_timeout_s": 0}, ["request_timeout_s"]),
        ({"gpu_memory_share": math.nan}, ["gpu_memory_share"]),
        ({"prefill": 0, "other": 1}, ["other", "prefill"]),
        ({"prefill": True}, ["prefill"]),
        ({"prefill": "2"}, ["prefill"]),
        ({"prefill": 2.0}, ["prefill"]),
        ({"mtp": True}, ["mtp"]),
        ({"request_timeout_s": True}, ["request_timeout_s"]),
        ({"request_timeout_s": 1e300}, ["request_timeout_s"]),
        ({"start_timeout_s": 10**400}, ["start_timeout_s"]),
        ({"kv_memory_mib": 10**23}, ["kv_memory_mib"]),
        ({"chunk_len": 10**30}, ["chunk_len"]),
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
        ({"mtp": "many"}, "mtp: 'many' is neither 0 ... 4 nor auto"),
        ({"mtp": 5}, "mtp: 5 is not in 0 ... 4"),
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
    path.write_text("grpc-port: 0\nmtp: auto\n")
    assert ServeConfig.read_file(path) == {"grpc_port": 0, "mtp": "auto"}
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


def test_a_dumped_config_is_read_back():
    config = ServeConfig.from_mapping({"numerics": "invariant", "gpu_memory_share": 0.5, "request_timeout_s": 3})
    assert ServeConfig.from_mapping(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    "text",
    [
        "prefill: 1\nprefill: 2\n",
        "grpc-port: 1\ngrpc_port: 1\n",
        '{"decode": 1, "decode": 1}',
        "a: " + "[" * 2000,
        "a: 2001-99-99",
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
