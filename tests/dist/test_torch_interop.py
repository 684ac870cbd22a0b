"""Our schedules run in torch.distributed.pipelining, and its CSVs load and are checked here."""

import csv
import io
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_executor import check_run
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from megatron_zbpp.analysis.checker import ScheduleError, check
from megatron_zbpp.ir import Schedule, formats
from megatron_zbpp.schedules import build, names

WIDTH, ROWS = 8, 3  # of a tiny stage's layer, and of one microbatch
PATIENCE = timedelta(seconds=60)
RANKS = (2, 4)


def stage_module(stage: int) -> torch.nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(stage)
        layer = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    return torch.nn.Sequential(layer, torch.nn.Tanh())


def batch(num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(99)
    return torch.randn(
        2, num_microbatches * ROWS, WIDTH, generator=generator, dtype=torch.float64
    ).unbind()


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).sum()


def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters()]


def run_in_torch(folder: Path) -> None:
    """One of the ranks: runs all CSVs, those for two ranks on the first two."""
    for size in RANKS:
        group = dist.new_group(list(range(size)), timeout=PATIENCE)
        if dist.get_rank() < size:
            run_files(folder / str(size), dist.get_rank(), group)
            dist.destroy_process_group(group)


def run_files(folder: Path, rank: int, group: dist.ProcessGroup) -> None:
    """torch's runtime on each CSV in `folder`; leaves the gradients of the rank's stages there."""
    for file in sorted(folder.glob('*.csv')):
        schedule = formats.load(file)
        held = schedule.placement.stages(rank)
        modules = [stage_module(stage) for stage in held]
        stages = [
            PipelineStage(module, stage, schedule.num_stages, torch.device('cpu'), group=group)
            for stage, module in zip(held, modules, strict=True)
        ]
        runtime = torch_schedules._PipelineScheduleRuntime(
            stages, schedule.num_microbatches, loss_fn=loss_of, scale_grads=False
        )
        runtime._load_csv(str(file))
        x, target = batch(schedule.num_microbatches)
        runtime.step(*([x] if 0 in held else []), target=target)
        for stage, module in zip(held, modules, strict=True):
            torch.save(gradients(module), folder / f'{file.stem}.{stage}.pt')


@pytest.fixture(scope='module')
def ran(ranks, tmp_path_factory):
    """By number of ranks, a folder with the CSVs of our schedules and what came of them."""
    folder = tmp_path_factory.mktemp('torch')
    for size in RANKS:
        (folder / str(size)).mkdir()
        for name in names(plain=True):
            text = formats.to_torch_csv(build(name, size, 2 * size))
            (folder / str(size) / f'{name}.csv').write_text(text)
    ranks(max(RANKS)).run(run_in_torch, folder)
    return folder


@pytest.mark.parametrize('name', names(plain=True))
@pytest.mark.parametrize('num_ranks', RANKS)
def test_ours_runs_in_torch(ran, num_ranks, name):
    folder = ran / str(num_ranks)
    schedule = formats.load(folder / f'{name}.csv')
    modules = [stage_module(stage) for stage in range(schedule.num_stages)]
    x, target = batch(schedule.num_microbatches)
    loss_of(torch.nn.Sequential(*modules)(x), target).backward()
    for stage, module in enumerate(modules):
        found = torch.load(folder / f'{name}.{stage}.pt')
        for gradient, wanted in zip(found, gradients(module), strict=True):
            torch.testing.assert_close(gradient, wanted)


def stand_ins(ranks: int, held: list[int]) -> list[SimpleNamespace]:
    """What torch's schedules ask of rank 0's stages to write down an order: no process group."""
    common = {'num_stages': ranks * len(held), 'group_size': ranks, 'group_rank': 0, 'submod': None}
    return [SimpleNamespace(stage_index=stage, **common) for stage in held]


def torch_order(family: type, ranks: int, held: list[int], microbatches: int) -> dict:
    """The order of torch's own schedule for all ranks; rank 0 holds the stages `held`."""
    stages = stand_ins(ranks, held)
    if issubclass(family, torch_schedules.PipelineScheduleSingle):
        return family(stages[0], microbatches)._get_pipeline_order()
    return family(stages, microbatches).pipeline_order


