"""Asynchronous schedules where a training changes between two calls: batch, data, evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import report
import torch
from example import MODEL, program, run
from grids import grid, some
from models import with_fields
from stock import trained as trained_by_stock
from supported import supports
from weights_by_hand import BY, ByHand, evaluation, laid_out

from megatron_zbpp.ir import Pass
from megatron_zbpp.mcore.iteration.stages import Arguments
from megatron_zbpp.mcore.patches.registry import Registry
from megatron_zbpp.mcore.side_effects import random_states
from megatron_zbpp.mcore.techniques import updating
from megatron_zbpp.mcore.techniques.forwards_in_flight import ForwardsInFlight
from megatron_zbpp.runtime.endless import EndlessTraining
from megatron_zbpp.runtime.versions import Corrected

pytestmark = [pytest.mark.alone, pytest.mark.on_ranks(1)]
METHODS = 'pipedream-2bw', 'pipedream', 'paci', 'pipemare', 'wpipe'
KEEP_OLDER = 'pipedream-2bw', 'pipedream', 'wpipe'
ITERATIONS, GROWS, EVALUATES, OTHER_DATA, OTHER_MODEL = 7, 2, 3, 4, 5


def draws() -> str:
    """What a checkpoint would have of random states."""
    host, device, tracked = random_states()
    found = [host, device, *(tracked[name] for name in sorted(tracked))]
    return hashlib.sha256(b''.join(each.numpy().tobytes() for each in found)).hexdigest()


def train(method: str, by_hand: bool, argv: list[str]) -> tuple:
    """Runs on each rank; returns all that is left, and random states between iterations."""
    from megatron.core.parallel_state import get_pipeline_model_parallel_rank

    def patches(script: Any) -> Iterator[tuple[Any, str, Any]]:
        dropout = {'hidden_dropout': 0.0 if method == 'wpipe' else 0.1}
        yield script, 'TransformerConfig', with_fields(script.TransformerConfig, **dropout)
        yield from laid_out(script, method)

    words = [*argv, '--pipeline-schedule', 'megatron' if by_hand else method]
    with program(words, patches) as at:
        script, args, plugin, models = at.script, at.args, at.plugin, at.models
        dataset = script.build_datasets(args)[0]
        data, others, held_out = (script.iterators(args, dataset, n) for n in (0, 50, 100))
        p, stage = args.pipeline_model_parallel_size, get_pipeline_model_parallel_rank()
        losses, norms, states, left = [], [], [], []
        for iteration in range(args.train_iters):
            if iteration == GROWS:
                args.num_microbatches += p if method == 'wpipe' else 1
            if iteration == EVALUATES:
                with evaluation(models):
                    losses.append(script.run_batch(args, models, held_out, forward_only=True))
            if iteration == OTHER_DATA:
                if plugin is not None:
                    plugin.drop_forwards()
                data = others
            if iteration in (0, OTHER_MODEL):
                models = script.build_model(args) if iteration else models
                optimizer, scheduler = script.build_optimizer(args, models)
                left.append((models, optimizer))
                norms.append([])
                hand = BY.get(method, ByHand)(method, p, stage, models)
            for model in models:
                model.zero_grad_buffer()
            optimizer.zero_grad()
            hand.keep()
            batch = args.num_microbatches, iteration in (0, GROWS, OTHER_DATA)
            with hand.batch(*batch) if by_hand else ExitStack():
                losses.append(script.run_batch(args, models, data))
            with hand.rates(optimizer, scheduler.num_steps) if by_hand else ExitStack():
                succeeded, norm, _ = optimizer.step()
            assert succeeded
            scheduler.step(increment=1)
            norms[-1].append(float(norm))
            states.append(draws())
        if plugin is not None:  # the program goes on without it
            plugin.disable()
        for model in models:
            model.zero_grad_buffer()
        losses.append(script.run_batch(args, models, held_out, forward_only=True))
        return norms, losses, states, [report.fingerprint(report.by_layer(m), o) for m, o in left]


def _has_reference(method: str, sizes: tuple[int, int], **_: Any) -> bool:
    """Whether Megatron's own schedule is right: with m > p = 2, interleaved, it is not on gloo."""
    return method != 'wpipe' or sizes[0] > 2


