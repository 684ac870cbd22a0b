"""Pretrains a GPT with Megatron-Core, by any pipeline schedule.

    torchrun --nproc-per-node 4 examples/gpt/pretrain_gpt.py --pipeline-model-parallel-size 4 \
        --num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
        --micro-batch-size 2 --global-batch-size 16 --train-iters 50 --pipeline-schedule zb-v

Everything is Megatron's own: model, DistributedDataParallel, optimizer, dataset, checkpoints. Ours
are two things: `megatron_zbpp.enable`, and weights that are drawn by layer and not by rank, so that
runs with different schedules start equal. Without a GPU it runs on
CPU and gloo. `--pipeline-schedule megatron` is Megatron's untouched 1F1B: the reference.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from prepare_data import VOCABULARY, prepare, tokenizer

import megatron_zbpp

DEVICE = megatron_zbpp.device()  # before megatron.core is imported

import checkpoints
import report
from checkpoints import InputError
from command_line import parse_args
from megatron.core import parallel_state, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_attr_wrapped_model


def initialize(args: argparse.Namespace) -> None:
    """Make process groups and random seeds."""
    if not dist.is_initialized():
        dist.init_process_group('nccl' if DEVICE.type == 'cuda' else 'gloo')
        if DEVICE.type == 'cuda':
            torch.cuda.set_device(DEVICE)
    chunks = args.layout.num_chunks
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    )
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)


def build_model(args: argparse.Namespace) -> list[DDP]:
    """Return this rank's chunks of the model, wrapped, with weights drawn by layer."""
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        hidden_dropout=0.0,  # masks would follow the ranks' random states, not the layers
        attention_dropout=0.0,
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        pipeline_model_parallel_layout=args.layout.text,
        deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=args.gradient_accumulation_fusion,
        finalize_model_grads_func=finalize_model_grads,
    )
    rank = parallel_state.get_pipeline_model_parallel_rank()
    stages = args.layout.stages(rank)
    chunks = [
        GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=-(-VOCABULARY // 128) * 128,
            max_sequence_length=args.seq_length,
            pre_process=args.layout.is_first(stage),
            post_process=args.layout.is_last(stage),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            vp_stage=chunk if len(stages) > 1 else None,
        )
        for chunk, stage in enumerate(stages)
    ]
    draw_weights(chunks, args.seed)
    wrapped = [Float16Module(config, chunk) if args.bf16 else chunk for chunk in chunks]
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=args.overlap_grad_reduce,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    with side_stream() if args.ddp_side_stream else nullcontext():
        models = [DDP(config, ddp_config, chunk.to(DEVICE)) for chunk in wrapped]
    config.no_sync_func = [model.no_sync for model in models]
    if len(models) == 1:
        config.no_sync_func = config.no_sync_func[0]
    return models


@contextmanager
def side_stream() -> Iterator[None]:
    """Run what is inside on a stream of its own, as NVIDIA's loop builds DDP: its hooks stay there.

    Autograd makes that stream wait for each gradient that is defined.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def gpt(model: torch.nn.Module) -> GPTModel:
    """Return the chunk inside its wrappers."""
    return get_attr_wrapped_model(model, 'pre_process', return_model_obj=True)


def draw_weights(chunks: list[GPTModel], seed: int) -> None:
    """Megatron's initial distributions, each parameter from a seed made of its layer and name."""
    config, tied = chunks[0].config, chunks[0].share_embeddings_and_output_weights
    for layer, name, parameter in report.by_layer(chunks):
        if parameter.dim() < 2:
            continue  # biases and norms are constants
        if layer == 'output_layer' and tied:
            layer, name = 'embedding', 'word_embeddings.weight'  # its copy
        sharded = getattr(parameter, 'tensor_model_parallel', False)
        shard = parallel_state.get_tensor_model_parallel_rank() if sharded else 0
        digest = hashlib.sha256(f'{seed} {layer} {name} {shard}'.encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], 'little') >> 1)
        residual = name.endswith(('linear_proj.weight', 'linear_fc2.weight'))
        (config.output_layer_init_method if residual else config.init_method)(parameter.data)


def build_optimizer(args: argparse.Namespace, models: list[DDP]) -> tuple[Any, Any]:
    """Megatron's optimizer and its parameter scheduler."""
    config = OptimizerConfig(
        optimizer='adam',
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        clip_grad=args.clip_grad,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(config, models)
    models[0].config.grad_scale_func = optimizer.scale_loss
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters,
        lr_decay_steps=max(args.train_iters, args.lr_warmup_iters + 1),
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters,
        wd_incr_style='constant',
    )
    return optimizer, scheduler


