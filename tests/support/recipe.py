"""A toy recipe of Megatron-Bridge, from weights of Hugging Face's and back to them."""

import contextlib
import functools
import shutil
import types
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import events
import torch
import torch.distributed as dist
from example import early_steps, forget_groups

ITERATIONS, MICROBATCHES, LENGTH, VOCABULARY, WIDTH = 4, 5, 16, 64, 32
UNTIED, TIED = 'a recipe', 'a recipe, tied embeddings'
LORA, MTP = 'a recipe of LoRA', 'a recipe of multi-token prediction'
SCRATCH, PACKED = 'a recipe from scratch', 'a recipe of packed sequences'


@dataclass(frozen=True)
class Trained:
    """What a run left: exact, so that two can be compared with ==."""

    losses: list[str]  # of each iteration, on the last rank
    norms: list[str]
    weights: dict[str, str]  # as Hugging Face names them: shape, and a weighted sum in hex
    loaded: dict[str, str]  # the same, before the first iteration
    early: int  # optimizer steps that did not wait for all ranks
    waits: list[list[str]]  # by iteration, but for its passes: see `events.pipeline_waits`


def save_weights(folder: Path, kind: str) -> None:
    """Leaves a small model in Hugging Face's format: run it on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    if dist.get_rank() == 0:
        torch.manual_seed(7)
        sizes = {
            'num_hidden_layers': 4,
            'hidden_size': WIDTH,
            'intermediate_size': 2 * WIDTH,
            'num_attention_heads': 4,
            'num_key_value_heads': 2,
            'head_dim': WIDTH // 4,
            'vocab_size': VOCABULARY,
            'max_position_embeddings': LENGTH,
            'tie_word_embeddings': kind == TIED,
        }
        if kind == MTP:
            config = Qwen3Config(**sizes, mtp_num_hidden_layers=1)
            Qwen3ForCausalLM(config).save_pretrained(folder)
            _add_mtp(folder / 'model.safetensors')
        else:
            LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    dist.barrier()


def _add_mtp(file: Path) -> None:
    """Add the weights of multi-token prediction, which Hugging Face's own model does not have."""
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    layer = 'model.layers.0.'
    found = {n.removeprefix(layer): w for n, w in weights.items() if n.startswith(layer)}
    added = {f'mtp.layers.0.{name}': torch.randn_like(w) / 50 for name, w in found.items()}
    added['mtp.fc.weight'] = torch.randn(WIDTH, 2 * WIDTH) / 50
    for name in ('pre_fc_norm_embedding', 'pre_fc_norm_hidden', 'norm'):
        added[f'mtp.{name}.weight'] = torch.ones(WIDTH)
    save_file(weights | added, file, {'format': 'pt'})


def adapters() -> Any:
    """Return LoRA, whose first weights do not depend on where layers are."""
    from megatron.bridge.peft.lora import LoRA

    class Seeded(LoRA):
        def __call__(self, model, training=True):
            made = super().__call__(model, training)
            for chunk in made:
                for layer in chunk.decoder.layers:
                    _fill(layer)
            return made

    return Seeded(dim=4, alpha=8)


def _fill(layer: torch.nn.Module) -> None:
    """Give this layer's adapters weights by its number and their names."""
    for name, parameter in sorted(layer.named_parameters()):
        if 'adapter' in name:
            generator = torch.Generator().manual_seed(layer.layer_number)
            parameter.data = torch.randn(parameter.shape, generator=generator) / 10


