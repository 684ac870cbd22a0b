"""Transformer Engine's linear modules: what they put off, run by our W passes.

A TE module built with `delay_wgrad_compute` puts the computation of its weight gradients into a
queue of its own (`wgrad_store`), and `backward_dw()` runs the oldest. Here, what it puts off goes
to our `WeightGradStore` instead, and into the queue right before `backward_dw`: so W passes may
come in any order, and an error leaves nothing behind. Where our store does not defer, the module is
told that it does not delay, and is stock.

`backward_dw` overwrites `.grad`, or adds to `main_grad` when fused: what it leaves in `.grad` goes
to autograd.

Autograd visits the parameters in B as well: with no gradient, with a bias gradient that FP8 has
computed there, when fused with one that stands for what is in `main_grad`, and GroupedLinear's
weights with memory that W is still to fill. Only that of a bias is real.
DistributedDataParallel's hooks run each time and want to see some gradient.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_zbpp.mcore.shards import Shard, start_all
from megatron_zbpp.runtime.store import WeightGradStore

_ADDED = 'grad_added_to_main_grad'  # a flag that DistributedDataParallel puts on parameters
# which of (input, gradient of the output) sequence parallelism gathers, by `parallel_mode`
_GATHERED = {'column': 0, 'row': 1}
_NOTHING = contextlib.nullcontext()


def delay_weight_gradients(config: Any) -> None:
    """Makes TE modules built from `config` leave their weight gradients to `backward_dw`.

    To be called between the construction of the config, which refuses the setting without
    `overlap_moe_expert_parallel_comm`, and that of the model.

    Raises:
        NotImplementedError: TE cannot delay weight gradients with userbuffers.
    """
    if config.tp_comm_overlap:
        raise NotImplementedError(
            'tp_comm_overlap does not work with schedules that split the backward: Transformer '
            'Engine cannot delay weight gradients with userbuffers; drop --tp-comm-overlap'
        )
    config.delay_wgrad_compute = True


def delaying_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The TE modules in `model` that were built to delay their weight gradients.

    Raises:
        NotImplementedError: one of them keeps its weight in parts, or reduces it by itself.
    """
    modules = [
        module
        for module in model.modules()
        if getattr(module, 'wgrad_store', None) is not None and module.wgrad_store.enabled
    ]
    for module in modules:
        if len(getattr(module, 'weight_names', ())) > 1:
            raise NotImplementedError(
                f'{type(module).__name__} has its weight in the parts {module.weight_names}, whose '
                'delayed gradients Transformer Engine loses; build it without parameters_split'
            )
        if getattr(module, 'wgrad_accumulation_and_reduce_hooks', ()):
            raise NotImplementedError(
                'DistributedDataParallelConfig.delay_wgrad_compute does not work with schedules '
                'that split the backward, which delay by themselves; leave it out'
            )
    return modules


class Delaying:
    """The TE modules of a model chunk that delay; from now on they leave it to `store`.

    Raises:
        NotImplementedError: as `delaying_modules`.
    """

    def __init__(self, model: torch.nn.Module, store: WeightGradStore) -> None:
        self.modules = delaying_modules(model)
        self._chunk = _Chunk(store)
        for module in self.modules:
            _delayed(module).join(self._chunk)

    def queueing(self) -> AbstractContextManager[None]:
        """Around a backward of the chunk: what its modules put off in it goes to the store."""
        return self._queueing() if self.modules and self._chunk.store.deferring else _NOTHING

    @contextlib.contextmanager
    def _queueing(self) -> Iterator[None]:
        chunk = self._chunk
        chunk.backward = backward = _Backward()
        try:
            yield
        finally:
            chunk.backward = None
            backward.put_back()
        for module, entries in backward.runs:
            module.defer(entries, backward.computed, chunk.store)


@dataclass
class _Chunk:
    """What the modules of a chunk share: their store, and the backward that runs now."""

    store: WeightGradStore
    backward: _Backward | None = None


