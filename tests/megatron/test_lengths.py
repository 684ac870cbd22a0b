"""Microbatches of other lengths and numbers, and passes of other models between steps."""

import json
import math
from copy import copy
from itertools import product
from random import Random
from unittest import mock

import pytest
import report
import torch
import torch.distributed as dist
from events import before
from example import MODEL, early_steps, program, small_config
from grids import grid, some
from models import Job, train
from nvidia import by
from rows import row, trains
from stock import trained as trained_by_stock
from supported import supports

from megatron_zbpp.analysis.program import BY_TAKER
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.guests import auto_plan, measurements
from megatron_zbpp.ir import F
from megatron_zbpp.mcore import programs
from megatron_zbpp.mcore.lowered import for_megatron
from megatron_zbpp.schedules import build

pytestmark = pytest.mark.on_ranks(2)
test_identical_to_megatron = trains(
    'microbatches of any length (`variable_seq_lengths`)',
    {'kind': 'lengths', 'te': False},
    row(
        '',
        ('zb-v', 'zb-h1', 'interleaved', '1f1b', 'dualpipe-v', 'zb-2p+post-validation'),
        **{'pp': (4, 2), 'dp': (1, 1, 1, 1, 2)},
    ),
)


@pytest.mark.parametrize(('kind', 'waits'), [('lengths', True), ('dense', False)])
def test_a_pass_waits_for_its_own_shape(data, kind, waits):
    """Where shapes vary, and there alone: tests/unit/analysis/test_lowering.py counts waits."""
    found, job = [], Job(kind, te=False, iterations=1)
    with before((programs, 'check', lambda schedule, receives: found.append(receives))):
        train(job, job.argv('zb-v', False, data))
    assert found and (BY_TAKER in found) == waits


def test_auto_plans_for_the_mean(data):
    """Each rank then has in the simulator as much to do as it had in training."""
    made, measured, planner = [], [], auto_plan.AutoPlan

    def make(profile_iters=5, *settings, **named):  # without: what nothing is known for
        made.append(planner(1, *settings, **named, seconds=0.1))
        return made[0]

    job = Job('lengths', te=False)
    with (
        mock.patch.object(auto_plan, 'AutoPlan', make),
        before((measurements, 'measured_costs', measured.append)),
    ):
        train(job, job.argv('auto', False, data))
    (timeline,) = measured
    simulated = simulate(timeline.schedule, made[0].costs)
    for rank in range(job.pp):
        assert simulated.busy(rank) == pytest.approx(timeline.busy(rank))


STEPS = 3
SCORED = {'seq_length': 8, 'micro_batch_size': 2}  # training has others
CALLS = (3, 1, 7)  # microbatches of each call by step: they divide by no number of ranks


def whole_model(script, args):
    """A reference that each rank has all of, with a pipeline of itself alone; and its groups."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    names = ['tp', 'cp', 'pp', 'embd', 'pos_embd', 'dp', 'dp_cp', 'tp_cp', 'tp_dp_cp', 'mp']
    groups = ProcessGroupCollection(**dict.fromkeys(names, own))
    groups.tp = groups.cp = parallel_state.get_tensor_model_parallel_group()
    sizes = args.num_layers, args.hidden_size, args.num_attention_heads
    plain = {'hidden_dropout': 0.0, 'attention_dropout': 0.0, 'gradient_accumulation_fusion': False}
    config = small_config(*sizes, **plain)
    model = script.GPTModel(
        config,
        script.get_gpt_layer_local_spec(),
        vocab_size=-(-script.VOCABULARY // 128) * 128,
        max_sequence_length=args.seq_length,
        pg_collection=groups,
    )
    script.draw_weights([model], args.seed + 1)
    return [model], {'pg_collection': groups}


def score(script, models, data, groups, num_microbatches):
    """The summed log likelihood of each microbatch, on the last rank of the model's pipeline."""
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

    def take(losses, non_loss_data=True):
        return losses.detach().sum()

    def forward_step(iterator, model):
        batch = next(iterator)
        output = model(batch['tokens'], batch['position_ids'], None, labels=batch['labels'])
        return output, take

    function = schedules.forward_backward_no_pipelining if groups else get_forward_backward_func()
    many = len(models) > 1
    with torch.no_grad():
        return function(
            forward_step_func=forward_step,
            data_iterator=data if many else data[0],
            model=models if many else models[0],
            forward_only=True,
            collect_non_loss_data=True,
            num_microbatches=num_microbatches,
            **SCORED,
            **groups,
        )


