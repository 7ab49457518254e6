"""Ranks of one process that gather through memory: a group without sockets, for tests that make many of them.

Every gather is checked to be one operation of all ranks, of one shape and dtype.
"""

import threading

import torch

from baton.model.vocab import CutVocab

TIMEOUT_S = 30.0


class Meeting:
    """Where ranks put what they have, and take what all have."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.said = [None] * size
        self.num_operations = [0] * size
        self.num_bytes = [0] * size

    def all_gather(self, rank, x):
        if x.numel() == 0:
            return x.new_empty((self.size, *x.shape))
        self.num_operations[rank] += 1
        self.num_bytes[rank] += x.numel() * x.element_size()
        self.said[rank] = x
        self.barrier.wait()
        assert len({(part.shape, part.dtype) for part in self.said}) == 1, "ranks are at different operations"
        together = torch.stack(self.said)
        self.barrier.wait()
        return together


def together(size, vocab_size, work, multiple=1):
    """`work(vocab)` at every rank at once; results in rank order, or the first error; and the meeting."""
    meeting = Meeting(size)
    results, errors = [None] * size, []

    def run(rank):
        def all_gather(x):
            return meeting.all_gather(rank, x)

        try:
            with torch.inference_mode():
                results[rank] = work(CutVocab(vocab_size, rank, size, all_gather, multiple))
        except threading.BrokenBarrierError:
            errors.append(AssertionError("another rank ended, or does not come"))
        except BaseException as error:  # noqa: BLE001
            errors.insert(0, error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results, meeting


def part_of(x, vocab, fill=-torch.inf):
    """A rank's columns of whole rows."""
    width = vocab.width(x.shape[-1])
    own = x[..., vocab.first : vocab.first + width]
    return torch.nn.functional.pad(own, (0, width - own.shape[-1]), value=fill)
