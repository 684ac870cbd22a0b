"""What tests do to NVIDIA's training loop while it runs, and what they look for in it."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock


def _joined(original: Callable, function: Callable, behind: bool) -> Callable:
    def call(*args, **kwargs):
        if behind:
            function(result := original(*args, **kwargs))
            return result
        function(*args, **kwargs)
        return original(*args, **kwargs)

    return call


@contextmanager
def before(*calls: tuple[Any, str, Callable], behind: bool = False) -> Iterator[None]:
    """Calls each (owner, name, function) before what has that name there, with its arguments."""
    with ExitStack() as stack:
        for owner, name, function in calls:
            made = _joined(getattr(owner, name), function, behind)
            stack.enter_context(mock.patch.object(owner, name, made))
        yield


after = partial(before, behind=True)  # with what was returned


@contextmanager
def nothing(training: Any) -> Iterator[None]:
    yield None


@contextmanager
def aliased_sends(training: Any) -> Iterator[None]:
    """Megatron's own interleaved schedule keeps what it sends: until 0.17 it frees that too early
    for gloo."""
    from torch import distributed as dist
    from torch.distributed import distributed_c10d

    from megatron_zbpp.emulation import cpu

    aliased = cpu._aliased_isend
    with (
        mock.patch.object(dist, 'isend', aliased),
        mock.patch.object(distributed_c10d, 'isend', aliased),
    ):
        yield


@dataclass(frozen=True)
class Overflow:
    """Puts an infinity into the gradients of one rank in one iteration."""

    iteration: int
    rank: int

    @contextmanager
    def __call__(self, training: Any) -> Iterator[None]:
        import torch

        calls = count(1)

        def spoil(model, *_, **__):
            if next(calls) == self.iteration and torch.distributed.get_rank() == self.rank:
                next(model[0].parameters()).main_grad.view(-1)[0] = float('inf')

        with before((training, 'finalize_model_grads', spoil)):
            yield


class ReducedOverflow(Overflow):
    """The same right before the reduction of gradients begins."""

    @contextmanager
    def __call__(self, training: Any) -> Iterator[None]:
        import torch
        from megatron.core.distributed import param_and_grad_buffer

        groups = param_and_grad_buffer._ParamAndGradBucketGroup
        steps, spoilt = [], []

        def spoil(group, *_, **__):
            here = torch.distributed.get_rank() == self.rank
            if here and len(steps) == self.iteration and not spoilt:
                assert group.grad_reduce_handle is None, 'it has begun'
                spoilt.append(group.buckets[0].grad_data[0].fill_(float('inf')))

        counted = training, 'train_step', lambda *_, **__: steps.append(None)
        with before(counted, (groups, 'start_grad_sync', spoil)):
            yield


@contextmanager
def evaluations(training: Any) -> Iterator[list[str]]:
    losses = []

    def note(result):
        losses.extend(loss.item().hex() for loss in result[0].values())

    with after((training, 'evaluate', note)):
        yield losses


@contextmanager
def unseen_before_the_first(*found: list | Counter) -> Iterator[None]:
    """Takes out of what is found what passes before the first iteration have put there."""
    from megatron_zbpp.mcore.iteration import prewarm

    original = prewarm.prewarmed

    def prewarmed(*args, **kwargs):
        before = [each.copy() for each in found]
        data = original(*args, **kwargs)
        for each, own in zip(found, before, strict=True):
            each.clear()
            each += own
        return data

    with mock.patch.object(prewarm, 'prewarmed', prewarmed):
        yield


@contextmanager
def reductions(training: Any) -> Iterator[list[tuple[int, int]]]:
    """For each reduction of gradients: how many passes had ended when it began, and of how many;
    without the first iteration, in which Megatron learns which gradients come when."""
    from megatron.core.distributed import param_and_grad_buffer

    from megatron_zbpp.ir import Pass
    from megatron_zbpp.runtime.executor import Executor

    groups = param_and_grad_buffer._ParamAndGradBucketGroup
    running, found = [], []

    def note(*_, **__):
        if len(running) > 1:
            executor = running[-1]
            passes = sum(isinstance(instruction, Pass) for instruction in executor.program)
            found.append((len(executor.record.passes), passes))

    calls = (Executor, 'run', running.append), (groups, 'start_grad_sync', note)
    with before(*calls), unseen_before_the_first(running, found):
        yield found


@contextmanager
def sequence_parallel(training: Any) -> Iterator[None]:
    """The final norm, too, takes part in sequence parallelism: see `specs`."""
    import specs
    from megatron.core.transformer import transformer_block

    with mock.patch.object(transformer_block, 'LayerNormImpl', specs.SequenceParallelNorm):
        yield


@contextmanager
def waits(training: Any) -> Iterator[list[str]]:
    """Collectives that the last iteration waited for, but for its passes: see `pipeline_waits`."""
    found: list[str] = []

    def end(_):
        found[:] = current

    with (
        pipeline_waits() as current,
        before((training, 'train_step', lambda *_, **__: current.clear())),
        after((training, 'training_log', end)),
    ):
        yield found


@contextmanager
def pipeline_waits() -> Iterator[list[str]]:
    """Collectives of several pipeline ranks, as they are waited for, by where each was called; what
    runs asynchronously does not count."""
    import traceback

    import torch.distributed as dist

    found: list[str] = []

    def counting(name):
        original = getattr(dist, name)

        def collective(*args, **kwargs):
            from megatron.core import parallel_state

            if not parallel_state.model_parallel_is_initialized():
                return original(*args, **kwargs)
            group = kwargs.get('group') or next(
                (a for a in args if isinstance(a, dist.ProcessGroup)), dist.group.WORLD
            )
            both = group, parallel_state.get_pipeline_model_parallel_group()
            ranks, own = (set(dist.get_process_group_ranks(each)) for each in both)
            if len(ranks & own) > 1 and not kwargs.get('async_op'):
                caller = traceback.extract_stack(limit=2)[0]
                found.append(f'{name} in {caller.name}')
            return original(*args, **kwargs)

        return mock.patch.object(dist, name, collective)

    names = ('all_reduce', 'barrier', 'broadcast', 'all_gather_into_tensor', 'all_gather_object')
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(counting(name))
        yield found


@contextmanager
def mtp_losses(training: Any) -> Iterator[list[list[str]]]:
    """What each log line has of multi-token prediction: of the rank that has it, in hex; without
    what is summed since the program began."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as Helper

    found: list[list[str]] = []

    def note(loss_scale, *_, **__):
        names = ('values', 'loss_values', 'correct_values', 'total_values')
        values = [Helper.tracker[name] for name in names if name in Helper.tracker]
        found.append([(v * loss_scale).item().hex() for each in values for v in each])

    with before((Helper, 'track_mtp_metrics', note)):
        yield found