@dataclass
class _Backward:
    """What a backward has done so far.

    Attributes:
        runs: modules with what each run of `backward_dw` will find in its queue, in order.
        computed: parameters whose gradients it has computed.
        held: others that autograd visited, with `.grad` and the flag as they were.
    """

    runs: list[tuple[_Delayed, list[list]]] = field(default_factory=list)
    computed: set[torch.nn.Parameter] = field(default_factory=set)
    held: list[tuple[torch.nn.Parameter, torch.Tensor | None, bool | None]] = field(
        default_factory=list
    )

    def put(self, module: _Delayed, entry: list) -> None:
        last = self.runs[-1] if self.runs else None
        if last is not None and last[0] is module and len(last[1]) < module.entries:
            last[1].append(entry)
        else:
            self.runs.append((module, [entry]))

    def hold(self, parameter: torch.nn.Parameter) -> None:
        """Until the end of the backward `.grad` and the flag are for DistributedDataParallel."""
        self.held.append((parameter, parameter.grad, getattr(parameter, _ADDED, None)))
        if hasattr(parameter, _ADDED):
            setattr(parameter, _ADDED, True)

    def put_back(self) -> None:
        """Leaves no trace on parameters whose gradients are still to come."""
        for parameter, gradient, added in self.held:
            parameter.grad = gradient
            if added is not None:
                setattr(parameter, _ADDED, added)


def _delayed(module: torch.nn.Module) -> _Delayed:
    """That of `module`, made at its first use."""
    put = vars(module.wgrad_store).get('put')
    return _Delayed(module) if put is None else put.__self__


class _Delayed:
    """A TE module whose store is asked and filled by us.

    Attributes:
        entries: how many one backward puts off, and `backward_dw` runs.
        trained: its weights and biases that want gradients; those of norms come with B.
        waiting: backwards whose W has not run.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.entries = 2 if hasattr(module, 'fc2_weight') else 1
        self.trained: list[torch.nn.Parameter] = []
        self.waiting = 0
        self._module = module
        self._all: list[torch.nn.Parameter] = []
        self._visits: list[_Visit] = []
        self._chunk: _Chunk | None = None
        self._running = False
        module.wgrad_store.put = self.put
        module.wgrad_store.delay_wgrad_compute = self.delays

    def join(self, chunk: _Chunk) -> None:
        """Belongs to `chunk` from now on."""
        named = [
            (name, parameter)
            for name, parameter in self._module.named_parameters(recurse=False)
            if 'layer_norm' not in name
        ]
        self._all = [parameter for _, parameter in named]
        trained = [parameter for parameter in self._all if parameter.requires_grad]
        if len(trained) != len(self.trained) or any(
            one is not other for one, other in zip(trained, self.trained, strict=True)
        ):
            for visit in self._visits:
                visit.remove()
            self.trained = trained
            self._visits = [_Visit(p, 'weight' in name) for name, p in named if p.requires_grad]
        for visit in self._visits:
            visit.chunk = chunk
        self._chunk = chunk
        self.waiting = 0

    def delays(self) -> bool:
        """What TE asks, in forward and in backward."""
        return self._running or self._chunk.store.deferring

    def put(self, tensors: list, function: Callable) -> None:
        """Called by TE's backward.

        Raises:
            RuntimeError: nobody would run it.
        """
        if self._chunk.backward is None:
            raise RuntimeError(
                f'{type(self._module).__name__} put off its weight gradient in a backward that '
                'is not one of the schedule'
            )
        self._chunk.backward.put(self, [tensors, function])

    def defer(
        self, entries: list[list], computed: set[torch.nn.Parameter], store: WeightGradStore
    ) -> None:
        """Leaves to the W what a backward put off, which has `computed` gradients of some."""
        if store.waits:
            entries = [[self._least(tensors), function] for tensors, function in entries]
        parameters = [parameter for parameter in self.trained if parameter not in computed]
        held = [t for tensors, _ in entries for t in _inner(tensors) if not self._is_permanent(t)]
        shards = [t for tensors, _ in entries for t in tensors if isinstance(t, Shard)]
        store.defer(
            parameters,
            functools.partial(self._compute, parameters, entries),
            held,
            start_all(shards),
        )
        self.waiting += 1

    def _least(self, tensors: list) -> list:
        """What W needs of them: FP8 data by columns, and this rank's rows of what was gathered."""
        for tensor in _leaves(tensors):
            if hasattr(tensor, 'update_usage'):
                tensor.update_usage(rowwise_usage=False, columnwise_usage=True)
        module = self._module
        gathered = _GATHERED.get(getattr(module, 'parallel_mode', None))
        if gathered is None or not module.sequence_parallel or self.entries > 1:
            return tensors
        if type(tensors[gathered]) is not torch.Tensor:
            return tensors
        kept = list(tensors)
        kept[gathered] = Shard.of(tensors[gathered], module.tp_group)
        return kept

    def _is_permanent(self, tensor: torch.Tensor) -> bool:
        """Whether it is a gradient that lives as long as its parameter."""
        return self._module.fuse_wgrad_accumulation and any(
            tensor is getattr(parameter, 'main_grad', None) for parameter in self.trained
        )

    def _compute(
        self, parameters: list[torch.nn.Parameter], entries: list[list]
    ) -> list[torch.Tensor | None]:
        """Runs what one backward put off; `backward_dw` leaves alone what is not in `parameters`.

        Returns:
            A gradient for each of `parameters`, None where it is in `main_grad`.
        """
        queue = self._module.wgrad_store.context
        held = [parameter.grad for parameter in self._all]
        wanted = set(parameters)
        for parameter in self._all:
            parameter.grad = None if parameter in wanted else parameter.detach()
        for tensors, function in entries:
            whole = [t.gather() if isinstance(t, Shard) else t for t in tensors]
            queue.put([whole, function])
        self._running = True
        try:
            self._module.backward_dw()
            self.waiting -= 1
            return [parameter.grad for parameter in parameters]
        finally:
            self._running = False
            queue.queue.clear()
            for parameter, gradient in zip(self._all, held, strict=True):
                parameter.grad = gradient


