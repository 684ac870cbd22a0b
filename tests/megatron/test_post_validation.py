"""Steps that are validated later leave what synchronous ones leave, to the bit. So do they where
programs touch weights, gradients or state between calls."""

import gc
import json
import random

import pytest
import stock
import torch
import torch.distributed as dist
import touching
from example import MODEL, forget_groups, logged, program
from grids import grid
from injected import VALUES, Early, Event, train
from nvidia import by
from supported import supports

from benchmarks.common.groups import shared_groups
from benchmarks.pipelines.emulated import Times
from benchmarks.pipelines.runners import EmulatedModel, ZbppRunner
from megatron_zbpp.post_validation.speculative_step import KEPT_BYTES
from megatron_zbpp.schedules import build

ITERATIONS = 8
COMMON = ['--num-layers', '4', '--global-batch-size', '8', '--train-iters', ITERATIONS]
# processes, schedule, flags, variant: see `injected`
SETUPS = {
    'fp32': (2, 'zb-h1', [], ''),
    'bf16 sgd, V': (2, 'zb-v', ['--bf16'], 'sgd'),
    'fp16': (2, 'zb-2p', ['--bf16'], 'fp16'),
    'fp16, V, distributed optimizer': (
        4,
        'zb-v',
        ['--bf16', '--use-distributed-optimizer'],
        'fp16',
    ),
    'distributed optimizer': (4, 'zb-h1', ['--use-distributed-optimizer'], ''),
    'experts, V': (2, 'zb-v', ['--untie-embeddings-and-output-weights'], 'experts'),
    'tensor parallel': (4, 'zb-h1', ['--bf16', '--tensor-model-parallel-size', 2], ''),
    'dropout': (2, 'zb-h1', [], 'dropout'),
}


@pytest.fixture(scope='module')
def compared(ranks, data):
    """Runs both ways; what post-validation did on each rank, once both are the same."""

    def run(setup, happening, *more, kept_bytes=KEPT_BYTES):
        size, schedule, flags, variant = SETUPS[setup]
        argv = [*MODEL, *COMMON, '--pipeline-schedule', schedule, '--data-path', data, *flags]
        argv += ['--pipeline-model-parallel-size', 2, '--log-interval', 1000, *more]
        given = train, list(map(str, argv)), happening
        later, found = (
            ranks(size).run(logged, *given, clean_steps, variant, kept_bytes)
            for clean_steps in (0, 1)
        )
        assert found[-1][1] == later[-1][1] != []
        return [early for early, _ in found]

    return run


@supports('steps validated later: {setup}', 'any+post-validation')
@pytest.mark.parametrize('setup', SETUPS)
def test_whatever_happens(compared, setup):
    """Clipping on no, some or all steps; overflow and nonsense on any rank in any step; of the old
    state, all is kept, some or nothing. Each run draws others."""
    draw = random.Random()
    steps = range(1, ITERATIONS + 1)
    happening = [
        Event(draw.choice(steps), draw.choice((0, 1)), draw.choice(sorted(VALUES)))
        for _ in range(draw.randint(1, 6))
    ]
    clip_grad, kept_bytes = draw.choice([0, 2.5, 10]), draw.choice([KEPT_BYTES, 200_000, 0])
    print(happening, clip_grad, kept_bytes)
    compared(setup, happening, '--clip-grad', clip_grad, kept_bytes=kept_bytes)


@grid(setup=('fp32', 'bf16 sgd, V', 'experts, V'), kept_bytes=(KEPT_BYTES, 0))
def test_prefix_passes_and_whole_fails(compared, setup, kept_bytes):
    """What the last of the chain finds, the first learns from the whole."""
    _, schedule, *_ = SETUPS[setup]
    last = 0 if schedule == 'zb-v' else 1  # Megatron's ranks: the first stage of a V is on the last
    happening = [Event(5, last, 'large'), Event(6, last, 'inf'), Event(8, last, 'nan')]
    early = compared(setup, happening, '--clip-grad', 10, kept_bytes=kept_bytes)
    first = early[1 - last]
    assert first.taken_back >= 2 and first.tried > first.taken_back
    assert early[last] == Early(0, 0), 'it knows the whole'


def test_what_happens_first_in_the_chain_stops_it(compared):
    """Nobody steps on a prefix that fails."""
    happening = [Event(5, 0, 'large'), Event(6, 0, 'inf')]
    assert compared('fp32', happening, '--clip-grad', 10)[0].taken_back == 0


def test_evaluation_and_saving_between(compared, tmp_path):
    """Forwards that ran ahead do not show; those before an evaluation run again."""
    more = ['--eval-iters', 2, '--eval-interval', 3, '--save-interval', 4]
    early = compared('dropout', [], '--clip-grad', 100, *more, '--save', tmp_path / 'saved')
    assert early[0] == Early(ITERATIONS - 1, 0)


