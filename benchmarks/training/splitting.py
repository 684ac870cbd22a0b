"""What it costs to split backwards, of Megatron's layers and of Transformer Engine's.

The same layers twice in the same processes, in turns: as Megatron alone runs them (one BW for each
microbatch), and with their weight gradients left to a W. Times are those of the core that a rank
has: what else the machine does, and waiting for other ranks, is not in them. Large layers show the
price where products take the time; small ones show what our hooks take of the host, and what
autograd, DistributedDataParallel and Transformer Engine take for the second visit of each layer.
Transformer Engine can delay weight gradients by itself, for a program that then calls `backward_dw`
layer by layer, as Megatron's overlap of experts does: what B and W take longer than that way is our
hooks' share. With sequence parallelism, W also gathers again what B let go, for memory. The small
layers of several ranks are measured on one, whose messages take no time (torch's `fake` backend): a
network carries them beside the passes. On a CPU Transformer Engine's kernels are emulated, and its
own Python runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.spawning import joined, spawned
from benchmarks.common.tables import aligned

LINEAR = 4  # linear layers of a transformer layer
HEADS, BATCH = 4, 1
SMALL = 64, 8  # hidden size and sequence where products take next to nothing


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        te: whether Transformer Engine's layers, else Megatron's own.
        folder: that holds `transformer_engine`; empty: where Python finds it.
        tp: ranks of tensor parallelism.
        shared: whether these share the sequence.
        layers: transformer layers.
        shape: hidden size and sequence.
        rounds: of both ways, after one that does not count.
    """

    te: bool
    folder: str
    tp: int
    shared: bool
    layers: int
    shape: tuple[int, int]
    rounds: int

    @property
    def alone(self) -> bool:
        """Whether one rank runs, and the others are thought."""
        return self.shape == SMALL


@dataclass(frozen=True)
class Row:
    """Of one model on rank 0; medians, in seconds.

    Attributes:
        layers, tp, shared, hidden: of the model.
        fused, b, w: of a BW, a B and a W.
        ratio: of B and W together to BW, in the same round.
        more: what B and W take longer than BW, for each linear layer.
        hooks: what of it our hooks take: all of it where nobody but us splits.
    """

    layers: str
    tp: int
    shared: bool
    hidden: int
    fused: float
    b: float
    w: float
    ratio: float
    more: float
    hooks: float


def _rank(rank: int, jobs: Sequence[Job], port: int, queue: Any) -> None:
    """Measures on one rank, one job after the other; rank 0 reports the rows."""
    from megatron_zbpp.emulation import cpu, te

    cpu.install()
    if jobs[0].te:
        te.install(jobs[0].folder or None)  # Megatron looks for it when it is imported
    for number, job in enumerate(jobs):
        if rank and job.alone:
            continue
        where = None if job.alone else port
        with joined(rank, job.tp, where, str(number), tensor_model_parallel_size=job.tp):
            row = _measured(job)
            if rank == 0:
                queue.put(row)


def _measured(job: Job) -> Row:
    import megatron_zbpp

    hidden, sequence = job.shape

    plugin = megatron_zbpp.enable('zb-h1')
    plugin.disable()
    whole = _model(job, '')
    alone = _model(job, 'TE') if job.te else None
    with plugin:
        plugin.install()
        split = _model(job, 'us')
    shape = (sequence // (job.tp if job.shared else 1), BATCH, hidden)
    fused, parts, least = [], [], []
    for number in range(job.rounds + 1):
        taken = _fused(whole, shape)
        with plugin:
            plugin.install()
            both = _split(plugin.session.store, split, shape)
        by_itself = taken if alone is None else _delayed(alone, shape)
        if number:
            fused.append(taken)
            parts.append(both)
            least.append(by_itself)

    def longer(than: Sequence[float]) -> float:
        """Return what B and W take longer, for each linear layer."""
        extra = median(b + w - other for other, (b, w) in zip(than, parts, strict=True))
        return extra / (LINEAR * job.layers)

    return Row(
        'te' if job.te else 'local',
        job.tp,
        job.shared,
        hidden,
        median(fused),
        median(b for b, _ in parts),
        median(w for _, w in parts),
        median((b + w) / bw for bw, (b, w) in zip(fused, parts, strict=True)),
        longer(fused),
        longer(least),
    )


def _model(job: Job, splitter: str) -> Any:
    """Layers without embedding and loss, as a training script wraps them.

    Args:
        job: of what size.
        splitter: who is to split backwards: 'us', 'TE', or nobody.
    """
    from megatron.core.distributed import DistributedDataParallel as DDP
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import TransformerConfig

    from megatron_zbpp.mcore.layers.transformer_engine import delay_weight_gradients

    config = TransformerConfig(
        num_layers=job.layers,
        hidden_size=job.shape[0],
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=job.tp,
        sequence_parallel=job.shared,
        gradient_accumulation_fusion=False,
    )
    if splitter and job.te:
        delay_weight_gradients(config)
    of = 'with_transformer_engine' if job.te else 'local'
    spec = getattr(gpt_layer_specs, f'get_gpt_layer_{of}_spec')()
    model = GPTModel(
        config,
        spec,
        vocab_size=128,
        max_sequence_length=job.shape[1],
        pre_process=False,
        post_process=False,
    )
    return DDP(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, delay_wgrad_compute=splitter == 'TE'
        ),
        model,
    )


