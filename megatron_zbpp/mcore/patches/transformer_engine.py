"""Transformer Engine's linear modules: what they put off, run by our W passes.

A TE module built with `delay_wgrad_compute` puts the computation of its weight gradients into a
queue of its own (`wgrad_store`), and `backward_dw()` runs the oldest. Here, what it puts off goes
to our `WeightGradStore` instead, and `backward_dw` gets it from there: so W passes may come in any
order, and an error leaves nothing behind. Where our store does not defer, the module is told that
it does not delay, and is stock.

While a module computes for us it finds aliases in place of its weights and biases, leaves of their
own: what autograd does with those in B reaches no parameter and no hook on it. Of what B leaves in
`.grad` of an alias only that of a bias is real, which FP8 computes there; GroupedLinear's weights
get memory that W is still to fill.

`backward_dw` leaves gradients in `.grad` of the aliases, or adds to `main_grad` when fused; W hands
the former to autograd. Of a module with one weight, what was put off returns its gradient and the
bias's, and W takes them there: `backward_dw` adds nothing but a third of the host's time.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.patches.shards import Shard, start_all
from megatron_zbpp.runtime.weight_grads import Gradients, WeightGradStore

_ADDED = 'grad_added_to_main_grad'  # a flag that DistributedDataParallel puts on parameters
# which of (input, gradient of the output) sequence parallelism gathers, by `parallel_mode`
_GATHERED = {'column': 0, 'row': 1}
_READ = 'main_grad', 'overwrite_main_grad'  # of a weight, by TE's modules
_NOTHING = contextlib.nullcontext()
Entries = list[tuple[list, Callable]]  # tensors, and what computes gradients from them


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
    every: Iterator[Any] = model.modules()
    modules = [
        module
        for module in every
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
        chunk.runs = runs = []
        try:
            yield
        finally:
            chunk.runs = None
        early: dict[_Delayed, Gradients | None] = {}
        for module, entries in runs:
            first = module not in early
            if first:
                early[module] = module.early()
            module.defer(entries, early[module], first)


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
    """What the modules of a chunk share.

    Attributes:
        store: takes what they put off.
        runs: of the backward that runs now: modules with what each run of `backward_dw` takes.
    """

    store: WeightGradStore
    runs: list[tuple[_Delayed, Entries]] | None = None


def _delayed(module: Any) -> _Delayed:
    """Return that of `module`, made at its first use."""
    put = vars(module.wgrad_store).get('put')
    return _Delayed(module) if put is None else put.__self__


class _Delayed:
    """A TE module whose store is asked, filled and emptied by us.

    Attributes:
        entries: how many one backward puts off, and `backward_dw` runs.
        trained: its weights and biases that want gradients; those of norms come with B.
        waiting: backwards whose W has not run.
    """

    _chunk: _Chunk  # that it has joined

    def __init__(self, module: Any) -> None:
        self.entries = 2 if hasattr(module, 'fc2_weight') else 1
        self.trained: list[torch.nn.Parameter] = []
        self.waiting = 0
        self._module = module
        self._single = self.entries == 1 and not hasattr(module, 'num_gemms')
        self._aliases: list[torch.Tensor] = []
        self._biases: list[int] = []  # places of biases among what is trained
        self._soiled = False  # whether B leaves something in `.grad` of aliases of weights
        self._shown: dict[str, torch.Tensor | None] = {}  # in place of the module's parameters
        self._fused: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._gathered: int | None = None
        self._queue = module.wgrad_store.context.queue  # without its locks
        self._running = False
        self._forward = module.forward
        module.forward = self.forward
        module.wgrad_store.put = self.put
        module.wgrad_store.pop = self.pop
        module.wgrad_store.delay_wgrad_compute = self.delays

    def join(self, chunk: _Chunk) -> None:
        """Belongs to `chunk` from now on."""
        module = self._module
        trained = {
            name: parameter
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad and 'layer_norm' not in name
        }
        self.trained = list(trained.values())
        self._biases = [place for place, name in enumerate(trained) if 'weight' not in name]
        quantized = any(type(parameter.data) is not torch.Tensor for parameter in self.trained)
        unfilled = hasattr(module, 'num_gemms') and not module.fuse_wgrad_accumulation
        self._soiled = quantized or unfilled
        self._aliases = [_alias(parameter, self._soiled) for parameter in self.trained]
        self._shown = {**module._parameters, **dict(zip(trained, self._aliases, strict=True))}
        self._fused = [
            # what DistributedDataParallel takes for a gradient and may add: one zero in memory
            (parameter, _zero(parameter.dtype, parameter.device).expand(parameter.shape))
            for name, parameter in trained.items()
            if module.fuse_wgrad_accumulation and 'weight' in name and hasattr(parameter, _ADDED)
        ]
        self._gathered = None
        if self.entries == 1 and module.sequence_parallel:
            self._gathered = _GATHERED.get(getattr(module, 'parallel_mode', ''))
        self._chunk = chunk
        self.waiting = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own, on aliases where its weight gradients are to wait."""
        if not self._chunk.store.deferring:
            return self._forward(*args, **kwargs)
        with self._aliased():
            return self._forward(*args, **kwargs)

    def delays(self) -> bool:
        """Return what TE asks, in forward and in backward."""
        return self._running or self._chunk.store.deferring

    def put(self, tensors: list, function: Callable) -> None:
        """Take note of a backward of TE, which calls this.

        Raises:
            RuntimeError: nobody would run it.
        """
        runs = self._chunk.runs
        if runs is None:
            raise RuntimeError(
                f'{type(self._module).__name__} put off its weight gradient in a backward that '
                'is not one of the schedule'
            )
        if self.entries > 1 and runs and runs[-1][0] is self and len(runs[-1][1]) < self.entries:
            runs[-1][1].append((tensors, function))
        else:
            runs.append((self, [(tensors, function)]))

    def pop(self) -> tuple[Any, list]:
        """Run the next of what one backward has put off, for `backward_dw`, which calls this."""
        tensors, function = self._queue.popleft()
        return function(*tensors), tensors

    def early(self) -> Gradients | None:
        """Take what a backward has left in the aliases: gradients of biases; None: nothing."""
        aliases = self._aliases
        early = {place: g for place in self._biases if (g := aliases[place].grad) is not None}
        if early or self._soiled:
            self._clear()
        return [early.get(place) for place in range(len(aliases))] if early else None

    def defer(self, entries: Entries, early: Gradients | None, first: bool) -> None:
        """Leave to the W what a backward put off.

        Args:
            entries: that.
            early: gradients that the backward has computed, of all runs of this module.
            first: whether this one of the runs is to hand them over.
        """
        store = self._chunk.store
        start = None
        if store.waits:
            entries = [(self._least(tensors), function) for tensors, function in entries]
            if self._gathered is not None:
                start = start_all([t for ts, _ in entries for t in ts if isinstance(t, Shard)])
        compute = functools.partial(self._compute, entries, early, first)
        store.defer(self.trained, compute, functools.partial(self._held, entries), start)
        self.waiting += 1

    def _least(self, tensors: list) -> list:
        """Return what W needs: FP8 data by columns, this rank's rows of what was gathered."""
        for item in tensors:
            for tensor in item if isinstance(item, list | tuple) else (item,):
                if type(tensor) is torch.Tensor:  # nor are the others quantized
                    break
                tensor.update_usage(rowwise_usage=False, columnwise_usage=True)
        gathered = self._gathered
        if gathered is None or type(tensors[gathered]) is not torch.Tensor:
            return tensors
        kept = list(tensors)
        kept[gathered] = Shard.of(tensors[gathered], self._module.tp_group)
        return kept

    def _held(self, entries: Entries) -> Iterator[torch.Tensor]:
        """Yield what waits; not `main_grad`, which lives as long as its parameter."""
        fused = self._module.fuse_wgrad_accumulation
        permanent = {id(getattr(p, 'main_grad', None)) for p in self.trained} if fused else set()
        for tensors, _ in entries:
            yield from (tensor for tensor in _inner(tensors) if id(tensor) not in permanent)

    def _compute(self, entries: Entries, early: Gradients | None, first: bool) -> Gradients:
        """Run what one backward put off.

        Returns:
            A gradient for each that is trained, None where it is in `main_grad`.
        """
        if self._gathered is not None:
            entries = [([_whole(t) for t in tensors], f) for tensors, f in entries]
        if self._single:
            ((tensors, function),) = entries
            weight, bias, *_ = function(*tensors)
            fused = self._module.fuse_wgrad_accumulation
            gradients: list[torch.Tensor | None] = [None if fused else weight] * len(self.trained)
            for place in self._biases:  # none, or an empty one, where the product has none
                gradients[place] = bias if bias is not None and bias.numel() else None
        else:
            gradients = self._backward_dw(entries, early)
        if early is not None:
            for place, gradient in enumerate(early):
                if gradient is not None:
                    gradients[place] = gradient if first else None
        for parameter, stand_in in self._fused:
            setattr(parameter, _ADDED, True)
            parameter.grad = stand_in
        self.waiting -= 1
        return gradients

    def _backward_dw(self, entries: Entries, early: Gradients | None) -> list[torch.Tensor | None]:
        """Return what it leaves in `.grad`; it leaves alone a bias that has a gradient."""
        if early is not None:
            for alias, gradient in zip(self._aliases, early, strict=True):
                alias.grad = gradient
        self._queue.extend(entries)
        self._running = True
        try:
            with self._aliased():
                self._module.backward_dw()
            return [alias.grad for alias in self._aliases]
        finally:
            self._running = False
            self._queue.clear()
            self._clear()

    def _aliased(self) -> _Aliased:
        return _Aliased(vars(self._module), self._shown)

    def _clear(self) -> None:
        for alias in self._aliases:
            alias.grad = None


