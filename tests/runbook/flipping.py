"""A prefill worker whose frames to one decode worker, the first it meets, lose a bit now and then. The rest is real."""

EVERY = 40


class Flipping:
    """A transport; see `Transport`."""

    def __init__(self, inner):
        self._inner = inner
        self._victim = None
        self._num_frames = 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def send_frame(self, peer, header, payload, data_path):
        self._victim = self._victim or peer
        if payload and peer == self._victim:
            self._num_frames += 1
            if self._num_frames % EVERY == 1:
                damaged = bytearray(b"".join(payload))
                damaged[len(damaged) // 2] ^= 1
                payload = [memoryview(damaged)]
        self._inner.send_frame(peer, header, payload, data_path)


def flipping_shell():
    from baton.prefill_worker import node
    from baton.prefill_worker.actor import PrefillActorShell

    connect = node.connecting_transport
    node.connecting_transport = lambda config: Flipping(connect(config))
    return PrefillActorShell
