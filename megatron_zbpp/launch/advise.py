"""A launch line that wants advice: the model, batch and setup that it has, and lines of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from megatron_zbpp.analysis.gain import RIVAL, gain_text
from megatron_zbpp.launch.flags import FLAGS, flag, without
from megatron_zbpp.launch.launch_line import LAUNCHER, LaunchLine, read, value_of
from megatron_zbpp.mcore import model_settings
from megatron_zbpp.mcore.job.model_shape import shape_of
from megatron_zbpp.mcore.settings import AUTO, OPTIONS
from megatron_zbpp.partitioning.advice import REPLACED, SWITCHES, flags_of, modules_again, processes
from megatron_zbpp.partitioning.setup_costs import JOB_SIZES, NONE, SELECTIVE, STOCK, Job, Setup
from megatron_zbpp.partitioning.setup_prediction import placement_of, predict, stages_of
from megatron_zbpp.partitioning.shapes import Shape
from megatron_zbpp.schedules import find
from megatron_zbpp.techniques import ASKED

_OWN_FILE = 'pipeline_schedule_file'
_FOLDERS = '--load', '--save'
_RESHARDABLE = '--dist-ckpt-optim-fully-reshardable'

_OFFERED = ('zb-h1', 'zb-v')  # schedules that a line with one of Megatron's own is told of
# Our flags that change the memory of activations or the times of passes.
_CHANGING = (*ASKED, *(name for name, option in OPTIONS.items() if option.differs))


@dataclass(frozen=True)
class LinePrediction:
    """An iteration of a launch line as `zbpp advise` predicts it."""

    # most that each pipeline rank holds, CUDA context, NCCL and fragments left out
    nbytes: tuple[float, ...] = ()
    fixed: tuple[float, ...] = ()  # those of them for weights, gradients and optimizer state
    seconds: float | None = None  # of an iteration; None: without rates of the machine
    rival: float | None = None  # seconds of 1f1b with the same sizes; None: there is none
    notes: tuple[str, ...] = ()  # what the prediction leaves out, or why there is none

    def lines(self) -> list[str]:
        found: list[str] = []
        if self.seconds is not None:
            gain = gain_text(self.seconds, self.rival, RIVAL)
            found.append(f'predicted: {self.seconds:.4g} s an iteration{gain}')
        if self.nbytes:
            most, fixed = max(zip(self.nbytes, self.fixed, strict=True))
            every = ' '.join(f'{own / 2**30:.1f}' for own in self.nbytes)
            found.append(
                f'predicted memory: {most / 2**30:.1f} GiB on the fullest rank, '
                f'{fixed / 2**30:.1f} of weights, gradients and optimizer state, '
                f'{(most - fixed) / 2**30:.1f} of activations; pipeline ranks: {every}'
            )
        return found

    @classmethod
    def of(cls, launch_line: LaunchLine, rates: Mapping[str, Any]) -> LinePrediction:
        """Predict the iteration of a launch line."""
        line, tflops = AdvisedLine(**vars(launch_line)), rates.get('tflops')
        gpus = line.world_size
        machine = {name: rates[name] for name in rates if name in JOB_SIZES}
        try:
            line.sizes.require_plain()
            shape = line.shape(tflops or 1.0, rates.get('bandwidth') or 0.0, rates.get('vocab'))
            job = Job(shape, gpus=gpus, memory=inf, **line.job_sizes(gpus), **machine)
            own = line.own(job)
            line.require_known(own)
            made, stages = predict(job, own), stages_of(job, own)
        except ValueError as error:
            reason = str(error).removeprefix('launch line: ')
            return cls(notes=(f'memory in GiB is not predicted: {reason}',))
        notes = [f'predictions: {each}' for each in line.unlike(job) if each != line.lacks]
        if tflops is None:
            return cls(made.nbytes, stages.fixed, notes=tuple(notes))
        gains = (
            name + gain_text(seconds, made.seconds, 'this line')
            for name in (_OFFERED if own.schedule in STOCK else ())
            if (seconds := _seconds(job, own, name))
        )
        if offered := '; '.join(gains):
            notes.append(f'predicted: --pipeline-schedule {offered}')
        rival = _seconds(job, own, RIVAL)
        return cls(made.nbytes, stages.fixed, made.seconds, rival, tuple(notes))


def _seconds(job: Job, own: Setup, name: str) -> float | None:
    """Return the iteration of a setup by another schedule; None: its layers do not divide so."""
    other = replace(own, schedule=name, chunks=find(name).default_chunks, layers=())
    try:
        return predict(job, other).seconds
    except ValueError:
        return None


class AdvisedLine(LaunchLine):
    """A launch line as the job and the setup that advice begins with."""

    @classmethod
    def of(cls, words: Sequence[str], gpus: int) -> AdvisedLine:
        line = cls(**vars(read(words, gpus)))
        line.sizes.require_plain()
        return line

    def shape(self, tflops: float, bandwidth: float, vocab: int | None) -> Shape:
        """Return the model's shape, with rates in TFLOP/s and GB/s; ValueError names the flag."""
        args = self.args
        for name in ('hidden_size', 'num_attention_heads', 'seq_length'):
            if not self._size(name):
                raise ValueError(f'launch line: {flag(name)} is missing: add it')
        vocab = vocab or self._size('vocab_size')
        if not vocab:
            raise ValueError('launch line: it has no --vocab-size: give --vocab, before the --')
        name, experts = model_settings.hybrid(args), self._size('num_experts')
        if name is not None:
            pattern = str(getattr(args, name)).partition('/')[0]
            if '|' in pattern or set(pattern) - set('M*-E'):
                raise ValueError(
                    f'launch line: {flag(name)} {pattern}: give letters M, *, - and E, without |'
                )
        if self.lacks and (experts or args.multi_latent_attention or name is not None):
            raise ValueError(f'{self.lacks}: without it advice is for dense models alone')
        every = getattr(args, 'moe_layer_freq', None) or 1
        dense_first = every == (sorted(every) if isinstance(every, list) else 1)
        if experts and name is None and not dense_first:
            raise ValueError(
                f'launch line: --moe-layer-freq {every}: advice is for dense layers before all '
                'with experts: give such a list'
            )
        ahead, rates = self._size('mtp_num_layers'), {'tflops': tflops, 'bandwidth': bandwidth}
        return shape_of(args, self._size('seq_length'), vocab=vocab, mtp=ahead, **rates)

    def job_sizes(self, gpus: int) -> dict[str, Any]:
        args = self.args
        if not args.global_batch_size and not args.micro_batch_size:
            raise ValueError('launch line: --global-batch-size is missing: add it')
        replicas = max(1, self.sizes.replicas(gpus))
        backend = getattr(args, 'attention_backend', None)
        backend = str(getattr(backend, 'name', backend))
        local = getattr(args, 'transformer_impl', None) == 'local'
        flash = self._on('use_flash_attn')
        return {
            'global_batch': args.global_batch_size or args.micro_batch_size * replicas,
            'cp': args.context_parallel_size,
            'etp': self._size('expert_tensor_parallel_size'),
            'shards_optimizer': self._on('use_distributed_optimizer'),
            'overlaps': self._on('overlap_grad_reduce'),
            # not by scores in memory
            'fused': backend not in ('unfused', 'local') and (not local or flash),
            'ends': self.sizes.counted_ends,
        }

    def own(self, job: Job) -> Setup:
        args, asked = self.args, self.sizes.num_chunks()
        chunks = asked or 1
        name = args.pipeline_schedule
        if name == AUTO or getattr(args, _OWN_FILE):
            given = f'{flag(_OWN_FILE)}' if name is None else f'--pipeline-schedule {name}'
            raise ValueError(
                f'launch line: {given} is no schedule by name: leave it out, or name one'
            )
        family = find(name or STOCK[chunks > 1])
        if asked is None:
            chunks = 1 if name is None else family.default_chunks
        again = vars(args).get('recompute_granularity') or NONE
        if getattr(args, 'recompute_activations', False):
            again = SELECTIVE
        words = value_of(self.words, '--recompute-modules') or 'core_attn'
        modules = {*(getattr(args, 'recompute_modules', None) or [words])}
        if again == SELECTIVE and modules.isdisjoint(modules_again(job)):
            again = NONE
        tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
        setup = Setup(
            *(tp, pp, chunks, args.expert_model_parallel_size or 1),
            args.micro_batch_size or 1,
            family.name if pp > 1 else STOCK[0],
            again,
            bool(args.sequence_parallel) and tp > 1,
        )
        if problem := job.why_impossible(setup):
            raise ValueError(f'launch line: {problem}: change it, or --gpus')
        if pp == 1 or family.num_routes > 1:
            return setup
        sizes, placement = self.sizes, placement_of(setup)
        layers = tuple(sizes.layers(placement))
        given = sizes.pipeline_model_parallel_layout or sizes.fixed_layers(placement)
        uneven = (sum(layers) + sum(sizes.counted_ends)) % placement.num_stages
        return replace(setup, layers=layers) if given or uneven else setup

    def require_known(self, own: Setup) -> None:
        """Raise ValueError where a prediction would leave out what changes memory or times."""
        family = find(own.schedule)
        if not family.is_plain:
            raise ValueError(f'--pipeline-schedule {family.name} is not among what advise weighs')
        for name in _CHANGING:
            if (value := getattr(self.args, f'pipeline_{name}', None)) is not None:
                raise ValueError(f'predictions leave out {flag(f"pipeline_{name}")} {value}')

    def unlike(self, job: Job) -> list[str]:
        """Return settings of the line that predictions leave out."""
        args, found = self.args, [self.lacks] if self.lacks else []
        if not (args.bf16 or args.fp16):
            found.append('no --bf16 or --fp16 in the line: costs are those of 16-bit training')
        if getattr(args, 'fp8', None) or getattr(args, 'fp4', None):
            found.append('give --tflops as FP8 or FP4 products reach it; activations count 16 bits')
        ours = {each.name for each in FLAGS} - {flag(_OWN_FILE), '--pipeline-schedule'}
        if left := [w for w in self.words if w.partition('=')[0] in ours]:
            found.append(f'left out of all predictions and lines: {" ".join(left)}')
        if vars(args).get('recompute_granularity') == SELECTIVE:
            found.append(f'selective recomputation is of {" ".join(modules_again(job))}')
        return found

    def line_of(self, job: Job, setup: Setup) -> list[str]:
        """Return the launch line of a setup, in words."""
        launcher = processes(self.launcher, job.gpus, job.gpus_per_node)
        if setup.schedule not in STOCK and LAUNCHER not in launcher and self.script:
            launcher = [*(launcher or ['python']), '-m', LAUNCHER]
        valued = [*REPLACED, *(each.name[2:] for each in FLAGS if each.unit)]
        switches = [*SWITCHES, *(each.name for each in FLAGS if not each.unit)]
        # which layers each rank holds, and their shards
        held, own = ((s.tp, s.ep, placement_of(s), s.layers) for s in (setup, self.own(job)))
        if self._kept_by_rank() and held != own:
            valued += [folder[2:] for folder in self._folders]
        kept = without(self.words, valued, switches)
        return [*launcher, *filter(None, [self.script]), *kept, *flags_of(job, setup)]

    @property
    def _folders(self) -> list[str]:
        return [each for each in _FOLDERS if value_of(self.words, each) is not None]

    def checkpoint_notes(self) -> list[str]:
        """Return where checkpoints of the line go, if it names folders of them."""
        if self._folders and (reason := self._kept_by_rank()):
            where = 'lines with another tp, ep or placement of stages'
            return [f'{where} are without {" and ".join(self._folders)}: {reason}']
        if '--load' not in self._folders:
            return []
        saved = f' if it was saved with {_RESHARDABLE}, too' * (_RESHARDABLE in self.words)
        return [
            f'the checkpoint of --load goes to all lines{saved}; where tp or pp differ, Megatron '
            'leaves out its random states'
        ]

    def _kept_by_rank(self) -> str:
        found = value_of(self.words, '--ckpt-format') or 'torch_dist'
        if found != 'torch_dist':
            cure = 'convert it (docs/exactness.md), or train from scratch'
            return f'--ckpt-format {found} keeps files by rank: {cure}'
        optimizers = 'use_distributed_optimizer', 'use_layer_wise_distributed_optimizer'
        sharded = any(map(self._on, optimizers))
        if not sharded or {_RESHARDABLE, '--no-load-optim', '--finetune'} & {*self.words}:
            return ''
        cure = f'save it once with {_RESHARDABLE}, or load with --no-load-optim'
        return f"the distributed optimizer's state is kept by rank: {cure}"

    def _size(self, name: str) -> int:
        found = getattr(self.args, name, None) or value_of(self.words, flag(name))
        return int(found) if found else 0

    def _on(self, name: str) -> bool:
        return bool(getattr(self.args, name, False)) or flag(name) in self.words