@supports('asynchronous: batches that grow, other data and models, evaluation, dropout', '{method}')
@grid(
    _has_reference,
    method=METHODS,
    sizes=((2, 2), (4, 1), (2, 1)),
    more=((), ('--bf16', '--use-distributed-optimizer')),
)
def test_what_is_in_flight_runs_again(ranks, data, method, sizes, more):
    """Losses, random states, parameters and optimizer state to the bit, as by the formula."""
    p, m = sizes
    if method == 'pipedream-2bw':
        m = max(m, p - 1)
    m = p if method == 'wpipe' else m  # else Megatron's interleaved schedule cannot
    argv = [*MODEL, '--num-layers', 2 * p, '--data-path', data, '--log-interval', 1000]
    argv += ['--pipeline-model-parallel-size', p, '--global-batch-size', m, *more]
    argv += ['--train-iters', ITERATIONS, '--lr-warmup-iters', 1, '--clip-grad', 0.5]
    if method == 'pipemare':  # whose rates differ by stage where m < p-1
        argv += ['--untie-embeddings-and-output-weights', '--pipeline-clip', 'global']
    argv = list(map(str, argv))
    ours = ranks(p).run(train, method, False, argv)
    reference = trained_by_stock(ranks(p), train, method, True, argv)
    for rank, (own, other) in enumerate(zip(ours, reference, strict=True)):
        late = method == 'pipedream-2bw'  # norms are those of the step before
        norms = [[each[0], *each[:-1]] if late else each for each in other[0]]
        assert own == (norms, *other[1:]), rank


def test_data_that_forwards_in_flight_have_read():
    """Refused on the rank that sees it, unless what is in flight is dropped first."""
    calls = SimpleNamespace(drop=lambda: None, begun_with_next_call=1, versions=None)
    calls.is_ahead = lambda p: True
    session = SimpleNamespace(
        watchdog=SimpleNamespace(collective=lambda what: ExitStack()),
        settings=SimpleNamespace(check_interval=0),
    )
    flight: Any = ForwardsInFlight(cast(Any, session), cast(Any, calls))
    model, data, other = torch.nn.Linear(1, 1), iter(range(9)), iter(range(9))
    sizes = {'num_microbatches': 2, 'seq_length': 8, 'micro_batch_size': 1}
    call = partial(Arguments, forward_step_func=print, model=model, **sizes)
    refused = []

    def train_on(iterator, reads):
        flight.take(call(data_iterator=iterator))
        found = [next(flight.replayed(iterator)) for _ in range(reads)]
        with flight.forward(Pass('F', 0, 0), model):
            pass
        assert flight.stands()
        return [*found, next(flight.replayed(iterator))]

    def refuse(**given):
        with pytest.raises(ValueError, match='drop_forwards') as error:
            flight.take(call(**given))
        refused.append(str(error.value))

    assert train_on(data, 2) == [0, 1, 2]
    refuse(data_iterator=data, forward_only=True)
    flight.take(call(data_iterator=other, forward_only=True))
    refuse(data_iterator=other)
    flight.drop()
    assert train_on(other, 2) == [0, 1, 2]
    flight.drop()
    assert train_on(data, 2) == [2, 3, 4]
    assert train_on(data, 1) == [5, 6]
    assert ['evaluation' in each for each in refused] == [True, False]


def resumed(ranks, data, folder, layers, ours, *more):
    """What a whole training leaves, the same that ends after three steps, and what goes on then;
    and what Megatron's own schedule makes of the checkpoint."""
    common = ['--num-layers', layers, '--pipeline-model-parallel-size', 2, '--data-path', data]
    common += ['--global-batch-size', 2, '--train-iters', 6, *more]
    ends = ['--save', folder / 'checkpoint', '--exit-interval', 3]
    loads = [*common, '--load', folder / 'checkpoint']
    stock = [*loads, '--pipeline-schedule', 'megatron']
    every = [*common, *ours], [*common, *ends, *ours], [*loads, *ours], stock
    return [run(ranks(2), *words) for words in every]


