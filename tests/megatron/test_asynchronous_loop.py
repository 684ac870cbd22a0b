"""Asynchronous schedules in NVIDIA's loop, unedited, beside its 1F1B on weights put in by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import events
import pytest
from grids import some
from nvidia import needs_training, run
from supported import supports
from weights_by_hand import ByChunk, ByHand, PipeMare, clip_by_stage

from megatron_zbpp.mcore import enabled

pytestmark = [needs_training, pytest.mark.alone]

METHODS = 'pipedream-2bw', 'pipedream', 'paci', 'wpipe', 'pipemare'
BASE = ['--pipeline-model-parallel-size', 2, '--num-layers', 2, '--train-iters', 5]
BASE += ['--clip-grad', 0.5, '--global-batch-size', 2, '--split', '90,10,0']
BASE += ['--eval-iters', 1, '--eval-interval', 2, '--untie-embeddings-and-output-weights']


@dataclass(frozen=True)
class WeightsByHand:
    """Puts weights of a method before each forward and backward of Megatron's 1F1B. Gives losses of
    evaluations."""

    method: str

    @contextmanager
    def __call__(self, training: Any) -> Iterator[list[str]]:
        from megatron.core import parallel_state
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        get, hands = training.get_forward_backward_func, []

        def get_forward_backward_func(*args: Any, **named: Any) -> Any:
            original = get(*args, **named)

            def forward_backward(**given: Any) -> Any:
                if given.get('forward_only'):
                    return original(**given)
                if not hands:
                    p = parallel_state.get_pipeline_model_parallel_world_size()
                    stage = parallel_state.get_pipeline_model_parallel_rank()
                    model = given['model']
                    models = model if isinstance(model, list) else [model]
                    by = {'wpipe': ByChunk, 'pipemare': PipeMare}.get(self.method, ByHand)
                    hands.append(by(self.method, p, get_num_microbatches(), stage, models))
                hands[0].keep()
                with hands[0].batch():
                    return original(**given)

            return forward_backward

        mine = mock.patch.object(training, 'get_forward_backward_func', get_forward_backward_func)

        def clip(made: Any) -> None:
            if self.method != 'pipedream-2bw':
                clip_by_stage(made[1], sharded=False)

        clips = events.after((training, 'setup_model_and_optimizer', clip))
        with events.evaluations(training) as losses, mine, clips:
            yield losses


@contextmanager
def finished(training: Any) -> Iterator[tuple[list[str], list[str]]]:
    """Takes the step that is begun at the end, before parameters are read. Gives losses of
    evaluations, and collectives that the last iteration waited for."""
    with events.evaluations(training) as losses, events.waits(training) as waited:
        yield losses, waited
    assert enabled.plugin is not None
    enabled.plugin.finish_step()


@supports("NVIDIA's loop: asynchronous, beside 1F1B with weights put in by hand", '{method}')
@some('method', METHODS[:2], *METHODS[2:])
def test_as_with_weights_put_in_by_hand(ranks, method):
    """Losses, evaluations, parameters and optimizer state to the bit; clipping is active. The loop
    waits for no other rank in the last iteration."""
    flags = [*BASE, '--log-interval', 4]
    chunks = []
    if method == 'wpipe':
        flags += ['--num-layers', 4]
        chunks = ['--num-virtual-stages-per-pipeline-rank', 2]
    ours = run(ranks(2), *flags, '--pipeline-schedule', method, event=finished)
    reference = run(ranks(2), *flags, *chunks, event=WeightsByHand(method))
    assert ours.losses == reference.losses
    assert ours.parameters == reference.parameters
    assert ours.optimizer == reference.optimizer
    assert [each for each, _ in ours.reported] == list(reference.reported)
    assert [waits for _, waits in ours.reported] == [[], []]
    assert all(float.fromhex(norm) > 0.5 for norm in reference.grad_norms.values())


def test_norms_of_parameters_are_of_the_newest_weights(ranks):
    """Which are taken behind the call then, and not within the next."""
    flags = [*BASE, '--log-interval', 4, '--log-params-norm', '--train-iters', 3]
    ours = run(ranks(2), *flags, '--pipeline-schedule', 'pipedream-2bw')
    reference = run(ranks(2), *flags, event=WeightsByHand('pipedream-2bw'))
    assert ours.param_norms == reference.param_norms and ours.losses == reference.losses
    assert len({*ours.param_norms.values()}) > 2
