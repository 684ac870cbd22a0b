"""The comparison as Markdown: a section for each of the papers' tables, and ratios by schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.paper import published as paper
from benchmarks.paper.predict import Prediction, predict, v_shape_timeline

Ratios = dict[str, list[float]]  # by schedule
LABELS = {
    '1f1b': '1F1B',
    'interleaved': '1F1B-I',
    'zb-h1': 'ZB-H1',
    'zb-h2': 'ZB-H2',
    'zb-1p': 'ZB-1p',
    'zb-2p': 'ZB-2p',
    'zb-v': 'ZB-V',
}


def page() -> str:
    """Return all sections: first the summary of what the others hold."""
    throughput: Ratios = defaultdict(list)
    memory: Ratios = defaultdict(list)
    speedup: Ratios = defaultdict(list)
    sections = [
        *_table_4(throughput, memory, speedup),
        _table_5(),
        _table_6(),
        _table_7(throughput),
        *_table_8(throughput, memory),
        _table_9(throughput, memory, speedup),
        _arxiv_table_6(speedup),
        _arxiv_table_7(),
        _arxiv_table_8(),
    ]
    return '\n'.join([_summary(throughput, memory, speedup), *sections])


def _summary(throughput: Ratios, memory: Ratios, speedup: Ratios) -> str:
    rows = [
        [LABELS[name], *map(_spread, (throughput[name], speedup[name], memory[name]))]
        for name in LABELS
        if throughput[name] or speedup[name]
    ]
    heads = ['schedule', 'throughput', 'speed-up over 1F1B', 'memory']
    return _section('Measured to predicted, by schedule', heads, rows)


def _spread(ratios: list[float]) -> str:
    if not ratios:
        return ''
    low, middle, high = min(ratios), median(ratios), max(ratios)
    return f'{middle:.2f} ({low:.2f} to {high:.2f}, {len(ratios)} cells)'


def _table_4(throughput: Ratios, memory: Ratios, speedup: Ratios) -> Iterator[str]:
    names = list(paper.THROUGHPUT)
    cells = {(n, i, k): _predicted(n, i, k) for n in names for i, k in _settings()}
    rows, gains = [], []
    for i, k in _settings():
        row, gain = [], []
        for name in names:
            measured, predicted = paper.THROUGHPUT[name][i][k], cells[name, i, k].throughput
            row.append(_cell(measured, predicted, throughput[name]))
            if name != '1f1b':
                base = paper.THROUGHPUT['1f1b'][i][k], cells['1f1b', i, k].throughput
                gain.append(_cell(measured / base[0], predicted / base[1], speedup[name]))
        rows.append([*_setting(i, k), *row])
        gains.append([*_setting(i, k), *gain])
    heads = ['model', 'p', 'm']
    labels = [LABELS[name] for name in names]
    yield _section('Table 4: samples per GPU and second', heads + labels, rows)
    yield _section('Table 4: speed-up over 1F1B', heads + labels[1:], gains)
    held = [
        [
            model.name,
            *(_cell(paper.MEMORY[n][i], cells[n, i, 0].memory, memory[n]) for n in names),
        ]
        for i, model in enumerate(paper.MODELS)
    ]
    yield _section('Table 4: GB of the fullest GPU', ['model', *labels], held)


def _table_5() -> str:
    rows = [
        [
            *_setting(i, k),
            *(
                f'{rates[i][k]:.4f}/{_predicted(name, i, k).bubble_rate:.4f}'
                for name, rates in paper.BUBBLE_RATES.items()
            ),
        ]
        for i, k in _settings()
    ]
    heads = ['model', 'p', 'm', *(LABELS[name] for name in paper.BUBBLE_RATES)]
    return _section('Table 5: bubble rates, computed by the paper / simulated here', heads, rows)


def _table_6() -> str:
    rows = [[*_setting(i, k), *paper.PASS_TIMES[i][k]] for i, k in _settings()]
    heads = ['model', 'p', 'm', 'T_F', 'T_B', 'T_W', 'T_comm']
    return _section('Table 6: pass times in ms, what the predictions start from', heads, rows)


def _table_7(throughput: Ratios) -> str:
    rows = []
    for i, model in enumerate(paper.MODELS):
        found = _predicted('zb-2p', i, 0)
        measured = paper.POST_VALIDATED[i], paper.SYNCHRONOUS[i]
        rows.append(
            [
                model.name,
                _cell(measured[0], found.throughput),  # Table 4's
                _cell(measured[1], found.synchronous, throughput['zb-2p']),
                _cell(measured[0] / measured[1], found.throughput / found.synchronous),
            ]
        )
    heads = ['model', 'post-validation', 'all ranks wait', 'gain']
    return _section('Table 7: ZB-2p, with and without a barrier before each step', heads, rows)


def _table_8(throughput: Ratios, memory: Ratios) -> Iterator[str]:
    names = list(paper.EQUAL_MEMORY)
    rows = []
    for i, k in _settings():
        row = []
        for name in names:
            found = _predicted(name, i, k, paper.BATCH_FACTOR[name])
            # ZB-2p's cells are Table 4's
            seen = throughput[name] if name != 'zb-2p' else None
            row.append(_cell(paper.EQUAL_MEMORY[name][i][k], found.throughput, seen))
        rows.append([*_setting(i, k), *row])
    labels = [LABELS[name] for name in names]
    yield _section(
        'Table 8: equal memory, samples per GPU and second', ['model', 'p', 'm', *labels], rows
    )
    held = [
        [
            model.name,
            *(
                _cell(
                    paper.EQUAL_MEMORY_GB[name][i],
                    _predicted(name, i, 0, paper.BATCH_FACTOR[name]).memory,
                    memory[name] if name != 'zb-2p' else None,
                )
                for name in names
            ),
        ]
        for i, model in enumerate(paper.MODELS)
    ]
    yield _section('Table 8: GB of the fullest GPU', ['model', *labels], held)


def _table_9(throughput: Ratios, memory: Ratios, speedup: Ratios) -> str:
    rows = []
    for i, settings in paper.FEW_MICROBATCHES.items():
        model = paper.MODELS[i]
        for m, *cells in settings:
            measured = dict(zip(('1f1b', 'zb-2p'), (cells[:2], cells[2:]), strict=True))
            row, found = [], {}
            for name, (samples, gb) in measured.items():
                found[name] = predict(name, model, m, paper.PASS_TIMES[i][0])
                row.append(_cell(samples, found[name].throughput, throughput[name]))
                row.append(_cell(gb, found[name].memory, memory[name]))
            gain = measured['zb-2p'][0] / measured['1f1b'][0]
            predicted = found['zb-2p'].throughput / found['1f1b'].throughput
            row.append(_cell(gain, predicted, speedup['zb-2p']))
            rows.append([model.name, model.num_ranks, m, *row])
    heads = ['model', 'p', 'm', '1F1B', '1F1B, GB', 'ZB-2p', 'ZB-2p, GB', 'speed-up']
    return _section('Table 9: no more microbatches than GPUs', heads, rows)


def _arxiv_table_6(speedup: Ratios) -> str:
    names = ('zb-v', 'zb-2p', 'zb-1p')
    rows = []
    for setting in paper.V_SHAPE:
        measured = setting.throughput
        base = max(v_shape_timeline('1f1b', setting).windows)
        row = []
        for name in names:
            factor = 2 if name == 'zb-2p' else 1  # half the samples, for equal memory
            predicted = base / max(v_shape_timeline(name, setting, factor).windows)
            row.append(_cell(measured[name] / measured['1f1b'], predicted, speedup[name]))
        rows.append([setting.model, setting.num_ranks, setting.num_microbatches, *row])
    heads = ['model', 'p', 'm', *(LABELS[name] for name in names)]
    return _section('arXiv Table 6: equal memory, speed-up over 1F1B', heads, rows)


def _arxiv_table_7() -> str:
    rows = [
        [model.name, *(_cell(after / before, 1.0) for before, after in of_schedules)]
        for model, *of_schedules in zip(paper.MODELS[1:], *paper.DOUBLED.values(), strict=True)
    ]
    heads = ['model', *(LABELS[name] for name in paper.DOUBLED)]
    return _section('arXiv Table 7: what twice the samples in a microbatch gain', heads, rows)


def _arxiv_table_8() -> str:
    rows = []
    for setting in paper.V_SHAPE:
        cells = (
            f'{rate:.4f}/{v_shape_timeline(name, setting).bubble_window:.4f}'
            for name, rate in setting.rates.items()
        )
        rows.append([setting.model, setting.num_ranks, setting.num_microbatches, *cells])
    heads = ['model', 'p', 'm', *(LABELS[name] for name in paper.V_SHAPE[0].rates)]
    return _section(
        'arXiv Table 8: bubble rates, computed by the paper / simulated here', heads, rows
    )


def _settings() -> list[tuple[int, int]]:
    """Model and number of microbatches of each row of Tables 4 to 8, by their places."""
    return [(i, k) for i in range(len(paper.MODELS)) for k in range(3)]


def _setting(i: int, k: int) -> list[object]:
    return [paper.MODELS[i].name, paper.MODELS[i].num_ranks, paper.MICROBATCHES[i][k]]


def _predicted(name: str, i: int, k: int, factor: int = 1) -> Prediction:
    return predict(name, paper.MODELS[i], paper.MICROBATCHES[i][k], paper.PASS_TIMES[i][k], factor)


def _cell(measured: float, predicted: float, ratios: list[float] | None = None) -> str:
    """Return both and their ratio, which goes to `ratios`, too."""
    ratio = measured / predicted
    if ratios is not None:
        ratios.append(ratio)
    return f'{measured:.4g}/{predicted:.4g}={ratio:.2f}'


def _section(title: str, heads: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    return f'## {title}\n\n{table(heads, rows)}\n'


def table(heads: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Return a table as Markdown."""
    head, *cells = ('| ' + ' | '.join(map(str, line)) + ' |' for line in (heads, *rows))
    return '\n'.join([head, '|' + '---|' * len(heads), *cells])
