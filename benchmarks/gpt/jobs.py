"""What the GPT benchmark is to measure: one job is one configuration, a row of the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from benchmarks.gpt import models
from megatron_zbpp.schedules import Family, build, find

MEGATRON, ZBPP = LIBRARIES = ('megatron', 'zbpp')
STAGE = 'stage'  # in place of a schedule: one stage alone
_MEGATRON = ('1f1b', 'interleaved')
SPECS = ('auto', 'te', 'local')


@dataclass(frozen=True)
class Job:
    """One configuration.

    Attributes:
        model: its name.
        runner: the library whose schedule it is.
        schedule: its name there; `STAGE` for one stage alone.
        p, t, m: pipeline ranks, tensor-parallel ranks, microbatches of one pipeline.
        replicas: data-parallel ranks.
        chunks: stages a rank.
        micro_batch: samples of a microbatch.
        spec: whose layers: of SPECS.
        warm_up, iterations: how many do not count, and how many do.
    """

    model: str
    runner: str
    schedule: str
    p: int
    t: int
    m: int
    replicas: int
    chunks: int
    micro_batch: int
    spec: str
    warm_up: int
    iterations: int

    @property
    def title(self) -> str:
        """For people."""
        if self.schedule == STAGE:
            return f'{self.model} {STAGE}'
        name = self.schedule if self.runner == ZBPP else f'{self.runner}:{self.schedule}'
        chunks = f' v={self.chunks}' if self.chunks > 1 else ''
        return f'{self.model} {name} p={self.p} m={self.m}{chunks}'

    @property
    def log(self) -> str:
        """A name for files."""
        return self.title.replace(' ', '-').replace(':', '-').replace('=', '')

    @property
    def samples(self) -> int:
        """Of one iteration."""
        return self.m * self.micro_batch * self.replicas

    def as_row(self) -> dict[str, Any]:
        """Return what identifies it in the result."""
        return asdict(self)

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Job:
        """Return the job that a row is of."""
        return cls(**{field.name: row[field.name] for field in fields(cls)})

    def refusal(self) -> str | None:
        """Why it cannot be had, where that is known before anything starts."""
        if self.schedule == STAGE:
            return None
        if self.p < 2:
            return f'a pipeline of {self.p}: needs more GPUs than {self.t} (tensor parallel)'
        if self.runner == MEGATRON and self.schedule == 'interleaved' and self.m % self.p:
            return f"Megatron's interleaved takes multiples of {self.p} microbatches, not {self.m}"
        try:
            build(self.schedule, self.p, self.m, num_chunks=self.chunks)
        except ValueError as error:
            return str(error).partition('\n')[0]
        return None


def schedules(texts: Sequence[str]) -> list[tuple[str, str]]:
    """(library, name) of each of `--schedules`.

    Raises:
        ValueError: one is not known.
    """
    found = []
    for text in texts:
        library, _, name = text.strip().rpartition(':')
        if library == MEGATRON and name in _MEGATRON:
            found.append((library, name))
        elif library in ('', ZBPP):
            found.append((ZBPP, find(name).name))
        else:
            known = ', '.join(f'{MEGATRON}:{name}' for name in _MEGATRON)
            raise ValueError(f'unknown schedule {text!r}: give {known} or a name of `zbpp list`')
    return list(dict.fromkeys(found))


def microbatches(text: str, p: int) -> int:
    """M from `24`, or from `3p`, so many a rank.

    Raises:
        ValueError: neither.
    """
    number = text.removesuffix('p')
    if not number.isdecimal() or int(number) < 1:
        raise ValueError(f'--microbatches {text}: give numbers such as 24, or 3p for 3 a rank')
    return int(number) * (p if text.endswith('p') else 1)


def stages(family: Family, wanted: int | None) -> int:
    """Return stages a rank: `wanted`, where the family can have so many; else its own number."""
    return wanted if wanted and wanted in family.chunks else family.default_chunks


def training_jobs(
    names: Sequence[str],
    chosen: Sequence[tuple[str, str]],
    world: int,
    *,
    counts: Sequence[str],
    pipeline: int | None,
    tensor: int | None,
    chunks: int | None,
    micro_batch: int | None,
    **others: Any,
) -> Iterator[Job]:
    """All pairs of a model and a schedule on `world` GPUs.

    Args:
        names, chosen: of models, and what `schedules` returned.
        world: GPUs. A pipeline takes as many as the model was published for if that divides them,
            and else all of them.
        counts: of microbatches, see `microbatches`.
        pipeline, tensor, chunks, micro_batch: in place of the model's, or the schedule's own.
        others: fields of `Job`.

    Raises:
        ValueError: the GPUs do not divide, or `counts` is not understood.
    """
    for name in names:
        model = models.find(name)
        t = tensor or model.tensor
        if world % t:
            raise ValueError(f'{world} GPUs do not divide by {t} (--tensor-parallel, {name})')
        own = model.pipeline if world % (t * model.pipeline) == 0 else world // t
        p = pipeline or own
        if world % (t * p):
            raise ValueError(
                f'{world} GPUs do not divide by {t * p} ({name}: tensor parallel {t} x pipeline '
                f'{p}): change --pipeline-parallel or --nproc-per-node'
            )
        for count in counts:
            for runner, schedule in chosen:
                family = find(schedule)
                v = stages(family, chunks)
                sizes = p, t, microbatches(count, p), world // (p * t), v
                size = micro_batch or model.micro_batch
                yield Job(name, runner, schedule, *sizes, size, **others)


def stage_jobs(
    names: Sequence[str], micro_batch: int | None = None, **others: Any
) -> Iterator[Job]:
    """One stage of each model."""
    for name in names:
        size = micro_batch or models.find(name).micro_batch
        yield Job(name, ZBPP, STAGE, 1, 1, 1, 1, 1, size, **others)