def dumped(order: dict) -> str:
    """What torch's `_dump_csv` writes of it."""
    file = io.StringIO(newline='')
    csv.writer(file).writerows(order.values())
    return file.getvalue()


OTHERS = [
    (torch_schedules.ScheduleInterleaved1F1B, 1, 'loop'),
    (torch_schedules.ScheduleInterleaved1F1B, 2, 'loop'),
    (torch_schedules.ScheduleInterleavedZeroBubble, 1, 'loop'),
    (torch_schedules.ScheduleInterleavedZeroBubble, 3, 'loop'),
    (torch_schedules.ScheduleZBVZeroBubble, 2, 'v'),
    (torch_schedules.ScheduleDualPipeV, 2, 'v'),
]


def their_schedule(
    family: type, chunks: int, placement: str, ranks: int, microbatches: int
) -> Schedule:
    held = [0, 2 * ranks - 1] if placement == 'v' else [ranks * chunk for chunk in range(chunks)]
    return formats.from_torch_csv(dumped(torch_order(family, ranks, held, microbatches)))


@pytest.mark.parametrize(('num_ranks', 'microbatches'), [(2, 4), (4, 8), (4, 12)])
@pytest.mark.parametrize(('family', 'chunks', 'placement'), OTHERS)
def test_theirs_passes_our_checker(family, chunks, placement, num_ranks, microbatches):
    schedule = their_schedule(family, chunks, placement, num_ranks, microbatches)
    check(schedule)
    assert schedule.placement.name == placement
    assert schedule.num_microbatches == microbatches
    assert formats.from_torch_csv(formats.to_torch_csv(schedule)) == schedule


def test_gpipe_drops_what_torch_lowered():
    order = torch_order(torch_schedules.ScheduleGPipe, 4, [0], 8)
    with pytest.warns(UserWarning, match='dropped 4 '):
        check(formats.from_torch_csv(dumped(order)))


@pytest.mark.parametrize('chunks', [1, 2])
def test_breadth_first_goes_back_in_order(ranks, chunks):
    """torch goes back from the last microbatch on; here the first comes first, as gradients are
    added by 1F1B."""
    order = torch_order(torch_schedules.ScheduleLoopedBFS, 2, [2 * k for k in range(chunks)], 3)
    with pytest.warns(UserWarning, match='backwards begin with microbatch 2'):
        schedule = formats.in_microbatch_order(formats.from_torch_csv(dumped(order)))
    assert schedule.passes == build('breadth-first', 2, 3, num_chunks=chunks).passes
    check_run(ranks, schedule)


def test_other_orders_stay():
    """Where stages go back in orders of their own, no number makes them one."""
    text = '0F0,0F1,0B0,0B1\n1F0,1F1,1B1,1B0\n'
    schedule = formats.in_microbatch_order(formats.from_torch_csv(text))
    assert ' '.join(map(str, schedule.passes[1])) == '1F0 1F1 1BW1 1BW0'
    with pytest.raises(ScheduleError):
        check(schedule)


def test_torch_misdraws_1f1b():
    """torch draws the last rank's microbatches from 1 on; it does not run that drawing."""
    order = torch_order(torch_schedules.Schedule1F1B, 4, [0], 8)
    with pytest.warns(UserWarning, match='dropped'):
        schedule = formats.from_torch_csv(dumped(order))
    with pytest.raises(ScheduleError, match='microbatch 8'):
        check(schedule)


def test_lowered_csv_keeps_its_passes():
    """compute_comms, which torch writes by default: what it added is dropped with a note."""
    theirs = torch_schedules.ScheduleZBVZeroBubble(stand_ins(2, [0, 3]), 6)
    with pytest.warns(UserWarning, match='sends, receives'):
        lowered = formats.from_torch_csv(dumped(theirs.pipeline_order_with_comms))
    assert lowered == formats.from_torch_csv(dumped(theirs.pipeline_order))
