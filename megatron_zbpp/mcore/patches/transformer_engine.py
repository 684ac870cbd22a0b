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
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.patches.shards import Shard, start_all
from megatron_zbpp.runtime.weight_grads import WeightGradStore

_ADDED = 'grad_added_to_main_grad'  # a flag that DistributedDataParallel puts on parameters
# which of (input, gradient of the output) sequence parallelism gathers, by `parallel_mode`
_GATHERED = {'column': 0, 'row': 1}
_NOTHING = contextlib.nullcontext()


def patches(splits: Callable[[int], bool]) -> Iterator[Patch]:
    """Yield what makes configs whose modules leave weight gradients to W.

    Args:
        splits: whether the schedule of so many pipeline ranks has W passes.
    """
    if find_spec('transformer_engine') is not None:
        config = 'megatron.core.transformer.transformer_config:TransformerConfig'
        yield Patch(config, '__post_init__', functools.partial(_delaying, splits))


def _delaying(splits: Callable[[int], bool], original: Callable) -> Callable:
    """`TransformerConfig.__post_init__`, and Transformer Engine's modules leave gradients to W."""

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        split = self.pipeline_model_parallel_size > 1 and splits(self.pipeline_model_parallel_size)
        if split:
            self.delay_wgrad_compute = False  # a copy has it, and Megatron would refuse it
        original(self)
        if split:
            delay_weight_gradients(self)

    return __post_init__


def delay_weight_gradients(config: Any) -> None:
    """Make TE modules built from `config` leave their weight gradients to `backward_dw`.

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
    """Return the TE modules in `model` that were built to delay their weight gradients.

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


