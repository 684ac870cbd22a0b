"""Published runs of Megatron-LM on A100s beside what `zbpp advise` predicts of the same setups.

All predictions have one machine: nothing was fitted to a run's throughput.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from benchmarks.paper import published
from megatron_zbpp.partitioning.advice import advise
from megatron_zbpp.partitioning.setup_costs import FULL, NONE, SELECTIVE, STOCK, Job, Setup
from megatron_zbpp.partitioning.setup_prediction import Prediction, predict
from megatron_zbpp.partitioning.shapes import Shape

# A100 SXM: what matrix products reach, by T_W of Table 6 of Zero Bubble (238 to 254 of 312
# TFLOP/s: W is products alone), and the GB/s of its memory by NVIDIA's data sheet.
TFLOPS, BANDWIDTH = 245.0, 2039.0
_MEMORY = 80 * 2.0**30
_MICRO_BATCHES = (1, 2, 4, 8)


class Run(NamedTuple):
    """A published run.

    Attributes:
        model: its name.
        setup: that it had, as far as is known.
        measured: seconds of an iteration.
        predicted: the same run here.
        held: GB of the fullest GPU; None: not published.
    """

    model: str
    setup: str
    measured: float
    predicted: Prediction
    held: float | None = None

    @property
    def ratio(self) -> float:
        """Measured over predicted time."""
        return self.measured / self.predicted.seconds


# Narayanan et al., SC'21 (arXiv 2104.04473), Table 1: billions of parameters, heads, hidden size,
# layers, tp, pp, GPUs, batch, TFLOP/s of a GPU. All layers run again.
SC21 = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)
# Korthikanti et al., 2022 (arXiv 2205.05198), Tables 3 and 5: billions of parameters, heads, hidden
# size, layers, tp, pp, chunks, GPUs, batch, micro batch, seconds with full recomputation, and with
# sequence parallelism and selective recomputation.
KORTHIKANTI = (
    (22, 64, 6144, 48, 8, 1, 1, 8, 4, 4, 1.42, 1.10),
    (175, 96, 12288, 96, 8, 8, 3, 64, 64, 1, 18.13, 13.75),
    (530, 128, 20480, 105, 8, 35, 3, 280, 280, 1, 49.05, 37.83),
    (1000, 160, 25600, 128, 8, 64, 1, 512, 512, 1, 94.42, 71.49),
)


def _job(layers: int, hidden: int, heads: int, seq: int, batch: int, gpus: int) -> Job:
    """Return a job of those years: attention keeps scores, replicas share no optimizer state."""
    shape = Shape('gpt', layers, hidden, heads, 51200, seq, TFLOPS, bandwidth=BANDWIDTH)
    return Job(shape, batch, gpus, _MEMORY, fused=False, shards_optimizer=False)


def of_sc21() -> Iterator[Run]:
    """Yield the runs of SC'21, with the best micro batch and chunks that fit: they are not told."""
    for size, heads, hidden, layers, tp, pp, gpus, batch, tflops in SC21:
        job = _job(layers, hidden, heads, 2048, batch, gpus)
        chunks = [v for v in (1, 2, 3, 4, 5) if v == 1 or (pp > 1 and not layers % (pp * v))]
        tried = [
            predict(job, Setup(tp, pp, v, 1, micro, STOCK[v > 1], FULL, False))
            for v in chunks
            for micro in _MICRO_BATCHES
            if not job.why_impossible(Setup(tp, pp, v, 1, micro))
            and (v == 1 or not batch // (gpus // tp // pp) // micro % pp)
        ]
        best = min((p for p in tried if max(p.nbytes) <= job.room), key=lambda p: p.seconds)
        seconds = _flops_again(job.shape, batch) / (tflops * 1e12 * gpus)
        made = best.setup
        text = f'pp {pp}, tp {tp}, {gpus} GPUs (mb {made.micro_batch}, v {made.chunks})'
        yield Run(f'{size:g}B', text, seconds, best)


def _flops_again(shape: Shape, samples: int) -> float:
    """Return the FLOPs of an iteration in which all layers run again (SC'21, section 5.1)."""
    s, h, layers, vocab = shape.seq, shape.hidden, shape.layers, shape.vocab
    return 96 * samples * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))


