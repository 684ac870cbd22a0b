"""A training script as users of megatron.training have it; nothing in it knows of megatron_zbpp."""

from functools import partial

import few_documents  # noqa: F401  (what it does, importing it does)
import packed
import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.utils import is_first_or_last_pipeline_stage

KEYS = ('tokens', 'labels', 'loss_mask', 'attention_mask', 'position_ids')


def has_mtp(ignore_virtual, vp_stage=None):
    """Whether this rank, or that chunk of it, predicts several tokens."""
    if not get_args().mtp_num_layers:
        return False
    config = core_transformer_config_from_args(get_args())
    layout = config.pipeline_model_parallel_layout
    return mtp_on_this_rank(layout, config.mtp_num_layers, ignore_virtual, vp_stage)


def needs_data(vp_stage):
    """Whether that chunk of this rank reads batches: all do of packed sequences."""
    if get_args().sft:
        return True
    return is_first_or_last_pipeline_stage(vp_stage) or has_mtp(False, vp_stage)


def get_batch(data_iterator, vp_stage):
    """This rank's part of the next microbatch; nothing where the stage needs none."""
    args = get_args()
    if not needs_data(vp_stage):
        return dict.fromkeys(KEYS)
    batch = {}
    tp_rank = mpu.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        sample = next(data_iterator)
        keys = (*KEYS, *packed.KEYS)
        batch = {k: sample[k].cuda(non_blocking=True) if k in sample else None for k in keys}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=args.sft,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp(ignore_virtual=True),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )


def loss_func(loss_mask, losses):
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    if get_args().check_for_nan_in_loss_and_grad:  # as in NVIDIA's, which runs again what is found
        get_rerun_state_machine().validate_result(
            result=loss, rejection_func=torch.isnan, message='loss', tolerance=0.0, fatal=True
        )
    num_tokens = mask.sum().detach().int()
    return loss, num_tokens, {'lm loss': torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(data_iterator, model, return_schedule_plan=False):
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, 'vp_stage'))
    sequences = {'packed_seq_params': packed.sequences(batch)} if get_args().sft else {}
    make = model.build_schedule_plan if return_schedule_plan else model
    output = make(
        batch['tokens'],
        batch['position_ids'],
        batch['attention_mask'],
        labels=batch['labels'],
        **sequences,
    )
    return output, partial(loss_func, batch['loss_mask'])


def datasets(sizes, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        tokenizer=build_tokenizer(args),
        blend=get_blend_from_list(args.data_path),
        split=args.split,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    real = GPTDataset if args.data_path else MockGPTDataset
    kind = packed.Dataset if args.sft else real
    return BlendedMegatronDatasetBuilder(kind, sizes, partial(needs_data, vp_stage), config).build()


if __name__ == '__main__':
    datasets.is_distributed = True
    args = parse_and_validate_args(args_defaults={'tokenizer_type': 'NullTokenizer'})
    make = hybrid_config_from_args if args.hybrid_layer_pattern else gpt_config_from_args
    container = pretrain_cfg_container_from_args(args, make(args))
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)