@pytest.mark.on_ranks(2)
def test_disabling_waits_for_messages():
    """Forwards run ahead that take long; the next rank disables the plugin meanwhile. Else messages
    would stand in the way of all that comes after them."""
    from megatron.core import parallel_state, tensor_parallel

    with shared_groups():  # so that what follows takes the connection of the messages
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = EmulatedModel(Times(0.2, 0.001, 0.001))
    runner = ZbppRunner(build('zb-h1', 2, 2), 'zb-h1', model, optimizer=True, early=True)
    with runner.ready():
        for _ in range(4):
            runner.iterate()
        early = runner.plugin.post_validation.early
    gc.collect()
    total = torch.ones(1)
    dist.all_reduce(total)
    forget_groups()
    assert total.item() == 2
    assert bool(early) == (dist.get_rank() == 0)


TURN = 4  # iterations


@pytest.mark.on_ranks(2)
def test_no_weights_are_said_to_have_changed_in_the_next_turn(data):
    """The plugin is taken out and put in again, as where schedules take turns: weights that a turn
    has ended with are not those that the next one begins with."""
    argv = [*MODEL, '--num-layers', 4, '--data-path', data, '--log-interval', 1000]
    argv += ['--pipeline-model-parallel-size', 2, '--global-batch-size', 4, '--clip-grad', 100]
    argv += ['--train-iters', 2 * TURN, *by('zb-h1+post-validation')]
    with program(argv) as at:
        for iteration in range(2 * TURN):
            if iteration == TURN:
                at.plugin.disable()
                at.plugin.install()
            at.step()
        done = at.plugin.post_validation
    assert done.redone == 0
    assert dist.get_rank() or done.early > TURN, 'in both turns'


TOUCHED_ITERATIONS = 6
TOUCHED = ['--num-layers', 4, '--global-batch-size', 8, '--train-iters', TOUCHED_ITERATIONS]
TOUCHED += ['--untie-embeddings-and-output-weights', '--pipeline-model-parallel-size', 2]
TOUCHED += ['--log-interval', 1000, '--clip-grad', 1000, '--no-check-for-nan-in-loss-and-grad']
OPTIMIZERS = {
    'plain': (2, []),
    'distributed': (4, ['--use-distributed-optimizer', '--overlap-grad-reduce']),
    'distributed bf16': (4, ['--use-distributed-optimizer', '--bf16']),
    'bf16': (2, ['--bf16']),
}
SCHEDULES = ('zb-h1', 'zb-v')
EVALUATION = ['--eval-iters', 1, '--eval-interval', 2]


@pytest.fixture(scope='module')
def touched(ranks, data):
    """Trains by stock Megatron and by a schedule; what each rank did, once both are the same."""

    def run(program, schedule, optimizer, variant=''):
        size, flags = OPTIMIZERS[optimizer]
        flags = [*MODEL, *TOUCHED, '--data-path', data, *flags]
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
    calls = zip(*(map(json.loads, rank.read) for rank in done), strict=True)
    return [together(call) if isinstance(call[0], dict) else call for call in calls]


def together(entries):
    return dict(sorted(item for each in entries for item in each.items()))


def possible(program, schedule, optimizer):
    """Random states follow the ranks, not the layers."""
    return schedule == 'zb-h1' or not program.startswith('random')


def check_redone(done, times):
    """All ranks have run again as often, one has said why, each time."""
    assert {rank.redone for rank in done} == {times}
    said = ''.join(rank.said for rank in done)
    assert said.count('changed between optimizer.step() and the next iteration') == times
    assert any(rank.early for rank in done)


DUE = TOUCHED_ITERATIONS // touching.NOW_AND_THEN


@supports('weights touched after the step', '{schedule}+post-validation')
@grid(possible, program=tuple(touching.WEIGHTS), schedule=SCHEDULES, optimizer=tuple(OPTIMIZERS))
def test_weights(touched, program, schedule, optimizer):
    done = touched(program, schedule, optimizer)
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
def test_more_weights(touched, program, schedule, optimizer):
    done = touched(program, schedule, optimizer)
    if program == 'clamp the last layer':  # where it is, forwards need not have run ahead
        check_redone(done, done[0].redone)
    else:
        check_redone(done, 0)


@supports('gradients, state and hooks touched between calls', '{schedule}+post-validation')
@grid(possible, program=tuple(touching.OTHERS), schedule=SCHEDULES, optimizer=tuple(OPTIMIZERS))
def test_others(touched, program, schedule, optimizer):
    """All but random states of dropout are touched where forwards do not see it."""
    variant = 'dropout' if program == 'random states' else ''
    done = touched(program, schedule, optimizer, variant)
    check_redone(done, DUE if variant else 0)
