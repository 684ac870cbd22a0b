r"""Tables in other formats than text.

>>> print(markdown(('schedule', 'gain'), [('zb-v', '22.7%')]))
| schedule | gain |
|---|---:|
| zb-v | 22.7% |
>>> print(latex(('schedule', 'gain'), [('zb-v', '22.7%')]))
\begin{tabular}{lr}
schedule & gain \\
\hline
zb-v & 22.7\% \\
\end{tabular}
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence

Rows = Sequence[Sequence[object]]
_LATEX = {
    '\\': r'\textbackslash{}',
    '~': r'\textasciitilde{}',
    '^': r'\textasciicircum{}',
    **{sign: f'\\{sign}' for sign in '&%$#_{}'},
}


def text(heads: Sequence[str], rows: Rows) -> str:
    """Return columns as wide as they need be: the first to the left, the others to the right."""
    lines = [tuple(map(str, line)) for line in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return '\n'.join(
        '  '.join(
            [
                first.ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)),
            ]
        )
        for first, *others in lines
    )


def markdown(heads: Sequence[str], rows: Rows) -> str:
    """Return a table of GitHub's Markdown."""
    rule = '|'.join(['', '---', *('---:' for _ in heads[1:]), ''])
    head, *lines = (
        f'| {" | ".join(str(cell).replace("|", chr(92) + "|") for cell in line)} |'
        for line in (heads, *rows)
    )
    return '\n'.join([head, rule, *lines])


def comma_separated(heads: Sequence[str], rows: Rows) -> str:
    """Return lines of CSV, their cells as people see them."""
    written = io.StringIO()
    csv.writer(written, lineterminator='\n').writerows([heads, *rows])
    return written.getvalue().removesuffix('\n')


def latex(heads: Sequence[str], rows: Rows) -> str:
    """Return a tabular, which needs no package."""
    head, *lines = (
        ' & '.join(''.join(_LATEX.get(sign, sign) for sign in str(cell)) for cell in line)
        for line in (heads, *rows)
    )
    columns = 'l' + 'r' * (len(heads) - 1)
    ends = ''.join(f'{line} \\\\\n' for line in lines)
    return f'\\begin{{tabular}}{{{columns}}}\n{head} \\\\\n\\hline\n{ends}\\end{{tabular}}'


FORMATS: Mapping[str, Callable[[Sequence[str], Rows], str]] = {
    'text': text,
    'md': markdown,
    'csv': comma_separated,
    'latex': latex,
}
