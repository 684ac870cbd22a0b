"""Bridge's check before the start asks of the same settings as the first call does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip('megatron.core')

from megatron_zbpp.mcore.bridge import prepare


def config(**changes):
    """A recipe's configuration, as far as it is read: of two pipeline ranks and four layers."""
    model = {
        'pipeline_model_parallel_size': 2,
        'pipeline_model_parallel_layout': None,
        'virtual_pipeline_model_parallel_size': None,
        'tensor_model_parallel_size': 1,
        'context_parallel_size': 1,
        'sequence_parallel': False,
        'num_layers': 4,
        'account_for_embedding_in_pipeline_split': False,
        'account_for_loss_in_pipeline_split': False,
        'num_moe_experts': None,
        'share_embeddings_and_output_weights': False,
        'defer_embedding_wgrad_compute': False,
        'delay_wgrad_compute': False,
        'overlap_moe_expert_parallel_comm': False,
    }
    return SimpleNamespace(
        model=SimpleNamespace(**model | changes),
        train=SimpleNamespace(micro_batch_size=1, global_batch_size=4, rampup_batch_size=None),
        comm_overlap=None,
        rerun_state_machine=SimpleNamespace(rerun_mode='disabled'),
        logger=SimpleNamespace(log_interval=1, log_params_norm=False),
        checkpoint=SimpleNamespace(async_save=False),
        dist=SimpleNamespace(
            use_megatron_fsdp=False, use_torch_fsdp2=False, use_decentralized_pg=False
        ),
        ddp=SimpleNamespace(use_megatron_fsdp=False),
    )


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
