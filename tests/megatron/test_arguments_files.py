"""Schedules and plans in files that flags name."""

from __future__ import annotations

import json
from unittest import mock

import pytest
from parsed_flags import parse, parsed, refused

from megatron_zbpp.schedules import build


def schedule_file(folder, p=2, m=4, drop=0):
    """ZB-V in a file, without its last passes on rank 0."""
    from megatron_zbpp.ir.formats import to_torch_csv

    rows = to_torch_csv(build('zb-v', p, m)).splitlines()
    if drop:
        rows[0] = ','.join(rows[0].split(',')[:-drop])
    path = folder / 'schedule.csv'
    path.write_text('\n'.join(rows))
    return path


def test_file(ranks, tmp_path):
    found = parsed(ranks, '--pipeline-schedule-file', schedule_file(tmp_path))
    assert found.code is None and found.result.source.name == 'schedule'
    assert found.result.placed['pipeline_model_parallel_layout'] == 'Et|t|t|tL'


def test_refused_files(ranks, tmp_path):
    path = tmp_path / 'schedule.csv'
    flags = ['--pipeline-schedule-file', path]
    error = refused(ranks, *flags)
    assert 'No such file' in error and str(path) in error
    path.write_text('0F0,oops')
    error = refused(ranks, *flags)
    assert f"{path}: row 0, column 1: 'oops' is not an action" in error and 'such as' in error
    path.write_text('{"schedule": 1}')
    assert str(path) in refused(ranks, *flags)
    schedule_file(tmp_path)
    error = refused(ranks, *flags, '--pipeline-schedule', 'zb-v')
    assert 'zb-v' in error and str(path) in error and 'give one of them' in error
    error = refused(ranks, *flags, global_batch_size=6)
    assert 'for 4 microbatches, not 6: change' in error
    error = refused(ranks, *flags, rampup_batch_size=['2', '2', '8'])
    assert 'for 4 microbatches, not 2: change' in error
    error = refused(ranks, *flags, eval_global_batch_size=6)
    assert '--eval-global-batch-size gives batches of 6, 6 microbatches: schedule' in error
    assert 'for 4 microbatches, not 6: change' in error
    error = refused(ranks, *flags, eval_micro_batch_size=2)
    assert '--eval-micro-batch-size gives batches of 4, 2 microbatches: schedule' in error
    evaluations = {'eval_global_batch_size': 8, 'eval_micro_batch_size': 2}
    for none in (evaluations, {'eval_global_batch_size': 6, 'eval_iters': 0}):
        assert parsed(ranks, *flags, **none).code is None
    error = refused(ranks, *flags, eval_global_batch_size=6, eval_iters=0, full_validation=True)
    assert 'for 4 microbatches, not 6: change' in error
    schedule_file(tmp_path, p=3)
    assert 'for 3 pipeline ranks, not 2: change' in refused(ranks, *flags)
    schedule_file(tmp_path, drop=1)
    assert '`zbpp check` shows the place' in refused(ranks, *flags)


@pytest.mark.parametrize('given', ['name', 'file'])
def test_two_routes_of_another_size(ranks, tmp_path, given):
    """Before a model is built: one chunk of each stage would train on half of the microbatches."""
    flags = ['--pipeline-schedule', 'two_ways:two-ways']
    if given == 'file':
        path = tmp_path / 'two-ways.json'
        path.write_text(build(flags[1], 2, 4).to_json())
        flags = ['--pipeline-schedule-file', path]
    said = (
        'makes 2 ways through the ranks, not 1: say' if given == 'name' else 'give an even number'
    )
    assert said in refused(ranks, *flags)


def plan_file(folder, layout='Ettt|tL'):
    """A plan of two ranks and four microbatches."""
    from megatron_zbpp.schedules import build

    path = folder / 'plan.json'
    schedule = json.loads(build('zb-h1', 2, 4).to_json())
    path.write_text(json.dumps({'layout': layout, 'cuts': [4, 2], 'schedule': schedule}))
    return path


def test_a_plan_brings_its_layout(ranks, tmp_path):
    plan = ['--pipeline-schedule-file', plan_file(tmp_path)]
    for given in (None, 'Ettt|tL', 'Et*3|tL'):
        found = parsed(ranks, *plan, pipeline_model_parallel_layout=given)
        assert found.code is None and 'layers as the plan has them: Ettt|tL' in found.said
        assert found.result.placed['pipeline_model_parallel_layout'] == 'Ettt|tL'


@pytest.mark.parametrize(
    ('layout', 'changes', 'said'),
    [
        ('Ett|tL', {}, '--num-layers 4, but the layout Ett|tL of'),
        ('Ettt|tmL', {}, '--mtp-num-layers 0'),
        ('ttt|t', {}, 'with E first and L last'),
        ('Ettt|tL', {'pipeline_model_parallel_layout': 'Ett|ttL'}, 'leave the flag out'),
        (3, {}, 'layout 3 is not a text'),
    ],
)
def test_a_plan_of_another_model(ranks, tmp_path, layout, changes, said):
    plan = plan_file(tmp_path, layout)
    assert said in refused(ranks, '--pipeline-schedule-file', plan, **changes)


def reads(plan):
    """How often its file is read while the flags are."""
    from megatron_zbpp.ir import files

    with mock.patch.object(files, 'content_of', side_effect=files.content_of) as text:
        assert parse(['--pipeline-schedule-file', plan], {}).code is None
    return text.call_count


def test_a_plan_is_read_once(ranks, tmp_path):
    assert ranks(2).run(reads, plan_file(tmp_path)) == [1, 1]


def test_a_plan_that_counts_on_selective_recomputation(ranks, tmp_path):
    plan = plan_file(tmp_path)
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {'selective': True}))
    words = ['--pipeline-schedule-file', plan]
    assert 'give --recompute-granularity selective' in refused(ranks, *words)
    assert parsed(ranks, *words, recompute_granularity='selective').code is None


def test_a_file_keeps_its_chunks(ranks, tmp_path):
    """Whatever flags say of them; that they say the same is no error."""
    file = ['--pipeline-schedule-file', schedule_file(tmp_path)]
    found = parsed(ranks, *file, pipeline_model_parallel_layout='Et|t|t|tL')
    assert found.code is None
    assert 'ask for 1 chunks' in refused(ranks, *file, pipeline_model_parallel_layout='Ett|ttL')
