"""The search for a better partition of the layers, beside the training, by `auto`.

Layers cannot move while a run lasts. What is found becomes a plan's file, for the next start.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.guests.autotune.background import BackgroundSearch, partition_text
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.partitioning.devices import Devices
from megatron_zbpp.partitioning.fitting import fit_layers, measured_devices
from megatron_zbpp.partitioning.layers import Layers
from megatron_zbpp.partitioning.space import Partition, stage_costs
from megatron_zbpp.planner.cache import default_folder

_WORTH = 0.01  # the least gain that a new start is worth


@dataclass(frozen=True)
class Looked:
    """The start of a search for a partition.

    Attributes:
        layers: whose costs are fitted to the times of stages that were measured.
        error: the largest of a stage, as a share.
        devices: of the pipeline, those of slower ranks with a factor; with the links' latency.
        now: what an iteration takes with the layers where they are, by those costs, in seconds.
    """

    layers: Layers
    error: float
    devices: Devices
    now: float

    @property
    def unequal(self) -> str:
        """Ranks slower or faster than others at the same layers, for messages; '' if none is."""
        return ', '.join(
            f'rank {rank} takes {device.factors[0]:.3g} times as long'
            for rank, device in enumerate(self.devices.devices)
            if device.factors[0] != 1
        )


def look(
    layout: str, schedule: Schedule, costs: Costs, objective: str, layers_alike: bool = True
) -> Looked:
    """Return what is known of the layers and ranks from the times of the stages.

    Args:
        layout: of the layers, in model order.
        schedule: that runs.
        costs: measured, of its stages.
        objective: 'makespan' or 'window'.
        layers_alike: whether layers of a letter are; if not, no rank is taken for a slower one.

    Raises:
        ValueError: the layout has another number of stages.
    """
    placement, stages = schedule.placement, layout.split('|')
    devices = measured_devices(stages, placement, costs, layers_alike)
    factors = [devices.devices[rank].factors[0] for rank in placement.only_route]
    layers, error = fit_layers([(layout, costs)], factors=factors)
    where = Partition(placement, tuple(map(len, stages)), tuple(range(placement.num_ranks)))
    fitted = stage_costs(layers, devices, where)
    return Looked(layers, error, devices, simulate(schedule, fitted).value(objective))


@dataclass(frozen=True)
class Repartition:
    """A search for a better partition, on the rank that plans.

    Attributes:
        search: beside the training.
        looked: what it starts from.
        objective: 'makespan' or 'window'.
        say: tells the user.
    """

    search: BackgroundSearch
    looked: Looked
    objective: str
    say: Callable[[str], None]

    @classmethod
    def start(
        cls,
        looked: Looked,
        num_microbatches: int,
        limit: float | None,
        seconds: float,
        objective: str,
        say: Callable[[str], None],
    ) -> Repartition | None:
        """Start a search within `limit` measured activations a rank, or within any (None).

        Returns:
            None: it cannot be started, and the user is told.
        """
        inputs = looked.layers, looked.devices, num_microbatches, limit
        call = partial(partition_text, *inputs, seconds, objective)
        search = BackgroundSearch.start('the search for a partition', call, seconds, say)
        return None if search is None else cls(search, looked, objective, say)

    def finished(self) -> bool:
        """Return whether there is nothing more to wait for; tell the user what was found, once."""
        if not self.search.ended():
            return False
        text = self.search.answer()
        if text:
            self._report(text)
        else:
            self.say('auto: no other partition of the layers was found, see above')
        return True

    def end(self) -> None:
        """Give it up."""
        self.search.end()

    def _report(self, text: str) -> None:
        plan, looked = json.loads(text), self.looked
        expected = plan[self.objective]
        gain = 1 - expected / looked.now if looked.now else 0.0
        fit = f'layers fitted to stages within {looked.error:.1%}'
        fit += f'; {looked.unequal} for its layers' if looked.unequal else ''
        if gain < _WORTH:
            self.say(f'auto: no other partition of the layers gains {_WORTH:.0%} ({fit})')
            return
        times = f'{expected * 1e3:.1f} ms instead of {looked.now * 1e3:.1f} ms predicted'
        holds = f'it holds {max(plan["peak_activations"]):.3g} activations'
        what = f'auto: the partition {plan["layout"]} would be {gain:.1%} faster'
        what += f' ({times}, {fit}; {holds})'
        try:
            path = _written(text)
        except OSError as error:
            self.say(f'{what}; its plan could not be written ({error})')
            return
        self.say(
            f'{what}; layers do not move while a run lasts: start again from a checkpoint with '
            f'--pipeline-schedule-file {path}'
        )


def _written(text: str) -> Path:
    plans = default_folder()
    folder = Path() if plans is None else plans.parent / 'partitions'
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f'{sha256(text.encode()).hexdigest()[:16]}.json'
    path.write_text(text, encoding='utf-8')
    return path.absolute()
