"""`python -m baton.tests.e2e.stranger`: another account of this machine, which knocks at every door it is told of.

Stdin has a JSON object: `ports` of `host`, those of them that are for `kv`, `methods` of gRPC to call with nothing,
`paths` to read. Stdout has what came of it: by port what each call was answered with, by path what it read. It imports
first and then becomes nobody, who may not be able to read libraries.
"""

import encodings.idna  # noqa: F401
import json
import os
import socket
import ssl
import sys

import grpc
import grpc._channel  # these two are otherwise imported at first use, by an account that may not read them

NOBODY = 65534
WAIT_S = 20.0
FORGED = b"\x0a\x08stranger\x12\x04evil\x18\x01\x22\x03fun"  # key, value, overwrite, namespace
CALLS = {
    "/ray.rpc.InternalKVGcsService/InternalKVKeys": b"\x0a\x03fun",  # the function table that workers unpickle
    "/ray.rpc.InternalKVGcsService/InternalKVPut": FORGED,
    "/baton.v1.Inference/Generate": b"",
    "/baton.v1.Admin/Inventory": b"",
    "/baton.v1.Membership/Heartbeat": b"",
    "/baton.v1.Decode/AttendAll": b"",
    "/baton.v1.Prefill/RunAll": b"",
    "/baton.v1.KvTransfer/Exchange": b"",
}
# Without metadata it ends processes of Ray 2.60 before they look for a token: it must not get that far.
ENDS_RAY = "/ray.rpc.syncer.RaySyncer/StartSync"
NO_CERTIFICATE = "TLS, no certificate"
SHUT = "asks for a certificate"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # and empty settings
HTTP = {
    "POST /get_runtime_envs_info": b"POST /get_runtime_envs_info HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
    "GET /metrics": b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
}


def become_nobody():
    """For good."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def channel_to(host, port, credentials=None):
    """In clear without TLS credentials."""
    options = (("grpc.enable_http_proxy", 0),)
    if credentials is None:
        return grpc.insecure_channel(f"{host}:{port}", options=options)
    return grpc.secure_channel(f"{host}:{port}", credentials, options=options)


def knock(port, host="127.0.0.1", *, calls=CALLS, metadata=(), credentials=None):
    """What each call is answered with: a gRPC code's name, an HTTP status line, or nothing."""
    found = {}
    with channel_to(host, port, credentials) as channel:
        for method, request in calls.items():
            call = channel.unary_stream(method, lambda data: data, lambda data: data)
            try:
                next(iter(call(request, timeout=WAIT_S, metadata=metadata)), None)
                found[method] = "OK"
            except grpc.RpcError as error:
                found[method] = error.code().name
                if found[method] in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):  # it speaks no gRPC, or TLS
                    break
    for name, request in HTTP.items():
        found[name] = say((host, port), request)
    found[NO_CERTIFICATE] = say_in_tls((host, port))
    return found


def say(address, request):
    """The first line of an HTTP answer."""
    try:
        with socket.create_connection(address, timeout=1.0) as connection:
            connection.sendall(request)
            answer = connection.recv(4096)
    except OSError:
        return ""
    return answer.split(b"\r\n")[0].decode(errors="replace") if answer.startswith(b"HTTP/1") else ""


def say_in_tls(address):
    """What somebody gets who speaks TLS, takes any certificate and has none: `SHUT`, "answers", or nothing of TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection(address, timeout=WAIT_S) as connection,
            context.wrap_socket(connection) as inside,
        ):
            try:
                inside.sendall(HTTP2)
                return "answers" if inside.recv(1) else SHUT
            except TimeoutError:
                return "answers"  # it waits for more
            except OSError:
                return SHUT
    except OSError as error:
        return "" if "CERTIFICATE_REQUIRED" not in str(error) else SHUT


ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x00%b" + bytes(32)
ZMTP_BYTES = 64
TAKEN = "takes messages"
KV = {
    "ZMTP NULL": (ZMTP % b"NULL".ljust(20, b"\0"), b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"),
    "ZMTP PLAIN": (ZMTP % b"PLAIN".ljust(20, b"\0"), b"\x04\x2d\x05HELLO\x05baton\x20" + b"0" * 32),
    "raw data path": (b"", b"KVR2" + bytes(512)),  # longer than the answer of its preface
}


def say_kv(address):
    """What a KV port answers to whoever has no secret, over each transport: `TAKEN`, or nothing."""
    return {name: _say_kv(address, *said) for name, said in KV.items()}


def _say_kv(address, greeting, command):
    try:
        with socket.create_connection(address, timeout=WAIT_S) as connection:
            connection.sendall(greeting)
            heard = b""
            while greeting and len(heard) < ZMTP_BYTES:
                more = connection.recv(ZMTP_BYTES - len(heard))
                if not more:
                    return ""
                heard += more
            connection.sendall(command)
            answer = connection.recv(256)
            while not greeting and b"KVR2 ok" not in answer:  # so far it was only challenged
                more = connection.recv(256)
                if not more:
                    break
                answer += more
    except TimeoutError:
        return "waits for more"
    except OSError:
        return ""
    return TAKEN if any(word in answer for word in (b"READY", b"WELCOME", b"KVR2 ok")) else ""


def look(path):
    """What of a path can be read."""
    try:
        if os.path.isdir(path):
            return sorted(os.listdir(path))
        with open(path, "rb") as file:
            return len(file.read(1))
    except OSError as error:
        return type(error).__name__


def main():
    asked = json.load(sys.stdin)
    if os.geteuid() == 0:
        become_nobody()
    calls = {ENDS_RAY: b""} | CALLS | {method: b"" for method in asked["methods"] if method not in CALLS}
    host = asked["host"]
    doors = {port: knock(port, host, calls=calls) for port in asked["ports"]}
    kv = {port: say_kv((host, port)) for port in asked["kv"]}
    print(json.dumps({"doors": doors, "kv": kv, "paths": {path: look(path) for path in asked["paths"]}}))


if __name__ == "__main__":
    main()
