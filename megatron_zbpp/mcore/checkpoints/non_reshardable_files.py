"""Checkpoints that are kept by rank and chunk: which layers each rank's file holds.

Megatron's format `torch` has a file a rank, with a state dict a chunk, whose layers are counted
from 0 in each chunk. Such a file fits any chunk of as many layers, and does not say which of the
model's it holds. `RankFiles` says it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.layout import layers_per_stage, layout_string
from megatron_zbpp.mcore import layout, model_settings

KEY = 'megatron_zbpp_layout'  # of a checkpoint's state dict


@dataclass(frozen=True)
class RankFiles:
    """Layers in the files of a checkpoint; equal where each file holds the same."""

    schedule: str  # who placed them
    # of each pipeline rank, of each of its chunks: as `E 1-2` or `7-8 L`, layers of the model
    # counted from 1, embedding and loss by their letters
    layers: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, schedule: str, placement: Placement, stages: Sequence[str]) -> RankFiles:
        """Return the files of stages, in model order, on their ranks; a stage is letters, as `Ett`.

        >>> RankFiles.of('zb-v', Placement.v(2), ['Et', 't', 't', 'tL']).layers
        (('E 1', '4 L'), ('2', '3'))
        """
        named, before = [], 0
        for stage in stages:
            named.append(_named(stage, before))
            before += len(stage.strip('EmL'))
        ranks = range(placement.num_ranks)
        return cls(schedule, tuple(tuple(named[s] for s in placement.stages(r)) for r in ranks))

    @classmethod
    def by_plugin(cls, schedule: str, placement: Placement, args: Any) -> RankFiles:
        """Return the files of a run that places its stages by `placement`."""
        return cls.of(schedule, placement, _stages(args, placement))

    @classmethod
    def by_megatron(cls, args: Any) -> RankFiles:
        """Return the files of a run by one of Megatron's schedules, from its saved arguments."""
        ranks = args.pipeline_model_parallel_size
        chunks = getattr(args, 'virtual_pipeline_model_parallel_size', None) or 1
        placement = Placement.loop(ranks, chunks)
        schedule = "Megatron's interleaved schedule" if chunks > 1 else "Megatron's 1F1B"
        return cls.of(schedule, placement, _stages(args, placement))

    @classmethod
    def saved(cls, state: Mapping[str, Any]) -> RankFiles | None:
        """Return the files that a checkpoint names; None: it has no layout and no arguments."""
        written = state.get(KEY)
        if written is not None:
            layers = tuple(map(tuple, written['layers']))
            return cls(written['schedule'], layers)
        args = state.get('args')
        return None if args is None else cls.by_megatron(args)

    def state(self) -> dict[str, Any]:
        """Return the layers as plain values, for `KEY` of a state dict."""
        return {'schedule': self.schedule, 'layers': [list(rank) for rank in self.layers]}

    def same_layers(self, other: RankFiles) -> bool:
        """Return whether both sets of files have the same layers by rank."""
        return self.layers == other.layers

    def difference(self, other: RankFiles) -> str:
        """Name the layers of the first rank whose layers differ, by these files and by `other`.

        >>> stages = ['Et', 't', 't', 'tL']
        >>> loop = RankFiles.of('interleaved', Placement.loop(2, 2), stages)
        >>> loop.difference(RankFiles.of('zb-v', Placement.v(2), stages))
        'rank 0 holds layers E 1 | 3 by interleaved, but E 1 | 4 L by zb-v'
        """
        if len(self.layers) != len(other.layers):
            return (
                f'it has {len(self.layers)} pipeline ranks by {self.schedule}, but '
                f'{len(other.layers)} by {other.schedule}'
            )
        both = enumerate(zip(self.layers, other.layers, strict=True))
        rank, (own, others) = next((r, pair) for r, pair in both if pair[0] != pair[1])
        return (
            f'rank {rank} holds layers {" | ".join(own)} by {self.schedule}, but '
            f'{" | ".join(others)} by {other.schedule}'
        )


def _named(stage: str, before: int) -> str:
    """Return a stage's layers, as `E 1-2`, behind so many layers."""
    count = len(stage.strip('EmL'))
    numbers = f'{before + 1}' if count == 1 else f'{before + 1}-{before + count}' if count else ''
    mtp = f'm{stage.count("m")}' if 'm' in stage else ''
    words = ('E' if 'E' in stage else '', numbers, mtp, 'L' if 'L' in stage else '')
    return ' '.join(filter(None, words)) or 'none'


def _stages(args: Any, placement: Placement) -> list[str]:
    """Return the letters of each stage in model order, as `Ett`."""
    hybrid = model_settings.hybrid(args)
    given = getattr(args, 'pipeline_model_parallel_layout', None)
    if hybrid is None and given is not None:
        parse = PipelineParallelLayerLayout.parse_str_to_list
        stages = parse(given) if isinstance(given, str) else given
        return [''.join(layout.LETTERS[layer] for layer in stage) for stage in stages]
    counts = _of_pattern(args, hybrid, placement) if hybrid else _by_megatron(args, placement)
    mtp = getattr(args, 'mtp_num_layers', None) or 0
    return layout_string(counts, mtp).split('|')


def _of_pattern(args: Any, name: str, placement: Placement) -> list[int]:
    """Return the layers of each stage of a hybrid model."""
    pattern = getattr(args, name)
    main = pattern.partition('/')[0] if isinstance(pattern, str) else 'M' * args.num_layers
    segments = main.split('|')
    if len(segments) == placement.num_stages:
        return [len(segment) for segment in segments]
    return layers_per_stage(len(main.replace('|', '')), placement)


def _by_megatron(args: Any, placement: Placement) -> list[int]:
    """Return the layers of each stage, as Megatron divides them without a layout."""
    if not placement.is_loop:  # the program has laid them out by itself
        return layers_per_stage(args.num_layers, placement)
    several = placement.num_chunks > 1
    config: Any = SimpleNamespace(
        pipeline_model_parallel_layout=None,
        num_layers=args.num_layers,
        pipeline_model_parallel_size=placement.num_ranks,
        virtual_pipeline_model_parallel_size=placement.num_chunks if several else None,
        num_layers_in_first_pipeline_stage=_given(args, 'decoder_first_pipeline_num_layers'),
        num_layers_in_last_pipeline_stage=_given(args, 'decoder_last_pipeline_num_layers'),
        account_for_embedding_in_pipeline_split=_given(
            args, 'account_for_embedding_in_pipeline_split', False
        ),
        account_for_loss_in_pipeline_split=_given(
            args, 'account_for_loss_in_pipeline_split', False
        ),
    )
    where = zip(placement.only_route, placement.chunks, strict=True)
    return [get_num_layers_to_build(config, c if several else None, r) for r, c in where]


def _given(args: Any, name: str, default: Any = None) -> Any:
    """Return an argument that a release may lack."""
    return getattr(args, name, default)
