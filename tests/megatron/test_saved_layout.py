"""Which layers the files of a checkpoint hold, as saved arguments tell: without NVIDIA's loop."""

from __future__ import annotations

from argparse import Namespace

import pytest

# Megatron's arguments, name by name, and the layers of each rank
SAVED = [
    ({}, [['E 1-4'], ['5-8 L']]),
    ({'virtual_pipeline_model_parallel_size': 2}, [['E 1-2', '5-6'], ['3-4', '7-8 L']]),
    ({'decoder_first_pipeline_num_layers': 3}, [['E 1-3'], ['4-8 L']]),
    (
        {
            'num_layers': 6,
            'account_for_embedding_in_pipeline_split': True,
            'account_for_loss_in_pipeline_split': True,
        },
        [['E 1-3'], ['4-6 L']],
    ),
    ({'pipeline_model_parallel_layout': 'Et*3|t*5,L'}, [['E 1-3'], ['4-8 L']]),
    (
        {
            'pipeline_model_parallel_layout': 'Et|ttt||ttttmL',
            'virtual_pipeline_model_parallel_size': 2,
        },
        [['E 1', 'none'], ['2-4', '5-8 m1 L']],
    ),
    ({'mtp_num_layers': 1}, [['E 1-4'], ['5-8 m1 L']]),
    ({'hybrid_layer_pattern': 'M*M|M-'}, [['E 1-3'], ['4-5 L']]),
    ({'hybrid_override_pattern': 'M*M-'}, [['E 1-2'], ['3-4 L']]),
]


def told(settings):
    """What saved arguments of a stock run tell."""
    from megatron_zbpp.mcore.checkpoints.non_reshardable_files import RankFiles

    args = Namespace(**{'num_layers': 8, 'pipeline_model_parallel_size': 2, **settings})
    return [list(rank) for rank in RankFiles.saved({'args': args}).layers]


@pytest.mark.parametrize(('settings', 'layers'), SAVED, ids=str)
def test_arguments_tell_the_layers(ranks, settings, layers):
    assert ranks(1).run(told, settings) == [layers]


def compared():
    """What is written, read again, and how it differs from other schedules."""
    import json

    from megatron_zbpp.mcore.checkpoints.non_reshardable_files import KEY, RankFiles
    from megatron_zbpp.schedules import build

    args = Namespace(num_layers=4, pipeline_model_parallel_layout='Et|t|t|tL')
    files = {
        name: RankFiles.by_plugin(name, build(name, 2, 4).placement, args)
        for name in ('zb-v', 'v-half', 'interleaved')
    }
    written = json.loads(json.dumps({KEY: files['zb-v'].state()}))
    again = RankFiles.saved(written)
    four = RankFiles.by_megatron(Namespace(num_layers=4, pipeline_model_parallel_size=4))
    return (
        again == files['zb-v'],
        again.same_layers(files['v-half']),
        again.same_layers(files['interleaved']),
        again.difference(files['interleaved']),
        again.difference(four),
        RankFiles.saved({}),
    )


def test_what_is_written_is_compared(ranks):
    ((written, alike, other, difference, ranks_differ, unknown),) = ranks(1).run(compared)
    assert written and alike and not other and unknown is None
    assert difference == 'rank 0 holds layers E 1 | 4 L by zb-v, but E 1 | 3 by interleaved'
    assert ranks_differ == "it has 2 pipeline ranks by zb-v, but 4 by Megatron's 1F1B"
