"""Two ends of every kind of transport, for the suites that all of them pass."""

import random
import subprocess
import threading
import time

import zmq.auth

from baton.core.config import KVTransferConfig
from baton.kvtransfer.protocol.frame import FrameHeader, decode_header, encode_header
from baton.kvtransfer.protocol.transport import PayloadDone
from baton.kvtransfer.transports.loopback import LoopbackHub
from baton.kvtransfer.transports.over_grpc import GrpcTransport
from baton.kvtransfer.transports.over_zmq import ZmqTransport

KINDS = ["loopback", "loopback-late", "zmq", "zmq-curve", "raw", "raw-2", "grpc", "grpc-mtls"]
SOCKET_KINDS = [kind for kind in KINDS if not kind.startswith("loopback")]
PATIENCE_S = 20.0


def make_header(payload_bytes, seq=0, **changes):
    fields = {
        "d_epoch": 1,
        "incoming_id": 2,
        "attempt": 0,
        "seq": seq,
        "layer": 0,
        "head_first": 0,
        "head_count": 1,
        "order_block_size": 16,
        "first": 0,
        "count": 1,
        "payload_bytes": payload_bytes,
    }
    return encode_header(FrameHeader(**{**fields, **changes}))


def openssl(folder, *args):
    subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)


def make_certificates(folder, name="worker", ca="ca"):
    """A CA and a certificate of it for 127.0.0.1; returns configuration."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    if not (folder / f"{ca}.pem").exists():
        files = ("-keyout", f"{ca}.key", "-out", f"{ca}.pem")
        openssl(folder, "req", "-x509", *key, *files, "-days", "2", "-subj", f"/CN={ca}")
    openssl(folder, "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1\n")
    signer = ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial")
    files = ("-in", f"{name}.csr", "-out", f"{name}.pem", "-extfile", "ext")
    openssl(folder, "x509", "-req", *files, *signer, "-days", "2")
    paths = {"tls_cert_file": f"{name}.pem", "tls_key_file": f"{name}.key", "tls_ca_file": f"{ca}.pem"}
    return {key: str(folder / path) for key, path in paths.items()}


def make_curve_key(folder, name="curve"):
    """A key pair; returns configuration."""
    _, secret = zmq.auth.create_certificates(folder, name)
    return {"curve_key_file": secret}


class Ends:
    """`p` pushes, `d` lands; `d` may be restarted. Drives both in this thread."""

    def __init__(self, kind, folder, **config):
        self.kind = kind
        if kind == "zmq-curve":
            config |= make_curve_key(folder)
        if kind == "grpc-mtls":
            config |= make_certificates(folder)
        if kind == "raw-2":
            config["raw_streams"] = 2
        self.config = KVTransferConfig(**{"heartbeat_s": 0.1, "lease_s": 1.0, **config})
        late = {"on_payload": lambda _sender, _receiver, size: size} if kind == "loopback-late" else {}
        self.hub = LoopbackHub(**late)
        self.p = self._make()
        self.d = self.listen()
        self.data_path = "raw" if kind.startswith("raw") else "inline"
        self.at_d, self.at_p = [], []  # what arrived
        self.done = {}  # id of payload -> ok

    def _make(self, bind=None):
        if self.kind.startswith("loopback"):
            return self.hub.join("d" if bind else "p")
        cls = GrpcTransport if self.kind.startswith("grpc") else ZmqTransport
        return cls(bind, self.config)

    def listen(self, address=None):
        return self._make(address or ("grpc" if self.kind.startswith("grpc") else "tcp") + "://127.0.0.1:0")

    def meet(self):
        """Say hello both ways, and open the data path."""
        self.say(b"hello")
        self.d.welcome(self.at_d[-1].peer)
        self.reply(b"hello yourself")
        if self.data_path == "raw":
            (offer,) = self.d.offers()
            assert self.p.open_data_path(self.d.address, offer) == ""
            self.pump_until(lambda: self.p.data_path_of(self.d.address) == "raw")
        self.at_d.clear(), self.at_p.clear()
        return self

    def say(self, message):
        num = len(self.at_d)
        self.p.send(self.d.address, message)
        self.pump_until(lambda: len(self.at_d) > num)
        assert bytes(self.at_d[-1].control) == message

    def reply(self, message):
        num = len(self.at_p)
        self.d.send(self.at_d[-1].peer, message)
        self.pump_until(lambda: len(self.at_p) > num)
        assert bytes(self.at_p[-1].control) == message
        assert self.at_p[-1].peer == self.d.address

    def send_frame(self, pieces, seq=0, **changes):
        header = make_header(sum(map(len, pieces)), seq, **changes)
        self.p.send_frame(self.d.address, header, pieces, self.data_path)
        return header

    def pump(self, timeout_s=0.002):
        """One turn of both."""
        self.at_p += self.p.receive(timeout_s)
        for item in self.d.receive(timeout_s):
            if isinstance(item, PayloadDone):
                self.done[id(item.payload)] = item.ok
            else:
                self.at_d.append(item)

    def pump_until(self, is_done, timeout_s=PATIENCE_S):
        end_s = time.monotonic() + timeout_s
        while not is_done():
            self.pump()
            assert time.monotonic() < end_s, (self.kind, self.at_d[-4:], self.p.counts, self.d.counts)

    def frames(self):
        return [item for item in self.at_d if item.header is not None]

    def read(self, delivery, pieces=None):
        """The bytes of a frame that was delivered."""
        size = decode_header(delivery.header).payload_bytes
        target = bytearray(size)
        pieces = pieces or [memoryview(target)]
        if not delivery.payload.read_into(pieces):
            self.pump_until(lambda: id(delivery.payload) in self.done)
            assert self.done[id(delivery.payload)]
        return target

    def close(self):
        self.p.close()
        self.d.close()


class Pool:
    """Random memory, in pieces that lie apart."""

    def __init__(self, num_bytes, seed=0):
        self.memory = bytearray(random.Random(seed).randbytes(num_bytes))

    def pieces(self, sizes, seed=0):
        """Pieces of these sizes at random places that do not overlap."""
        order = list(range(len(sizes)))
        random.Random(seed).shuffle(order)
        places, start = {}, 0
        for index in order:
            places[index] = start
            start += sizes[index] + 8
        assert start <= len(self.memory)
        view = memoryview(self.memory)
        return [view[places[index] : places[index] + size] for index, size in enumerate(sizes)]


def threads_named(prefix):
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]
