"""Process groups that order and block as NCCL's do, on the CPU.

- A communicator is made by its first operation, which waits on the host until all members come:
  collectives of a group have one, and each two ranks of it that talk to each other another one.
- Operations of a communicator run one after the other. A message ends on both sides once both have
  started; there are no tags. A collective runs once all have started.
- `Device.passing` is what a rank computes: under `synchronises` it waits for all that was launched
  before it (torch.cuda.synchronize); under `in_order` everything starts in the order of launch
  (CUDA_DEVICE_MAX_CONNECTIONS=1).
- What would wait for ever raises `Stuck`, which says where each rank stands.

    with nccl.Device() as device:
        group = dist.new_group(backend=nccl.NAME)

Messages travel by the store of the default group, collectives by gloo. Waiting for an operation is
what the device's stream would do; here the host does.
"""

from __future__ import annotations

import queue
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from devtools.launches import Device, Stuck, Work
from devtools.python_group import PythonGroup, over_gloo

__all__ = ['NAME', 'Device', 'Group', 'Stuck']

NAME = 'nccl_like'


class Communicator:
    """A stream of operations among `size` ranks that share its name."""

    def __init__(self, device: Device, name: str, size: int) -> None:
        self.device, self.name = device, name
        self._size, self._made = size, False
        self._stream: queue.SimpleQueue[Work] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def issue(self, what: str, run: Callable[[], None]) -> Work:
        """Launch an operation; the first one waits for all members."""
        if not self._made:
            self.meet('made', f'the others to make a communicator for {what}')
            self._made = True
        work = Work(self.device, what, run)
        self.device.launch(work)
        self._stream.put(work)
        return work

    def meet(self, what: str, words: str | None = None) -> None:
        """Wait until all members have come there."""
        key, store = f'{self.name} {what}', self.device.store
        store.add(key, 1)
        self.device.look(lambda: store.add(key, 0) == self._size, words)

    def _work(self) -> None:
        while not self.device.closed:
            try:
                work = self._stream.get(timeout=1)
            except queue.Empty:
                continue
            self.device.start(work)
            try:
                if not self.device.closed:
                    work.run()
            except Exception as error:
                work.error = error
            self.device.end(work)


class Group(PythonGroup):
    """A process group on `Device.current`."""

    NAME = NAME
    supports_coalescing = True

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size, timeout)
        assert Device.current is not None, 'such groups are made within `with Device()`'
        self.device = Device.current
        if rank == 0:
            store.set('name', uuid.uuid4().hex)
        self._name = store.get('name').decode()
        self._store = store
        self._gloo: dist.ProcessGroup | None = None
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        self._counts: dict[tuple[int, int] | str, int] = defaultdict(int)
        self._together: list[tuple[str, Callable[[], None]]] | None = None  # messages of one call

    def shutdown(self) -> None:
        self._gloo = None

    def _communicator(self, members: tuple[int, ...]) -> Communicator:
        if members not in self._communicators:
            name, size = f'{self._name} {members}', len(members) or self.size()
            self._communicators[members] = Communicator(self.device, name, size)
        return self._communicators[members]

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        """Send what the tensor holds when the operation starts."""
        (tensor,) = tensors
        key, store = self._message(self.rank(), peer), self.device.store
        words = f'a send to {self._words(peer)}'

        def run() -> None:
            sent = tensor.detach().reshape(-1).view(torch.uint8)
            store.set(key, sent.clone().numpy().tobytes())  # numpy's storage cannot be resized
            self.device.look(lambda: store.check([f'{key} taken']))

        return self._issue(peer, words, run)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        key, store = self._message(peer, self.rank()), self.device.store
        words = f'a receive from {self._words(peer)}'

        def run() -> None:
            store.set(f'{key} taken', b'')
            self.device.look(lambda: store.check([key]))
            if self.device.closed:
                return
            taken = torch.frombuffer(bytearray(store.get(key)), dtype=torch.uint8)
            tensor.detach().copy_(taken.view(tensor.dtype).view(tensor.shape))
            store.delete_key(key)

        return self._issue(peer, words, run)

    def _issue(self, peer: int, words: str, run: Callable[[], None]) -> Work:
        """Launch a message, or leave it to the call that launches several."""
        if self._together is None:
            return self._communicator(_pair(self.rank(), peer)).issue(words, run)
        self._together.append((words, run))
        return Work(self.device, words, run)

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, device: torch.device) -> Work:
        """Launch as one what was called since: NCCL takes the communicator of all ranks for it."""
        together, self._together = self._together or [], None

        def run() -> None:
            for _, each in together:
                each()

        words = together[0][0] if len(together) == 1 else f'{len(together)} messages'
        return self._communicator(()).issue(words, run)

    def _message(self, sender: int, receiver: int) -> str:
        self._counts[sender, receiver] += 1
        return f'{self._name} {sender} to {receiver} {self._counts[sender, receiver]}'

    def _words(self, peer: int) -> str:
        return f'rank {dist.get_global_rank(self, peer)}'

    def collective(self, name: str, *args: object, **options: object) -> Work:
        """Return an operation of all ranks."""
        communicator = self._communicator(())
        self._counts[name] += 1
        turn = f'{name} {self._counts[name]}'
        words = f'{turn} among {self.size()} ranks'

        def run() -> None:
            communicator.meet(turn)
            if self._gloo is None:
                limit = timedelta(seconds=self.device.patience)
                self._gloo = over_gloo(self._store, self.rank(), self.size(), limit)
            getattr(self._gloo, name)(*args, **options).wait()

        return communicator.issue(words, run)


def _pair(a: int, b: int) -> tuple[int, int]:
    return min(a, b), max(a, b)


def _collective(name: str) -> Callable[..., Work]:
    def call(self: Group, *args: object, **options: object) -> Work:
        return self.collective(name, *args, **options)

    return call


for _name in (
    'allreduce',
    'allreduce_coalesced',
    'allgather',
    '_allgather_base',
    'all_gather_single',
    'all_gather_single_coalesced',
    'allgather_into_tensor_coalesced',
    'alltoall',
    'alltoall_base',
    'barrier',
    'broadcast',
    'gather',
    'reduce',
    'reduce_scatter',
    '_reduce_scatter_base',
    'reduce_scatter_single',
    'reduce_scatter_single_coalesced',
    'reduce_scatter_tensor_coalesced',
    'scatter',
):
    setattr(Group, _name, _collective(_name))
if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, Group, devices=['cpu'])
