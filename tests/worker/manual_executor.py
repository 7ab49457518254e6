"""An executor that runs its work when a test says so, or when it is waited for; the same from run to run."""

from collections import deque

import torch

from baton.engine.step.host_future import HostFuture
from baton.kernels.copies import copy_to_host


class _Done:
    def __init__(self, executor):
        self._executor = executor
        self.is_done = False

    def query(self):
        return self.is_done

    def synchronize(self):
        while not self.is_done:
            self._executor.work_off(1)


class ManualExecutor:
    """Has the interface of `engine.step.executor.StepExecutor`; what work raises, it raises at whoever has it done."""

    def __init__(self):
        self._tasks = deque()

    def submit(self, work, target):
        done = _Done(self)
        self._tasks.append((work, target, done))
        return HostFuture(target, done)

    def run(self, work):
        done = _Done(self)
        self._tasks.append((work, None, done))
        return done

    @torch.inference_mode()
    def work_off(self, num_tasks):
        """Do what was given first."""
        for _ in range(min(num_tasks, len(self._tasks))):
            work, target, done = self._tasks.popleft()
            result = work()
            if target is not None:
                copy_to_host(target, result)
            done.is_done = True

    def drain(self):
        self.work_off(len(self._tasks))

    def close(self):
        self.drain()
