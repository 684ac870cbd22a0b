"""Pictures of one iteration as it was, beside what the simulator makes of its times."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_zbpp.planning.fit import fit, latency
from megatron_zbpp.planning.simulate import simulate
from megatron_zbpp.render.html import html
from megatron_zbpp.render.perfetto import perfetto
from megatron_zbpp.runtime.measure import Iteration

_DRAWN = 5  # the iteration to draw: the first ones are slower than others


@dataclass
class Tracer:
    """Draws one iteration of the first pipeline.

    Args:
        folder: takes `pipeline.html` and `pipeline.perfetto.json`; made where it is not there.
    """

    folder: Path
    _seen: int = 0

    def after(self, iteration: Iteration) -> None:
        """Draws `iteration`, which has ended, if it is the one: a collective of its pipeline."""
        self._seen += 1
        if self._seen != _DRAWN:
            return
        measured = iteration.gather().timeline
        if dist.get_rank() == 0:
            costs = fit(measured, latency(measured))
            lines = {'measured': measured, 'simulated': simulate(measured.schedule, costs)}
            self.folder.mkdir(parents=True, exist_ok=True)
            title = f'{measured.schedule.name}, iteration {_DRAWN}'
            (self.folder / 'pipeline.html').write_text(html(lines, title=title, unit='s'))
            (self.folder / 'pipeline.perfetto.json').write_text(perfetto({'measured': measured}))