def left_over(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Parameters of `model` whose weight gradients a backward has put off, and no W has run."""
    return {
        parameter
        for module in delaying_modules(model)
        if 'put' in vars(module.wgrad_store) and _delayed(module).waiting
        for parameter in _delayed(module).trained
    }


@contextlib.contextmanager
def strays() -> Iterator[list[tuple[torch.Size, ...]]]:
    """Collect what TE's stores take in meanwhile that are not ours to run: shapes of operands.

    Such are those of modules that `model.modules()` does not find.
    """
    common = sys.modules.get('transformer_engine.pytorch.module._common')
    found: list[tuple[torch.Size, ...]] = []
    if common is None:
        yield found
        return
    original = common.WeightGradStore.put

    @functools.wraps(original)
    def put(self: Any, tensors: list, function: Callable) -> None:
        found.append(tuple(tensor.shape for tensor in _inner(tensors)))
        original(self, tensors, function)

    common.WeightGradStore.put = put
    try:
        yield found
    finally:
        common.WeightGradStore.put = original


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
        gradients: `.grad` of others that autograd visited, as it was.
        flags: those of DistributedDataParallel on such, as they were.
    """

    runs: list[tuple[_Delayed, list[list]]] = field(default_factory=list)
    computed: set[torch.nn.Parameter] = field(default_factory=set)
    gradients: list[tuple[torch.nn.Parameter, torch.Tensor | None]] = field(default_factory=list)
    flags: list[tuple[torch.nn.Parameter, bool]] = field(default_factory=list)

    def put(self, module: _Delayed, entry: list) -> None:
        last = self.runs[-1] if self.runs else None
        if last is not None and last[0] is module and len(last[1]) < module.entries:
            last[1].append(entry)
        else:
            self.runs.append((module, [entry]))

    def put_back(self) -> None:
        """Leaves no trace on modules and on parameters whose gradients are still to come."""
        for module, _ in self.runs:
            module.backward = None
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        for parameter, added in self.flags:
            parameter.grad_added_to_main_grad = added


def _delayed(module: torch.nn.Module) -> _Delayed:
    """Return that of `module`, made at its first use."""
    put = vars(module.wgrad_store).get('put')
    return _Delayed(module) if put is None else put.__self__


class _Delayed:
    """A TE module whose store is asked and filled by us.

    Attributes:
        entries: how many one backward puts off, and `backward_dw` runs.
        chunk: that it belongs to.
        backward: that runs now, if it has put something off in it.
        trained: its weights and biases that want gradients; those of norms come with B.
        waiting: backwards whose W has not run.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.entries = 2 if hasattr(module, 'fc2_weight') else 1
        self.trained: list[torch.nn.Parameter] = []
        self.waiting = 0
        self.chunk: _Chunk | None = None
        self.backward: _Backward | None = None
        self._module = module
        self._all: list[torch.nn.Parameter] = []
        self._handles: list[RemovableHandle] = []
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
            for handle in self._handles:
                handle.remove()
            self.trained = trained
            self._handles = [
                _watch(p, 'weight' in name, self) for name, p in named if p.requires_grad
            ]
        self.chunk = chunk
        self.waiting = 0

    def delays(self) -> bool:
        """Return what TE asks, in forward and in backward."""
        return self._running or self.chunk.store.deferring

    def put(self, tensors: list, function: Callable) -> None:
        """Take note of a backward of TE, which calls this.

        Raises:
            RuntimeError: nobody would run it.
        """
        if self.chunk.backward is None:
            raise RuntimeError(
                f'{type(self._module).__name__} put off its weight gradient in a backward that '
                'is not one of the schedule'
            )
        self.backward = self.chunk.backward
        self.backward.put(self, [tensors, function])

    def defer(
        self, entries: list[list], computed: set[torch.nn.Parameter], store: WeightGradStore
    ) -> None:
        """Leaves to the W what a backward put off, which has `computed` gradients of some."""
        if store.waits:
            entries = [[self._least(tensors), function] for tensors, function in entries]
        parameters = self.trained
        if computed:
            parameters = [parameter for parameter in parameters if parameter not in computed]
        shards = [t for tensors, _ in entries for t in tensors if isinstance(t, Shard)]
        store.defer(
            parameters,
            functools.partial(self._compute, parameters, entries),
            functools.partial(self._held, entries),
            start_all(shards),
        )
        self.waiting += 1

    def _least(self, tensors: list) -> list:
        """Return what W needs: FP8 data by columns, this rank's rows of what was gathered."""
        for item in tensors:
            for tensor in item if isinstance(item, list | tuple) else (item,):
                if type(tensor) is torch.Tensor:  # nor are the others quantized
                    break
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

    def _held(self, entries: list[list]) -> Iterator[torch.Tensor]:
        """Yield what waits; not `main_grad`, which lives as long as its parameter."""
        fused = self._module.fuse_wgrad_accumulation
        permanent = {id(getattr(p, 'main_grad', None)) for p in self.trained} if fused else set()
        for tensors, _ in entries:
            yield from (tensor for tensor in _inner(tensors) if id(tensor) not in permanent)

    def _compute(
        self, parameters: list[torch.nn.Parameter], entries: list[list]
    ) -> list[torch.Tensor | None]:
        """Run what one backward put off; `backward_dw` leaves alone what is not in `parameters`.

        Returns:
            A gradient for each of `parameters`, None where it is in `main_grad`.
        """
        waiting = self._module.wgrad_store.context.queue  # without its locks
        held = [(parameter, parameter.grad) for parameter in self._all]
        wanted = set(parameters)
        for parameter, gradient in held:
            if parameter not in wanted:
                parameter.grad = parameter.detach()
            elif gradient is not None:
                parameter.grad = None
        for tensors, function in entries:
            whole = [t.gather() if isinstance(t, Shard) else t for t in tensors]
            waiting.append([whole, function])
        self._running = True
        try:
            self._module.backward_dw()
            self.waiting -= 1
            return [parameter.grad for parameter in parameters]
        finally:
            self._running = False
            waiting.clear()
            for parameter, gradient in held:
                parameter.grad = gradient


def _watch(parameter: torch.nn.Parameter, is_weight: bool, module: _Delayed) -> RemovableHandle:
    """Autograd's visits of a parameter of a module, right before DistributedDataParallel's.

    Called for each weight in each backward, of experts there are many: so it does little.

    Args:
        parameter: visited.
        is_weight: whether no B computes its gradient.
        module: that it belongs to.
    """
    zeroed = getattr(parameter, 'zero_out_wgrad', False)  # then it is added, whatever the flag
    # what DistributedDataParallel takes for a gradient and may add: one zero in memory
    stand_in = _zero(parameter.dtype, parameter.device).expand(parameter.shape)

    def visit(gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is not None and not is_weight:  # it may come before the module's own backward
            if module.chunk.backward is not None:
                module.chunk.backward.computed.add(parameter)
            return None
        backward = module.backward
        added = getattr(parameter, _ADDED, None)
        if backward is None:  # a W, or a backward in which the module has put nothing off
            if gradient is None and added:
                parameter.grad = stand_in
            return None
        if added is not None:
            backward.flags.append((parameter, added))
            parameter.grad_added_to_main_grad = True
        elif gradient is not None:
            backward.gradients.append((parameter, parameter.grad))
            parameter.grad = None
        if gradient is None:
            if added is not None:
                parameter.grad = stand_in
            return None
        # What autograd would keep is not real. A tensor that nobody else has is kept, not copied.
        return torch.zeros_like(gradient) if zeroed else gradient.detach()

    return parameter.register_hook(visit)


@functools.lru_cache
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def _inner(tensors: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory: in lists, in quantized ones, and the rows of shards."""
    for item in tensors:
        if isinstance(item, list | tuple):
            yield from _inner(item)
        elif type(item) is torch.Tensor:
            yield item
        elif item is not None:
            yield from _inner([part for part in vars(item).values() if type(part) is torch.Tensor])
