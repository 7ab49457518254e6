"""What holds for every declared transport: its declaration makes sense, and it hands a prompt over."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from baton.core.config import ServeConfig
from baton.core.errors import ConfigInvalid
from baton.core.kv_transports import (
    CONTROL_CHANNELS,
    COPY_ENVIRONMENT,
    INLINE,
    KV_TRANSPORTS,
    RAW,
    TRANSPORT_NAMES,
    control_channel,
    data_path_order,
    is_one_sided,
    is_same_host,
    one_sided_data_paths,
    sender_environment,
)
from baton.kvtransfer.receiver.service import Completed
from baton.kvtransfer.sender.service import Acked, Granted
from baton.tests.kvtransfer.conftest import make_layout
from baton.tests.kvtransfer.push_bench import Decode, Prefill

LAYOUT = make_layout(block_size=16, num_layers=4)
ON_CPU = [name for name in TRANSPORT_NAMES if name == "auto" or KV_TRANSPORTS[name].memory != "GPU"]


def runnable(name):
    declared = KV_TRANSPORTS.get(name)
    problem = declared.problem if declared else ""
    return pytest.param(name, marks=[pytest.mark.skipif(bool(problem), reason=problem)])


@pytest.mark.fast
@pytest.mark.parametrize("declared", KV_TRANSPORTS.values(), ids=KV_TRANSPORTS)
def test_its_declaration_makes_sense(declared):
    order = data_path_order(declared.name)
    assert order[0] == declared.data_path
    assert declared.control in CONTROL_CHANNELS
    assert bool(declared.sender) == bool(declared.receiver) == declared.is_one_sided
    assert declared.is_one_sided == is_one_sided(declared.data_path) == (declared.data_path not in (INLINE, RAW))
    assert declared.is_same_host == is_same_host(declared.data_path) == ("of one host" in declared.text)
    assert one_sided_data_paths(declared.name) == ((declared,) if declared.is_one_sided else ())
    assert declared.is_auto == (declared.data_path in data_path_order("auto")) or declared.data_path == INLINE
    assert not declared.is_clear or declared.is_one_sided, "two-sided data paths keep to what encrypts their channel"
    assert sender_environment(declared.name) == dict(declared.sender_environment)
    assert ServeConfig.from_mapping({"transport": declared.name}).transport == declared.name


@pytest.mark.fast
def test_nothing_else_can_be_named():
    for data_path in ("inline", "raw", "loopback", ""):
        assert not is_one_sided(data_path)
        with pytest.raises(ConfigInvalid, match="transport"):
            ServeConfig.from_mapping({"transport": data_path})
    assert not is_same_host("tin-cans")
    assert control_channel("auto").name == "zmq"
    assert sender_environment("auto") == COPY_ENVIRONMENT, "it may copy into pools"
    assert sender_environment("tcp") == {}


def test_what_a_receiver_process_loads_of_them_is_free_of_torch():
    places = [declared.receiver for declared in KV_TRANSPORTS.values() if declared.is_one_sided]
    places += [channel.made_by for channel in CONTROL_CHANNELS.values()]
    code = "import sys; from baton.core.kv_transports import load; [load(place) for place in sys.argv[1:]]; "
    code += "print(sorted({'torch', 'triton', 'ray'} & set(sys.modules)))"
    command = [sys.executable, "-c", code, *places]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.fast
@pytest.mark.parametrize("place", [d.sender for d in KV_TRANSPORTS.values() if d.is_one_sided])
def test_its_sender_is_there(place):
    """Not loaded: one needs CUDA's bindings."""
    module, name = place.split(":")
    source = Path(importlib.util.find_spec(module).origin).read_text()
    assert f"\ndef {name}(side: SenderSide)" in source


@pytest.mark.parametrize("name", [runnable(name) for name in ON_CPU])
def test_it_hands_a_prompt_over(name):
    times = {"heartbeat_s": 0.1, "lease_s": 5.0, "commit_timeout_s": 10.0}
    data_paths = tuple(declared.data_path for declared in one_sided_data_paths(name))
    decode = Decode(LAYOUT, data_paths=data_paths, kind=control_channel(name).name, transport=name, **times)
    prefill = None
    try:
        prefill = Prefill(decode, transport=name, **times)
        prefill.fill(5)
        key = prefill.reserve(f"by {name}", 75)
        blocks = prefill.tables[key].blocks
        prefill.wait_for(Granted, key)
        prefill.compute(key)
        prefill.commit(key)
        prefill.wait_for(Completed, key)
        prefill.wait_for(Acked, key)
        prefill.assert_landed(key, blocks)
        best = next(data_path for data_path in data_path_order(name) if name != "auto" or data_path != "nvlink")
        assert prefill.push.data_path_of(decode.peer.kv_address).data_path == best
        assert decode.peer.kv_address.startswith(control_channel(name).scheme + "://")
        decode.release(key)
        prefill.assert_clean()
    finally:
        if prefill is not None:
            prefill.close()
        decode.incoming.close()
