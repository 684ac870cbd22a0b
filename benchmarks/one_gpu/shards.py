"""What S and T of a shard of the output layer take on one GPU, and their three collectives.

    python -m benchmarks.one_gpu.shards [--ranks 4] [--words 131072] [--hidden 4096] [--tokens 4096]

Ranks of NCCL share the GPU (see `ranks`): one takes S and T of its shard while the others wait on
the host, and the whole output layer beside them, forward and backward by Megatron's functions. Then
all run the collectives of a microbatch together: sockets carry them, so their times are no
network's. Losses of all shards are compared with the whole layer's. Without a GPU the same runs
small on gloo.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.one_gpu import REHEARSAL, ranks
from benchmarks.one_gpu.timing import milliseconds

_RANK = ['-m', 'benchmarks.one_gpu.shards', '--rank']


def rank_main(args: argparse.Namespace) -> int:
    """Run on each rank; rank 0 prints. Return 1 if losses are wrong."""
    real = torch.cuda.is_available()
    if not real:
        from megatron_zbpp.emulation import cpu

        cpu.install()
    dist.init_process_group('nccl' if real else 'gloo')
    device = torch.device('cuda' if real else 'cpu')
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(1, dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        return measure(args, device)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def measure(args: argparse.Namespace, device: torch.device) -> int:
    """Compare losses, time S, T and the whole layer on rank 0, and collectives on all."""
    from megatron_zbpp.mcore.techniques import vocabulary_shards as vocabulary

    real, group, rank = device.type == 'cuda', dist.group.WORLD, dist.get_rank()
    kind = torch.bfloat16 if real else torch.float32
    drawing = torch.Generator(device).manual_seed(1)
    weight = torch.randn(args.words, args.hidden, generator=drawing, device=device, dtype=kind)
    weight.div_(args.hidden**0.5)
    hidden = torch.randn(args.tokens, args.hidden, generator=drawing, device=device, dtype=kind)
    targets = torch.randint(args.words, (args.tokens,), generator=drawing, device=device)
    weights = torch.full((args.tokens,), 1 / args.tokens, device=device)
    shard = _shard(weight.chunk(args.ranks)[rank].clone(), args)
    made, part = shard(hidden, targets=targets)
    whole = vocabulary.combined(vocabulary.gathered(made.statistics, group))
    losses = vocabulary.losses_of(whole)
    expected = torch.nn.functional.cross_entropy(
        (hidden @ weight.t()).float(), targets, reduction='none'
    )
    off = ((losses - expected).abs().max() / expected.abs().max()).item()
    host = dist.new_group(backend='gloo')  # who waits in it leaves the GPU to the others
    dist.barrier(host)
    if rank == 0:
        told = {
            'S': lambda: shard(hidden, targets=targets),
            'T': lambda: vocabulary.weight_gradient(made, whole, weights),
            'whole output layer': _whole(weight, hidden, targets, weights),
        }
        for name, run in told.items():
            print(f'{name}: {milliseconds(run, real):.2f} ms', flush=True)
    dist.barrier(host)
    own = part.away.clone()
    collectives = {
        'broadcast of hidden states': lambda: dist.broadcast(hidden, 0),
        'gather of statistics': lambda: vocabulary.gathered(made.statistics, group),
        'reduction of the gradient': lambda: dist.reduce(own, 0),
    }
    for name, run in collectives.items():
        taken = milliseconds(run, real)
        if rank == 0:
            print(f'{name}, {args.ranks} ranks: {taken:.2f} ms', flush=True)
    limit = 2e-2 if real else 1e-5
    if rank == 0:
        print(f'losses differ by {off:.1e}, {"WRONG" if off > limit else "right"}', flush=True)
    return int(off > limit)


def _shard(rows: torch.Tensor, args: argparse.Namespace) -> Any:
    """Return the shard of this rank, of a model that is nothing else."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from megatron_zbpp.mcore.techniques.vocabulary_shards import OutputShard

    config = TransformerConfig(
        num_layers=args.ranks,
        hidden_size=args.hidden,
        num_attention_heads=1,
        params_dtype=rows.dtype,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = SimpleNamespace(config=config, vocab_size=args.words, pg_collection=groups)
    return OutputShard(model, rows)


def _whole(
    weight: torch.Tensor, hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> Callable[[], None]:
    """Return forward and backward of the whole layer by Megatron's loss, on one rank."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    w, x = (each.detach().requires_grad_() for each in (weight, hidden))

    def run() -> None:
        w.grad = x.grad = None
        losses = vocab_parallel_cross_entropy((x @ w.t())[:, None], targets[:, None])
        (losses[:, 0] * weights).sum().backward()

    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks; print what rank 0 says. The exit status is 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add('--ranks', type=int, default=4, help='(default: %(default)s)')
    add('--words', type=int, default=131072, help='(default: %(default)s)')
    add('--hidden', type=int, default=4096, help='(default: %(default)s)')
    add('--tokens', type=int, default=4096, help='of a microbatch (default: %(default)s)')
    add('--seconds', type=float, default=300, help='after which ranks hang')
    add('--logs', type=Path, default=Path(tempfile.gettempdir()) / 'one_gpu_shards')
    add('--rank', action='store_true', help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if min(args.ranks, args.words, args.hidden, args.tokens) < 1 or args.words % args.ranks:
        parser.error('give sizes above 0, and --words that --ranks divides')
    if args.rank:
        return rank_main(args)
    real = torch.cuda.is_available()
    print(torch.cuda.get_device_name() if real else REHEARSAL, flush=True)
    words = [f'--{name}={getattr(args, name)}' for name in ('ranks', 'words', 'hidden', 'tokens')]
    failed = ranks.run(args.ranks, [*_RANK, *words], args.logs.resolve(), args.seconds)
    lines = (args.logs / 'rank0.log').read_text().splitlines()
    print(*(line for line in lines if line.endswith((' ms', 'right', 'WRONG'))), sep='\n')
    if failed:
        print(f'FAILED: {failed}, see {args.logs}')
    return int(bool(failed))


if __name__ == '__main__':
    sys.exit(main())
