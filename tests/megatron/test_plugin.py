"""Registration: in place, idempotent, undone; what it does not serve goes to Megatron. And by two
lines at the top of a script, which has our flags then, however it is started."""

import copy
import json
import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
from commands import run
from example import small_config
from paths import ROOT

import megatron_zbpp
from megatron_zbpp.ir import Schedule
from megatron_zbpp.mcore.layers import transformer_engine
from megatron_zbpp.mcore.settings import Settings


def attributes():
    """What the plugin replaces, as Megatron's own code finds it."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import layers

    finalize = sys.modules['megatron.core.distributed.finalize_model_grads']
    return (
        get_forward_backward_func(2, None),
        get_forward_backward_func(2, 2),
        layers.LinearWithGradAccumulationAndAsyncCommunication,
        finalize._allreduce_word_embedding_grads,
    )


@pytest.mark.on_ranks(2)
def test_enable_and_disable():
    own = attributes()
    plugin = megatron_zbpp.enable('zb-h1')
    ours = attributes()
    assert not set(ours[:-1]) & set(own)
    assert ours[-1] is own[-1], 'in a loop, Megatron itself reduces gradients of tied embeddings'
    assert megatron_zbpp.enable('ZB_H1') is plugin and attributes() == ours, 'idempotent'
    switching = r'schedule is zb-v, but .* zb-h1: call its disable\(\)'
    for other, said in (('zb-v', switching), ('zb-w', "unknown schedule 'zb-w'")):
        with pytest.raises(ValueError, match=said):
            megatron_zbpp.enable(other)
        assert plugin.enabled and attributes() == ours, 'nothing is undone'
    plugin.disable()
    plugin.disable()
    assert attributes() == own
    for other in ('1f1b', 'zb-v'):
        with megatron_zbpp.enable(other):
            assert set(attributes()) & set(own) == ({own[-1]} if other == '1f1b' else set())
        assert attributes() == own


FREEZING = Path(__file__).with_name('freezing.json')  # for zb-h1, two ranks, four microbatches
# what is asked for, what asks for the same in other words, and what asks for something else
ASKED = [
    *json.loads(Path(__file__).with_name('settings_asked.json').read_text()),
    ({'trace_dir': 'one'}, {'trace_dir': Path('one')}, {'trace_dir': 'other'}),
    ({}, {'freeze': None}, {'freeze': FREEZING}),
]


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize(('asked', 'same', 'other'), ASKED, ids=str)
def test_other_values_need_disable(asked, same, other):
    def enable(changes):
        return megatron_zbpp.enable(**{'schedule': 'zb-h1', **asked, **changes})

    with enable({}) as first:
        assert enable(same) is first
        with pytest.raises(ValueError, match=r': call its disable\(\) first$') as error:
            enable(other)
        assert any(str(error.value).startswith(f'{name} is ') for name in other), error
        assert first.enabled
    text = megatron_zbpp.build('zb-h1', 2, 4).to_json()
    with megatron_zbpp.enable(Schedule.from_json(text)) as given:
        assert megatron_zbpp.enable(Schedule.from_json(text)) is given


@pytest.mark.on_ranks(2)
def test_every_setting_is_compared():
    """A field that is new in the settings needs rows of its own."""
    switched = {name for _, _, other in ASKED for name in other}
    assert {field.name for field in fields(Settings) if field.compare} <= switched


@pytest.mark.on_ranks(2)
def test_delegation():
    """Process groups of several modules are not ours to serve."""
    from megatron.core.pipeline_parallel import schedules

    calls = []
    name = 'forward_backward_pipelining_without_interleaving'
    own = mock.patch.object(schedules, name, lambda **arguments: calls.append(arguments) or 'own')
    with own, megatron_zbpp.enable('zb-h1'):
        function = schedules.get_forward_backward_func(2, None)
        result = function(pg_collection=object(), model=None, num_microbatches=1)
    assert (result, len(calls)) == ('own', 1)
    assert schedules.get_forward_backward_func(1, None).__name__ == 'forward_backward_no_pipelining'


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize('schedule', ['zb-h1', '1f1b'])
def test_transformer_engine_delays_where_the_schedule_splits(schedule):
    """Where a config is of a pipeline, and made while the plugin is enabled; and copies of it."""

    def config(size):
        return small_config(4, p=size, tp_comm_overlap=False)

    with (
        mock.patch.object(transformer_engine, 'find_spec', lambda name: name),
        megatron_zbpp.enable(schedule),
    ):
        one, two = config(1), config(2)
        made = (one, two, copy.deepcopy(two), replace(two))
    splits = schedule == 'zb-h1'
    delayed = [each.delay_wgrad_compute for each in (*made, config(2))]
    assert delayed == [False, splits, splits, splits, False]


CHECKOUT = os.environ.get('MEGATRON_LM')
# what NVIDIA's checkout has to do with it, and nothing else
ARGUMENTS = """
import argparse


