"""Registration: in place, idempotent, undone; what it does not serve goes to Megatron."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch


def attributes():
    """What the plugin replaces, as Megatron's own code finds it."""
    import sys

    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import layers

    finalize = sys.modules['megatron.core.distributed.finalize_model_grads']
    return (
        get_forward_backward_func(2, None),
        get_forward_backward_func(2, 2),
        layers.LinearWithGradAccumulationAndAsyncCommunication,
        finalize._allreduce_word_embedding_grads,
    )


def enable_and_disable():
    import megatron_zbpp

    own = attributes()
    plugin = megatron_zbpp.enable('zb-h1')
    ours = attributes()
    assert not set(ours) & set(own)
    assert megatron_zbpp.enable('ZB_H1') is plugin and attributes() == ours, 'idempotent'
    with pytest.raises(ValueError, match=r'schedule is zb-v, but .* zb-h1: call its disable\(\)'):
        megatron_zbpp.enable('zb-v')
    assert plugin.enabled and attributes() == ours, 'nothing is undone'
    plugin.disable()
    plugin.disable()
    assert attributes() == own
    with megatron_zbpp.enable('1f1b'):
        assert attributes() != own
    assert attributes() == own


FREEZING = Path(__file__).with_name('freezing.json')  # for zb-h1, two ranks, four microbatches


# what is asked for, what asks for the same in other words, and what asks for something else
ASKED = [
    ({}, {'schedule': 'ZB_H1'}, {'schedule': 'zb-v'}),
    ({'schedule': 'zb-interleaved', 'num_chunks': 2}, {}, {'num_chunks': 3}),
    ({'schedule': 'zb-1p', 'memory_limit': 4}, {'memory_limit': 4.0}, {'memory_limit': 5}),
    ({'schedule': 'auto', 'memory_limit': 4}, {}, {'memory_limit': 8}),
    ({'schedule': 'auto'}, {}, {'schedule': 'zb-v'}),
    ({}, {'watchdog_timeout': 0}, {'watchdog_timeout': 30}),
    ({'watchdog_timeout': 30}, {}, {'watchdog_timeout': None}),
    ({'post_validation': 5}, {}, {'post_validation': 20}),
    ({'post_validation': True}, {'post_validation': 10}, {'post_validation': 1}),
    ({}, {'post_validation': False}, {'post_validation': 0}),
    ({'watchdog_timeout': 9}, {}, {'watchdog_pause_timeout': 90}),
    ({'watchdog_pause_timeout': 0}, {}, {'watchdog_pause_timeout': None}),
    ({'schedule': 'auto'}, {'profile_iters': 5}, {'profile_iters': 6}),
    ({'trace_dir': 'one'}, {'trace_dir': Path('one')}, {'trace_dir': 'other'}),
    ({}, {'trace_dir': None}, {'trace_dir': 'one'}),
    ({'offload': 'half'}, {}, {'offload': 'all'}),
    ({'offload': 2, 'schedule': 'zb-v'}, {}, {'offload': None}),
    ({}, {'freeze': None}, {'freeze': FREEZING}),
    ({'recompute': 'half'}, {}, {'recompute': 'all'}),
    ({'slices': 4}, {'slices': '4'}, {'slices': [8, 8]}),
    ({'vocab_parallel': 'output'}, {}, {'vocab_parallel': None}),
    ({'post_validation': 5}, {'kept_gib': None}, {'kept_gib': 2.5}),
    ({'post_validation': 5}, {'check_interval': 10}, {'check_interval': 0}),
    ({}, {'same_start': True}, {'same_start': False}),
    ({'same_start': False}, {}, {'same_start': 'Ett|ttL'}),
    ({}, {'dropout_seeds': False}, {'dropout_seeds': True}),
    ({'schedule': 'paci'}, {'clip': None}, {'clip': 'global'}),
    ({'schedule': 'pipemare'}, {'anneal_steps': None}, {'anneal_steps': 9}),
    ({'schedule': 'pipemare'}, {'correction_decay': 0.135}, {'correction_decay': 0.5}),
    ({'schedule': 'pipemare'}, {'async_warmup_steps': 0}, {'async_warmup_steps': 3}),
    ({}, {'prewarm': None}, {'prewarm': True}),
    ({}, {'message_ctas': 2}, {'message_ctas': 4}),
    ({}, {'message_priority': 'high'}, {'message_priority': 'group'}),
    ({}, {'message_receives': 'late'}, {'message_receives': 'early'}),
]


def asked_again(asked, same, other):
    """Whether the second call of `enable` returned the plugin of the first; the third's error."""
    import megatron_zbpp
    from megatron_zbpp.ir import Schedule

    def enable(changes):
        arguments = {'schedule': 'zb-h1', **asked, **changes}
        return megatron_zbpp.enable(**arguments)

    with enable({}) as first:
        kept = enable(same)
        with pytest.raises(ValueError) as error:
            enable(other)
        assert first.enabled
    text = megatron_zbpp.build('zb-h1', 2, 4).to_json()
    with megatron_zbpp.enable(Schedule.from_json(text)) as given:
        again = megatron_zbpp.enable(Schedule.from_json(text))
        return kept is first, str(error.value), given is again