class _Aliased:
    """While it is entered, a module's parameters are what is `shown`.

    A class: of a generator the entering alone takes longer than all of this.
    """

    __slots__ = ('_attributes', '_parameters', '_shown')

    def __init__(self, attributes: dict[str, Any], shown: dict[str, Any]) -> None:
        self._attributes = attributes
        self._shown = shown

    def __enter__(self) -> None:
        self._parameters = self._attributes['_parameters']
        self._attributes['_parameters'] = self._shown

    def __exit__(self, *_: object) -> None:
        self._attributes['_parameters'] = self._parameters


def _alias(parameter: torch.nn.Parameter, soiled: bool) -> torch.Tensor:
    """Return a leaf with the memory of `parameter`.

    Of a quantized one it has all attributes, too, which come and go with its data; Transformer
    Engine then sees the flag of DistributedDataParallel, and gives autograd a stand-in.

    Args:
        parameter: a weight or a bias.
        soiled: whether autograd gets for it what is no gradient, to be kept and not copied.
    """
    alias: Any = parameter.detach().requires_grad_()
    if type(alias) is torch.Tensor:
        for name in _READ:
            if hasattr(parameter, name):
                setattr(alias, name, getattr(parameter, name))
    else:
        alias.__dict__ = parameter.__dict__
    if soiled:
        alias.register_hook(_unshared)
    return alias


def _unshared(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor that nobody else has, which autograd keeps and does not copy."""
    return None if gradient is None else gradient.detach()


def _whole(tensor: Any) -> Any:
    return tensor.gather() if isinstance(tensor, Shard) else tensor


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