def batches(seed, length, size):
    """Endless, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(length).expand(size, -1)
    while True:
        tokens = torch.randint(0, 256, (size, length + 1), generator=generator)
        yield {
            'tokens': tokens[:, :-1],
            'labels': tokens[:, 1:],
            'position_ids': positions,
            'loss_mask': torch.ones(size, length),
        }


def trained_beside(argv, second):
    """Answers of both models and losses of the policy, in hex, and hashes of its weights; and how
    many steps were taken early."""
    with program(argv) as at:
        groups = {}
        if second == 'whole':
            reference, groups = whole_model(at.script, at.args)
        else:
            other = copy(at.args)
            other.seed += 1
            reference = at.script.build_model(other)
        training = [batches(100, at.args.seq_length, 1) for _ in at.models]
        found = []
        for step in range(STEPS):
            answers = []
            for models, options in ((at.models, {}), (reference, groups)):
                length, size = SCORED['seq_length'], SCORED['micro_batch_size']
                data = [batches(step, length, size) for _ in models]
                answers.append(score(at.script, models, data, options, CALLS[step]))
            told = [answers]
            dist.broadcast_object_list(told, src=dist.get_world_size() - 1)
            gain = sum(own - theirs for own, theirs in zip(*told[0], strict=True))
            for group in at.optimizer.param_groups:  # a bit of either answer shows
                group['lr'] = 1e-3 * (2 + math.tanh(gain))
            loss = at.step(training)
            flat = [float(answer).hex() for each in told[0] for answer in each]
            found.append((flat, None if loss is None else loss.hex()))
        hashes = report.fingerprint(report.by_layer(at.models), at.optimizer)
        return found, hashes, early_steps()


@supports(
    'policy and reference in one process ({second}), forward-only passes of other sizes between'
)
@grid(
    schedule=('zb-v', 'zb-h1', 'interleaved', 'zb-2p+post-validation'),
    second=('whole', 'pipelined'),
    p=(2, 2, 4),
)
def test_policy_and_reference(ranks, schedule, second, p):
    _, stock = as_by_stock(ranks(p), trained_beside, schedule, (p, 5, STEPS), second)
    losses, *_ = stock[-1]
    assert len({loss for _, loss in losses}) == STEPS
    assert len({answer for answers, _ in losses for answer in answers}) == 2 * sum(CALLS)


def as_by_stock(ranks, train, schedule, sizes, given, *more):
    """Train by a schedule and by Megatron's own, to the bit; what each leaves on each rank."""
    p, m, steps = sizes
    argv = [*MODEL, '--num-layers', 2 * p, '--pipeline-model-parallel-size', p, '--clip-grad', 1e9]
    argv += ['--global-batch-size', m, '--train-iters', steps]
    stock = trained_by_stock(ranks, train, [*argv, '--pipeline-schedule', 'megatron'], given)
    ours = ranks.run(train, [*argv, *by(schedule), *more], given)
    assert [left[:2] for left in ours] == [left[:2] for left in stock]
    assert any(left[2] for left in ours) == ('+' in schedule)
    return ours, stock


def trained_in_counts(argv, counts):
    """Losses in hex, hashes of weights, steps taken early, and the sizes whose programs are
    kept."""
    with program(argv) as at:
        data = [batches(100, at.args.seq_length, 1) for _ in at.models]
        losses = []
        for at.args.num_microbatches in counts:
            loss = at.step(data)
            losses.append(None if loss is None else loss.hex())
        hashes = report.fingerprint(report.by_layer(at.models), at.optimizer)
        known = set()
        if at.plugin is not None:
            cache = at.plugin.session.programs.cache
            cache.ahead.wait()
            known = {size.num_microbatches for size in cache.sizes if not size.forward_only}
        return losses, hashes, early_steps(), known


@supports('a number of microbatches that differs from call to call', '{schedule}')
@some(
    'schedule, p, steps',
    [('zb-2p+post-validation', 2, 7), ('auto', 2, 7)],
    *product(('zb-v', 'zb-2p+post-validation', 'auto', 'interleaved'), (2, 4), (50,)),
)
def test_as_stock(ranks, tmp_path, schedule, p, steps):
    """Random numbers from 1 to 3p; iteration 5 is traced with as many as it has."""
    random = Random(55)  # of p = 2 the first 7 are 1, 2, 2, 6, 3, 1, 6
    counts = [random.randint(1, 3 * p) for _ in range(steps)]
    sizes, trace = (p, 3 * p, steps), ('--pipeline-trace-dir', tmp_path)
    ours, stock = as_by_stock(ranks(p), trained_in_counts, schedule, sizes, counts, *trace)
    assert len(set(stock[-1][0])) == steps
    between = set(range(min(counts), max(counts) + 1))
    assert [left[3] for left in ours] == [between] * p and between > set(counts[:7])
    traced = json.loads((tmp_path / 'pipeline.perfetto.json').read_text())['traceEvents']
    ran = [event['name'] for event in traced if event['ph'] == 'X']
    forwards = [name for name in ran if name.startswith('0F')]
    assert len(forwards) == counts[4] or schedule == 'auto', 'drawn again after a switch'


def test_the_watchdog_knows_the_position():
    """At each forward: by the passes of the step that runs, whatever steps before it had."""
    found = []

    def note(*_):
        found.append(at.plugin.session.watchdog._activity.standing())

    argv = [*MODEL, '--num-layers', 4, '--pipeline-model-parallel-size', 2, *by('zb-v')]
    with program([*argv, '--global-batch-size', 4, '--train-iters', 3]) as at:
        data = [batches(100, at.args.seq_length, 1) for _ in at.models]
        with before((at.script, 'forward_step', note)):
            for at.args.num_microbatches in (4, 1, 6):
                found.clear()
                at.batch(data)
                schedule = for_megatron(build('zb-v', 2, at.args.num_microbatches))
                order = schedule.passes[dist.get_rank()]
                assert [(each['now'], each['last passes'].split()) for each in found] == [
                    (
                        f'F stage {f.stage} microbatch {f.microbatch} ({f})',
                        [*map(str, order[:place][-10:])] or ['none'],
                    )
                    for place, f in enumerate(order)
                    if f.kind == F
                ]
