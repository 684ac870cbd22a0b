"""One module of Transformer Engine whose weight gradients are put off."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_zbpp.mcore.layers.linear import Shard, dummy_gradient, start_all
from megatron_zbpp.runtime.weight_grads import INNER_BACKWARD, Gradients, WeightGradStore

READ = 'main_grad', 'overwrite_main_grad'  # of a weight, by TE's modules


class Aliased:
    """A context in which `shown` stands in place of a module's parameters.

    A class: of a generator the entering alone takes longer than all of this.
    """

    __slots__ = ('_attributes', '_parameters', '_shown')

    def __init__(self, attributes: dict[str, Any], shown: dict[str, Any]) -> None:
        self._attributes, self._shown = attributes, shown

    def __enter__(self) -> None:
        self._parameters = self._attributes['_parameters']
        self._attributes['_parameters'] = self._shown

    def __exit__(self, *_: object) -> None:
        self._attributes['_parameters'] = self._parameters


def alias_of(parameter: torch.nn.Parameter, soiled: bool) -> torch.Tensor:
    """Return a leaf with the memory of `parameter`.

    Of a quantized one it has all attributes, too, which come and go with its data; Transformer
    Engine then sees the flag of DistributedDataParallel, and gives autograd a stand-in. For a
    `soiled` one autograd gets what is no gradient, to be kept and not copied.
    """
    alias: Any = parameter.detach().requires_grad_()
    if type(alias) is torch.Tensor:
        for name in READ:
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


# by which the backward of TE's Linear, and that of its LayerNormLinear, decides whether to gather
_FLAGS = 'backward_input_needs_gather', 'ln_out_needs_gather'


def leave_gather_to_w(output: Any) -> None:
    """Let the backward behind a module's `output` put off this rank's rows of the input alone.

    Under sequence parallelism TE gathers the input beside the product that gives its gradient, for
    the weight gradient. W gathers it again, so that B need not. FP8 data is left alone: there the
    whole waits for W, for its scales and its layout are made with the gather.
    """
    first = output[0] if isinstance(output, tuple) else output
    node = first.grad_fn
    context = getattr(node, 'backward_objects', node)  # of TE's Linear from 2.9 on
    if getattr(context, 'fp8', True) or getattr(context, 'debug', False):
        return
    for flag in _FLAGS:
        if hasattr(context, flag):
            setattr(context, flag, False)


# which of (input, gradient of the output) sequence parallelism gathers, by `parallel_mode`
_GATHERED = {'column': 0, 'row': 1}
Entries = list[tuple[list, Callable]]  # tensors, and what computes gradients from them


@dataclass
class Chunk:
    """State that the modules of a chunk share."""

    store: WeightGradStore  # takes what they put off
    # of the backward that runs now: modules with what each run of `backward_dw` takes
    runs: list[tuple[DelayedModule, Entries]] | None = None


def delayed(module: Any) -> DelayedModule:
    """Return the `DelayedModule` of `module`, made at its first use."""
    put = vars(module.wgrad_store).get('put')
    return DelayedModule(module) if put is None else put.__self__


class DelayedModule:
    """A TE module whose store is asked, filled and emptied by us."""

    _chunk: Chunk  # that it has joined

    def __init__(self, module: Any) -> None:
        # how many one backward puts off, and `backward_dw` runs
        self.entries = 2 if hasattr(module, 'fc2_weight') else 1
        self.waiting = 0  # backwards whose W has not run
        self._module, self._forward = module, module.forward
        self._single = self.entries == 1 and not hasattr(module, 'num_gemms')
        self._alias_of: list[tuple] | None = None
        self._queue = module.wgrad_store.context.queue  # without its locks
        self._running = False
        module.forward = self.forward
        module.wgrad_store.put = self.put
        module.wgrad_store.pop = self.pop
        module.wgrad_store.delay_wgrad_compute = self.delays

    def join(self, chunk: Chunk) -> None:
        """Belong to `chunk` from now on."""
        self._chunk = chunk
        self.waiting = 0
        read = self._read()
        if read is not None and read == self._alias_of:
            self._clear()  # of an iteration that an error has ended
            return
        module = self._module
        trained = {
            name: parameter
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad and 'layer_norm' not in name
        }
        # weights and biases that want gradients; those of norms come with B
        self.trained, fused = list(trained.values()), module.fuse_wgrad_accumulation
        weights = [place for place, name in enumerate(trained) if 'weight' in name]
        self._biases = [place for place, name in enumerate(trained) if 'weight' not in name]
        quantized = any(type(parameter.data) is not torch.Tensor for parameter in self.trained)
        # whether B leaves something in `.grad` of aliases of weights, such as memory to be filled
        self._soiled = quantized or (hasattr(module, 'num_gemms') and not fused)
        self._aliases = [alias_of(parameter, self._soiled) for parameter in self.trained]
        # in place of the module's parameters
        self._shown = {**module._parameters, **dict(zip(trained, self._aliases, strict=True))}
        self._fused = weights if fused else []  # whose gradients are added to `main_grad`
        self._gathered: int | None = None
        if self.entries == 1 and module.sequence_parallel:
            self._gathered = _GATHERED.get(getattr(module, 'parallel_mode', ''))
        self._alias_of = read

    def _read(self) -> list[tuple] | None:
        read: list[tuple] = [(self._module.fuse_wgrad_accumulation,)]
        for name, parameter in self._module._parameters.items():
            if parameter is None:
                continue
            if type(parameter) is not torch.nn.Parameter:  # a quantized one has memory of many
                return None
            attributes = (id(vars(parameter).get(each)) for each in READ)
            memory, trained = parameter.data_ptr(), parameter.requires_grad
            read.append((name, id(parameter), memory, trained, *attributes))
        return read

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own, on aliases where its weight gradients are to wait."""
        if not self._chunk.store.deferring:
            return self._forward(*args, **kwargs)
        with Aliased(vars(self._module), self._shown):
            output = self._forward(*args, **kwargs)
        if self._gathered == _GATHERED['column']:
            leave_gather_to_w(output)
        return output

    def delays(self) -> bool:
        """Return True if weight gradients wait: TE asks in forward and in backward."""
        return self._running or self._chunk.store.deferring

    def put(self, tensors: list, function: Callable) -> None:
        """Take note of a backward of TE, which calls this; raise where nobody would run it."""
        runs = self._chunk.runs
        if runs is None:
            raise RuntimeError(
                f'{type(self._module).__name__} put off its weight gradient in a backward that '
                f"is not one of the schedule's: {INNER_BACKWARD}"
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
        """Take the gradients of biases that a backward has left in the aliases; None: none."""
        aliases = self._aliases
        early = {place: g for place in self._biases if (g := aliases[place].grad) is not None}
        if early or self._soiled:
            self._clear()
        return [early.get(place) for place in range(len(aliases))] if early else None

    def defer(self, entries: Entries, early: Gradients | None, first: bool) -> None:
        """Leave the `entries` of a backward to W; the `first` run hands over `early` gradients."""
        store, start = self._chunk.store, None
        if store.waits:
            for tensors, _ in entries:
                _by_columns(tensors)
        if self._gathered is not None:
            entries = [(self._sharded(tensors), function) for tensors, function in entries]
            start = start_all([t for ts, _ in entries for t in ts if isinstance(t, Shard)])
        compute = functools.partial(self._compute, entries, early, first)
        held = functools.partial(self._held, entries)
        store.defer(self.trained, compute, held, start, self._fused)
        self.waiting += 1

    def _sharded(self, tensors: list) -> list:
        gathered: Any = self._gathered
        operand, other = tensors[gathered], tensors[1 - gathered]
        if type(operand) is not torch.Tensor:
            return tensors
        whole = gathered == _GATHERED['row'] or len(operand) == len(other)
        if whole and not self._chunk.store.waits:
            return tensors
        kept = list(tensors)
        kept[gathered] = (Shard.of if whole else Shard)(operand, self._module.tp_group)
        return kept

    def _held(self, entries: Entries) -> Iterator[torch.Tensor]:
        fused = self._module.fuse_wgrad_accumulation
        permanent = {id(getattr(p, 'main_grad', None)) for p in self.trained} if fused else set()
        for tensors, _ in entries:
            yield from (tensor for tensor in inner(tensors) if id(tensor) not in permanent)

    def _compute(self, entries: Entries, early: Gradients | None, first: bool) -> Gradients:
        if self._gathered is not None:
            entries = [
                ([t.gather() if isinstance(t, Shard) else t for t in tensors], function)
                for tensors, function in entries
            ]
        if self._single:
            ((tensors, function),) = entries
            weight, bias, *_ = function(*tensors)
            fused = self._module.fuse_wgrad_accumulation
            gradients: list[torch.Tensor | None] = [None if fused else weight] * len(self.trained)
            for place in self._biases:  # none, or an empty one, where the product has none
                gradients[place] = bias if bias is not None and bias.numel() else None
        else:
            for place, gradient in enumerate(early or ()):
                self._aliases[place].grad = gradient
            self._queue.extend(entries)
            self._running = True
            try:
                with Aliased(vars(self._module), self._shown):
                    self._module.backward_dw()
                gradients = [alias.grad for alias in self._aliases]
            finally:
                self._running = False
                self._queue.clear()
                self._clear()
        for place, gradient in enumerate(early or ()):
            if gradient is not None:
                gradients[place] = gradient if first else None
        for place in self._fused:
            gradients[place] = dummy_gradient(self.trained[place])
        self.waiting -= 1
        return gradients

    def _clear(self) -> None:
        for alias in self._aliases:
            alias.grad = None


def _by_columns(tensors: list) -> None:
    """Drop the FP8 data by rows, which W does not read."""
    for item in tensors:
        for tensor in item if isinstance(item, list | tuple) else (item,):
            if type(tensor) is torch.Tensor:  # nor are the others quantized
                break
            tensor.update_usage(rowwise_usage=False, columnwise_usage=True)


def inner(tensors: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory: in lists, in quantized ones, and the rows of shards."""
    for item in tensors:
        if isinstance(item, list | tuple):
            yield from inner(item)
        elif type(item) is torch.Tensor:
            yield item
        elif item is not None:
            yield from inner([part for part in vars(item).values() if type(part) is torch.Tensor])
