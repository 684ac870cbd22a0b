"""Says at the start of a training, once and on one rank, what runs."""

from __future__ import annotations

from typing import Any

from megatron_zbpp.analysis.gain import RIVAL, gain_text, makespan_of, megatron_refuses
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.runtime.log import job_log
from megatron_zbpp.techniques.composition import VOCABULARY, techniques_of
from megatron_zbpp.version import __version__

# whether steps are taken late
_NORMS = {
    False: 'each step makes the weights of the next forward',
    True: 'steps are taken within the next call, once the norm of all gradients is there, so that '
    'norm and success in the log are of the step before',
}


def announce(schedule: Schedule, config: Any) -> None:
    """Log what runs, on the first rank of the job."""
    for line in lines(schedule, config):
        job_log.info(line)


def lines(schedule: Schedule, config: Any) -> list[str]:
    """Return schedule and sizes, layers of each rank, simulated bubble, simulated memory."""
    placement = schedule.placement
    by_stage = _by_stage(config)
    costs = alike = Costs.known(schedule, by_stage or ())
    by_layers = ', by layers' if by_stage and len({*by_stage}) > 1 else ''
    times = f'F = B = W{by_layers}' if schedule.costs is None else 'the costs of the plan'
    rival = RIVAL
    if VOCABULARY in techniques_of(schedule):
        from megatron_zbpp.techniques.vocabulary.place import (
            USUAL_SHARE,
            WHOLE,
            rival_costs,
            with_usual_share,
        )

        costs = with_usual_share(schedule, costs)
        alike = rival_costs(schedule, costs)
        rival += WHOLE
        times += '' if schedule.costs else f', shards {USUAL_SHARE}'
    timeline, late = simulate(schedule, costs), asynchrony(schedule)
    least = makespan_of(RIVAL, schedule, alike)
    m = late[0] if late else schedule.num_microbatches
    found = [
        f'version {__version__}: {schedule.name} on {schedule.num_ranks} ranks x '
        f'{placement.num_chunks} chunks, {m} microbatches'
        f'{_slices(schedule)}',
        f'layers of each rank, by chunk: {_layers(schedule, config)}',
        late[1]
        if late
        else f'simulated with {times}: idle GPU time {timeline.idle_all_ranks:.1%}'
        f'{gain_text(timeline.makespan, least, rival)}',
        f'simulated memory: {_held(schedule, max(peak(schedule, costs)))}',
    ]
    if schedule.graph.num_slices > 1 and getattr(config, 'num_moe_experts', None):
        found.append(
            'auxiliary losses of experts are those of each slice, weighed by its tokens: not quite '
            'those of whole sequences'
        )
    if refused := megatron_refuses(placement, m):
        found.append(refused)
    return found


def _held(schedule: Schedule, most: float) -> str:
    if schedule.costs is None:
        return f'{most:.1f} activations of a microbatch on a full rank'
    return f'{most:.4g} in the unit of the plan'


def asynchrony(schedule: Schedule) -> tuple[int, str] | None:
    """Return the microbatches of a call, and how it differs from training with Megatron's own.

    None: the schedule is synchronous.
    """
    if not any(kind.of_weights for kind in schedule.graph.kinds.values()):
        return None
    from megatron_zbpp.runtime.endless import steps_late
    from megatron_zbpp.techniques.updates.versions import copies, delays, updates_of

    updates = updates_of(schedule.graph)
    assert updates is not None, 'of our own families'
    late = ' '.join(f'{each.mean:g}' for each in delays(schedule))
    kept = ' '.join(map(str, copies(schedule)))
    return updates.every, (
        f'asynchronous, trains another model than 1F1B: weights of forwards are {late} steps old '
        f'in the mean of each stage, of which there are {kept} copies; '
        + _NORMS[steps_late(updates)]
    )


def _slices(schedule: Schedule) -> str:
    """Return such as ` of 4 slices`; empty: sequences are whole."""
    slices = schedule.graph.num_slices
    return f' of {slices} slices' if slices > 1 else ''


def _layers(schedule: Schedule, config: Any) -> str:
    """Return such as `2+2, 2+2`; as Megatron divides them where no layout says otherwise."""
    placement = schedule.placement
    by_stage = _by_stage(config)
    if by_stage is None:
        total = getattr(config, 'num_layers', None)
        return 'as the model has them' if total is None else f'{total} in all, divided by Megatron'
    ranks = (placement.stages(rank) for rank in range(placement.num_ranks))
    return ', '.join('+'.join(str(by_stage[stage]) for stage in own) for own in ranks)


def _by_stage(config: Any) -> list[int] | None:
    """Return the layers of each stage in model order; None: no layout says."""
    layout = getattr(config, 'pipeline_model_parallel_layout', None)
    return getattr(layout, 'num_layers', None)
