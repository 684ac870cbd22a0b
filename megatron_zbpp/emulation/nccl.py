"""A process group that orders and blocks as ProcessGroupNCCL does, over gloo.

- A communicator is made at the first operation, a rendezvous of all its ranks on the host
  (`LAZY`).
- Operations of one communicator run one after the other on its stream (a thread), in the order
  of the calls.
- A send ends when its receive has taken it; there are no tags; nobody else may overtake.
- Work.wait() is what the compute stream does on a GPU: on the CPU that is the caller.
- What would wait for ever raises `Stuck`, with what this rank stood at.
"""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = 3.0
LAZY = True


class Stuck(RuntimeError):
    pass


class Work(dist._Work):
    def __init__(self, what):
        super().__init__()
        self.what, self.done, self.error = what, threading.Event(), None

    def is_completed(self):
        return self.done.is_set()

    def wait(self, timeout=None):
        if not self.done.wait(TIMEOUT):
            raise Stuck(f'rank {dist.get_rank()} waits for ever for {self.what}')
        if self.error:
            raise self.error
        return True


class NcclLike(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._store = store
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
        self._ready = False
        self._stream = queue.Queue()
        self._first = True
        threading.Thread(target=self._run, daemon=True).start()

    def getBackendName(self):
        return 'nccl_like'

    def _communicator(self, what):
        if self._ready or not LAZY:
            return
        self._store.add('arrived', 1)
        deadline = time.monotonic() + TIMEOUT
        while int(self._store.add('arrived', 0)) < self.size():
            if time.monotonic() > deadline:
                raise Stuck(
                    f'rank {dist.get_rank()} makes a communicator for {what}: no peer comes'
                )
            time.sleep(0.002)
        self._ready = True

    def _run(self):
        while True:
            work, function = self._stream.get()
            try:
                function()
            except BaseException as error:
                work.error = error
            work.done.set()

    def _issue(self, what, function):
        self._communicator(what)
        work = Work(what)
        self._stream.put((work, function))
        return work

    def send(self, tensors, peer, tag=0):
        (tensor,) = tensors

        def run():
            self._gloo.send([tensor], peer, 0).wait()
            self._gloo.recv([torch.zeros(1)], peer, 1).wait()  # matched

        return self._issue(f'send to {peer} of the group', run)

    def recv(self, tensors, peer, tag=0):
        (tensor,) = tensors

        def run():
            self._gloo.recv([tensor], peer, 0).wait()
            self._gloo.send([torch.zeros(1)], peer, 1).wait()

        return self._issue(f'receive from {peer} of the group', run)


def _collective(name):
    def call(self, *args):
        return self._issue(name, lambda: getattr(self._gloo, name)(*args).wait())

    return call


for _name in (
    'allreduce',
    'broadcast',
    'allgather',
    'barrier',
    '_allgather_base',
    'reduce_scatter',
    'alltoall_base',
):
    setattr(NcclLike, _name, _collective(_name))


def register():
    dist.Backend.register_backend(
        'nccl_like',
        lambda store, rank, size, timeout: NcclLike(store, rank, size, timeout),
        devices=['cpu'],
    )
