"""An encoder's outputs beside hidden states: Megatron's T5Model, encoder first, a decoder a stage.

Each stage of the decoder attends to what the encoder has made, and hands it on; gradients come back
from all of them. The reference is autograd through all chunks in one process.
"""

from __future__ import annotations

from unittest import mock

import pytest
import test_hops
from grids import grid
from supported import supports
from test_hops import HIDDEN, SEQUENCE, VOCABULARY, require_same

MEMORY = 12  # tokens that the encoder reads


def passing(base):
    """A T5 whose decoder hands on what it has attended to."""

    class Passing(base):
        def hops(self, shape, dtype):
            hidden, memory = (shape, dtype), ((MEMORY, *shape[1:]), dtype)
            both = [hidden, memory]
            takes = None if self.add_encoder else [memory] if self.pre_process else both
            return takes, None if self.post_process else [memory] if self.add_encoder else both

        def forward(self, *arguments, **options):
            made = super().forward(*arguments, **options)
            return (
                made if self.add_encoder or self.post_process else (made, self.encoder_hidden_state)
            )

    return Passing


def build(layout, stages, *_):
    """A chunk for each stage: the first has the encoder, the second the decoder's embedding."""
    import torch
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,  # of each stage, which knows nothing of the others
        hidden_size=HIDDEN,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=False,
    )
    chunks = [
        passing(T5Model)(
            config,
            config,
            t5_spec.encoder_model_with_local_spec(),
            t5_spec.decoder_model_with_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=MEMORY,
            pre_process=stage < 2,
            post_process=layout.is_last(stage),
            add_encoder=layout.is_first(stage),
            add_decoder=not layout.is_first(stage),
        )
        for stage in stages
    ]
    return config, chunks


def forward_step(data, model):
    import torch

    text = next(data)
    read = text[:, :1] + torch.arange(MEMORY).expand(2, -1)
    square = torch.ones(2, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    open_ = torch.zeros(2, 1, MEMORY, MEMORY, dtype=torch.bool)
    masks = open_, square, open_[:, :, :SEQUENCE]
    made = model(read % VOCABULARY, text[:, :-1], *masks, lm_labels=text[:, 1:])
    return made, test_hops.loss_of


def trained(schedule, ranks):
    """As of test_hops, of this model."""
    with (
        mock.patch.object(test_hops, 'build', build),
        mock.patch.object(test_hops, 'forward_step', forward_step),
    ):
        return test_hops.trained(schedule, ranks)


@pytest.mark.shared
@supports("an encoder's outputs beside hidden states (T5Model, encoder on the first stage)")
@grid(
    schedule=('zb-h1', 'interleaved', '1f1b', 'zb-2p'),
    ranks_=(4, 2, 4, 2),
    when=lambda schedule, ranks_: (schedule, ranks_) != ('interleaved', 4),  # of four layers
)
def test_gradients_are_those_of_autograd(ranks, schedule, ranks_):
    """Of the encoder's weights, too, to which each stage of the decoder adds."""
    require_same(ranks(ranks_).run(trained, schedule, ranks_), ranks_)
