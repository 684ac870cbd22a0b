"""Programs that touch weights, gradients or state between calls train as with stock Megatron."""

import json

import pytest
import stock
import touching
from example import MODEL, logged
from grids import grid
from supported import supports

ITERATIONS = 6
COMMON = ['--num-layers', 4, '--global-batch-size', 8, '--train-iters', ITERATIONS]
COMMON += ['--untie-embeddings-and-output-weights', '--pipeline-model-parallel-size', 2]
COMMON += ['--log-interval', 1000, '--clip-grad', 1000, '--no-check-for-nan-in-loss-and-grad']
OPTIMIZERS = {
    'plain': (2, []),
    'distributed': (4, ['--use-distributed-optimizer', '--overlap-grad-reduce']),
    'distributed bf16': (4, ['--use-distributed-optimizer', '--bf16']),
    'bf16': (2, ['--bf16']),
}
SCHEDULES = ('zb-h1', 'zb-v')
EVALUATION = ['--eval-iters', 1, '--eval-interval', 2]


@pytest.fixture(scope='module')
def compared(ranks, data):
    """Trains by stock Megatron and by a schedule; what each rank did, once both are the same."""

    def run(program, schedule, optimizer, variant='', *more):
        size, flags = OPTIMIZERS[optimizer]
        flags = [*MODEL, *COMMON, '--data-path', data, *flags, *more]
        flags += EVALUATION if 'evaluation' in touching.PROGRAMS[program] else ['--eval-iters', 0]

        def trained(name, early):
            words = [*map(str, flags), '--pipeline-schedule', name]
            given = touching.train, words, program, early, variant
            found = stock.trained(ranks(size), logged, *given, kept=not early)
            done = [rank for rank, _ in found]
            lines = [dict(line) for line in found[-1][1]]
            for line in lines if schedule != 'zb-h1' else ():  # norms add up in another order
                line.pop('grad_norm', None)
            return (lines, read(done)), done

        found, done = trained(schedule, True)
        assert found == trained('megatron', False)[0]
        return done

    return run


def read(done):
    """What all ranks together have written down, call by call."""
    calls = []
    for entries in zip(*(rank.read for rank in done), strict=True):
        loaded = [json.loads(entry) for entry in entries]
        if isinstance(loaded[0], dict):
            calls.append(dict(sorted((k, v) for each in loaded for k, v in each.items())))
        else:
            calls.append(loaded)
    return calls


def possible(program, schedule, optimizer):
    """Random states follow the ranks, not the layers."""
    return schedule == 'zb-h1' or not program.startswith('random')


def check_redone(done, times):
    """All ranks have run again as often, one has said why, each time."""
    assert {rank.redone for rank in done} == {times}
    said = ''.join(rank.said for rank in done)
    assert said.count('changed between optimizer.step() and the next iteration') == times
    assert any(rank.early for rank in done)


DUE = ITERATIONS // touching.NOW_AND_THEN


@supports('weights touched after the step', '{schedule}+post-validation')
@grid(possible, program=tuple(touching.WEIGHTS), schedule=SCHEDULES, optimizer=tuple(OPTIMIZERS))
def test_weights(compared, program, schedule, optimizer):
    done = compared(program, schedule, optimizer)
    ends = [rank for rank in done if 'post-validation ends' in rank.said]
    if program == 'weight decay each time':
        check_redone(done, 3)
        assert len(ends) == 1 and 'changes weights after each of 3 steps in a row' in ends[0].said
    elif program == 'gradients before, clamp':
        check_redone(done, 1)
        assert len(ends) == 1 and 'gradients are not zero when an iteration' in ends[0].said
    else:
        check_redone(done, 0 if 'evaluation' in program else DUE)
        assert not ends


@pytest.mark.full
@grid(
    possible, program=tuple(touching.MORE_WEIGHTS), schedule=SCHEDULES, optimizer=tuple(OPTIMIZERS)
)
def test_more_weights(compared, program, schedule, optimizer):
    done = compared(program, schedule, optimizer)
    if program == 'clamp the last layer':  # where it is, forwards need not have run ahead
        check_redone(done, done[0].redone)
    else:
        check_redone(done, 0)


@supports('gradients, state and hooks touched between calls', '{schedule}+post-validation')
@grid(possible, program=tuple(touching.OTHERS), schedule=SCHEDULES, optimizer=tuple(OPTIMIZERS))
def test_others(compared, program, schedule, optimizer):
    """All but random states of dropout are touched where forwards do not see it."""
    variant = 'dropout' if program == 'random states' else ''
    done = compared(program, schedule, optimizer, variant)
    check_redone(done, DUE if variant else 0)