class _Visit:
    """Autograd's visits of a parameter of a module that delays, before DistributedDataParallel's.

    Args:
        parameter: visited.
        is_weight: whether no B computes its gradient.
    """

    def __init__(self, parameter: torch.nn.Parameter, is_weight: bool) -> None:
        self.chunk: _Chunk | None = None
        self._is_weight = is_weight
        self.remove = parameter.register_hook(functools.partial(self._visit, parameter)).remove

    def _visit(
        self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        backward = self.chunk.backward
        if backward is not None and (self._is_weight or gradient is None):
            backward.hold(parameter)
            parameter.grad = None
        elif backward is not None:
            backward.computed.add(parameter)
        if gradient is None and getattr(parameter, _ADDED, False):
            parameter.grad = _stand_in(parameter)
        if backward is None or gradient is None or not self._is_weight:
            return None
        # What autograd would keep is not real. A tensor that nobody else has is kept, not copied.
        return (
            torch.zeros_like(gradient)
            if getattr(parameter, 'zero_out_wgrad', False)  # then it is added nevertheless
            else gradient.detach()
        )


def _stand_in(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What DistributedDataParallel takes for a gradient and may add: zeros, one in memory."""
    return _zero(parameter.dtype, parameter.device).expand(parameter.shape)


@functools.lru_cache
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def _leaves(tensors: Any) -> Iterator[Any]:
    """What is in lists of lists."""
    for item in tensors:
        if isinstance(item, list | tuple):
            yield from _leaves(item)
        else:
            yield item


def _inner(tensors: Any) -> Iterator[torch.Tensor]:
    """The tensors with memory: those in quantized ones, and the rows of shards."""
    for item in _leaves(tensors):
        if type(item) is torch.Tensor:
            yield item
        elif item is not None:
            yield from (t for t in vars(item).values() if type(t) is torch.Tensor)