@contextmanager
def doubted(training: Any) -> Iterator[dict[str, list[str]]]:
    """Megatron doubts each loss and norm of gradients that it validates: iterations run again.
    Gives them, of first runs and of runs again."""
    from megatron.core.rerun_state_machine import RerunStateMachine as Machine

    original = Machine.validate_result
    found: dict[str, list[str]] = {'INITIAL_RUN': [], 'RERUNNING_IN_PLACE': []}

    def validate_result(self, *, result, rejection_func, fatal, **arguments):
        found.get(self.state.name, []).append(result.item().hex())
        original(self, result, lambda _: True, fatal=False, **arguments)

    with mock.patch.object(Machine, 'validate_result', validate_result):
        yield found


@dataclass(frozen=True)
class Dumps:
    """Gradients that the loop has saved, of the files: hashes by iteration, layer and name."""

    folder: Path  # of `--save`

    @contextmanager
    def __call__(self, training: Any) -> Iterator[dict[str, dict[str, str]]]:
        import report
        import torch
        from megatron.core import parallel_state
        from megatron.core.utils import unwrap_model

        found: dict[str, dict[str, str]] = {}
        chunks: list[Any] = []
        built = training, 'setup_model_and_optimizer', lambda made: chunks.extend(made[0])
        with after(built):
            yield found
        if parallel_state.get_data_parallel_rank():
            return  # the first replica has saved
        rank = parallel_state.get_pipeline_model_parallel_rank()
        for file in sorted(self.folder.glob(f'wgrads/iter_*/mp_rank_00_{rank:03d}.pth')):
            saved = torch.load(file)
            values = found.setdefault(file.parent.name, {})
            for index, chunk in enumerate(unwrap_model(chunks)):
                gradients = saved.pop(f'model_chunk{index}')
                places = report.by_layer([chunk])
                for (name, _), (layer, rest, _) in zip(
                    chunk.named_parameters(), places, strict=True
                ):
                    values[f'{layer}.{rest}'] = report._sha256([gradients.pop(name)])
                assert not gradients
            assert not saved


