"""The models of the GPT benchmark, and how many floating-point operations they take."""

from __future__ import annotations

from dataclasses import dataclass

_GPT2_WORDS = 50257


@dataclass(frozen=True)
class Model:
    """A GPT: LayerNorm, GELU, biases, learned positions, tied embeddings, no dropout.

    Attributes:
        layers, hidden, heads, sequence: its shape.
        pipeline: pipeline ranks that it was published for.
        tensor: tensor-parallel ranks.
        micro_batch: samples of a microbatch.
        ends: whether embedding and output count as a layer each, so that the first and the last
            stage have one fewer.
        stage_layers: of the stage that `--single-gpu` measures, not tensor-parallel.
        words: the vocabulary before it is padded.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    pipeline: int
    tensor: int
    micro_batch: int
    ends: bool
    stage_layers: int
    words: int = _GPT2_WORDS

    def vocabulary(self, tensor: int) -> int:
        """Pad as Megatron does, to whole 128 for each tensor-parallel rank."""
        step = 128 * tensor
        return -(-self.words // step) * step

    @property
    def layer_flops(self) -> float:
        """Of one token in one layer, forward and backward.

        As Megatron's `num_floating_point_operations` counts: a matrix product once forward and
        twice backward, two operations an element, half of the attention matrix.
        """
        return 72.0 * self.hidden**2 + 6.0 * self.hidden * self.sequence

    def flops(self, samples: int, tensor: int = 1) -> float:
        """Of one iteration over so many samples; recomputation does not count."""
        logits = 6.0 * self.hidden * self.vocabulary(tensor)
        return samples * self.sequence * (self.layers * self.layer_flops + logits)


MODELS = {
    # for tests, and to try things out on a CPU
    'tiny': Model(8, 64, 4, 32, 2, 1, 2, True, 2, words=1000),
    # arXiv 2401.10241, table 3
    '1.5b': Model(22, 2304, 24, 1024, 8, 1, 6, True, 3),
    '6.2b': Model(30, 4096, 32, 1024, 8, 1, 3, True, 4),
    '14.6b': Model(46, 5120, 40, 1024, 16, 1, 1, True, 3),
    '28.3b': Model(62, 6144, 48, 1024, 32, 1, 1, True, 2),
    # arXiv 2005.14165, table 2.1; six layers a rank would not fit on one GPU undivided
    '175b': Model(96, 12288, 96, 2048, 16, 8, 1, False, 1),
}


def find(name: str) -> Model:
    """Return the model of that name.

    Raises:
        ValueError: there is none; the message lists them.
    """
    if name not in MODELS:
        raise ValueError(f'unknown model {name!r}: known are {", ".join(MODELS)}')
    return MODELS[name]
