"""What `megatron_zbpp.enable` puts into Megatron-Core, and takes out again."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.transformer import TransformerConfig

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.program import Program
from megatron_zbpp.analysis.run_ahead import passes_ahead, passes_run_ahead, split
from megatron_zbpp.ir import Placement, Schedule, W
from megatron_zbpp.mcore.import_hook import after_import
from megatron_zbpp.mcore.iteration.forward_backward import forward_backward
from megatron_zbpp.mcore.layout import for_megatron
from megatron_zbpp.mcore.patches import log_line, placement
from megatron_zbpp.mcore.patches.linear import deferring_linear, remembering_reduce_scatter
from megatron_zbpp.mcore.patches.transformer_engine import delay_weight_gradients
from megatron_zbpp.mcore.post_validation import split_step, stepping
from megatron_zbpp.mcore.post_validation.next_iteration import NextIteration
from megatron_zbpp.mcore.settings import AUTO, Settings
from megatron_zbpp.post_validation.policy import Governor
from megatron_zbpp.post_validation.protocol import PostValidation
from megatron_zbpp.runtime.autotune import AutoPlan, start_family
from megatron_zbpp.runtime.channels import Channels
from megatron_zbpp.runtime.guard import agreement
from megatron_zbpp.runtime.guard.watchdog import Watchdog
from megatron_zbpp.runtime.observe.measure import Iteration
from megatron_zbpp.runtime.observe.trace import Tracer
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.schedules import build

_LINEAR = 'LinearWithGradAccumulationAndAsyncCommunication'
_REDUCE_SCATTER = '_ReduceScatterToSequenceParallelRegion'
_PIPELINED = (
    'forward_backward_pipelining_with_interleaving',
    'forward_backward_pipelining_without_interleaving',
)


def lookups() -> Iterator[tuple[Callable, str]]:
    """Which function of Megatron's must find which name replaced."""
    for user, names in (
        (schedules.get_forward_backward_func, _PIPELINED),
        (layers.linear_with_grad_accumulation_and_async_allreduce, (_LINEAR,)),
        (mappings.reduce_scatter_to_sequence_parallel_region, (_REDUCE_SCATTER,)),
        (placement.finalize_module().finalize_model_grads, (placement.TIED,)),
        (inspect.unwrap(TransformerConfig.__post_init__), (placement.LAYOUT,)),
        (LanguageModule._is_in_embd_group, ('is_pp_first_stage',)),
        (inspect.unwrap(MegatronOptimizer.get_grad_norm), (split_step.NORM,)),
        (inspect.unwrap(ChainedOptimizer.get_grad_norm), (split_step.NORM,)),
        (inspect.unwrap(ChainedOptimizer.step), (split_step.CLIP,)),
        (MegatronOptimizer.clip_grad_norm, (split_step.NORM, split_step.CLIP)),
    ):
        for name in names:
            yield user, name


def looks_up(user: Callable, name: str) -> bool:
    """Whether the function looks the name up in its module when it runs."""
    return name in user.__code__.co_names and name in user.__globals__


@dataclass(frozen=True, eq=False)
class Lowered:
    """A checked schedule as programs, in Megatron's ranks.

    Attributes:
        schedule: as it was checked.
        programs: of all ranks.
        ahead: how many of its first passes each rank may run before an iteration begins.
    """

    schedule: Schedule
    programs: tuple[Program, ...]
    ahead: tuple[int, ...]

    @property
    def placement(self) -> Placement:
        return self.schedule.placement

    @functools.lru_cache(64)  # noqa: B019 - as many as ranks; they end with the plugin's schedules
    def program(self, rank: int, ranks_ahead: int) -> tuple[Program, int]:
        """The program of a rank, and how many instructions of it come ahead.

        Args:
            rank: in the pipeline.
            ranks_ahead: how many ranks of the chain go ahead.
        """
        passes = passes_run_ahead(self.schedule, self.ahead, ranks_ahead)
        first, rest = split(self.programs[rank], passes)
        return first + rest, len(first)


