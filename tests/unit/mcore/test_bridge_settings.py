"""Bridge's check before the start asks of the same settings as the first call does."""

from __future__ import annotations

import pytest
from bridge import config

pytest.importorskip('megatron.core')

from megatron_zbpp.mcore import bridge
from megatron_zbpp.mcore.settings import Settings


def prepare(config, schedule, **options):
    return bridge.prepare(config, Settings(schedule, **options))


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '2')


FP8 = {'fp8': 'e4m3', 'fp8_recipe': 'delayed'}


def test_what_does_not_run_again_is_refused():
    """FP8's delayed scaling counts its largest values once a forward."""
    prepare(config(), '1f1b', recompute='all')
    prepare(config(**FP8), '1f1b')
    with pytest.raises(NotImplementedError, match=r'recompute all, fp8_recipe=delayed: a forward'):
        prepare(config(**FP8), '1f1b', recompute='all')


@pytest.mark.parametrize('what', ['offload', 'recompute'])
def test_amounts_that_no_rank_has(what):
    with pytest.raises(ValueError, match=f'{what} of 3 chunks: a rank has 1'):
        prepare(config(), '1f1b', **{what: 3})


def test_they_are_part_of_what_is_said():
    with pytest.raises(NotImplementedError, match=r'offload half, .*overlap_moe_expert'):
        prepare(config(overlap_moe_expert_parallel_comm=True), '1f1b', offload='half')


def test_what_the_configuration_asks_for_is_in_the_settings():
    """Chunks a rank, and its values as flags, which do not make settings different."""
    asked = Settings('interleaved')
    made = bridge.prepare(config(virtual_pipeline_model_parallel_size=2), asked)
    assert made.num_chunks == 2 and made.flags['num_layers'] == 4
    assert made == Settings('interleaved', 2, same_start='Et|t|t|tL')
    assert asked.num_chunks is None
    one = bridge.prepare(config(pipeline_model_parallel_size=1), asked)
    assert one == asked and one.flags['pipeline_model_parallel_size'] == 1


def test_slices_are_found_from_the_configuration():
    """Sizes and number, before the model is built, as by the flag."""
    shape = {'hidden_size': 64, 'num_attention_heads': 4, 'ffn_hidden_size': 256}
    made = prepare(config(seq_length=4096, **shape), 'zb-v', slices='auto:1024')
    assert sum(made.slices) == 4096 and len(made.slices) > 1
    assert made.slices[0] > made.slices[-1], 'later ones attend to more'