def of_korthikanti() -> Iterator[Run]:
    """Yield the runs of 2022."""
    for size, heads, hidden, layers, tp, pp, v, gpus, batch, micro, full, selective in KORTHIKANTI:
        job = _job(layers, hidden, heads, 2048, batch, gpus)
        for saving, seconds in ((FULL, full), (SELECTIVE, selective)):
            setup = Setup(tp, pp, v, 1, micro, STOCK[v > 1], saving, saving == SELECTIVE)
            text = f'pp {pp}, tp {tp}, v {v}, {gpus} GPUs, mb {micro}, {saving}'
            yield Run(f'{size}B', text, seconds, predict(job, setup))


def of_zero_bubble() -> Iterator[Run]:
    """Yield the runs of Table 4 of Zero Bubble; of ZB-2p those of Table 7, where all ranks wait."""
    for at, (model, counts) in enumerate(
        zip(published.MODELS, published.MICROBATCHES, strict=True)
    ):
        p, layers = model.num_ranks, model.layers * model.num_ranks - 2
        for k, m in enumerate(counts):
            batch = m * model.batch
            job = _job(layers, model.hidden, model.heads, published.SEQUENCE, batch, p)
            job = replace(job, ends=(True, True))
            rows = [(name, published.THROUGHPUT[name][at][k]) for name in ('1f1b', 'zb-1p')]
            rows.append(('interleaved', published.THROUGHPUT['interleaved'][at][k]))
            rows += [('zb-2p', published.SYNCHRONOUS[at])] if k == 0 else []
            for name, throughput in rows:
                v = model.layers if name == 'interleaved' else 1
                made = predict(job, Setup(1, p, v, 1, model.batch, name, NONE))
                held = published.MEMORY[name][at] if k == 0 else None
                seconds = batch / p / throughput
                yield Run(model.name, f'{name}, pp {p}, m {m}', seconds, made, held)


def page() -> str:
    """Return the tables as Markdown."""
    runs = {
        "Megatron-LM, SC'21, Table 1": [*of_sc21()],
        'Megatron-LM, 2022, Table 5': [*of_korthikanti()],
        'Zero Bubble, Tables 4 and 7': [*of_zero_bubble()],
    }
    lines = ['## Measured over predicted time, by source', '']
    lines += ['| runs | number | median | least | most |', '|---|---|---|---|---|']
    for name, own in runs.items():
        ratios = [run.ratio for run in own]
        row = (len(own), *(f'{f(ratios):.2f}' for f in (median, min, max)))
        lines.append(f'| {name} | {" | ".join(map(str, row))} |')
    for name, own in runs.items():
        lines += ['', f'## {name}', '']
        lines += [
            '| model | setup | measured, s | predicted, s | ratio | GB, measured / predicted |'
        ]
        lines += ['|---|---|---|---|---|---|']
        lines += map(_line, own)
    return '\n'.join([*lines, '', *_advised(), ''])


def _line(run: Run) -> str:
    gb = max(run.predicted.nbytes) / 1e9
    held = f'-/{gb:.0f}' if run.held is None else f'{run.held:g}/{gb:.1f}={run.held / gb:.2f}'
    times = f'{run.measured:.2f} | {run.predicted.seconds:.2f} | {run.ratio:.2f}'
    return f'| {run.model} | {run.setup} | {times} | {held} |'


def _advised() -> Iterator[str]:
    """Yield what is advised for two published models, of Megatron's own schedules alone."""
    yield "## Advice beside the published setup, Megatron's own schedules alone"
    yield ''
    yield '| model | published, predicted s | advised | predicted s |'
    yield '|---|---|---|---|'
    for size, heads, hidden, layers, tp, pp, v, gpus, batch, micro, *_ in KORTHIKANTI[:2]:
        job = _job(layers, hidden, heads, 2048, batch, gpus)
        own = Setup(tp, pp, v, 1, micro, STOCK[v > 1], SELECTIVE, True)
        advice = advise(job, STOCK, own, 1)
        best, kept = advice.best[0], advice.own
        made = best.setup
        assert kept is not None
        yield (
            f'| {size}B | pp {pp}, tp {tp}, v {v}, mb {micro}, selective: {kept.seconds:.2f} | pp '
            f'{made.pp}, tp {made.tp}, v {made.chunks}, mb {made.micro_batch}, {made.saving} | '
            f'{best.seconds:.2f} |'
        )