@supports('asynchronous: checkpoints hold older weights', '{method}')
@grid(
    method=KEEP_OLDER,
    more=('--bf16', '--untie-embeddings-and-output-weights --use-distributed-optimizer'),
)
def test_resumed_as_if_never_ended(ranks, data, tmp_path, method, more):
    """And Megatron loads them; from its own, versions are equal at first."""
    ours = ['--pipeline-schedule', method, '--pipeline-clip', 'global']
    more = ['--clip-grad', 0.5, *more.split()]
    whole, before, after, megatron = resumed(ranks, data, tmp_path, 4, ours, *more)
    both = {name: getattr(before, name) + getattr(after, name) for name in ('losses', 'grad_norms')}
    assert replace(after, **both) == whole
    assert len(megatron.losses) == 3 and megatron.losses[1:] != after.losses[1:]


@contextmanager
def patched(endless):
    registry = Registry()
    registry.install(updating.checkpoint_patches(endless))
    try:
        yield
    finally:
        registry.undo()


def test_averages_and_steps_are_in_checkpoints(tmp_path):
    """In four bytes beside weights in two. Megatron alone saves none, and that is said."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    (folder := tmp_path / 'checkpoint').mkdir()
    (plain := tmp_path / 'plain').mkdir()
    weight = torch.nn.Parameter(torch.randn(4, 2, dtype=torch.bfloat16))
    main = weight.data.float()

    def state():
        return {'w': ShardedTensor.from_rank_offsets('w', weight)}

    ended, begun = EndlessTraining(warm_up=1), EndlessTraining(warm_up=1)
    ended.resume(3)
    ended.versions = Corrected([weight], [main], every=1, ahead=2, decay=0.25)
    ended.versions.step(lambda: main.add_(0.001))
    with patched(ended):
        dist_checkpointing.save(state(), str(folder))
    for loaded in (state(), {}):  # of no parameters: nothing new
        with patched(begun):
            dist_checkpointing.load(loaded, str(folder))
    dist_checkpointing.save(state(), str(plain))
    said = []
    keep = mock.patch.object(updating.job_log, 'info', lambda line, *_: said.append(line))
    with keep, patched(EndlessTraining()):
        dist_checkpointing.load(state(), str(plain))
    ((name, averages),) = ended.versions.kept().items()
    loaded = begun.loaded[name][id(weight)]
    assert begun.steps == 3 and loaded.dtype == torch.float32
    assert torch.equal(loaded, averages[id(weight)])
    assert torch.equal(dist_checkpointing.load(state(), str(folder))['w'], weight)
    equal = '%s has no older weights: versions are equal at first, as where a training begins'
    assert said == [equal]


@supports('asynchronous: checkpoints hold averages of steps', 'pipemare')
@some('more', ['--bf16'], '--untie-embeddings-and-output-weights --use-distributed-optimizer')
def test_corrections_go_on(ranks, data, tmp_path, more):
    """All stages have averages, the last one too; later steps are nearly those of a whole training.
    Only forwards that were in flight run again, with newer weights than they had."""
    ours = ['--pipeline-schedule', 'pipemare']
    whole, before, after, megatron = resumed(ranks, data, tmp_path, 2, ours, *more.split())
    assert before.losses == whole.losses[:3] and len(after.losses) == len(megatron.losses) == 3
    for own, other in zip(after.losses, whole.losses[3:], strict=True):
        assert float.fromhex(own) == pytest.approx(float.fromhex(other), rel=1e-2)


@supports("asynchronous: from a checkpoint of Megatron's own", '{method}')
@some('method', ['pipedream-2bw'], 'wpipe')
def test_versions_are_equal_at_first_where_a_checkpoint_has_no_older_ones(
    ranks, data, tmp_path, method
):
    """The first batch trains on what was loaded, as by 1F1B: its loss and norm are the same."""
    pool = ranks(2)
    common = ['--num-layers', 4, '--pipeline-model-parallel-size', 2, '--global-batch-size', 2]
    common += ['--data-path', data, '--train-iters', 5]
    ends = [*common, '--save', tmp_path / 'checkpoint', '--exit-interval', 3]
    run(pool, *ends, '--pipeline-schedule', 'megatron')
    loads = [*common, '--load', tmp_path / 'checkpoint']
    stock, ours = (run(pool, *loads, '--pipeline-schedule', each) for each in ('megatron', method))
    assert ours.losses[0] == stock.losses[0]
    norms = [float.fromhex(run.grad_norms[0]) for run in (ours, stock)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6), 'two chunks are summed in another order'
    assert ours.parameters != stock.parameters
