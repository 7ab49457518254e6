"""One stream at a worker, as the router reads it: in a call of its own, on the test's thread."""

import queue
from collections import deque

import grpc

from baton.proto import worker_pb2
from baton.proto.stream_mux_wire import End, StreamTokens, decode_frame, read_decode_frame, read_prefill_frame

TIMEOUT_S = 60.0
_open: set["Stream"] = set()  # gRPC cancels a call once nothing refers to it, whenever the collector gets to it


class Stream:
    """Iterates over events; raises what the stream was ended with. It goes on until then, held or not.

    Attributes:
        epoch: of the life that answers.
    """

    def __init__(self, method, commands, read, message):
        self._commands, self._commands_of, self._read = queue.SimpleQueue(), commands, read
        self._call = method(iter(self._commands.get, None), timeout=TIMEOUT_S)
        self._said = deque()
        opening = commands()
        opening.open.add(stream=1, request=message)
        self._commands.put(opening)
        _open.add(self)
        self._call.add_callback(lambda: _open.discard(self))
        self.epoch = next(self._call).epoch

    def __iter__(self):
        return self

    def __next__(self):
        while not self._said:
            self._said.extend(said for _, said in self._read(next(self._call)))
        said = self._said.popleft()
        if isinstance(said, End):
            self._commands.put(None)
            if said.error is not None:
                raise said.error
            raise StopIteration
        return decode_frame([(1, End()), (1, said)]).items[1].event if isinstance(said, StreamTokens) else said

    def cancel(self):
        """Its end is not told; the call goes on."""
        self._commands.put(self._commands_of(cancelled=[1]))

    def drop(self):
        """End the call, as a router does that dies."""
        self._commands.put(None)
        self._call.cancel()


def attend(stub, message):
    """Opened at a decode worker."""
    return Stream(stub.AttendAll, worker_pb2.DecodeCommands, read_decode_frame, message)


def run(stub, message):
    """Opened at a prefill worker."""
    return Stream(stub.RunAll, worker_pb2.PrefillCommands, read_prefill_frame, message)


RUN_ALL, ATTEND_ALL = "/baton.v1.Prefill/RunAll", "/baton.v1.Decode/AttendAll"
_FRAMES = {
    RUN_ALL: (worker_pb2.PrefillFrame, read_prefill_frame),
    ATTEND_ALL: (worker_pb2.DecodeFrame, read_decode_frame),
}


def opening(data):
    """Bytes that open stream 1 with `data` in the place of a request: `PrefillCommands` or `DecodeCommands`."""
    opened = b"\x08\x01\x12" + _len(data) + data
    return b"\x0a" + _len(opened) + opened


def _len(data):
    size, found = len(data), bytearray()
    while size > 0x7F:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*found, size])


def ends_in(method, frame):
    """Errors with which streams end in the bytes of a frame; None for one that ended well."""
    message, read = _FRAMES[method]
    return [said.error for _, said in read(message.FromString(frame)) if isinstance(said, End)]


def raw_end(channel, method, data, timeout_s):
    """What the worker says to bytes in a call of streams: (the call's error or None, the stream's error or None)."""
    commands = queue.SimpleQueue()
    commands.put(data)
    call = channel.stream_stream(method)(iter(commands.get, None), timeout=timeout_s)
    try:
        for frame in call:
            if ended := ends_in(method, frame):
                return None, ended[0]
    except grpc.RpcError as error:
        return error, None
    finally:
        commands.put(None)
        call.cancel()
    return None, None
