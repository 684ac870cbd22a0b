"""Parameters of tests in the words of the page of what is supported."""

from __future__ import annotations

from typing import Any

# (parameter, value): what it is called; others are called what they are
_WORDS: dict[tuple[str, object], str] = {
    ('kind', 'dense'): 'dense layers',
    ('kind', 'SwiGLU'): 'SwiGLU layers',
    ('kind', 'experts'): 'layers of experts',
    ('kind', 'grouped experts'): 'layers of experts in one product',
    ('kind', 'MLA'): 'layers with latent attention (MLA)',
    ('kind', 'lengths'): 'dense layers, microbatches of any length',
    ('recompute', None): 'all activations kept',
    ('recompute', 'full'): 'all activations recomputed',
    ('recompute', 'selective'): 'some activations recomputed',
    ('shape', 'pp 4'): '4 pipeline ranks',
    ('shape', 'tp 2'): 'tensor parallel',
    ('shape', 'ep 2'): 'expert parallel, distributed optimizer, overlapped reduction',
    ('shape', 'overlap'): 'data parallel, overlapped reduction',
    ('shape', 'distributed'): 'data parallel, distributed optimizer',
    ('option', '--overlap-grad-reduce'): 'data parallel, overlapped reduction',
    ('option', '--tensor-model-parallel-size=2'): 'tensor parallel',
    ('option', '--use-distributed-optimizer'): 'data parallel, distributed optimizer',
    ('layers', 'output'): 'the output layer',
    ('layers', 'input+output'): 'the output layer and the embedding',
    ('layers', 'input+output, tied'): 'the output layer and the embedding, tied,',
    ('has', 'sliced'): 'slices',
    ('has', 'split_vocabulary'): 'the output layer on all ranks',
    ('has', 'split_embedding'): 'the output layer and the embedding on all ranks',
    ('added', 'split_vocabulary'): 'the output layer on all ranks',
    ('added', 'split_embedding'): 'the embedding on all ranks',
    ('added', 'evict'): 'activations on a partner',
    ('case', 'gpt3'): 'GPT-3',
    ('case', 'llama'): 'Llama',
    ('case', 'untied'): 'untied embeddings',
    ('case', 'uneven'): 'stages of unlike numbers of layers',
    ('case', 'per-token-loss'): 'losses averaged by token',
    ('case', 'recompute-uniform'): 'full recompute, uniform',
    ('case', 'recompute-block'): 'full recompute, by block',
    ('case', 'recompute-selective'): 'selective recompute',
    ('case', 'tensor'): 'tensor parallel',
    ('case', 'sequence'): 'sequence parallel',
    ('case', 'context'): 'context parallel',
    ('case', 'data'): 'data parallel',
    ('case', 'distributed-optimizer'): 'data parallel, distributed optimizer',
    ('case', 'overlap-grad-reduce'): 'data parallel, overlapped reduction',
    ('case', 'overlap-param-gather'): 'data parallel, overlapped gathering of parameters',
    ('case', 'moe'): 'experts',
    ('case', 'expert-parallel'): 'expert parallel',
    ('case', 'llama-moe-bf16'): 'Llama of experts, bf16, distributed optimizer',
}


def worded(params: dict[str, Any]) -> dict[str, Any]:
    """Return a test's parameters by name, each in words where it has some."""
    return {
        name: _WORDS.get((name, value), value) if isinstance(value, str | None) else value
        for name, value in params.items()
    }
