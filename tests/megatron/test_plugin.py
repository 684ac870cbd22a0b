"""Registration: in place, idempotent, undone; what it does not serve goes to Megatron."""

from __future__ import annotations

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
    other = megatron_zbpp.enable('zb-v')
    assert other is not plugin and not plugin.enabled and other.enabled
    other.disable()
    other.disable()
    assert attributes() == own
    with megatron_zbpp.enable('1f1b'):
        assert attributes() != own
    assert attributes() == own


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

    from megatron_zbpp.mcore.forward_backward import refuse_unsupported

    try:
        refuse_unsupported(SimpleNamespace(**{setting: 1}), None)
    except NotImplementedError as error:
        return str(error)


def test_enable_and_disable(ranks):
    ranks(2).run(enable_and_disable)


def test_patch_without_effect_is_an_error(ranks):
    for message, undone in ranks(2).run(moved_upstream):
        assert 'would have no effect' in message and undone


def test_delegation(ranks):
    expected = ('own', 1, 'forward_backward_no_pipelining')
    assert ranks(2).run(delegated) == [expected] * 2


@pytest.mark.parametrize('setting', ['variable_seq_lengths', 'mtp_num_layers'])
def test_refusal_names_setting_and_cure(ranks, setting):
    for message in ranks(2).run(refused, setting):
        assert f'{setting}=1: ' in message and 'or use' in message


def delayed(schedule):
    """What configs of a pipeline and of one rank ask of Transformer Engine, and a copy does."""
    import copy
    from dataclasses import replace

    from megatron.core.transformer import TransformerConfig

    import megatron_zbpp
    from megatron_zbpp.mcore import plugin

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
        mock.patch.object(plugin, 'find_spec', lambda name: name),
        megatron_zbpp.enable(schedule),
    ):
        one, two = config(1), config(2)
        made = (one, two, copy.deepcopy(two), replace(two))
    return tuple(c.delay_wgrad_compute for c in (*made, config(2)))


def test_transformer_engine_delays_where_the_schedule_splits(ranks):
    assert ranks(2).run(delayed, 'zb-h1') == [(False, True, True, True, False)] * 2
    assert ranks(2).run(delayed, '1f1b') == [(False,) * 5] * 2
