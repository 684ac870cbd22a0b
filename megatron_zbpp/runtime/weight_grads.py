"""The weight-gradient store: what W passes will compute, kept from B until W.

A layer whose weight gradient can wait hands the store its parameters and a function that computes
their gradients. The W pass runs those functions inside autograd, as the backward of a node whose
inputs are the parameters: so a gradient reaches its parameter by the same way, with the same hooks,
the same roundings and the same in-place accumulation as in a fused backward. Whoever listens for
gradients (DistributedDataParallel, a user's hook) sees an ordinary gradient, later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron_zbpp.runtime import compat
from megatron_zbpp.runtime.stage import Key

INNER_BACKWARD = (
    'a backward inside a forward (backward() or torch.autograd.grad in a loss function or a model) '
    'is unsupported because W passes compute weight gradients later: choose a schedule without W '
    'passes, such as 1f1b'
)
Gradients = Sequence[torch.Tensor | None]
# of a parameter, and whether its gradients are added where they belong by `Deferred.compute`
DroppedGradient = Callable[[torch.nn.Parameter, bool], torch.Tensor | None]


@dataclass(slots=True, eq=False)  # frozen, it would take longer to make than all else here
class Deferred:
    """A layer's weight gradients, to be computed."""

    parameters: Sequence[torch.nn.Parameter]  # that get them
    # gives one for each; a dummy where it has put it where it belongs
    compute: Callable[[], Gradients]
    held: Callable[[], Iterable[torch.Tensor]] | None  # tells the tensors that wait for it
    start: Callable[[], None] | None  # begins its communication, some time before `compute`
    fused: Collection[int]  # places of the parameters that get dummies

    def drop(self, dropped: DroppedGradient | None) -> None:
        """Compute nothing: no gradient reaches the parameters, though their hooks are called.

        `dropped` makes what hooks get in place of each gradient; None: an undefined one.
        """
        self.held = self.start = None
        parameters, fused = self.parameters, self.fused

        def compute() -> Gradients:
            if dropped is None:
                return [None] * len(parameters)
            return [dropped(each, place in fused) for place, each in enumerate(parameters)]

        self.compute = compute

    @property
    def storages(self) -> Iterable[tuple[int, int]]:
        """Address and bytes of each storage that it holds."""
        for tensor in self.held() if self.held is not None else ():
            storage = tensor.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()


class WeightGradStore:
    """Deferred weight gradients by (stage, microbatch, slice).

    `scope(key)` says which pass is running: layers ask `deferring` in forward, and `defer` in
    backward. Under `scope(None)` nothing is deferred. Autograd runs CUDA backwards on threads of
    its own, which see these attributes; a context variable they would not.
    """

    def __init__(self) -> None:
        # whether the W of the pass that runs comes later, not right behind it: then layers hold as
        # little as they can
        self.waits = True
        # tells of a key, and how many weight gradients its W has, which of them are not computed;
        # None: all are
        self.left_out: Callable[[Key, int], Collection[int]] | None = None
        # makes what hooks of parameters get in place of those; None: they need nothing
        self.dropped: DroppedGradient | None = None
        self.used = False  # whether a W pass has had anything to compute
        self._key: Key | None = None
        self._pending: dict[Key, list[Deferred]] = {}
        self._visits: dict[int, _Visits] = {}

    @property
    def deferring(self) -> bool:
        """True if the pass that runs now leaves its weight gradients to a W pass."""
        return self._key is not None

    @property
    def pending(self) -> int:
        """The number of (stage, microbatch, slice) between their B and their W."""
        return len(self._pending)

    def scope(self, key: Key | None) -> WeightGradStore:
        """Let everything run inside belong to `key`; `None`: compute weight gradients at once."""
        self._key = key
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._key = None

    def open(self, key: Key, waits: bool = True) -> None:
        """Begin the B of `key`: from here to `run(key)` it counts as pending."""
        self._pending[key] = []
        self.waits = waits

    def defer(
        self,
        parameters: Sequence[torch.nn.Parameter],
        compute: Callable[[], Gradients],
        held: Callable[[], Iterable[torch.Tensor]] | None = None,
        start: Callable[[], None] | None = None,
        fused: Collection[int] = (),
    ) -> None:
        """Keep the weight gradients that a layer's backward defers; arguments as of `Deferred`."""
        key = self._key
        assert key is not None, 'only a pass that leaves them to W is to ask for it'
        if key not in self._pending:
            raise NotImplementedError(INNER_BACKWARD)
        self._pending[key].append(Deferred(parameters, compute, held, start, fused))

    def held(self, key: Key) -> int:
        """Return the bytes that wait for the W of `key`; what several layers hold counts once."""
        return sum(dict(pair for d in self._pending[key] for pair in d.storages).values())

    def run(self, key: Key) -> None:
        """Run the W pass of `key`: compute its gradients and let autograd accumulate them.

        Layers are visited in the order of a fused backward, last first; a parameter that was used
        twice gets the sum of both gradients in one accumulation, as there. Each record is freed as
        soon as its gradient is computed.
        """
        records = self._pending.pop(key)
        if not records:
            return
        self.used = True
        if self.left_out is not None:
            for place in self.left_out(key, len(records)):
                records[place].drop(self.dropped)
        stage = key[0]
        visits = self._visits.get(stage)
        if visits is None or not visits.fit(records):
            visits = self._visits[stage] = _Visits(records)
        visits.run(records)

    def clear(self) -> None:
        """Forget everything: after an error, so that no activation outlives its iteration."""
        self._key = None
        self._pending.clear()
        self._visits.clear()


class _Visits:
    """Autograd's nodes before a stage's parameters, by layer: made for its first W, for all."""

    def __init__(self, records: Sequence[Deferred]) -> None:
        self._shape = _shape(records)
        self._left: list[Deferred | None] = []  # a node each
        # The engine runs the youngest node first: create them in forward order.
        self._roots = tuple(
            _WeightGradient.apply(self._left, place, *records[place].parameters)
            for place in reversed(range(len(records)))
        )

    def fit(self, records: Sequence[Deferred]) -> bool:
        return self._shape == _shape(records)

    def run(self, records: list[Deferred]) -> None:
        if records[0].start is not None:
            records[0].start()
        self._left[:] = records
        records.clear()  # each is freed when it has run
        try:
            # as `torch.autograd.backward` does once it has made a gradient of each root: nobody
            # reads it; the nodes stay
            compat.run_backward(
                self._roots, self._roots, True, False, (), True, accumulate_grad=True
            )
        finally:
            self._left.clear()


def _shape(records: Sequence[Deferred]) -> list[tuple[int, ...]]:
    """Return the parameters of each record; nodes keep them alive, and so their identities."""
    return [tuple(map(id, deferred.parameters)) for deferred in records]


class _WeightGradient(torch.autograd.Function):
    """A node over parameters whose backward is the computation that waits at its place."""

    @staticmethod
    def forward(
        ctx, left: list[Deferred | None], place: int, *parameters: torch.nn.Parameter
    ) -> torch.Tensor:
        ctx.left, ctx.place = left, place
        return _nothing(parameters[0].device, torch.float32).detach()

    @staticmethod
    def backward(ctx, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        left, place = ctx.left, ctx.place
        deferred, left[place] = left[place], None
        if place + 1 < len(left) and left[place + 1].start is not None:
            left[place + 1].start()  # overlaps with what is computed now
        return None, None, *deferred.compute()


@functools.lru_cache
def _nothing(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((), device=device, dtype=dtype)
