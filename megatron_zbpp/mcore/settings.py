"""The options of `megatron_zbpp.enable` and of our flags, as a value whose fields describe them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_zbpp.analysis.program import LATE, RECEIVES
from megatron_zbpp.ir import Schedule
from megatron_zbpp.mcore.options import (
    ARGUMENTS,
    Checks,
    Names,
    Option,
    Problem,
    option,
    options_of,
)
from megatron_zbpp.runtime import MessageKernels
from megatron_zbpp.schedules import Family, checked_chunks, find, require_no_limit
from megatron_zbpp.techniques import ASKED
from megatron_zbpp.techniques import find as find_technique
from megatron_zbpp.techniques.composition import (
    BOTH,
    EMBEDDING,
    OUTPUT,
    SHARED_LAYERS,
    TRAINED_BY,
    VOCABULARY,
    require_family_trained,
    require_trained,
    techniques_of,
)
from megatron_zbpp.techniques.slices.graph import Slices, ToFind, number_of, slices_of

if TYPE_CHECKING:
    from megatron_zbpp.partitioning.freeze_plans import FreezePlan
    from megatron_zbpp.techniques import Amount

AUTO = 'auto'
_CLEAN_STEPS = 10
STAGE = 'stage'
CLIPPING = STAGE, 'global'
_PIPEMARE = '[PipeMare](asynchronous.md#pipemare)'
_LAYOUT = re.compile(r'E[t|]*[m|]*L')
# by setting, why asynchronous schedules do not train with it
_SYNCHRONOUS = {
    'offload': 'copies end with a call, and forwards of the next batch outlive it',
    'recompute': 'backwards have other weights than their forwards, which could not run again',
    'slices': 'it steps after so many whole microbatches',
    'vocab_parallel': 'shards are put between F, B and W alone',
    'freeze': 'forwards of the next batch have run before layers freeze',
    'dropout_seeds': 'seeds count steps, and forwards of the next batch come before a step',
    'post_validation': 'its steps wait for nobody by themselves',
    'trace_dir': 'a trace ends with a call, and forwards of the next batch outlive it',
    'prewarm': 'forwards of the next batch belong to its first call, too',
}


@dataclass(frozen=True)
class Settings:
    """Equal where they ask for the same: aliases become names, files what is in them.

    Raises:
        ValueError: no such schedule, or a value that makes no sense; the message names it.
        OSError: a file cannot be read.
    """

    schedule: str | Schedule = option(
        'zb-h1',
        parts=(
            Option(
                '--pipeline-schedule NAME',
                'Name of the pipeline schedule, such as zb-v or zb-h1 (`zbpp list --all` has all). '
                'auto measures some iterations, plans a schedule of one way for their times '
                'beside the training, and switches to it.',
                page='[the gallery](schedules.md)',
            ),
            Option(
                '--pipeline-schedule-file FILE',
                'File of a schedule instead: JSON of `zbpp plan` or of your own, or CSV of torch.',
                page='[your own schedule](your-own-schedule.md)',
            ),
        ),
    )
    """Or a `Schedule` itself."""
    num_chunks: int | None = option(None, least=1)
    """Chunks of the model on each rank, for schedules that leave the choice. None: the default of
    the schedule."""
    _: KW_ONLY
    memory_limit: float | None = option(
        None,
        '--pipeline-schedule-memory-limit A',
        least=0.0,
        or_else=', in activations of one microbatch on a full rank, not in bytes',
    )
    """Most memory of a rank, in activations of one microbatch on a full rank. 1F1B needs as many as
    there are pipeline ranks. For auto and schedules that take one, such as zb-1p."""
    profile_iters: int = option(5, '--pipeline-schedule-profile-iters N', least=1)
    """Iterations that auto measures, of the schedule or of the offload, before it plans."""
    offload: Amount | None = option(
        None, '--pipeline-offload half|all|N|auto', page='[less memory](does-not-fit.md)'
    )
    """Chunks of each rank whose activations are on the host between forward and backward: half
    (those that wait longest), all, or how many. auto: all of them while some iterations are
    measured, then as many as cost no time. Losses stay the same to the bit."""
    freeze: str | Path | FreezePlan | None = option(
        None,
        '--pipeline-freeze FILE',
        differs='freezing trains another model',
        page='[another training](unbalanced.md#freezing)',
    )
    """File that `zbpp freeze -o` wrote: weight gradients that it names are left out, to shorten the
    batch (TimelyFreeze). This trains another model: losses are not those of Megatron."""
    recompute: Amount | None = option(
        None, '--pipeline-recompute half|all|N', page='[the page](does-not-fit.md#recompute-passes)'
    )
    """Chunks of each rank whose forwards keep only their input, and run again before their
    backward: half (those that wait longest), all, or how many. They run again in bubbles first.
    Chunks that run again are not offloaded. Losses stay the same to the bit."""
    slices: int | str | Sequence[int] | ToFind | None = option(
        None,
        '--pipeline-slices N|SIZE,SIZE,...|balanced:N|auto',
        differs='slices round otherwise',
        page='[long context](long-context.md)',
    )
    """Slices of each sequence, whose forwards and backwards follow one another: bubble and memory
    fall with their number. How many, as equal as can be, or the tokens of each. The last slice goes
    back first. Losses are those of whole sequences but for rounding. balanced:N finds the sizes
    that take equal times by the shape of the model, auto also how many, of 4096 tokens or more;
    auto:TOKENS of as many."""
    vocab_parallel: str | None = option(
        None,
        '--pipeline-vocab-parallel',
        choices=SHARED_LAYERS,
        differs='shards of the output layer round otherwise',
        page='[large vocabularies](large-vocabulary.md)',
    )
    """Layers that all pipeline ranks share: output, the last one, and input, the word embedding,
    with which tied ones train, too. Each rank has the rows of its words, their logits and
    gradients. Losses are those of the whole layer but for rounding."""
    same_start: bool | str = option(
        True,
        flag_default=False,
        holds=lambda value: (
            isinstance(value, bool) or (isinstance(value, str) and _LAYOUT.fullmatch(value))
        ),
        takes="True, False, or the stages of stock Megatron, such as 'Ett|ttL'",
        parts=(
            Option(
                '--no-pipeline-same-start',
                'Leave each rank its own seeds. By default layers get the initial weights that '
                'stock Megatron draws for them with the rest of the launch line, wherever the '
                'schedule places them: losses from scratch are the same.',
                page='[exactness](exactness.md#training-from-scratch)',
            ),
        ),
    )
    """As an argument: False. True: those of 1F1B; or the stages of another run of stock Megatron,
    in the language of its layouts, as Et|t|t|tL."""
    dropout_seeds: bool = option(
        False,
        '--pipeline-dropout-seeds',
        flag_default=None,
        holds=lambda value: isinstance(value, bool),
        takes='True or False',
        page='[exactness](exactness.md#seeds-of-dropout)',
    )
    """Seed dropout for each layer and microbatch: all schedules, 1f1b included, draw the same
    masks, whatever their placement. Stock Megatron draws others."""
    clip: str | None = option(
        None, '--pipeline-clip', choices=CLIPPING, page='[steps](asynchronous.md#steps)'
    )
    """Norm by which asynchronous schedules clip gradients: stage, that of the stage's own; global,
    that of all, for which each step waits. The default is stage, and for pipedream-2bw the norm of
    all, which its late steps do not wait for."""
    anneal_steps: int | None = option(None, '--pipeline-anneal-steps K', least=0, page=_PIPEMARE)
    """Optimizer steps over which pipemare anneals learning rates, which begin divided by the delay
    of each stage (T1). 0: they are not divided. The default is five times the warm-up of the
    learning rate, or, without one, a quarter of its decay."""
    correction_decay: float = option(
        0.135,
        '--pipeline-correction-decay D',
        least=0.0,
        holds=lambda value: 0 < value < 1,
        takes='a number above 0, below 1',
        page=_PIPEMARE,
    )
    """Decay, over the delay of a stage, of the average of steps by which pipemare corrects the
    weights of backwards (T2): above 0, below 1."""
    async_warmup_steps: int = option(0, '--pipeline-async-warmup-steps T', least=0, page=_PIPEMARE)
    """Optimizer steps that an asynchronous schedule first takes synchronously, with 1F1B (T3)."""
    prewarm: bool | None = option(
        None,
        flag_default=False,
        holds=lambda value: value in (None, True, False),
        takes='True, False, or None',
        parts=(
            Option(
                '--pipeline-prewarm',
                'Run the chunks of each rank once before the first iteration, on all ranks at the '
                'same time: kernels are compiled and communicators made once, and not rank after '
                'rank. Nothing else changes, to the bit. By default on GPUs.',
                page='[the first iteration](gpu-tips.md#the-first-iteration)',
            ),
            Option(
                '--no-pipeline-prewarm',
                'Leave that out, on GPUs, too.',
                page='[the first iteration](gpu-tips.md#the-first-iteration)',
            ),
        ),
    )
    """None: on GPUs."""
    message_ctas: int = option(
        MessageKernels.ctas,
        '--pipeline-message-ctas N',
        least=1,
        page='[tips for GPUs](gpu-tips.md#messages-between-stages)',
    )
    """Most thread blocks of NCCL's kernels for a message between stages. Fewer leave more of the
    GPU to passes that run meanwhile, more make large messages faster."""
    message_priority: str = option('high', '--pipeline-message-priority', choices=('high', 'group'))
    """Priority of these kernels: high, so that a message does not wait for queued kernels of the
    next pass; or group, that of the pipeline's group, which is normal without
    `--high-priority-stream-groups pp`."""
    message_receives: str = option(LATE, '--pipeline-message-receives', choices=RECEIVES)
    """When receives of messages between stages are posted: early, before the pass during which the
    message comes; late, as late as it costs nothing, so that few of NCCL's kernels spin beside
    passes; or latest, so that hardly any does, where messages are short."""
    trace_dir: str | Path | None = option(
        None, '--pipeline-trace-dir FOLDER', page='[unbalanced pipelines](unbalanced.md)'
    )
    """Folder for pictures of an early iteration, and of one after auto has switched, with the
    clocks of all hosts aligned. A page for a browser shows planned beside measured passes, a trace
    for Perfetto all ranks of the first pipeline; times of stages are for `zbpp profile`."""
    watchdog_timeout: float | None = option(
        0, '--pipeline-watchdog-timeout SECONDS', flag_default=300.0, least=0.0
    )
    """Seconds without progress inside a schedule after which a rank reports what it waits for and
    ends the job. Give several times what an iteration takes. 0: never."""
    watchdog_pause_timeout: float | None = option(
        None, '--pipeline-watchdog-pause-timeout SECONDS', least=0.0
    )
    """Seconds without progress between two schedules (checkpoints, evaluation, data) after which it
    does so, too. It needs a watchdog timeout above 0; by default it is ten times as long, at least
    600. 0: no limit."""
    post_validation: bool | int | None = option(
        False,
        least=0,
        or_else=', True or False',
        booleans=True,
        parts=(
            Option(
                '--enable-optimizer-post-validation',
                'Optimizer steps do not wait for all ranks: each rank steps on what it knows, '
                'begins the next iteration, and takes the step back if gradients have to be '
                'clipped or overflow. Losses and parameters stay the same to the bit. `zbpp '
                'doctor` names what else would make ranks wait.',
                page='[post-validation](post-validation.md)',
            ),
            Option(
                '--optimizer-post-validation-clean-steps N',
                'Steps in a row, neither clipped nor skipped, before this begins. 0: none.',
                _CLEAN_STEPS,
                least=0,
            ),
        ),
    )
    """A number: after so many steps in a row that were neither clipped nor skipped. True: 10."""
    kept_gib: float | None = option(None, '--optimizer-post-validation-kept-gib GIB', least=0.0)
    """Most GiB of old parameters and optimizer state that a step keeps on the GPU until it is
    validated. What is not kept is stepped twice. By default as much as there is memory for."""
    check_interval: int = option(
        10,
        '--optimizer-post-validation-check-interval N',
        least=0,
        page='[your own loop](post-validation.md#in-your-own-loop)',
    )
    """Interval, in early steps, at which weights are compared with those that the next iteration
    began with: this finds what a program writes through `.data`. The first ten steps are always
    compared. 0: only those."""
    flags: Mapping[str, object] | None = option(
        None,
        compare=False,
        holds=lambda value: value is None or isinstance(value, Mapping),
        takes='names with values, such as vars(args)',
    )
    """Flags of the program, by name. All ranks must have the same, except for paths and their own
    numbers, or they stop before they train."""

    def __post_init__(self) -> None:
        checks, put = Checks(), partial(object.__setattr__, self)
        for name, each in OPTIONS.items():
            with checks.one(name):
                each.require(getattr(self, name), name)
                continue
            put(name, getattr(Settings, name))  # what follows takes a number for one
        with checks.one('slices'):
            self._read_slices()
        for name, amount in self.amounts.items():
            with checks.one(name):
                find_technique(name).require(amount, self.num_chunks or sys.maxsize)
                if self.schedule == AUTO:
                    raise ValueError(
                        f'{name}: auto plans orders only: name a schedule, or give a plan that '
                        'zbpp plan --actions has made'
                    )
        with checks.one('trace_dir'):
            if self.trace_dir is not None:
                from megatron_zbpp.guests.tracing import writable

                put('trace_dir', writable(self.trace_dir))
        with checks.one('freeze'):
            if self.freeze is not None:
                from megatron_zbpp.partitioning.freeze_plans import plan_of

                put('freeze', plan_of(self.freeze))
                if self.schedule == AUTO:
                    raise ValueError(
                        'freeze: it is planned for one schedule: name that instead of auto'
                    )
        with checks.one('schedule', 'num_chunks', 'memory_limit'):
            family = self._family()
            with checks.one('clip'):
                if self.clip is not None and (family is None or not family.asynchronous):
                    raise ValueError(
                        f'clip is {self.clip!r}, but the schedule is synchronous and clips as '
                        'Megatron does: leave it out'
                    )
            if family is not None:
                self._take(family, checks)
        with checks.one('vocab_parallel', 'freeze', 'post_validation'):
            self._require_vocabulary()
        checks.require_all()
        if isinstance(self.post_validation, bool):
            put('post_validation', _CLEAN_STEPS if self.post_validation else None)
        put('watchdog_timeout', self.watchdog_timeout or 0)

    @property
    def kernels(self) -> MessageKernels:
        """How NCCL carries messages between stages."""
        return MessageKernels(self.message_ctas, self.message_priority == 'high')

    @property
    def amounts(self) -> dict[str, Amount]:
        """How much is asked for of each technique, by its name."""
        asked = {name: getattr(self, name) for name in ASKED}
        return {name: amount for name, amount in asked.items() if amount is not None}

    @property
    def freeze_plan(self) -> FreezePlan | None:
        """Which weight gradients are left out, and when; None: none."""
        assert not isinstance(self.freeze, str | Path)  # it was read
        return self.freeze

    @property
    def sliced(self) -> Slices | None:
        """How many slices sequences have, or how long ones; None: what the schedule says."""
        assert self.slices is None or isinstance(self.slices, int | tuple | ToFind)  # it was read
        return self.slices

    def _read_slices(self) -> None:
        if self.slices is None:
            return
        slices = slices_of(self.slices)
        object.__setattr__(self, 'slices', slices)
        if self.schedule == AUTO:
            raise ValueError(
                'slices: auto plans whole sequences: name a schedule, or give a plan that zbpp '
                'plan --slices has made'
            )
        if isinstance(self.schedule, Schedule):
            has, number = self.schedule.graph.num_slices, number_of(slices)
            if number != has and (number or has == 1):
                raise ValueError(
                    f'slices: the schedule that is given has {has}, not {slices}: give tokens of '
                    f'{has}, or leave it out'
                )

    def _family(self) -> Family | None:
        """Return the family that is asked for; None: a schedule itself, or one that is planned."""
        if isinstance(self.schedule, str):
            if self.schedule.endswith(('.json', '.csv')):
                raise ValueError(
                    f'schedule {self.schedule!r} is a file: give megatron_zbpp.load of it, or its '
                    'path to --pipeline-schedule-file'
                )
            if self.schedule == AUTO and self.memory_limit is not None and self.memory_limit < 1:
                raise ValueError(
                    f'memory_limit is {self.memory_limit:g}, but each plan holds one microbatch on '
                    'a rank: give 1 or more'
                )
            return None if self.schedule == AUTO else find(self.schedule)
        if not isinstance(self.schedule, Schedule):
            raise ValueError(
                f'schedule {self.schedule!r} is neither the name of one (zbpp list --all), '
                f'nor {AUTO!r}, nor a Schedule'
            )
        require_trained(self.schedule)
        for name in ('num_chunks', 'memory_limit'):
            if getattr(self, name) is not None:
                raise ValueError(f'{name}: the schedule that is given has its own: leave it out')
        return None

    def _take(self, family: Family, checks: Checks) -> None:
        require_family_trained(family)
        refused = [name for name in _SYNCHRONOUS if family.asynchronous and getattr(self, name)]
        if 'recompute' in refused:
            from megatron_zbpp.techniques.updates.versions import STASHED, backwards_use

            if backwards_use(STASHED, family):
                refused.remove('recompute')
        for name in refused:
            with checks.one(name):
                raise ValueError(
                    f'{name} is {getattr(self, name)!r}, but {family.name} is asynchronous '
                    f'({_SYNCHRONOUS[name]}): leave it out, or take a synchronous schedule, such '
                    'as zb-v'
                )
        object.__setattr__(self, 'schedule', TRAINED_BY.get(family.name, family.name))
        with checks.one('num_chunks'):
            checked_chunks(family, self.num_chunks)
        with checks.one('memory_limit'):
            require_no_limit(family, self.memory_limit, '{memory_limit}')
        if family.in_shards:
            object.__setattr__(self, 'vocab_parallel', OUTPUT)

    def _require_vocabulary(self) -> None:
        source = self.schedule
        if isinstance(source, Schedule) and VOCABULARY in techniques_of(source):
            if (VOCABULARY, (source.num_ranks, 2)) in source.graph.techniques:
                raise ValueError(
                    f'{source.name} has two barriers a microbatch: the output layer on all ranks '
                    'trains with one: make the schedule by zbpp plan --vocab-parallel'
                )
            layers = BOTH if EMBEDDING in techniques_of(source) else self.vocab_parallel or OUTPUT
            object.__setattr__(self, 'vocab_parallel', layers)
        if self.vocab_parallel is None:
            return
        for name in ('freeze', 'post_validation'):
            if getattr(self, name):
                raise ValueError(
                    f'{name} is {getattr(self, name)!r}: it does not train with the output layer '
                    'on all ranks yet: leave it out, or {vocab_parallel}'
                )


OPTIONS = options_of(Settings)
BY_FLAG = Names(
    {name: each.flags[0].name if each.flags else name for name, each in OPTIONS.items()}
    # of Megatron's settings, whose flag is not their name
    | {
        'fp8': '--fp8-format',
        'fp4': '--fp4-format',
        'apply_rope_fusion': '--rope-fusion',
        'barrier_with_L1_time': '--barrier-with-level-1-timing',
    },
    flags=True,
)
# Megatron's arguments that place layers
PLACING = (
    'pipeline_model_parallel_layout',
    'decoder_first_pipeline_num_layers',
    'decoder_last_pipeline_num_layers',
    'account_for_embedding_in_pipeline_split',
    'account_for_loss_in_pipeline_split',
)
BY_BRIDGE = Names(
    {name: f'model.{name}' for name in ('num_layers', *PLACING)}
    # fields of Megatron-Bridge, and of a config, with other names than the argument
    | {
        'decoder_first_pipeline_num_layers': 'model.num_layers_in_first_pipeline_stage',
        'decoder_last_pipeline_num_layers': 'model.num_layers_in_last_pipeline_stage',
        'num_virtual_stages_per_pipeline_rank': 'model.virtual_pipeline_model_parallel_size',
        'untie_embeddings_and_output_weights': 'share_embeddings_and_output_weights=False',
    }
)


@dataclass(frozen=True)
class Request:
    """Options that were given for a job."""

    options: Mapping[str, Any]  # arguments of `enable`, by their names
    names: Names = ARGUMENTS  # of options, as the person spells them
    file: str | None = None  # of a schedule or a plan, in place of its name
    problems: tuple[Problem, ...] = ()  # of flags that are no options by themselves

    @classmethod
    def of(cls, settings: Settings, names: Names, **more: Any) -> Request:
        return cls({name: getattr(settings, name) for name in OPTIONS} | more, names)

    def settings(self, checks: Checks, **more: Any) -> Settings | None:
        """Return the settings without options that cannot be; None: not even the schedule can."""
        options = {**self.options, **more}
        while True:
            tried = Checks()
            with tried.one('schedule'):
                return Settings(**options)
            checks.problems += tried.problems
            wrong = options.keys() & {each.option for each in tried.problems}
            if not wrong or 'schedule' in wrong:
                return None
            options = {name: value for name, value in options.items() if name not in wrong}


def meaning(name: str) -> str:
    """Return the first sentence of an option, as help of `zbpp` for what means the same there."""
    sentence = OPTIONS[name].text.partition('. ')[0]
    return sentence[:1].lower() + sentence[1:]
