"""Sizes of a model and its batches as Megatron's settings give them, not validated yet."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace
from typing import Any

from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.ir.placement import layers_per_stage, layout_string
from megatron_zbpp.mcore import layout, model_settings
from megatron_zbpp.mcore.options import Names
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import AUTO, BY_FLAG
from megatron_zbpp.schedules import checked_chunks, find

_ONE = 'tensor_model_parallel_size', 'pipeline_model_parallel_size', 'context_parallel_size'


class Sizes:
    """Layers, chunks, ranks and batches: attributes are Megatron's arguments, of the same names.

    None where all sources lack one, 1 for the sizes of parallelism. Errors name settings as their
    user spells them.
    """

    def __init__(self, *sources: Any, names: Names = BY_FLAG) -> None:
        self.names, self._sources = names, sources

    def __getattr__(self, name: str) -> Any:
        for source in self._sources:
            if hasattr(source, name):
                return getattr(source, name)
        return 1 if name in _ONE else None

    @property
    def ranks(self) -> int:
        return self.pipeline_model_parallel_size

    def require_plain(self) -> None:
        """Check that the layers are known, and given in a way that a layout can take."""
        for name, of in (('yaml_cfg', ''), ('use_checkpoint_args', ' of the checkpoint')):
            if getattr(self, name):
                cure = f'give the arguments{of} as flags'
                raise self._error(f'{{{name}}} does not work with {{schedule}}: {cure}')
        if self.num_layers is None and self.hybrid_layers() in (None, [None]):
            raise self._error('{num_layers} is missing: give how many layers the model has')

    def _error(self, text: str) -> ValueError:
        return ValueError(self.names.fill(text))

    def num_chunks(self) -> int | None:
        """Return chunks a rank, as Megatron's settings give them; None: the schedule's choice."""
        segments = self.hybrid_layers()
        if segments is not None:
            return len(segments) // self.ranks if len(segments) > self.ranks else None
        text = self.pipeline_model_parallel_layout
        if text is not None:
            named = f'{{pipeline_model_parallel_layout}} {text}'
            try:
                known = isinstance(text, list)  # of a program; as a flag it is text
                stages = len(text) if known else layout.StageLayout.get_num_stages_from_str(text)
            except AssertionError as error:
                cure = 'give the letters E, t, m, L and |'
                raise self._error(f'{named}: {error}: {cure}') from None
            if stages % self.ranks:
                raise self._error(
                    f'{named} has {stages} stages, which do not divide among {self.ranks} pipeline '
                    'ranks: give each rank as many, divided by |'
                )
            return stages // self.ranks
        each = self.num_layers_per_virtual_pipeline_stage
        if each is None:
            return self.num_virtual_stages_per_pipeline_rank
        counted = (self.num_layers or 0) + sum(self.counted_ends)
        chunks, left = divmod(counted, self.ranks * each)
        if left:
            raise self._error(
                f'{{num_layers_per_virtual_pipeline_stage}} {each} does not divide {counted} '
                f'layers among {self.ranks} pipeline ranks: leave it out, or change {{num_layers}}'
            )
        return chunks

    def chunks_for(self, schedule: str | Schedule) -> int | None:
        """Return the chunks a rank that are asked for; None: the schedule has its own."""
        asked = self.num_chunks()
        if isinstance(schedule, Schedule):
            if asked not in (None, schedule.placement.num_chunks):
                raise self._error(
                    f'the settings ask for {asked} chunks on each rank, but the schedule '
                    f'{schedule.name} has {schedule.placement.num_chunks}: give as many stages in '
                    '{pipeline_model_parallel_layout}, or leave such settings out'
                )
            return None
        if asked is not None and schedule != AUTO:
            family = find(schedule)
            wanted, hybrid = family.default_chunks, model_settings.hybrid(self)
            if hybrid is not None:
                cure = f'give {{{hybrid}}} {wanted * self.ranks} segments'
            elif self.pipeline_model_parallel_layout is not None:
                cure = 'leave {pipeline_model_parallel_layout} out, or give it '
                cure += f'{wanted * self.ranks} stages'
            elif self.num_layers_per_virtual_pipeline_stage is not None:
                cure = 'leave {num_layers_per_virtual_pipeline_stage} out'
            else:
                cure = f'leave {{num_virtual_stages_per_pipeline_rank}} out, or give it {wanted}'
            checked_chunks(family, asked, self.names.fill(cure))
        return asked

    def hybrid_layers(self) -> list[Any] | None:
        """Return the number of layers in each segment of a hybrid model's pattern; None: no hybrid.

        Layers of multi-token prediction at the end of the pattern do not count. A pattern without
        segments is one; Megatron divides it evenly among the ranks.
        """
        name = model_settings.hybrid(self)
        if name is None:
            return None
        pattern = getattr(self, name)
        if not isinstance(pattern, str):  # a ratio, of releases that know no segments
            return [self.num_layers]
        return [len(segment) for segment in pattern.partition('/')[0].split('|')]

    @property
    def counted_ends(self) -> tuple[bool, bool]:
        """Of embedding and loss: True if it counts as a layer."""
        loss = bool(self.account_for_loss_in_pipeline_split)
        return bool(self.account_for_embedding_in_pipeline_split), loss

    def fixed_layers(self, placement: Placement) -> dict[int, int]:
        """Return the layers of stages that are given for the first and the last pipeline rank.

        In a loop they are those of all chunks of first and last rank, as Megatron has it; elsewhere
        one rank may hold both ends, and they are those of a rank of chunks like the first or last
        one.
        """
        fixed: dict[int, int] = {}
        for name, end in (
            ('decoder_first_pipeline_num_layers', 0),
            ('decoder_last_pipeline_num_layers', placement.num_stages - 1),
        ):
            layers: int | None = getattr(self, name)
            if layers is None:
                continue
            each, left = divmod(layers, placement.num_chunks)
            if left:
                raise self._error(
                    f'{{{name}}} {layers} does not divide among {placement.num_chunks} chunks: '
                    'give a multiple, or {pipeline_model_parallel_layout}'
                )
            same = placement.stages(placement.only_route[end]) if placement.is_loop else (end,)
            fixed |= dict.fromkeys(same, each)
        return fixed

    def placed(self, placement: Placement) -> dict[str, Any]:
        """Return the settings of Megatron's that place the layers for `placement`.

        One chunk a rank, in a loop, is what Megatron does by itself if all get as many, or the ends
        are given. A hybrid model's layers are where its pattern says; one that is not divided yet
        is divided here.
        """
        hybrid = model_settings.hybrid(self)
        if hybrid is not None:
            return self._placed_hybrid(hybrid, placement)
        embedding, loss = self.counted_ends
        mtp, fixed = self.mtp_num_layers or 0, self.fixed_layers(placement)
        assert self.num_layers is not None
        uneven = (self.num_layers + embedding + loss) % placement.num_stages and not fixed
        if placement == Placement.loop(placement.num_ranks) and not uneven:
            return {}
        text = self.pipeline_model_parallel_layout
        if text is None:
            named, loss = self.names.of('num_layers'), loss + mtp
            layers = layers_per_stage(self.num_layers, placement, embedding, loss, fixed, named)
            text = layout_string(layers, mtp)
        elif fixed:
            raise self._error(
                '{pipeline_model_parallel_layout} says how many layers all stages have: drop '
                '{decoder_first_pipeline_num_layers} and {decoder_last_pipeline_num_layers}'
            )
        return {
            'pipeline_model_parallel_layout': text,
            'decoder_first_pipeline_num_layers': None,
            'decoder_last_pipeline_num_layers': None,
            'account_for_embedding_in_pipeline_split': False,
            'account_for_loss_in_pipeline_split': False,
            'num_layers_per_virtual_pipeline_stage': None,
            'num_virtual_stages_per_pipeline_rank': None,
            'overlap_p2p_comm': True,  # else Megatron refuses two ranks with chunks
        }

    def _placed_hybrid(self, name: str, placement: Placement) -> dict[str, Any]:
        pattern = getattr(self, name)
        if not isinstance(pattern, str):
            return {}  # a ratio, of releases that know no segments
        main, slash, rest = pattern.partition('/')
        segments = main.split('|')
        if len(segments) == placement.num_chunks == 1:
            return {}  # Megatron divides it
        if len(segments) == 1:
            layers = layers_per_stage(len(main), placement)
            ends = list(itertools.accumulate(layers))
            segments = [main[end - count : end] for count, end in zip(layers, ends, strict=True)]
        if len(segments) != placement.num_stages:
            raise ValueError(
                f'{self.names.of(name)} has {len(segments)} segments, but the schedule places '
                f'{placement.num_stages} stages: give that many, divided by |'
            )
        return {name: '|'.join(segments) + slash + rest, 'overlap_p2p_comm': True}

    def with_(self, settings: dict[str, Any]) -> Sizes:
        return Sizes(SimpleNamespace(**settings), *self._sources, names=self.names)

    def layers(self, placement: Placement) -> list[int]:
        """Return the transformer layers of each stage."""
        placed = self.with_(self.placed(placement))
        segments = placed.hybrid_layers()
        if segments is not None:
            even = [sum(segments) // placement.num_stages] * placement.num_stages
            return segments if len(segments) > 1 else even
        if placed.pipeline_model_parallel_layout is not None:
            return layout.StageLayout(placement, placed.pipeline_model_parallel_layout).num_layers
        assert self.num_layers is not None
        return layers_per_stage(
            self.num_layers, placement, *self.counted_ends, self.fixed_layers(placement)
        )

    def planned(self, text: str, file: str) -> dict[str, Any]:
        """Return the settings of Megatron's that place the layers as a plan does."""
        hybrid = model_settings.hybrid(self)
        if hybrid is not None and isinstance(getattr(self, hybrid), str):
            main, slash, rest = getattr(self, hybrid).partition('/')
            segments = text.removeprefix('E').removesuffix('L')
            if segments.replace('|', '') != main.replace('|', ''):
                raise ValueError(
                    f'{self.names.of(hybrid)} {main}, but the layout {text} of {file} has other '
                    'layers: partition the layers of this model (zbpp partition)'
                )
            return {hybrid: segments + slash + rest}
        for name, letter in (('num_layers', 't'), ('mtp_num_layers', 'm')):
            wanted, has = getattr(self, name) or 0, text.count(letter)
            if wanted != has:
                raise ValueError(
                    f'{self.names.of(name)} {wanted}, but the layout {text} of {file} has {has}: '
                    'partition the layers of this model (zbpp partition), or take the schedule '
                    'without its layout'
                )
        if not (text.startswith('E') and text.endswith('L') and set(text) <= set('EtmL|')):
            raise ValueError(
                f'the layout {text} of {file} is none of E, t, m, L and |, with E first and L '
                'last: name the layers so in the file of layers'
            )
        given, parsed = self.pipeline_model_parallel_layout, layout.StageLayout.parse_str_to_list
        if given is not None and parsed(given) != parsed(text):
            raise self._error(
                f'{{pipeline_model_parallel_layout}} {given}, but {file} was planned for {text}: '
                'leave the flag out'
            )
        return {'pipeline_model_parallel_layout': text}

    def stock_layout(self) -> str | None:
        """Return the stages of the same training without us, in the language of Megatron's layout.

        None where Megatron cannot share out its layers so: then there is no such training.
        """
        given, hybrid = self.pipeline_model_parallel_layout, model_settings.hybrid(self)
        where = Placement.loop(self.ranks, self.num_chunks() or 1)
        if hybrid is None and given is not None:
            return layout.text_of_stages(given)
        mtp = '/' in str(getattr(self, hybrid)) if hybrid else self.mtp_num_layers or 0
        counts = self.hybrid_layers() or [self.num_layers or 0]
        if sum(counts) < where.num_stages:
            return None
        if len(counts) != where.num_stages:
            fixed = self.fixed_layers(where)
            try:
                counts = layers_per_stage(sum(counts), where, *self.counted_ends, fixed)
            except ValueError:
                return None  # stages of ours may do, or are refused by their own numbers
        return layout_string(counts, mtp)

    @property
    def ranks_of_replica(self) -> int:
        return self.tensor_model_parallel_size * self.context_parallel_size * self.ranks

    def replicas(self, world_size: int) -> int:
        return world_size // self.ranks_of_replica

    def microbatches(self, world_size: int) -> list[int]:
        """Return with how many microbatches training begins and ends, and its steps between."""
        step = self.replicas(world_size) * (self.micro_batch_size or 0)
        steps = re.findall(r':\s*(\d+)', self.step_batch_size_schedule or '')
        sizes = {*map(int, [*steps, *(self.rampup_batch_size or [])[:1]])}
        if not steps:
            sizes.add(self.global_batch_size or step)
        # sizes that do not divide are Megatron's to refuse
        return sorted({size // step for size in sizes if step and size >= step})

    def require_every_size(self, world_size: int, programs: Programs) -> None:
        """Check that each number of microbatches of a ramp-up or an evaluation can be run."""
        copies, whole = self.replicas(world_size), self.global_batch_size
        step = copies * (self.micro_batch_size or 0)
        ramp = [*map(int, self.rampup_batch_size or ())]
        between = range(ramp[0], whole or step, ramp[1]) if len(ramp) == 3 and ramp[1] > 0 else ()
        # setting, its batch, samples at a time
        calls = [('rampup_batch_size', size, step) for size in between]
        evaluated, micro = self.eval_global_batch_size, self.eval_micro_batch_size
        evaluates = (self.eval_iters != 0 or self.full_validation) and (evaluated or micro)
        if evaluates and not programs.asynchronous:  # whose evaluations drain, by another schedule
            name = 'eval_global_batch_size' if evaluated else 'eval_micro_batch_size'
            calls.append((name, evaluated or whole or step, copies * (micro or 0) or step))
        for name, size, at_once in calls:
            if not at_once or size < at_once:
                continue  # Megatron's to refuse
            try:
                programs.schedule(self.ranks, size // at_once)
            except ValueError as error:
                batches = f'gives batches of {size}, {size // at_once} microbatches'
                raise ValueError(f'{self.names.of(name)} {batches}: {error}') from None