def config(weights: Path, kind: str = UNTIED) -> tuple[Any, Any]:
    """Return Bridge's configuration, and what converts weights."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.training import config as of

    bridge = AutoBridge.from_hf_pretrained(weights)
    model = bridge.to_megatron_provider(load_weights=kind != SCRATCH)
    for name, value in {
        'pipeline_model_parallel_size': dist.get_world_size(),
        'pipeline_dtype': torch.float32,
        'params_dtype': torch.float32,
        'bf16': False,
        'seq_length': LENGTH,
        'apply_rope_fusion': False,
        'masked_softmax_fusion': False,
        'bias_activation_fusion': False,
        'bias_dropout_fusion': False,
        'cross_entropy_loss_fusion': False,
        'gradient_accumulation_fusion': False,
        'make_vocab_size_divisible_by': 1,
    }.items():
        setattr(model, name, value)
    made = of.ConfigContainer(
        model=model,
        train=of.TrainingConfig(
            train_iters=ITERATIONS, micro_batch_size=1, global_batch_size=MICROBATCHES
        ),
        validation=of.ValidationConfig(eval_iters=0),
        optimizer=of.OptimizerConfig(optimizer='adam', lr=1e-2, min_lr=1e-3, clip_grad=1e9),
        scheduler=of.SchedulerConfig(
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style='constant',
            lr_decay_style='linear',
            lr_warmup_iters=1,
        ),
        dataset=of.MockGPTDatasetConfig(
            seq_length=LENGTH,
            random_seed=7,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            dataloader_type='single',
            num_workers=0,
            split='1,0,0',
        ),
        ddp=of.DistributedDataParallelConfig(),
        logger=of.LoggerConfig(log_interval=100),
        tokenizer=of.TokenizerConfig(tokenizer_type='NullTokenizer', vocab_size=VOCABULARY - 1),
        checkpoint=of.CheckpointConfig(),
        peft=adapters() if kind == LORA else None,
        dist=of.DistributedInitConfig(distributed_backend='gloo'),
        rng=of.RNGConfig(seed=7),
    )
    if kind == PACKED:
        made.dataset = packed_dataset()
    if kind == LORA:
        made.checkpoint.pretrained_checkpoint = str(weights)
    return made, bridge


def packed_dataset() -> Any:
    """Return sequences packed behind each other, of other lengths in each sample."""
    from megatron.bridge.training.config import DatasetProvider

    class Packed(DatasetProvider):
        enable_offline_packing = True
        offline_packing_specs = types.SimpleNamespace(
            packed_sequence_size=LENGTH, pad_cu_seqlens=False
        )

        def build_datasets(self, context):
            return [_packed(k) for k in range(context.train_samples)], None, None

    return Packed(dataloader_type='single', num_workers=0)


def _packed(number: int) -> dict[str, torch.Tensor]:
    """Return a sample of two or three sequences; their ends are filled up with -1."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY - 1, (LENGTH + 1,), generator=generator)
    ends = [3 + number % 5, *([9 + number % 4] if number % 2 else []), LENGTH]
    lengths = [end - start for start, end in pairwise([0, *ends])]
    return {
        'tokens': tokens[:-1],
        'labels': tokens[1:],
        'loss_mask': torch.ones(LENGTH),
        'position_ids': torch.cat([torch.arange(length) for length in lengths]),
        'cu_seqlens': torch.tensor([0, *ends, *[-1] * (4 - len(ends))], dtype=torch.int32),
        'cu_seqlens_argmin': torch.tensor([1 + len(ends)]),
        'max_seqlen': torch.tensor([max(lengths)]),
    }


def overlaps(tp_comm_overlap: bool = False, **asked: bool) -> Any:
    """Return what of communication a recipe overlaps."""
    from megatron.bridge.training.comm_overlap import CommOverlapConfig

    return CommOverlapConfig(tp_comm_overlap=tp_comm_overlap, data_parallel_size=1, **asked)


def change(made: Any, changes: Mapping[str, Any]) -> None:
    """Set fields of a configuration, by names such as `model.num_layers`."""
    for name, value in changes.items():
        path, _, last = name.rpartition('.')
        owner = functools.reduce(getattr, path.split('.'), made) if path else made
        setattr(owner, last, overlaps(**value) if last == 'comm_overlap' else value)


def train(
    folder: Path,
    schedule: str,
    post_validation: bool | int,
    kind: str,
    changes: Mapping[str, Any] = types.MappingProxyType({}),
    **options: Any,
) -> Trained:
    """Runs on each rank: `pretrain` of Bridge, by `schedule`; 'megatron' is Megatron's own."""
    from megatron.bridge.training import pretrain as entry
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step

    from megatron_zbpp import bridge as ours

    losses, norms, waits, found = [], [], [], {}

    class Watch(Callback):
        def on_train_start(self, context):
            found['loaded'] = hashes(converter, context.model)

        def on_train_step_end(self, context):
            waits.append([*current])
            current.clear()
            losses.extend(value.item().hex() for value in context.loss_dict.values())
            norms.append(float(context.grad_norm).hex())

        def on_train_end(self, context):
            found['weights'] = hashes(converter, context.model)

    made, converter = config(folder, kind)
    change(made, changes)
    try:
        if schedule != 'megatron':
            ours.enable(made, schedule, post_validation=post_validation, **options)
        with events.pipeline_waits() as current:
            entry.pretrain(made, forward_step, callbacks=[Watch()])
        return Trained(losses, norms, found['weights'], found['loaded'], early_steps(), waits)
    finally:
        forget()


def hashes(converter: Any, model: list) -> dict[str, str]:
    """Weights by Hugging Face's names: all ranks have all."""
    exported = converter.export_hf_weights(model, cpu=True, show_progress=False)
    return {name: _sums(weight) for name, weight in exported}


def _sums(weight: torch.Tensor) -> str:
    flat = weight.double().flatten()
    order = torch.arange(1, flat.numel() + 1, dtype=torch.float64)
    return f'{tuple(weight.shape)} {(flat * order).sum().item().hex()}'


def forget() -> None:
    """Everything that Bridge keeps in modules, and the plugin."""
    from megatron.bridge.training.initialize import destroy_global_state
    from megatron.bridge.training.utils import checkpoint_utils

    checkpoint_utils.read_train_state.cache_clear()  # what it gives out is then trained on
    checkpoint_utils.read_run_config.cache_clear()
    with contextlib.suppress(Exception):
        destroy_global_state()
    forget_groups()
    shutil.rmtree('nemo_experiments', ignore_errors=True)