@dataclass(frozen=True)
class OwnLoaders:
    """The script's provider gives loaders of its own, in Megatron's order of samples: what
    --dataloader-type external is for."""

    asks: str  # for the data-parallel rank: 'Megatron', 'megatron_zbpp', or the 'group'

    @contextmanager
    def __call__(self, training: Any) -> Iterator[None]:
        from megatron.core import parallel_state
        from torch.utils.data import DataLoader

        import megatron_zbpp

        name = 'build_train_valid_test_datasets'
        original = getattr(training, name)
        rank_of = {
            'Megatron': lambda _: parallel_state.get_data_parallel_rank(),
            'megatron_zbpp': megatron_zbpp.data_parallel_rank,
            'group': lambda _: parallel_state.get_data_parallel_group().rank(),
        }[self.asks]

        def build_train_valid_test_datasets(provider, *sizes):
            train, *others = original(provider, *sizes)
            if train is None:
                return train, *others
            replicas = parallel_state.get_data_parallel_world_size()
            first = rank_of(provider.keywords.get('vp_stage'))
            first += training.get_args().consumed_train_samples
            return iter(DataLoader(train, sampler=range(first, len(train), replicas))), *others

        with mock.patch.object(training, name, build_train_valid_test_datasets):
            yield


@dataclass(frozen=True)
class Faulty:
    """Doubts an iteration's losses: it runs again, saves, exits (gives the code), to be resumed."""

    iteration: int

    @contextmanager
    def __call__(self, training: Any) -> Iterator[list[int]]:
        from megatron.core.rerun_state_machine import RerunStateMachine as Machine

        original, codes = Machine.validate_result, []

        def validate_result(self_, *, rejection_func, **arguments):
            due = self_.current_iteration == self.iteration
            original(self_, rejection_func=lambda _: due, **arguments)

        with mock.patch.object(Machine, 'validate_result', validate_result):
            try:
                yield codes
            except SystemExit as left:
                codes.append(left.code)


@dataclass(frozen=True)
class Signalled:
    """A rank gets SIGTERM amid an iteration, in a forward; gives those forwards' calls."""

    iteration: int  # that one, counted from where the run begins
    rank: int  # that one
    ahead: bool  # in a forward of the next iteration, which runs within the optimizer's step

    @contextmanager
    def __call__(self, training: Any) -> Iterator[list[str]]:
        import torch.distributed as dist
        from megatron.core.models.gpt import GPTModel

        iterations, stepping, found = [], [], []
        handler = signal.getsignal(signal.SIGTERM)

        def begin(*_, **__):
            iterations.append(None)
            stepping.clear()

        def send(*_, **__):
            here = dist.get_rank() == self.rank and len(iterations) == self.iteration
            if here and bool(stepping) == self.ahead and not found:
                found.append('in the step' if stepping else 'before it')
                os.kill(os.getpid(), signal.SIGTERM)

        # behind the gradients of all passes comes the optimizer's step
        reduced = training, 'finalize_model_grads', lambda *_, **__: stepping.append(None)
        with before((training, 'train_step', begin), reduced, (GPTModel, 'forward', send)):
            try:
                yield found
            finally:
                signal.signal(signal.SIGTERM, handler)


@dataclass(frozen=True)
class Late:
    """The program has begun an hour earlier, as it turns out in an iteration."""

    iteration: int  # that one, counted from where the run begins

    @contextmanager
    def __call__(self, training: Any) -> Iterator[None]:
        iterations = count(1)
        training._TRAIN_START_TIME = time.time()  # ranks were started long before, for other tests

        def come_late(*_, **__):
            if next(iterations) == self.iteration:
                training._TRAIN_START_TIME -= 3600

        with before((training, 'train_step', come_late)):
            yield None
