"""Model chunks that run slice by slice, with shards of layers on all pipeline ranks."""

from __future__ import annotations

from typing import Any

from megatron_zbpp.ir import Pass
from megatron_zbpp.mcore.iteration.embedding import EmbeddingStage
from megatron_zbpp.mcore.iteration.sliced import SlicedStage
from megatron_zbpp.mcore.iteration.vocabulary import VocabularyStage
from megatron_zbpp.mcore.slicing import Slice


class SlicedVocabularyStage(VocabularyStage, SlicedStage):
    """One chunk of a Megatron model whose passes, S and T among them, are of slices."""

    def _of_whole(self, p: Pass, part: Slice, loss_func: Any) -> Any:
        self._remember(p, loss_func)
        return super()._of_whole(p, part, loss_func)


class SlicedEmbeddingStage(EmbeddingStage, SlicedVocabularyStage):
    """The same, with the embedding on all ranks, too: D, I and J are of slices."""


STAGES = {False: SlicedVocabularyStage, True: SlicedEmbeddingStage}  # embedding on all ranks?