class Plugin:
    """The plugin's state while it is enabled; a context manager that disables it at its end.

    Args:
        settings: what was asked for.

    Attributes:
        settings: those.
        source: a schedule; or the family that makes one for any number of microbatches, the stages
            a rank and the memory limit that it is given.
        store: the weight gradients that wait for their W.
        watchdog: ends this process if the pipeline no longer moves.
        post_validation: of the optimizer steps, where that is asked for.
        next: what of the next iteration has been run already.
        steps: takes those of optimizers.
        auto: plans, where that is asked for.
        tracer: draws an iteration, where that is asked for.
        flags: of the program, that all ranks must have alike: compared before groups are made.
        latest: the latest iteration of this rank.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        schedule, chunks, limit = settings.schedule, settings.num_chunks, settings.memory_limit
        objective = 'makespan' if settings.post_validation is None else 'window'
        self.auto: AutoPlan | None = None
        if schedule == AUTO:
            self.auto = AutoPlan(settings.profile_iters, limit, objective=objective)
            schedule, limit = start_family(chunks), None
        self.source = schedule if isinstance(schedule, Schedule) else (schedule, chunks, limit)
        self.tracer = None if settings.trace_dir is None else Tracer(settings.trace_dir)
        self.store = WeightGradStore()
        self.watchdog = Watchdog(settings.watchdog_timeout)
        if settings.watchdog_pause_timeout is not None:
            self.watchdog.limit_pauses(settings.watchdog_pause_timeout)
        self.next = NextIteration(self)
        self.post_validation: PostValidation | None = None
        if settings.post_validation is not None:
            governor = Governor(settings.post_validation)
            self.post_validation = PostValidation(governor, self.watchdog.meeting)
        self.steps = stepping.Steps(self)
        self.flags: Mapping[str, object] = {}
        self.latest: Iteration | None = None
        self._schedules: dict[tuple[int, int, bool], Lowered] = {}
        self._channels: dict[tuple[dist.ProcessGroup, Placement], Channels] = {}
        self._placements: dict[int, Placement] = {}
        self._planned: dict[tuple[int, int], Schedule] = {}
        self._agreed: set[tuple] = set()
        self._undo: list[placement.Attribute] = []
        self._functions: list[placement.Function] = []

    @functools.cached_property
    def title(self) -> str:
        """The source in words: equal on two ranks exactly if the source is."""
        if isinstance(self.source, Schedule):
            return agreement.words(self.source)
        name, num_chunks, memory_limit = self.source
        chunks = f' with {num_chunks} chunks a rank' if num_chunks else ''
        limit = f' within {memory_limit:g}' if memory_limit else ''
        return name + chunks + limit + (' to plan from' if self.auto else '')

    def agree(self, settings: Mapping[str, object], group: dist.ProcessGroup) -> None:
        """Returns if all ranks of `group` have these settings: a collective where they are new.

        Settings that are new on some ranks only are a stall, for the watchdog.

        Raises:
            DisagreementError: they have not.
        """
        settings = {'schedule': self.title, **settings}
        if group is dist.group.WORLD:
            settings |= self.flags
        key = (group, *settings.items())
        if key not in self._agreed:
            with self.watchdog.meeting(f'handshake about {agreement.words(settings)}'):
                gathered = agreement.gather(settings, group)
            agreement.compare(gathered)
            self._agreed.add(key)

    def schedule(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """The schedule for p ranks and m microbatches, in Megatron's ranks.

        Raises:
            ValueError: the family cannot make one, or the given one is for another p or m.
        """
        if (num_ranks, num_microbatches) in self._planned:
            return self._planned[num_ranks, num_microbatches]
        if isinstance(self.source, Schedule):
            for what, has, needed in (
                ('pipeline ranks', self.source.num_ranks, num_ranks),
                ('microbatches', self.source.num_microbatches, num_microbatches),
            ):
                if has != needed:
                    raise ValueError(
                        f'schedule {self.source.name} is for {has} {what}, not {needed}: change '
                        'the parallel or batch sizes, or use a family by its name'
                    )
            return for_megatron(self.source)
        name, num_chunks, memory_limit = self.source
        schedule = build(
            name,
            num_ranks,
            num_microbatches,
            num_chunks=num_chunks,
            memory_limit=memory_limit,
        )
        return for_megatron(schedule)

    def placement(self, num_ranks: int) -> Placement:
        """Where the stages are, whatever the number of microbatches."""
        if num_ranks not in self._placements:
            given = isinstance(self.source, Schedule)
            schedule = self.schedule(num_ranks, self.source.num_microbatches if given else 1)
            self._placements[num_ranks] = schedule.placement
        return self._placements[num_ranks]

    def splits(self, num_ranks: int) -> bool:
        """Whether weight gradients wait for W passes."""
        given = isinstance(self.source, Schedule)
        m = self.source.num_microbatches if given else 2 * num_ranks
        return any(p.kind == W for order in self.schedule(num_ranks, m).passes for p in order)

    def lowered(self, num_ranks: int, num_microbatches: int, forward_only: bool) -> Lowered:
        """The checked programs, from the cache or made now.

        Raises:
            ScheduleError: the schedule is not valid.
        """
        key = (num_ranks, num_microbatches, forward_only)
        if key not in self._schedules:
            schedule = self.schedule(num_ranks, num_microbatches)
            schedule = schedule.forward_only() if forward_only else schedule
            programs = check(schedule).programs
            self._schedules[key] = Lowered(schedule, programs, passes_ahead(schedule))
        return self._schedules[key]

    def trained(self, iteration: Iteration) -> None:
        """Takes note of an iteration of training that has ended."""
        self.latest = iteration
        if self.tracer is not None:
            self.tracer.after(iteration)
        planned = self.auto.after(iteration) if self.auto is not None else None
        if planned is not None:
            shape = planned.num_ranks, planned.num_microbatches
            self._planned[shape] = planned
            for forward_only in (False, True):
                self._schedules.pop((*shape, forward_only), None)
            if self.tracer is not None:
                self.tracer.switched(self.auto.costs)

    def channels(
        self, pp_group: dist.ProcessGroup, placement: Placement, device: torch.device
    ) -> Channels:
        """The channels of this rank between neighbouring stages; made once for each group."""
        key = (pp_group, placement)
        if key not in self._channels:
            ranks = placement.ranks
            steps = [(a, b) for a, b in itertools.pairwise(ranks) if a != b]
            pairs = {*steps, *((b, a) for a, b in steps)}
            self._channels[key] = Channels(pp_group, pairs, device, self.watchdog.meeting)
        return self._channels[key]

    def install(self) -> None:
        """Puts everything in place and asserts that Megatron now finds it."""
        for name in _PIPELINED:
            original = getattr(schedules, name)
            ours = functools.partial(forward_backward, self, original)
            self._patch(schedules, name, functools.update_wrapper(ours, original))
        self._patch(layers, _LINEAR, deferring_linear(getattr(layers, _LINEAR), self.store))
        reduce_scatter = getattr(mappings, _REDUCE_SCATTER)
        ours = remembering_reduce_scatter(reduce_scatter, self.store)
        self._patch(mappings, _REDUCE_SCATTER, ours)
        for owner, name, replacement in placement.attributes(self.placement):
            self._patch(owner, name, replacement)
        for owner, name, replacement in stepping.attributes(self):
            self._patch(owner, name, replacement)
        if find_spec('transformer_engine') is not None:
            post_init = _delaying(TransformerConfig.__post_init__, self.splits)
            self._patch(TransformerConfig, '__post_init__', post_init)
        modules = {*placement.TRAINING, log_line.TRAINING, stepping.TRAINING}
        here = modules & set(sys.modules)
        found = (self._training_functions(sys.modules[name]) for name in here)
        placed = placement.functions(self.placement, self.agree)
        self._replace(itertools.chain(placed, *found))  # one search: there are many modules
        later = modules - here
        self._forget_imports = after_import(dict.fromkeys(later, self._imported))
        try:
            self._assert_found()
        except RuntimeError:
            self.disable()
            raise

    def _assert_found(self) -> None:
        """Each patch took effect: the code that is to find it looks it up by that name.

        Raises:
            RuntimeError: Megatron's code has moved.
        """
        for user, name in lookups():
            if not looks_up(user, name):
                raise RuntimeError(
                    f'{user.__module__}.{user.__name__} does not use {name} in this release '
                    'of Megatron-Core: the patch would have no effect; please report it'
                )

    def _imported(self, module: ModuleType) -> None:
        self._replace(self._training_functions(module))

    def _training_functions(self, module: ModuleType) -> Iterator[placement.Function]:
        """What is replaced of a module of NVIDIA's training loop."""
        if module.__name__ in placement.TRAINING:
            yield from placement.training_functions(module.__name__, self.placement)
        if module.__name__ == log_line.TRAINING:
            yield from log_line.training_functions(module, self)
        if module.__name__ == stepping.TRAINING and self.post_validation is not None:
            yield from stepping.training_functions(module, self.post_validation)

    def disable(self) -> None:
        """Takes everything out again; later calls do nothing."""
        if not self.enabled:
            return
        self.next.close()
        self.watchdog.stop()
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)
        self._forget_imports()
        for module, name, original in self._replaced_functions():
            setattr(module, name, original)
        self._functions.clear()

    def replaced(self) -> list[placement.Attribute]:
        """Owner, name and original of all that is replaced now."""
        return [*self._undo, *self._replaced_functions()]

    def _replaced_functions(self) -> Iterator[placement.Attribute]:
        return placement.everywhere((ours, original) for original, ours in self._functions)

    def __enter__(self) -> Plugin:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()

    @property
    def enabled(self) -> bool:
        return bool(self._undo)

    def _patch(self, owner: Any, name: str, replacement: Any) -> None:
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replacement)

    def _replace(self, functions: Iterable[placement.Function]) -> None:
        pairs = list(functions)
        self._functions += pairs
        if pairs:
            for module, name, replacement in placement.everywhere(pairs):
                setattr(module, name, replacement)


def _delaying(original: Callable, splits: Callable[[int], bool]) -> Callable:
    """`TransformerConfig.__post_init__`, and Transformer Engine's modules leave gradients to W."""

    @functools.wraps(original)
    def __post_init__(self: TransformerConfig) -> None:
        split = self.pipeline_model_parallel_size > 1 and splits(self.pipeline_model_parallel_size)
        if split:
            self.delay_wgrad_compute = False  # a copy has it, and Megatron would refuse it
        original(self)
        if split:
            delay_weight_gradients(self)

    return __post_init__