def _forward(model: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Output, and a gradient for it."""
    import torch

    x = torch.randn(shape).requires_grad_()
    model.module.set_input_tensor(x)
    output = model(None, None, None)
    return output, torch.randn(output.shape)


def _fused(model: Any, shape: tuple[int, ...]) -> float:
    with model.no_sync():
        output, gradient = _forward(model, shape)
        return _timed(lambda: output.backward(gradient))


def _delayed(model: Any, shape: tuple[int, ...]) -> float:
    """Seconds of both halves, as Transformer Engine splits by itself."""

    def backward() -> None:
        output.backward(gradient)
        for layer in reversed(model.module.decoder.layers):
            layer.mlp.backward_dw()
            layer.self_attention.backward_dw()

    with model.no_sync():
        output, gradient = _forward(model, shape)
        return _timed(backward)


def _split(store: Any, model: Any, shape: tuple[int, ...]) -> tuple[float, float]:
    """Seconds of B and of W."""
    from megatron_zbpp.mcore.layers.transformer_engine import Delaying

    key, delaying = (0, 0), Delaying(model, store)
    with model.no_sync():
        with store.scope(key):
            output, gradient = _forward(model, shape)
        store.open(key)

        def backward() -> None:
            with store.scope(key), delaying.queueing():
                output.backward(gradient)

        return _timed(backward), _timed(lambda: store.run(key))


def _timed(function: Callable[[], None]) -> float:
    """Seconds of this thread's work, without those of the emulation that looks at devices."""
    from megatron_zbpp.emulation import cpu

    with cpu.untranslated():
        start = time.thread_time()
        function()
        return time.thread_time() - start


def table(rows: Sequence[Row]) -> str:
    """One line for each model; the last two columns are of a linear layer."""
    heads = (
        'layers',
        'tp',
        'hidden',
        'BW ms',
        'B ms',
        'W ms',
        '(B + W)/BW',
        'more, µs',
        'ours, µs',
    )
    cells = [
        (
            row.layers,
            f'{row.tp}, SP' if row.shared else str(row.tp),
            str(row.hidden),
            *(f'{1e3 * seconds:.2f}' for seconds in (row.fused, row.b, row.w)),
            f'{row.ratio:.3f}',
            f'{1e6 * row.more:.0f}',
            f'{1e6 * row.hooks:.0f}',
        )
        for row in rows
    ]
    return aligned([heads, *cells], left=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        '--te',
        metavar='FOLDER',
        nargs='?',
        const='',
        help="measure Transformer Engine's layers, too: it is in this folder, or installed",
    )
    add('--layers', type=int, default=2, help='transformer layers (default: %(default)s)')
    add('--hidden-size', type=int, default=1024, help='of the large ones (default: %(default)s)')
    add('--seq-length', type=int, default=256, help='of the large ones (default: %(default)s)')
    add('--rounds', type=int, default=15, help='of both ways (default: %(default)s)')
    add('--json', type=Path, metavar='FILE', help='takes the numbers')
    args = parser.parse_args(argv)
    for name in ('layers', 'rounds'):
        if getattr(args, name) < 1:
            parser.error(f'--{name} {getattr(args, name)} is too small: give at least 1')
    if args.hidden_size < 1 or args.hidden_size % (2 * HEADS):
        parser.error(f'--hidden-size {args.hidden_size} is no multiple of {2 * HEADS}')
    if args.seq_length < 2 or args.seq_length % 2:
        parser.error(f'--seq-length {args.seq_length} is not even and above 0')
    shapes = (args.hidden_size, args.seq_length), SMALL
    rows: list[Row] = []
    for te, tp in itertools.product((False, True) if args.te is not None else (False,), (1, 2)):
        jobs = [
            Job(te, args.te or '', tp, shared, args.layers, shape, args.rounds)
            # norms of Megatron's own layers share nothing
            for shared in ((False, True) if te and tp > 1 else (False,))
            for shape in shapes
        ]
        rows += spawned(_rank, tp, jobs)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps({'rows': [asdict(row) for row in rows]}, indent=1) + '\n')
    return 0
