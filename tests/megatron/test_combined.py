"""Forwards and backwards that Megatron's combined step runs as one, so that the experts'
all-to-all of one hides behind the other: to the bit as by Megatron's own schedules, which run them
apart (1F1B) or do the same (interleaved, with the overlap)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import events
import pytest
from collectives import counted
from grids import some
from nvidia import SCRIPT, by, go_on, launch, needs_training, run
from outcome import of_all, refusal
from supported import refuses, supports
from test_auto import told
from test_collectives import TP, norms_for_sequence_parallelism, of_tensor_parallelism
from test_launch import MOE, NO_CLIPPING

from megatron_zbpp.guests import measurements
from megatron_zbpp.ir import Pass
from megatron_zbpp.mcore.lowered import for_megatron
from megatron_zbpp.schedules import build

pytestmark = needs_training

M = 8
EXPERTS = [*MOE, '--expert-model-parallel-size', 2, '--disable-bias-linear']
BASE = [*NO_CLIPPING, '--global-batch-size', 2 * M, '--train-iters', 3]
BASE += ['--untie-embeddings-and-output-weights', '--position-embedding-type', 'rope']
OVERLAP = '--overlap-moe-expert-parallel-comm'
OURS = ['--pipeline-schedule', 'dualpipe-v', OVERLAP]
# other models; what each lacks of the experts' flags is their default
MODELS = {
    'experts': [],
    'first layer dense': ['--moe-layer-freq', '[0]+[1]*{rest}'],
    'shared expert': ['--moe-shared-expert-intermediate-size', 32],
    'gradients reduced while passes run': ['--overlap-grad-reduce'],
    'fp16': ['--fp16', '--initial-loss-scale', 1024],
}


@contextmanager
def combined_steps(training: Any) -> Iterator[list[tuple[str | int, ...]]]:
    """What each combined step of the last iteration ran, by microbatch and chunk of this rank. And
    how many layers it ran of both at once."""
    from megatron.core.models.common import model_chunk_schedule_plan as plans
    from megatron.core.pipeline_parallel import combined_1f1b

    found: list[tuple[str | int, ...]] = []
    named: dict[int, str] = {}
    layers = [0]
    step, train_step = combined_1f1b.combined_forward_backward_step, training.train_step
    run_layer = plans.TransformerLayerSchedulePlan.run

    def noting_step(*args: Any, **given: Any) -> Any:
        back = given['b_output_tensor']
        done = [] if back is None else [f'BW{named.pop(id(back.schedule_plan))}']
        layers[0] = 0
        made = step(*args, **given)
        if given['f_model'] is not None:
            name = f'{given["f_model_chunk_id"]}.{given["current_microbatch"]}'
            named[id(made[0].schedule_plan)] = name
            done.insert(0, f'F{name}')
        found.append((*done, layers[0]))
        return made

    def noting_layer(f_layer: Any, b_layer: Any, *args: Any, **given: Any) -> Any:
        layers[0] += f_layer is not None and b_layer is not None
        return run_layer(f_layer, b_layer, *args, **given)

    def counting_step(*args: Any, **given: Any) -> Any:
        found.clear()
        return train_step(*args, **given)

    with (
        mock.patch.object(combined_1f1b, 'combined_forward_backward_step', noting_step),
        mock.patch.object(plans.TransformerLayerSchedulePlan, 'run', staticmethod(noting_layer)),
        mock.patch.object(training, 'train_step', counting_step),
    ):
        yield found


def planned(p: int, rank: int, layers: int) -> list[tuple]:
    """The same by the schedule: what runs as one is one entry, a W by itself none."""
    schedule = for_megatron(build('dualpipe-v', p, M, together=True))
    held = schedule.placement.stages(rank)
    entries = []
    for entry in schedule.order(rank):
        passes = (entry,) if isinstance(entry, Pass) else entry.passes
        words = tuple(
            f'{"F" if q.kind == "F" else "BW"}{held.index(q.stage)}.{q.microbatch}'
            for q in passes
            if q.kind != 'W'
        )
        if words:
            entries.append((*words, layers if len(words) > 1 else 0))
    return entries


def flags_of(model: str, p: int) -> list:
    words = [str(word).format(rest=2 * p - 1) for word in MODELS[model]]
    words += [] if '--fp16' in words else ['--bf16']
    return [*BASE, *EXPERTS, *words, '--num-layers', 2 * p, '--pipeline-model-parallel-size', p]


@supports('overlapped communication of experts: {model}', 'dualpipe-v')
@some('p, model', [(2, 'experts')], *product((2, 4), MODELS))
def test_identical_to_megatron(ranks, tmp_path, p, model):
    """From a checkpoint of Megatron's own 1F1B; each cell is one combined step, as planned."""
    found, _ = go_on(ranks(2 * p), tmp_path, flags_of(model, p), OURS, event=combined_steps)
    require_joined(found)
    for rank, steps in enumerate(found.reported if model == 'experts' else ()):
        assert steps == planned(p, rank // 2, layers=1)


INTERLEAVED = ['--num-virtual-stages-per-pipeline-rank', 2, OVERLAP]


@supports(
    "overlapped communication of experts, beside Megatron's interleaved with it", 'dualpipe-v'
)
@some('p', [2], 4)
def test_identical_to_what_megatron_overlaps(ranks, tmp_path, p):
    """Its own schedule with the same step; both from one checkpoint."""
    how = {'theirs': INTERLEAVED, 'stock_event': events.aliased_sends}
    go_on(ranks(2 * p), tmp_path, flags_of('experts', p), OURS, **how)


TE = ['--transformer-impl', 'transformer_engine', '--moe-grouped-gemm']
# of which Megatron's own layers have no part: `k_channels`, and from 0.20 on a norm to compare with
MODELS_OF_TE = {
    'in one product': [],
    'in one product, multi-token prediction': ['--mtp-num-layers', 1],
    'in one product, attention in few dimensions': """--multi-latent-attention --q-lora-rank 16
        --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16""".split(),
}


@pytest.mark.te
@supports('overlapped communication of experts {model}', 'dualpipe-v')
@some('p, model', [(2, 'in one product')], *product((2, 4), MODELS_OF_TE))
def test_transformer_engine(te_ranks, tmp_path, p, model):
    """Whose modules delay weight gradients, though Megatron's plans are to find that none does."""
    flags, ours = [*flags_of('experts', p), *TE, *MODELS_OF_TE[model]], ['--delay-wgrad-compute']
    require_joined(go_on(te_ranks(2 * p), tmp_path, flags, [*OURS, *ours], event=combined_steps)[0])


def require_joined(found: Any) -> None:
    """Each rank ran some passes as one."""
    assert all(any(len(step) > 2 for step in steps) for steps in found.reported)


SHARDED = ['--tensor-model-parallel-size', 2, '--sequence-parallel', '--train-iters', 2]
SHARDED += ['--expert-tensor-parallel-size', 1, '--global-batch-size', M // 2]


@contextmanager
def collectives_and_cells(training: Any) -> Iterator[tuple[Counter[str], list]]:
    """Collectives of tensor parallelism, and what combined steps ran."""
    with (
        norms_for_sequence_parallelism(),
        counted(of_tensor_parallelism) as found,
        events.unseen_before_the_first(found),
        combined_steps(training) as steps,
    ):
        yield found, steps


def sharded(ranks: Any, *argv: Any) -> tuple[Counter[str], bool]:
    """Collectives of both iterations, of all ranks; whether each ran some passes as one."""
    flags = [*flags_of('experts', 2), *SHARDED, *argv]
    reported = run(ranks, *flags, event=collectives_and_cells).reported
    joined = all(any(len(step) > 2 for step in steps) for _, steps in reported)
    return sum((found for found, _ in reported), Counter()), joined


def check_collectives(ranks: Any, *argv: Any) -> None:
    """A pass that runs as one with another gathers as often as stock does; W passes once more. Of a
    layer's products those of the attention are parallel; W needs the gradient of the output of one
    of them as a whole, which B has gathered, too."""
    theirs, _ = sharded(ranks, *argv)
    ours, joined = sharded(ranks, *argv, *OURS)
    assert joined and theirs['reduce-scatter']
    schedule = build('dualpipe-v', 2, M // 2, together=True)
    split = sum(p.kind == 'W' for order in schedule.passes for p in order)
    assert ours == theirs + Counter({'all-gather': 2 * TP * split})


@pytest.mark.te
def test_collectives_of_transformer_engine(te_ranks):
    check_collectives(te_ranks(4), *TE)


@pytest.mark.full
def test_collectives(ranks):
    check_collectives(ranks(4))


@pytest.mark.full
@supports('overlapped communication of experts', '{schedule}')
@pytest.mark.parametrize('schedule', ['dualpipe-v+post-validation', 'stp'])
def test_other_schedules(ranks, tmp_path, schedule):
    """Of STP F & B run as one; Megatron has nothing for its F & F and F & W, which run apart."""
    flags, ours = [*flags_of('experts', 2), '--train-iters', 6], [*by(schedule), OVERLAP]
    require_joined(go_on(ranks(4), tmp_path, flags, ours, event=combined_steps)[0])


@pytest.mark.full
@supports('overlapped communication of experts, by a file with such cells', 'dualpipe-v')
def test_a_file(ranks, tmp_path):
    """A schedule of one's own, without a W, with evaluation between."""
    schedule = for_megatron(build('dualpipe-v', 2, M, together=True))
    orders = [_whole(schedule.order(rank)) for rank in range(2)]
    own = schedule.of('own', schedule.placement, M, orders)
    (tmp_path / 'own.json').write_text(own.to_json())
    flags = [*flags_of('experts', 2), '--eval-interval', 2, '--eval-iters', 1, '--split', '90,10,0']
    ours = [OVERLAP, '--pipeline-schedule-file', tmp_path / 'own.json']
    go_on(ranks(4), tmp_path, flags, ours)


def _whole(order: Any) -> Iterator[Any]:
    for entry in order:
        if not isinstance(entry, Pass):
            yield entry
        elif entry.kind != 'W':
            yield entry._replace(kind='BW') if entry.kind == 'B' else entry


@contextmanager
def hiding(training: Any) -> Iterator[tuple[list[str], list]]:
    """What auto says, and what combined steps ran, where cells take half of their passes' time. On
    a CPU nothing hides."""
    fit = measurements.measured_costs
    measured = []

    def halved(*args: Any) -> Any:
        measured.append(fit(*args))
        return replace(measured[-1], together=0.5)

    with (
        told(training, switching=True, seconds=1.0) as said,
        combined_steps(training) as steps,
        mock.patch.object(measurements, 'measured_costs', halved),
    ):
        yield said, steps
    assert all(costs.together != 1 for costs in measured), 'cells are measured'


@supports('overlapped communication of experts, by what cells were measured to take', 'auto')
@some('p', [2], 4)
def test_auto(ranks, tmp_path, p):
    """It begins with dualpipe-v, and switches to a plan with cells."""
    flags = [*flags_of('experts', p), '--train-iters', 7]
    auto = [*by('auto'), '--pipeline-schedule-profile-iters', 1, OVERLAP]
    found, _ = go_on(ranks(2 * p), tmp_path, flags, auto, event=hiding)
    assert any('switches' in line for line in found.reported[0][0])
    for _, steps in found.reported:
        assert any(len(step) > 2 for step in steps)


def test_auto_with_one_chunk_is_refused(ranks):
    flags = [*flags_of('experts', 2), OVERLAP, '--pipeline-schedule', 'auto']
    flags += ['--num-virtual-stages-per-pipeline-rank', 1]
    said = refusal(of_all(ranks(4).run(launch, *map(str, flags))), SCRIPT.name)
    assert 'this schedule has no forward that runs as one with a backward; take dualpipe-v' in said


@refuses(
    'overlapped communication of experts, offload', 'Megatron frees what would go', 'dualpipe-v'
)
def test_offload_is_refused(ranks):
    flags = [*flags_of('experts', 2), *OURS, '--pipeline-offload', 'half']
    said = refusal(of_all(ranks(4).run(launch, *map(str, flags))), SCRIPT.name)
    assert 'Megatron frees what layers of such a pair pass to each other' in said
    assert 'drop --overlap-moe-expert-parallel-comm, or take a schedule without offload' in said


@supports("NVIDIA's loop: overlapped communication of experts, two-way", 'dualpipe')
@pytest.mark.full
def test_a_two_way_pipeline(ranks, tmp_path):
    """Its pairs run as one, over experts that both replicas share."""
    ours = [*by('dualpipe'), OVERLAP]
    found, _ = go_on(ranks(4), tmp_path, flags_of('experts', 2), ours, event=combined_steps)
    assert any(found.reported), 'steps that ran both'
