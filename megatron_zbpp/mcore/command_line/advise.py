"""A launch line that wants advice: the model, batch and setup that it has, and lines of others."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from megatron_zbpp.analysis.gain import RIVAL, gain_text
from megatron_zbpp.ir.layout import layers_per_stage
from megatron_zbpp.mcore import layout, model_settings
from megatron_zbpp.mcore.command_line import launch_line, sizes
from megatron_zbpp.mcore.command_line.bench import LAUNCHER, value_of
from megatron_zbpp.mcore.command_line.flags import FLAGS
from megatron_zbpp.mcore.command_line.launch_line import LaunchLine
from megatron_zbpp.mcore.command_line.messages import flag
from megatron_zbpp.mcore.command_line.parsing import without
from megatron_zbpp.mcore.settings import AUTO
from megatron_zbpp.partitioning.advise.job import JOB_SIZES, NONE, SELECTIVE, STOCK, Job, Setup
from megatron_zbpp.partitioning.advise.layer_costs import modules_again
from megatron_zbpp.partitioning.advise.prediction import placement_of, predict, stages_of
from megatron_zbpp.partitioning.advise.search import REPLACED, SWITCHES, flags_of, processes
from megatron_zbpp.partitioning.shapes import Shape
from megatron_zbpp.schedules import find

# Fields of `Shape` by the argument of Megatron's that has them, and those of some models alone.
_FIELDS = {'hidden': 'hidden_size', 'heads': 'num_attention_heads', 'seq': 'seq_length'}
_OPTIONAL = {'ffn': 'ffn_hidden_size', 'head_dim': 'kv_channels', 'mtp': 'mtp_num_layers'}
_EXPERTS = {
    'experts': 'num_experts',
    'top_k': 'moe_router_topk',
    'expert_ffn': 'moe_ffn_hidden_size',
    'shared_ffn': 'moe_shared_expert_intermediate_size',
}
_LATENT = {
    'q_rank': 'q_lora_rank',
    'kv_rank': 'kv_lora_rank',
    'rope_dim': 'qk_pos_emb_head_dim',
    'v_dim': 'v_head_dim',
    'head_dim': 'qk_head_dim',
}
_OWN_FILE = 'pipeline_schedule_file'
_FOLDERS = '--load', '--save'
_RESHARDABLE = '--dist-ckpt-optim-fully-reshardable'


_OFFERED = ('zb-h1', 'zb-v')  # schedules that a line with one of Megatron's own is told of
# Our flags that change the memory of activations or the times of passes.
_CHANGING = ('offload', 'recompute', 'slices', 'vocab_parallel', 'freeze')


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
        """Return time and memory for people."""
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
    def of(cls, read: LaunchLine, rates: Mapping[str, Any]) -> LinePrediction:
        """Predict the iteration of a launch line."""
        line, tflops = AdvisedLine((), None, read.words, read), rates.get('tflops')
        machine = {name: rates[name] for name in rates if name in JOB_SIZES}
        gpus = read.world_size
        try:
            sizes.require_plain(read.args)
            shape = line.shape(tflops or 1.0, rates.get('bandwidth') or 0.0, rates.get('vocab'))
            job = Job(shape, gpus=gpus, memory=inf, **line.sizes(gpus), **machine)
            own = line.own(job)
            line.require_known(own)
            made, stages = predict(job, own), stages_of(job, own)
        except ValueError as error:
            reason = str(error).removeprefix('launch line: ')
            return cls(notes=(f'memory in GiB is not predicted: {reason}',))
        notes = [f'predictions: {each}' for each in line.unlike(job) if each != read.lacks]
        seconds = rival = None
        if tflops is not None:
            seconds, rival = made.seconds, _seconds(job, own, RIVAL)
            ours = {name: _seconds(job, own, name) for name in _OFFERED}
            gains = [
                name + gain_text(each, seconds, 'this line') for name, each in ours.items() if each
            ]
            notes += (
                [f'predicted: --pipeline-schedule {"; ".join(gains)}']
                if own.schedule in STOCK and gains
                else []
            )
        return cls(made.nbytes, stages.fixed, seconds, rival, tuple(notes))


def _seconds(job: Job, own: Setup, name: str) -> float | None:
    """Return the iteration of a setup by another schedule; None: its layers do not divide so."""
    other = replace(own, schedule=name, chunks=find(name).default_chunks, layers=())
    try:
        return predict(job, other).seconds
    except ValueError:
        return None


@dataclass(frozen=True)
class AdvisedLine:
    """A launch line, divided."""

    launcher: tuple[str, ...]  # what starts the script
    script: str | None  # its path; None: the line is flags alone
    flags: tuple[str, ...]  # of the script
    line: LaunchLine  # what was read of it

    @classmethod
    def of(cls, words: Sequence[str], gpus: int) -> AdvisedLine:
        """Return the line that these words are."""
        launcher, script, flags = launch_line.divided(words)
        read = launch_line.read(words, gpus)
        sizes.require_plain(read.args)
        return cls(tuple(launcher), script, tuple(flags), read)

    @property
    def args(self) -> Namespace:
        """Megatron's arguments, not validated."""
        return self.line.args

    def shape(self, tflops: float, bandwidth: float, vocab: int | None) -> Shape:
        """Return the model's shape, with rates in TFLOP/s and GB/s; ValueError names the flag."""
        sizes: dict[str, Any] = {field: self._size(name) for field, name in _FIELDS.items()}
        for field, name in _FIELDS.items():
            if not sizes[field]:
                raise ValueError(f'launch line: {flag(name)} is missing: add it')
        vocab = vocab or self._size('vocab_size')
        if not vocab:
            raise ValueError('launch line: it has no --vocab-size: give --vocab, before the --')
        sizes |= {field: self._size(name) for field, name in _OPTIONAL.items()}
        if getattr(self.args, 'group_query_attention', False):
            sizes['groups'] = self._size('num_query_groups')
        model, more = self._model()
        sizes |= more
        if not sizes['ffn']:
            h = sizes['hidden']
            sizes['ffn'] = 4 * h * 2 // 3 // 64 * 64 if self.args.swiglu else 4 * h
        return Shape(model, vocab=vocab, tflops=tflops, bandwidth=bandwidth, **sizes)

    def _model(self) -> tuple[str, dict[str, Any]]:
        args, layers = self.args, {'layers': self.args.num_layers}
        name = model_settings.hybrid(args)
        if name is not None:
            pattern = str(getattr(args, name)).partition('/')[0]
            if '|' in pattern or set(pattern) - set('M*-E'):
                raise ValueError(
                    f'launch line: {flag(name)} {pattern}: give letters M, *, - and E, without |'
                )
            layers = {'layers': len(pattern), 'pattern': pattern}
        experts, latent = self._size('num_experts'), args.multi_latent_attention
        if self.line.lacks and (experts or latent or name is not None):
            raise ValueError(f'{self.line.lacks}: without it advice is for dense models alone')
        more: dict[str, Any] = dict(layers)
        if experts:
            more |= {field: self._size(own) for field, own in _EXPERTS.items()}
            more |= {} if name is not None else {'dense_first': self._dense_first()}
        if latent:
            more |= {field: self._size(own) for field, own in _LATENT.items()}
        plain = 'moe' if experts else 'llama' if args.swiglu else 'gpt'
        return 'hybrid' if name is not None else 'mla' if latent else plain, more

    def _dense_first(self) -> int:
        every = getattr(self.args, 'moe_layer_freq', 1)
        if every in (1, None):
            return 0
        pattern = every if isinstance(every, list) else [int(not k % every) for k in range(2)]
        dense = pattern.index(1) if 1 in pattern else len(pattern)
        if 0 in pattern[dense:]:
            raise ValueError(
                f'launch line: --moe-layer-freq {every}: advice is for dense layers before all '
                'with experts: give such a list'
            )
        return dense

    def sizes(self, gpus: int) -> dict[str, Any]:
        """Return fields of `Job` that the line says."""
        args = self.args
        if not args.global_batch_size and not args.micro_batch_size:
            raise ValueError('launch line: --global-batch-size is missing: add it')
        replicas = max(1, sizes.replicas(args, gpus))
        return {
            'global_batch': args.global_batch_size or args.micro_batch_size * replicas,
            'cp': args.context_parallel_size,
            'etp': self._size('expert_tensor_parallel_size'),
            'shards_optimizer': self._on('use_distributed_optimizer'),
            'overlaps': self._on('overlap_grad_reduce'),
            'fused': self._fused(),
            'ends': sizes.counted_ends(args),
        }

    def own(self, job: Job) -> Setup:
        """Return the setup of the line."""
        args, chunks = self.args, sizes.num_chunks(self.args) or 1
        name = args.pipeline_schedule
        if name == AUTO or getattr(args, _OWN_FILE):
            given = f'{flag(_OWN_FILE)}' if name is None else f'--pipeline-schedule {name}'
            raise ValueError(
                f'launch line: {given} is no schedule by name: leave it out, or name one'
            )
        family = find(name or STOCK[chunks > 1])
        if sizes.num_chunks(args) is None:
            chunks = 1 if name is None else family.default_chunks
        again = vars(args).get('recompute_granularity') or NONE
        if getattr(args, 'recompute_activations', False):
            again = SELECTIVE
        words = value_of(self.flags, '--recompute-modules') or 'core_attn'
        modules = set(getattr(args, 'recompute_modules', None) or [words])
        if again == SELECTIVE and not modules & set(modules_again(job)):
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
        return setup if pp == 1 else _with_layers(setup, args)

    def require_known(self, own: Setup) -> None:
        """Raise ValueError where a prediction would leave out what changes memory or times."""
        family = find(own.schedule)
        if family.num_routes > 1 or family.default_slices > 1 or family.asynchronous:
            raise ValueError(f'--pipeline-schedule {family.name} is not among what advise weighs')
        for name in _CHANGING:
            if (value := getattr(self.args, f'pipeline_{name}', None)) is not None:
                raise ValueError(f'predictions leave out {flag(f"pipeline_{name}")} {value}')

    def unlike(self, job: Job) -> list[str]:
        """Return settings of the line that predictions leave out."""
        args, found = self.args, [self.line.lacks] if self.line.lacks else []
        precise = args.bf16 or args.fp16
        if not precise:
            found.append('no --bf16 or --fp16 in the line: costs are those of 16-bit training')
        if getattr(args, 'fp8', None) or getattr(args, 'fp4', None):
            found.append('give --tflops as FP8 or FP4 products reach it; activations count 16 bits')
        ours = [each.name for each in FLAGS if each.name not in (flag(_OWN_FILE),)]
        left = [w for w in self.flags if w.partition('=')[0] in ours]
        left = [w for w in left if w.partition('=')[0] != '--pipeline-schedule']
        if left:
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
        if self._kept_by_rank() and self._folders and _ranks_of(setup) != _ranks_of(self.own(job)):
            valued += [folder[2:] for folder in _FOLDERS]
        kept = without(self.flags, valued, switches)
        return [*launcher, *filter(None, [self.script]), *kept, *flags_of(job, setup)]

    @property
    def _folders(self) -> list[str]:
        return [each for each in _FOLDERS if value_of(self.flags, each) is not None]

    def checkpoint_notes(self) -> list[str]:
        """Return where checkpoints of the line go, if it names folders of them."""
        if self._folders and (reason := self._kept_by_rank()):
            where = 'lines with another tp, ep or placement of stages'
            return [f'{where} are without {" and ".join(self._folders)}: {reason}']
        if '--load' not in self._folders:
            return []
        saved = f' if it was saved with {_RESHARDABLE}, too' * (_RESHARDABLE in self.flags)
        return [
            f'the checkpoint of --load goes to all lines{saved}; where tp or pp differ, Megatron '
            'leaves out its random states'
        ]

    def _kept_by_rank(self) -> str:
        found = value_of(self.flags, '--ckpt-format') or 'torch_dist'
        if found != 'torch_dist':
            cure = 'convert it (docs/exactness.md), or train from scratch'
            return f'--ckpt-format {found} keeps files by rank: {cure}'
        sharded = self._on('use_distributed_optimizer') or self._on(
            'use_layer_wise_distributed_optimizer'
        )
        if not sharded or {_RESHARDABLE, '--no-load-optim', '--finetune'} & {*self.flags}:
            return ''
        cure = f'save it once with {_RESHARDABLE}, or load with --no-load-optim'
        return f"the distributed optimizer's state is kept by rank: {cure}"

    def _size(self, name: str) -> int:
        found = getattr(self.args, name, None) or value_of(self.flags, flag(name))
        return int(found) if found else 0

    def _on(self, name: str) -> bool:
        return bool(getattr(self.args, name, False)) or flag(name) in self.flags

    def _fused(self) -> bool:
        backend = getattr(self.args, 'attention_backend', None)
        local = getattr(self.args, 'transformer_impl', None) == 'local'
        plain = str(getattr(backend, 'name', backend)) in ('unfused', 'local')
        return not (plain or (local and not self._on('use_flash_attn')))


def _ranks_of(setup: Setup) -> tuple[Any, ...]:
    """Return which layers each rank holds, and their shards."""
    return setup.tp, setup.ep, placement_of(setup), setup.layers


def _with_layers(setup: Setup, args: Namespace) -> Setup:
    """Return the setup with the layers of each stage, where they are not even."""
    placement, args = placement_of(setup), copy.copy(args)
    args.num_layers = args.num_layers or sum(sizes.hybrid_layers(args) or ())
    fixed = sizes.fixed_layers(args, placement)
    if args.pipeline_model_parallel_layout is not None:
        layers = layout.StageLayout(placement, args.pipeline_model_parallel_layout).num_layers
    else:
        layers = layers_per_stage(args.num_layers, placement, *sizes.counted_ends(args), fixed)
    even = (args.num_layers + sum(sizes.counted_ends(args))) % placement.num_stages == 0
    plain = even and not fixed and args.pipeline_model_parallel_layout is None
    return setup if plain else replace(setup, layers=tuple(layers))
