"""Tables of trainings that leave, to the bit, what Megatron's own schedule leaves.

    test_identical_to_megatron = trains(
        'activation offload',
        {'te': False, 'offload': 'all'},
        row(': GPT', ('zb-v', 'po'), offload=('all', 'half', '1'), fused=(False, True)),
        row(': GPT on 4 ranks', 'zb-h1', pp=4),
    )

A row is a feature, as docs/support.csv has it, with schedules and fields of a job (`models.Job`).
Each case trains by the schedule and by Megatron's own, whose outcome is kept (`stock`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from grids import covering
from models import Job, check
from supported import supports, worded

from megatron_zbpp.ir import Schedule


@dataclass(frozen=True)
class Training:
    row: str  # the feature of all cases of the row, unfilled
    job: Job
    schedule: str  # a name, with +post-validation if optimizer steps are to be validated later
    plan: Callable[[str, Job], Schedule] | None  # gives a schedule that a file has instead
    than: str  # of the reference, without offload and recomputation of ours; 'same': `schedule`
    moves: bool | None  # whether activations leave the device; None: where the job has an offload

    def check(self, ranks: Callable, data: Path, folder: Path) -> None:
        """Train it and its reference on `ranks`, and compare them."""
        job = self.job
        if self.plan is not None:
            file = folder / 'plan.json'
            file.write_text(self.plan(self.schedule, job).to_json())
            job = replace(job, file=str(file))
        than = self.schedule if self.than == 'same' else self.than
        check(ranks, data, self.schedule, job, than, self.moves)


class Row(NamedTuple):
    """A grid of cases (see `grids.grid`) that show a feature.

    Attributes:
        feature: with names of what differs from case to case, such as {pp}.
        schedules: a name, or several.
        when: which combinations there are.
        full: whether each run can spare all of them.
        fields: of the job, and `than`, `moves` and `plan` of `Training`. A tuple has alternatives;
            a dict has them by a name, each with fields, which count before all others.
    """

    feature: str
    schedules: str | tuple[str, ...]
    when: Callable[..., bool]
    full: bool
    fields: dict[str, Any]

    def cases(self, common: str, defaults: dict[str, Any]) -> Iterator[Any]:
        """Yield parameters of a test; `common` begins all features, `defaults` are fields."""
        feature = common + self.feature
        fields = {'schedule': self.schedules, 'than': 'megatron', 'moves': None, 'plan': None}
        fields |= defaults | self.fields
        many = {n: tuple(value) for n, value in fields.items() if isinstance(value, tuple | dict)}
        for case, spared in covering(self.when, many):
            own = fields | case
            text = feature.format(**worded(own))
            marks = [supports(text, own['schedule'])] if feature else []
            marks += [pytest.mark.full] if spared or self.full else []
            values = [str(value) for name, value in case.items() if f'{{{name}}}' not in feature]
            for name in [name for name, value in fields.items() if isinstance(value, dict)]:
                own |= fields[name][own.pop(name)]
            told = [own.pop(name) for name in ('schedule', 'plan', 'than', 'moves')]
            name = '-'.join(filter(None, [text, *values]))
            yield pytest.param(Training(feature, Job(**own), *told), id=name, marks=marks)


def row(
    feature: str,
    schedules: str | tuple[str, ...],
    when: Callable[..., bool] = lambda **case: True,
    full: bool = False,
    **fields: Any,
) -> Row:
    return Row(feature, schedules, when, full, fields)


def trains(common: str, defaults: dict[str, Any], *rows: Row, te: bool = False) -> Callable:
    """Return a test of rows.

    Args:
        common: with what each feature begins; if all is empty, none is shown.
        defaults: fields of all rows.
        rows: see `Row`.
        te: whether on ranks that have Transformer Engine.
    """
    cases = [case for each in rows for case in each.cases(common, defaults)]

    def on_ranks(ranks: Any, data: Path, tmp_path: Path, training: Training) -> None:
        training.check(ranks, data, tmp_path)

    def on_te_ranks(te_ranks: Any, data: Path, tmp_path: Path, training: Training) -> None:
        training.check(te_ranks, data, tmp_path)

    test = pytest.mark.te(on_te_ranks) if te else on_ranks
    return pytest.mark.parametrize('training', cases)(test)
