"""The command line of pretrain_gpt.py, with Megatron's names, checked before anything starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import megatron_zbpp

WATCHDOG = 'report and exit when the pipeline makes no step forward for so long; 0: never'
PAUSE = 'the same between iterations, as in checkpoints (default: ten times that, at least 600)'


def parse_args(argv: list[str] | None = None, description: str | None = None) -> argparse.Namespace:
    """Return the command line; where it makes no sense, end with status 2 and a reason.

    Args:
        argv: its words; None: those of this program.
        description: what --help says first.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for add_group in (_add_model, _add_pipeline, _add_training, _add_data):
        add_group(parser.add_argument)
    args = parser.parse_args(argv)
    try:
        check_args(args, int(os.environ.get('WORLD_SIZE', 1)))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args


def _add_model(add: Callable[..., object]) -> None:
    """Add the sizes of the model."""
    add('--num-layers', type=int, default=8)
    add('--hidden-size', type=int, default=128)
    add('--num-attention-heads', type=int, default=4)
    add('--seq-length', type=int, default=128)
    add('--position-embedding-type', choices=['learned_absolute', 'rope'], default='rope')
    add('--untie-embeddings-and-output-weights', action='store_true')
    add('--bf16', action='store_true')


def _add_pipeline(add: Callable[..., object]) -> None:
    """Add parallelism, the schedule and what goes with it."""
    add('--pipeline-model-parallel-size', type=int, default=1, metavar='P')
    add('--tensor-model-parallel-size', type=int, default=1, metavar='T')
    add('--pipeline-schedule', default='zb-v', help="a schedule's name, or `megatron` for its own")
    add('--pipeline-schedule-file', type=Path, help='JSON, or CSV as of torch: instead of a name')
    add('--num-virtual-stages-per-pipeline-rank', type=int, metavar='V', help='where it can vary')
    add(
        '--account-for-embedding-in-pipeline-split', action='store_true', help='a layer fewer there'
    )
    add('--account-for-loss-in-pipeline-split', action='store_true', help='a layer less there')
    add('--pipeline-watchdog-timeout', type=float, default=300, metavar='SECONDS', help=WATCHDOG)
    add('--pipeline-watchdog-pause-timeout', type=float, metavar='SECONDS', help=PAUSE)
    add('--pipeline-offload', metavar='CHUNKS', help='half, all, N or auto: on the host')
    add('--pipeline-freeze', type=Path, metavar='FILE', help='of zbpp freeze -o: another training')
    add('--pipeline-recompute', metavar='CHUNKS', help='half, all or how many: F again before B')
    add('--pipeline-prewarm', action='store_true', help='the first iteration in parallel, on CPUs')
    add('--pipeline-async-warmup-steps', type=int, default=0, metavar='T', help='of 1F1B, before')
    add('--pipeline-clip', choices=['stage', 'global'], help='norm, of asynchronous schedules')
    add(
        '--pipeline-trace-dir', type=Path, metavar='FOLDER', help='for pages that show an iteration'
    )
    add('--enable-optimizer-post-validation', action='store_true', help='steps do not wait')
    add('--optimizer-post-validation-clean-steps', type=int, default=10, metavar='N')


def _add_training(add: Callable[..., object]) -> None:
    """Add batches, the optimizer and DDP."""
    add('--micro-batch-size', type=int, default=2)
    add('--global-batch-size', type=int, default=16)
    add('--train-iters', type=int, default=50)
    add('--lr', type=float, default=1e-3)
    add('--min-lr', type=float, default=1e-4)
    add('--lr-warmup-iters', type=int, default=2)
    add('--lr-decay-style', choices=['constant', 'linear', 'cosine'], default='cosine')
    add('--weight-decay', type=float, default=0.01)
    add('--clip-grad', type=float, default=1.0, help='0: no clipping')
    add('--use-distributed-optimizer', action='store_true')
    add('--overlap-grad-reduce', action='store_true')
    add(
        '--gradient-accumulation-fusion',
        action='store_true',
        help="weight gradients are added to DDP's buffer by apex's kernel",
    )
    add(
        '--ddp-side-stream',
        action='store_true',
        help="build DDP on a stream of its own, as NVIDIA's loop does",
    )
    add(
        '--no-check-for-nan-in-loss-and-grad',
        action='store_false',
        dest='check_for_nan_in_loss_and_grad',
        help='go on where a loss is NaN or infinite',
    )


def _add_data(add: Callable[..., object]) -> None:
    """Add data, checkpoints and reports."""
    add('--seed', type=int, default=1234)
    add('--data-path', type=Path, metavar='PREFIX', help='of .bin and .idx; default: real text')
    add('--split', default='97,3,0', help='of the data into training, validation and test')
    add('--save', type=Path, metavar='FOLDER')
    add('--save-interval', type=int, help='default: at the end')
    add('--load', type=Path, metavar='FOLDER')
    add('--ckpt-step', type=int, metavar='N', help='of --load; default: the latest')
    add('--exit-interval', type=int, help='end after an iteration that this divides')
    add('--eval-interval', type=int, default=1000)
    add('--eval-iters', type=int, default=0)
    add('--log-interval', type=int, default=1)
    add('--metrics-file', type=Path, help='a JSON line per iteration; the parameters at the end')
    add('--timeline-file', type=Path, help='the last iteration as measured, as JSON')


def check_args(args: argparse.Namespace, world_size: int) -> None:
    """Derive data-parallel size, number of microbatches and placement.

    Raises:
        ValueError: a value that cannot work, with the cure.
    """
    p, t = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    if p < 1 or t < 1 or world_size % (p * t):
        raise ValueError(
            f'{world_size} processes cannot be divided into pipelines of {p} x {t} ranks: change '
            '--pipeline-model-parallel-size, --tensor-model-parallel-size or --nproc-per-node'
        )
    for name in ('pipeline_watchdog_timeout', 'pipeline_watchdog_pause_timeout'):
        seconds = getattr(args, name)
        if seconds is not None and seconds < 0:
            flag = '--' + name.replace('_', '-')
            raise ValueError(f'{flag} {seconds:g} is negative: give seconds, or 0 for none')
    for name in ('pipeline_offload', 'pipeline_freeze', 'pipeline_recompute'):
        if getattr(args, name) is not None and args.pipeline_schedule == 'megatron':
            flag = '--' + name.replace('_', '-')
            raise ValueError(
                f'{flag} is not for --pipeline-schedule megatron: give another, or none'
            )
    args.data_parallel_size = world_size // (p * t)
    step = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size < 1 or step < 1 or args.global_batch_size % step:
        raise ValueError(
            f'--global-batch-size {args.global_batch_size} is not a positive multiple of {step} '
            '(--micro-batch-size times data-parallel size): no whole number of microbatches'
        )
    args.num_microbatches = args.global_batch_size // step
    if args.hidden_size % args.num_attention_heads:
        raise ValueError(
            f'--hidden-size {args.hidden_size} is not divisible by --num-attention-heads '
            f'{args.num_attention_heads}'
        )
    if args.pipeline_schedule_file is not None:
        args.pipeline_schedule = megatron_zbpp.load(args.pipeline_schedule_file)
    own = megatron_zbpp.Placement.loop(p)  # as Megatron's own schedule has it
    args.layout = megatron_zbpp.layout_for(
        own if args.pipeline_schedule == 'megatron' else args.pipeline_schedule,
        p,
        args.num_layers,
        num_chunks=args.num_virtual_stages_per_pipeline_rank,
        num_microbatches=args.num_microbatches,
        embedding=args.account_for_embedding_in_pipeline_split,
        loss=args.account_for_loss_in_pipeline_split,
    )