def add_megatron_arguments(parser):
    parser.add_argument('--num-layers', type=int, help='(about 50%)')
    parser.add_argument('--no-help')
    return parser


def parse_args():
    return add_megatron_arguments(argparse.ArgumentParser()).parse_known_args()[0]
"""
SCRIPT = """# License

'''Pretrain.'''

# Early.
import time

from megatron.training.arguments import parse_args

if __name__ == '__main__':
    parse_args()
"""


def checkout(folder: Path) -> Path:
    """A stand-in for Megatron-LM, or the real one, whose script is copied."""
    folder.mkdir()
    if CHECKOUT:
        for entry in Path(CHECKOUT).iterdir():
            (folder / entry.name).symlink_to(entry)
        (folder / 'pretrain_gpt.py').unlink()
        (folder / 'pretrain_gpt.py').write_text((Path(CHECKOUT) / 'pretrain_gpt.py').read_text())
        return folder
    (folder / 'megatron' / 'training').mkdir(parents=True)
    (folder / 'megatron' / 'training' / 'arguments.py').write_text(ARGUMENTS)
    (folder / 'pretrain_gpt.py').write_text(SCRIPT)
    return folder


def help_of(folder: Path) -> str:
    """`--help` of the script, started without our launcher, on the CPU; that of 0.18 and later ends
    in a traceback without our flags."""
    path = [Path(megatron_zbpp.__file__).parent / 'emulation' / 'subprocess_hook', ROOT]
    command = [sys.executable, 'pretrain_gpt.py', '--help']
    path = os.pathsep.join(map(str, path))
    return run(command, cwd=folder, env={'PYTHONPATH': path}, timeout=200).stdout


@pytest.mark.one_release
def test_flags_come_by_a_patch(tmp_path):
    """And go: tests/project/test_package.py has the script back as it was."""
    folder = checkout(tmp_path / 'Megatron-LM')
    assert '--pipeline-schedule NAME' not in help_of(folder)
    run([sys.executable, ROOT / 'patches' / 'apply.py', folder]).check_returncode()
    patched = help_of(folder)
    assert '--pipeline-schedule NAME' in patched and '--num-layers' in patched


@pytest.mark.on_ranks(2)
def test_after_the_import():
    """Parses where the module was imported before: as often as asked, and with our flags."""
    import megatron_zbpp.mcore.job.resolve  # what it imports is to stay

    module, package = ModuleType('megatron.training.arguments'), ModuleType('megatron.training')
    exec(ARGUMENTS, vars(module))
    package.arguments = module
    modules = {'megatron.training': package, 'megatron.training.arguments': module}
    with mock.patch.dict(sys.modules, modules), mock.patch.object(sys, 'argv', ['script']):
        megatron_zbpp.add_arguments()
        first = module.parse_args()
        megatron_zbpp.add_arguments()
        assert first == module.parse_args() and hasattr(first, 'pipeline_schedule')