def settings_of(changes):
    """The settings' names, and which of them the changes set."""
    from dataclasses import fields

    from megatron_zbpp.mcore.settings import Settings

    names = [field.name for field in fields(Settings) if field.compare]
    return names, [name for name in names if name in changes]


def nonsense(arguments):
    """What is said of arguments that make no sense, and whether what was enabled still is."""
    import megatron_zbpp

    with megatron_zbpp.enable('zb-h1') as plugin:
        with pytest.raises(ValueError) as error:
            megatron_zbpp.enable(**arguments)
        return str(error.value), plugin.enabled


def moved_upstream():
    """A release whose function does not look the name up: the patch must not pass silently."""
    from megatron.core.pipeline_parallel import schedules

    import megatron_zbpp

    own = attributes()
    with mock.patch.object(schedules, 'get_forward_backward_func', lambda: None):
        try:
            megatron_zbpp.enable('zb-v')
        except RuntimeError as error:
            return str(error), attributes()[2:] == own[2:]
    return None


def delegated():
    """Process groups of several modules are not ours to serve."""
    from megatron.core.pipeline_parallel import schedules

    import megatron_zbpp

    calls = []
    name = 'forward_backward_pipelining_without_interleaving'
    own = mock.patch.object(schedules, name, lambda **arguments: calls.append(arguments) or 'own')
    with own, megatron_zbpp.enable('zb-h1'):
        function = schedules.get_forward_backward_func(2, None)
        result = function(pg_collection=object(), model=None, num_microbatches=1)
    return result, len(calls), schedules.get_forward_backward_func(1, None).__name__


def refused(setting):
    from types import SimpleNamespace

    from megatron_zbpp.mcore import preflight
    from megatron_zbpp.mcore.iteration.preparation import refuse_unsupported
    from megatron_zbpp.mcore.programs import Programs
    from megatron_zbpp.mcore.settings import Settings

    try:
        config = SimpleNamespace(**{setting: 1})
        refuse_unsupported(config, None, preflight.refused(config, Programs(Settings('zb-h1')), 2))
    except NotImplementedError as error:
        return str(error)


def test_enable_and_disable(ranks):
    ranks(2).run(enable_and_disable)


@pytest.mark.parametrize(('asked', 'same', 'other'), ASKED, ids=str)
def test_other_values_need_disable(ranks, asked, same, other):
    for kept, error, again in ranks(2).run(asked_again, asked, same, other):
        assert kept and again and error.endswith(': call its disable() first')
        assert any(error.startswith(f'{name} is ') for name in other), error


def test_every_setting_is_compared(ranks):
    """A field that is new in the settings needs rows of its own."""
    switched = {name: None for _, _, other in ASKED for name in other}
    for names, found in ranks(2).run(settings_of, switched):
        assert found == names


@pytest.mark.parametrize(
    ('arguments', 'said'),
    [
        ({'schedule': 'zb-w'}, "unknown schedule 'zb-w'"),
        ({'watchdog_timeout': -1}, 'watchdog_timeout is -1: give a number from 0 up'),
        (
            {'post_validation': -1},
            'post_validation is -1: give a whole number from 0 up, True or False',
        ),
    ],
    ids=str,
)
def test_nonsense_changes_nothing(ranks, arguments, said):
    for message, enabled in ranks(2).run(nonsense, arguments):
        assert said in message and enabled


def test_patch_without_effect_is_an_error(ranks):
    for message, undone in ranks(2).run(moved_upstream):
        assert 'would have no effect' in message and undone


def test_delegation(ranks):
    expected = ('own', 1, 'forward_backward_no_pipelining')
    assert ranks(2).run(delegated) == [expected] * 2


@pytest.mark.parametrize('setting', ['tp_comm_overlap', 'use_megatron_fsdp'])
def test_refusal_names_setting_and_cure(ranks, setting):
    for message in ranks(2).run(refused, setting):
        assert f'{setting}=1: ' in message and 'or use' in message


def delayed(schedule):
    """What configs of a pipeline and of one rank ask of Transformer Engine, and a copy does."""
    import copy
    from dataclasses import replace

    from megatron.core.transformer import TransformerConfig

    import megatron_zbpp
    from megatron_zbpp.mcore.layers import transformer_engine

    def config(size):
        return TransformerConfig(
            num_layers=4,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=size,
            pipeline_dtype=torch.float32,
            tp_comm_overlap=False,
        )

    with (
        mock.patch.object(transformer_engine, 'find_spec', lambda name: name),
        megatron_zbpp.enable(schedule),
    ):
        one, two = config(1), config(2)
        made = (one, two, copy.deepcopy(two), replace(two))
    return tuple(c.delay_wgrad_compute for c in (*made, config(2)))


def test_transformer_engine_delays_where_the_schedule_splits(ranks):
    assert ranks(2).run(delayed, 'zb-h1') == [(False, True, True, True, False)] * 2
    assert ranks(2).run(delayed, '1f1b') == [(False,) * 5] * 2