def check_data(args: argparse.Namespace) -> None:
    """Raise where Megatron would search an empty part of the data for ever.

    Raises:
        InputError: no data at --data-path, or too little for --split.
    """
    if not IndexedDataset.exists(str(args.data_path)):
        raise InputError(f'no {args.data_path}.bin and .idx: see prepare_data.py for --data-path')
    documents = len(IndexedDataset(str(args.data_path)))
    shares = [float(share) for share in args.split.split(',')]
    bounds = [round(documents * sum(shares[:i]) / sum(shares)) for i in range(len(shares) + 1)]
    if any(share and a == b for share, (a, b) in zip(shares, pairwise(bounds), strict=True)):
        raise InputError(
            f'{args.data_path} has {documents} documents: too few for each part of --split '
            f'{args.split}; add text, or give the validation part more'
        )


def build_datasets(args: argparse.Namespace) -> tuple[GPTDataset, GPTDataset | None]:
    """Training and validation data."""
    if args.data_path is None:
        args.data_path = Path('runs/data/text')
        if dist.get_rank() == 0:
            prepare(args.data_path)
        dist.barrier()
    check_data(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=([str(args.data_path)], None),
        split=args.split,
        tokenizer=tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    evaluations = args.train_iters // args.eval_interval + 1
    sizes = [args.train_iters, args.eval_iters * evaluations, 0]
    sizes = [iterations * args.global_batch_size for iterations in sizes]
    train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    return train, valid


def batches(
    args: argparse.Namespace, dataset: GPTDataset, iteration: int, rank: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the microbatches of a data-parallel rank, from the start of `iteration` on."""
    size = args.micro_batch_size
    start = iteration * args.global_batch_size + rank * size
    while True:
        samples = [dataset[index % len(dataset)] for index in range(start, start + size)]
        keys = ('tokens', 'labels', 'loss_mask', 'position_ids')
        yield {key: on_device(torch.stack([s[key] for s in samples])) for key in keys}
        start += size * args.data_parallel_size


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the device; nobody waits: a GPU fetches it from page-locked memory."""
    if DEVICE.type == 'cuda':
        tensor = tensor.pin_memory()
    return tensor.to(DEVICE, non_blocking=True)


def iterators(
    args: argparse.Namespace, dataset: GPTDataset, iteration: int
) -> list[Iterator[dict[str, torch.Tensor]] | None]:
    """One iterator for each chunk; only the first and the last stage of the model read data."""
    layout, rank = args.layout, parallel_state.get_pipeline_model_parallel_rank()
    ends = [layout.is_first(stage) or layout.is_last(stage) for stage in layout.stages(rank)]
    replicas = map(megatron_zbpp.data_parallel_rank, range(len(ends)))
    return [
        batches(args, dataset, iteration, replica) if reads else None
        for replica, reads in zip(replicas, ends, strict=True)
    ]


def loss_func(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the losses, number of tokens, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().detach().int()
    return loss, num_tokens, {'lm loss': torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(data_iterator: Iterator | None, model: DDP) -> tuple[torch.Tensor, partial]:
    """Megatron calls this for each microbatch on each chunk."""
    batch = next(data_iterator) if data_iterator is not None else {}
    output = model(batch.get('tokens'), batch.get('position_ids'), None, labels=batch.get('labels'))
    return output, partial(loss_func, batch.get('loss_mask'))


def run_batch(
    args: argparse.Namespace, models: list[DDP], data: list[Iterator | None], **options: Any
) -> float | None:
    """Run one global batch; return its mean loss, on the last pipeline rank.

    Raises:
        FloatingPointError: that is NaN or infinite, and checked.
    """
    many = len(models) > 1
    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data if many else data[0],
        model=models if many else models[0],
        num_microbatches=args.num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        **options,
    )
    if not results:
        return None
    total = torch.stack([result['lm loss'] for result in results]).sum(0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    loss = (total[0] / total[1]).item()
    if args.check_for_nan_in_loss_and_grad and not math.isfinite(loss):
        raise FloatingPointError(
            f'the loss is {loss}: lower --lr, look at the data, or go on with '
            '--no-check-for-nan-in-loss-and-grad'
        )
    return loss


def evaluate(
    args: argparse.Namespace, models: list[DDP], data: list[Iterator | None], iteration: int
) -> None:
    """Mean loss over --eval-iters batches of validation data, printed by the last rank."""
    for model in models:
        model.eval()
    with torch.no_grad():
        losses = [run_batch(args, models, data, forward_only=True) for _ in range(args.eval_iters)]
    for model in models:
        model.train()
    if losses[0] is not None and report.is_reporter():
        loss = sum(losses) / len(losses)
        print(f' validation loss at iteration {iteration} | lm loss value: {loss:.6E}', flush=True)
        report.write_line(
            args.metrics_file, {'iteration': iteration, 'validation_loss': loss.hex()}
        )


def enable(args: argparse.Namespace, stack: ExitStack) -> Any | None:
    """Return the plugin, until `stack` ends; None where Megatron's own schedule is to run."""
    if args.pipeline_schedule == 'megatron':
        return None
    plugin = megatron_zbpp.enable(
        args.pipeline_schedule,
        args.num_virtual_stages_per_pipeline_rank,
        watchdog_timeout=args.pipeline_watchdog_timeout,
        watchdog_pause_timeout=args.pipeline_watchdog_pause_timeout,
        trace_dir=args.pipeline_trace_dir,
        offload=args.pipeline_offload,
        freeze=args.pipeline_freeze,
        recompute=args.pipeline_recompute,
        prewarm=args.pipeline_prewarm or None,
        clip=args.pipeline_clip,
        async_warmup_steps=args.pipeline_async_warmup_steps,
        flags=vars(args),
        post_validation=(
            args.enable_optimizer_post_validation and args.optimizer_post_validation_clean_steps
        ),
    )
    return stack.enter_context(plugin)


def train(args: argparse.Namespace) -> None:
    """Train, from process groups to the last line of metrics."""
    with ExitStack() as stack:
        plugin = enable(args, stack)
        initialize(args)
        folder = checkpoints.to_load(args)
        models = build_model(args)
        optimizer, scheduler = build_optimizer(args, models)
        iteration = checkpoints.load(folder, models, optimizer, scheduler) if folder else 0
        train_data, valid_data = build_datasets(args)
        data = iterators(args, train_data, iteration)
        validation = iterators(args, valid_data, 0) if args.eval_iters else []
        skipped, measured = 0, []
        pp_group = parallel_state.get_pipeline_model_parallel_group()
        meter = plugin or stack.enter_context(megatron_zbpp.observe(DEVICE, pp_group))
        while iteration < args.train_iters:
            start = time.perf_counter()
            for model in models:
                model.zero_grad_buffer()
            optimizer.zero_grad()
            loss = run_batch(args, models, data)
            succeeded, grad_norm, _ = optimizer.step()
            if succeeded:
                scheduler.step(increment=1)
            skipped += not succeeded
            iteration += 1
            seconds = time.perf_counter() - start
            if args.timeline_file is not None:
                measured.append(meter.latest)
            with megatron_zbpp.guard('figures for the log'):
                figures = report.figures_due(args, iteration, meter)
            if loss is not None:
                lr = optimizer.param_groups[0]['lr']
                report.log(args, iteration, seconds, lr, loss, grad_norm, skipped, figures)
            if args.eval_iters and iteration % args.eval_interval == 0:
                evaluate(args, models, validation, iteration)
            leaving = args.exit_interval and iteration % args.exit_interval == 0
            last = leaving or iteration == args.train_iters
            if args.save and (last or (args.save_interval and iteration % args.save_interval == 0)):
                checkpoints.save(args, models, optimizer, scheduler, iteration)
            if leaving:
                break
        if plugin is not None:
            plugin.finish_step()  # the last one of an asynchronous schedule may be begun only
        with megatron_zbpp.guard('summary of the training'):
            summary = megatron_zbpp.summary()  # None: Megatron's own schedule has run
        if summary is not None and report.is_reporter():
            print(summary, flush=True)
    hashes = report.fingerprint(report.by_layer(models), optimizer)
    report.write_line(args.metrics_file, hashes)
    if args.timeline_file is not None:
        report.write_median(args.timeline_file, measured)


def main() -> None:
    args = parse_args(description=__doc__)
    try:
        train(args)
    except (InputError, FloatingPointError) as error:
        sys.exit(f'{Path(__file__).name}: error: {error}')
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == '__main__':
    main()
