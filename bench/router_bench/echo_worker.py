"""`python -m baton.bench.router_bench.echo_worker`: a worker without a model, a plain process.

It reports heartbeats, queues, blocks and rates like a real one, and answers at the pace it is told. It moves no KV: a
prefill worker tells the decode worker over a TCP connection that a prompt has landed. It says `{"address": ...}` on
stdout once it serves, and ends when its stdin closes.
"""

import argparse
import json
import os
import secrets
import sys
from collections.abc import Callable

import grpc.aio

from baton.bench.router_bench.echo_decode import DecodePace, EchoDecode
from baton.bench.router_bench.echo_prefill import EchoPrefill, PrefillPace
from baton.core.clock_id import clock_id
from baton.core.telemetry.logs import configure_logging
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.worker.host import WorkerHost

BLOCK_SIZE = 16


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m baton.bench.router_bench.echo_worker", description="A worker without a model."
    )
    add = parser.add_argument
    add("--role", choices=("prefill", "decode"), required=True)
    add("--worker-id", required=True)
    add("--router", required=True, help="address of the router's port for workers")
    add("--model-name", default="echo")
    add("--max-model-len", type=int, default=4096)
    add("--max-queue-len", type=int, default=8192)
    add("--max-num-seqs", type=int, default=8192, help="sequences it decodes at once")
    add("--num-blocks", type=int, default=1 << 20, help=f"of {BLOCK_SIZE} positions")
    add("--tokens-per-s", type=float, default=0.0, help="prompt tokens computed; 0: without delay, and not reported")
    add("--first-delay-s", type=float, default=0.0, help="of each first token, beside the computing")
    add("--step-s", type=float, default=0.02, help="between two tokens of a stream")
    return parser.parse_args(arguments)


def main() -> int:
    """Serve until stdin closes."""
    configure_logging("text", {"role": "echo"})
    options = parse()
    epoch = secrets.randbits(63) or 1
    served: EchoPrefill | EchoDecode
    if options.role == "prefill":
        pace = PrefillPace(options.tokens_per_s, options.first_delay_s, options.max_queue_len)
        served = EchoPrefill(pace, epoch)
    else:
        served = EchoDecode(
            DecodePace(options.step_s, options.max_num_seqs, options.num_blocks, BLOCK_SIZE, options.max_queue_len),
            epoch,
        )
    host = WorkerHost(
        "127.0.0.1", _register(served), _state(options, served, epoch, lambda: host), options.router, _die
    )
    host.start()
    print(json.dumps({"address": host.address}), flush=True)
    while os.read(0, 4096):
        pass
    return 0


def _register(served: EchoPrefill | EchoDecode) -> Callable[[grpc.aio.Server], None]:
    def register(server: grpc.aio.Server) -> None:
        if isinstance(served, EchoPrefill):
            worker_pb2_grpc.add_PrefillServicer_to_server(served, server)
        else:
            worker_pb2_grpc.add_DecodeServicer_to_server(served, server)
            served.listen()

    return register


def _state(
    options: argparse.Namespace, served: EchoPrefill | EchoDecode, epoch: int, host: Callable[[], WorkerHost]
) -> Callable[[], worker_pb2.WorkerState]:
    def state() -> worker_pb2.WorkerState:
        return worker_pb2.WorkerState(
            worker_id=options.worker_id,
            role=options.role,
            epoch=epoch,
            address=host().address,
            kv_address=served.kv_address if isinstance(served, EchoDecode) else "",
            model=options.model_name,
            max_model_len=options.max_model_len,
            block_size=BLOCK_SIZE,
            numerics="default",
            dtype="float32",
            kv_dtype="float32",
            max_num_seqs=options.max_num_seqs,
            inventory=served.inventory(options.num_blocks),
            clock_id=clock_id(),
        )

    return state


def _die(error: BaseException) -> None:
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
