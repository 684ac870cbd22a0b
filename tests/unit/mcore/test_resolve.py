"""One request comes to one job, or to all of its problems, whoever asks."""

from __future__ import annotations

import argparse
import tempfile
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip('megatron.core')

from bridge import config
from parsed_flags import MEGATRONS

import megatron_zbpp
from megatron_zbpp import bridge, build
from megatron_zbpp.launch import flags
from megatron_zbpp.mcore import enabled
from megatron_zbpp.mcore.job.resolve import Facts, resolve
from megatron_zbpp.mcore.job.rules import rows
from megatron_zbpp.mcore.options import ARGUMENTS, Problems
from megatron_zbpp.mcore.settings import BY_BRIDGE, BY_FLAG, Request, Settings
from megatron_zbpp.runtime.activations import copies


def resolved(schedule='zb-v', names=BY_FLAG, options=(), given=(), **changes):
    """The job of a schedule on two ranks, beside Megatron's settings."""
    facts = Facts(SimpleNamespace(**{**MEGATRONS, **changes}), 2, given=given)
    return resolve(Request({'schedule': schedule, **dict(options)}, names), facts)


def prepared(config, schedule, **options):
    """The settings of a recipe."""
    return bridge.prepare(config, Settings(schedule, **options)).settings


@pytest.fixture(autouse=True)
def two_processes(monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '2')


def told(job):
    with pytest.raises((ValueError, NotImplementedError)) as error:
        job.require()
    return str(error.value).splitlines()


def test_nothing_is_written_into_what_is_read():
    args = SimpleNamespace(**MEGATRONS, defer_embedding_wgrad_compute=True)
    before = dict(vars(args))
    job = resolve(Request({'schedule': 'zb-v'}), Facts(args, 2))
    assert vars(args) == before and not job.checks.problems
    assert job.writes['pipeline_model_parallel_layout'] == 'Et|t|t|tL'
    assert job.writes['defer_embedding_wgrad_compute'] is False


@pytest.mark.parametrize(
    ('names', 'option', 'layers', 'cure'),
    [
        (BY_FLAG, '--pipeline-watchdog-timeout', '--num-layers', 'drop --moe-paged-stash'),
        (ARGUMENTS, 'watchdog_timeout', 'num_layers', 'drop moe_paged_stash'),
        (BY_BRIDGE, 'watchdog_timeout', 'model.num_layers', 'drop moe_paged_stash'),
    ],
    ids=['flags', 'arguments', 'fields'],
)
def test_each_person_is_told_their_own_names(names, option, layers, cure):
    options, wrong = {'watchdog_timeout': -1}, {'num_layers': 3, 'moe_paged_stash': True}
    value, few, refused = told(resolved(names=names, options=options, **wrong))
    assert value == f'{option} is -1: give a number from 0 up'
    assert f'give each stage a layer ({layers})' in few and refused.endswith(cure)


def test_problems_have_their_option():
    job = resolved(options={'clip': 3}, num_virtual_stages_per_pipeline_rank=3)
    assert [each.option for each in job.checks.problems] == ['num_chunks', 'clip']
    with pytest.raises(Problems) as error:
        job.require()
    assert error.value.problems == tuple(job.checks.problems)


def test_what_schedules_do_by_themselves_is_noted():
    """Of those with W passes one setting more; barriers where steps do not wait for all ranks."""
    delayed = {'delay_wgrad_compute': True, 'log_interval': 1}
    (note,) = resolved(**delayed).notes
    assert note.startswith('--delay-wgrad-compute has no effect')
    assert not resolved('1f1b', **delayed).notes
    for schedule, options in (('zb-v', {'post_validation': 1}), ('pipedream', {})):
        (waits,) = resolved(schedule, options=options, log_interval=1).notes
        assert waits.startswith('all ranks wait: log_interval=1')
    early = {'options': {'post_validation': 1}, 'rerun_mode': 'validate_results'}
    assert resolved(**early).writes['rerun_mode'] == 'disabled'
    assert 'rerun_mode' not in resolved(given=flags.names_in(['--rerun-mode=a']), **early).writes


def test_nothing_is_enabled_where_something_is_wrong(monkeypatch):
    """Nor written."""
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    parser.set_defaults(**MEGATRONS | {'num_layers': 3})
    args = parser.parse_args(['--pipeline-schedule', 'zb-v'])
    before = dict(vars(args))
    monkeypatch.setattr(enabled, 'plugin', None)
    with pytest.raises(ValueError, match='3 layers cannot be placed'):
        flags.prepare(args)
    assert enabled.plugin is None and vars(args) == before


def test_an_asynchronous_plugin_is_disabled_before_there_are_process_groups():
    megatron_zbpp.enable('pipedream').disable()


def test_a_folder_is_tried_once():
    with mock.patch.object(tempfile, 'TemporaryFile', wraps=tempfile.TemporaryFile) as tried:
        assert not resolved(options={'trace_dir': 'traces'}).checks.problems
    assert tried.call_count == 1


def test_a_recipe_is_asked_as_a_launch_line_is(monkeypatch):
    """Chunks beside a schedule that is given as a value, and memory of the host."""
    two = config(virtual_pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match='ask for 2 chunks on each rank, but the schedule zb-h1'):
        bridge.prepare(two, Settings(build('zb-h1', 2, 4)))
    for name, value in {'RANK': '0', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '2'}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(copies, 'room', lambda: copies.Room(1, 'a limit'))
    shape = {'hidden_size': 64, 'num_attention_heads': 4, 'seq_length': 64}
    with pytest.raises(ValueError, match=r'needs about .* of host memory for the 2 ranks'):
        bridge.prepare(config(**shape), Settings('zb-v', offload='all'))


FP8 = {'fp8': 'e4m3', 'fp8_recipe': 'delayed'}


def test_what_does_not_run_again_is_refused():
    """FP8's delayed scaling counts its largest values once a forward."""
    prepared(config(), '1f1b', recompute='all')
    prepared(config(**FP8), '1f1b')
    mixed = config(fp8=None, fp8_recipe=None)
    mixed.mixed_precision = SimpleNamespace(**FP8, of_another_config=1)
    for asked in (config(**FP8), mixed):
        with pytest.raises(NotImplementedError, match=r'recompute all, fp8_recipe=delayed: a for'):
            prepared(asked, '1f1b', recompute='all')


def test_what_the_configuration_asks_for_is_in_the_settings():
    """Chunks a rank, and its values as flags, which do not make settings different."""
    asked = Settings('interleaved')
    made = bridge.prepare(config(virtual_pipeline_model_parallel_size=2), asked).settings
    assert made.num_chunks == 2 and made.flags['num_layers'] == 4
    assert made == Settings('interleaved', 2, same_start='Et|t|t|tL')
    assert asked.num_chunks is None
    one = bridge.prepare(config(pipeline_model_parallel_size=1), asked).settings
    assert one == asked and one.flags['pipeline_model_parallel_size'] == 1
    # sizes and number, before the model is built, as by the flag
    shape = {'hidden_size': 64, 'num_attention_heads': 4, 'ffn_hidden_size': 256}
    made = prepared(config(seq_length=4096, **shape), 'zb-v', slices='auto:1024')
    assert sum(made.slices) == 4096 and len(made.slices) > 1
    assert made.slices[0] > made.slices[-1], 'later ones attend to more'


@pytest.mark.parametrize('text', ['# nowhere\na: b', '# every schedule\na is odd: b'])
def test_words_that_no_condition_has_are_no_row(text):
    with pytest.raises((ValueError, AssertionError)):
        [*rows(text)]
