"""Pictures of one measured iteration, beside the planned one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from megatron_zbpp.analysis.fit_costs import measured_costs
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.guests.base import Change, Guest, ModelLayers, Run
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.plan_costs import stages_file
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.render.html import html
from megatron_zbpp.render.perfetto import perfetto
from megatron_zbpp.runtime.measure import Iteration

_DRAWN = 5  # the iteration to draw: the first ones are slower than others


@dataclass
class Tracer(Guest):
    """Draws one iteration of the first pipeline, and one more after a switch to a planned schedule.

    `planned` is the schedule as the simulator has it: with the times that it was planned for, those
    of a file in the unit of what was measured; a schedule by name was planned for none, and takes
    those that were measured.
    """

    folder: Path  # of `pipeline.html`, `pipeline.perfetto.json`, and `stages.json` with a layout
    _seen: int = 0
    _costs: Costs | None = None
    _before: Timeline | None = None
    _layout: str | None = None

    def starts(self, describe: Callable[[], ModelLayers]) -> None:
        self._layout = describe().layout

    def after(self, iteration: Iteration, run: Run) -> None:
        """Draw the ended `iteration` if it is the chosen one: a collective of its pipeline."""
        self._seen += 1
        if self._seen != _DRAWN:
            return
        measured = iteration.gather().timeline
        if dist.get_rank() == 0:
            self.draw(measured)
            self._before = measured

    def changed(self, change: Change) -> None:
        self._seen, self._costs = 0, change.costs

    def draw(self, measured: Timeline) -> None:
        """Write the files."""
        fitted, own = measured_costs(measured), measured.schedule.costs
        planned = simulate(measured.schedule, self._costs or own or fitted)
        if self._costs is None and own is not None:
            ranks = range(measured.schedule.num_ranks)
            ours, theirs = (sum(map(line.busy, ranks)) for line in (planned, measured))
            factor = theirs / ours if ours else 1.0
            spans = (((a * factor, b * factor) for a, b in own) for own in planned.spans)
            planned = replace(planned, spans=tuple(map(tuple, spans)))
        lines = {'planned': planned, 'measured': measured}
        if self._before is not None:
            lines[f'measured before, {self._before.schedule.name}'] = self._before
        costs = dict.fromkeys(lines, fitted)  # for what is held, which all of them count alike
        after = '' if self._costs is None else ' after the switch to it'
        title = f'{measured.schedule.name}, iteration {_DRAWN}{after}'
        took = 'this iteration' if self._costs is None else 'the iterations before the switch'
        heading = f'planned: simulated, with the times that passes took in {took}'
        if self._costs is None and own is not None:
            heading = (
                'planned: simulated, with the times of the plan, all longer or shorter by one '
                'factor: passes take as long as they took, in sum'
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        page = html(lines, costs, title, unit='s', heading=heading)
        (self.folder / 'pipeline.html').write_text(page)
        routes = measured.schedule.placement.routes
        (self.folder / 'stages.json').write_text(stages_file(fitted, self._layout, routes))
        trace = {name: line for name, line in lines.items() if line is not planned}
        (self.folder / 'pipeline.perfetto.json').write_text(perfetto(trace, costs))


def writable(trace_dir: object) -> Path:
    """Return the folder that is given for pictures, which rank 0 can write."""
    if not isinstance(trace_dir, str | Path) or not str(trace_dir):
        raise ValueError(f'trace_dir is {trace_dir!r}: give the path of a folder, or None')
    path = Path(trace_dir)
    if path.exists() and not path.is_dir():
        raise ValueError(f'trace_dir is {str(path)!r}, which is a file: give the path of a folder')
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    try:
        if int(os.environ.get('RANK', 0)) == 0:  # which writes them
            tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ValueError(
            f'trace_dir is {str(path)!r}, but nothing can be written in {there} '
            f'({error.strerror}): give the path of another folder'
        ) from error
    return path
