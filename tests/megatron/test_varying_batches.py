"""Batches whose number of microbatches differs from call to call, as packed sequences have them."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from random import Random
from unittest import mock

import pytest
from example import MODEL, early_steps, forget_groups
from stock import trained as trained_by_stock
from supported import supports
from test_several_models import batches

from megatron_zbpp.ir import F
from megatron_zbpp.mcore.lowered import for_megatron
from megatron_zbpp.schedules import build


@contextmanager
def set_up(argv):
    """What the example makes of these arguments on this rank: them, its chunks and data of each."""
    import pretrain_gpt as script

    try:
        with ExitStack() as stack:
            args = script.parse_args(list(map(str, argv)))
            script.enable(args, stack)
            script.initialize(args)
            models = script.build_model(args)
            yield args, models, [batches(100, args.seq_length, 1) for _ in models]
    finally:
        forget_groups()


def trained(argv, counts):
    """Losses in hex, hashes of weights, steps taken early, and the sizes whose programs are kept.

    Args:
        argv: of the example.
        counts: microbatches of each step.
    """
    import pretrain_gpt as script
    import report

    from megatron_zbpp.mcore import enabled

    with set_up(argv) as (args, models, data):
        optimizer, _ = script.build_optimizer(args, models)
        losses = []
        for count in counts:
            args.num_microbatches = count
            for model in models:
                model.zero_grad_buffer()
            optimizer.zero_grad()
            loss = script.run_batch(args, models, data)
            assert optimizer.step()[0]
            losses.append(None if loss is None else loss.hex())
        hashes = report.fingerprint(report.by_layer(models), optimizer)
        known = set()
        if enabled.plugin is not None:
            cache = enabled.plugin.session.programs.cache
            cache.ahead.wait()
            known = {size.num_microbatches for size in cache.sizes if not size.forward_only}
        return losses, hashes, early_steps(), known


@supports('a number of microbatches that differs from call to call', '{schedule}')
@pytest.mark.parametrize(
    ('schedule', 'p', 'steps'),
    [
        ('zb-2p+post-validation', 2, 7),
        ('auto', 2, 7),
        *(
            pytest.param(schedule, p, 50, marks=pytest.mark.full)
            for schedule in ('zb-v', 'zb-2p+post-validation', 'auto', 'interleaved')
            for p in (2, 4)
        ),
    ],
)
def test_as_stock(ranks, tmp_path, schedule, p, steps):
    """Random numbers from 1 to 3p; iteration 5 is traced with as many as it has."""
    random = Random(55)  # of p = 2 the first 7 are 1, 2, 2, 6, 3, 1, 6
    counts = [random.randint(1, 3 * p) for _ in range(steps)]
    name, _, early = schedule.partition('+')
    argv = [*MODEL, '--num-layers', 2 * p, '--pipeline-model-parallel-size', p, '--clip-grad', 1e9]
    argv += ['--global-batch-size', 3 * p, '--train-iters', steps]
    post = ['--enable-optimizer-post-validation', '--optimizer-post-validation-clean-steps', 1]
    flags = ['--pipeline-schedule', name, *(post if early else [])]
    stock = trained_by_stock(ranks(p), trained, [*argv, '--pipeline-schedule', 'megatron'], counts)
    ours = ranks(p).run(trained, [*argv, *flags, '--pipeline-trace-dir', tmp_path], counts)
    assert len(set(stock[-1][0])) == steps
    assert [left[:2] for left in ours] == [left[:2] for left in stock]
    assert any(left[2] for left in ours) == bool(early)
    between = set(range(min(counts), max(counts) + 1))
    assert [left[3] for left in ours] == [between] * p and between > set(counts[:7])
    traced = json.loads((tmp_path / 'pipeline.perfetto.json').read_text())['traceEvents']
    ran = [event['name'] for event in traced if event['ph'] == 'X']
    forwards = [name for name in ran if name.startswith('0F')]
    assert len(forwards) == counts[4] or schedule == 'auto', 'drawn again after a switch'


def standings(argv, counts):
    """Where the watchdog says that a rank is at each forward of each step."""
    import pretrain_gpt as script

    from megatron_zbpp.mcore import enabled

    found, original = [], script.forward_step

    def forward_step(*given):
        found[-1].append(enabled.plugin.session.watchdog._activity.standing())
        return original(*given)

    with (
        set_up(argv) as (args, models, data),
        mock.patch.object(script, 'forward_step', forward_step),
    ):
        for args.num_microbatches in counts:
            found.append([])
            script.run_batch(args, models, data)
    return found


def test_the_watchdog_knows_the_position(ranks):
    """By the passes of the step that runs, whatever steps before it had."""
    p, counts = 2, (4, 1, 6)
    argv = [*MODEL, '--num-layers', 2 * p, '--pipeline-model-parallel-size', p]
    argv += ['--pipeline-schedule', 'zb-v', '--global-batch-size', 4, '--train-iters', 3]
    for rank, steps in enumerate(ranks(p).run(standings, argv, counts)):
        for count, forwards in zip(counts, steps, strict=True):
            order = for_megatron(build('zb-v', p, count)).passes[rank]
            expected = [
                (f'F stage {f.stage} microbatch {f.microbatch} ({f})', order[:at][-10:])
                for at, f in enumerate(order)
                if f.kind == F
            ]
            assert [(each['now'], each['last passes']) for each in forwards] == [
                (now, ' '.join(map(str, before)) or 'none') for now, before in expected
            ]
