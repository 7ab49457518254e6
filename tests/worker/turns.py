"""A worker without its thread: commands and steps run where the test calls."""

from baton.engine.engine import IDLE_S


def turn(worker):
    """What the loop thread does once; whether there was anything to do."""
    commands = worker._loop._commands
    while commands:
        commands.popleft()()
    engine = worker.engine
    has_worked = engine.step() < IDLE_S
    if engine._later and not engine._flights:
        engine.runner.drain()  # all that is left to do is to wait for the end of a step
    return has_worked


class Sink:
    """An EventSink that keeps what it is told."""

    def __init__(self):
        self.events = []
        self.ended = False
        self.error = None

    def emit(self, event):
        assert not self.ended, "an event behind the end"
        self.events.append(event)

    def end(self, error=None):
        if not self.ended:
            self.ended, self.error = True, error
