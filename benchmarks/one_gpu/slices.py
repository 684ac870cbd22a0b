"""What a slice of a sequence costs on one GPU, and whether its attention is hidden as it must be.

    python -m benchmarks.one_gpu.slices [--attention flash] [--tokens 1024,4096] [--hidden 4096]

The queries of a slice attend to all tokens before them: a mask whose corner is below. Attention is
compared with the same by plain products, forward and backward: torch's, or Transformer Engine's
own module by one of its backends (a process each: it chooses once). Then the products and the
attention of a layer, forward and backward, in slices of so many tokens, the last of a sequence of
four: milliseconds for each thousand tokens. Without a GPU the same code runs small on the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch.nn.attention.bias import causal_lower_right

from benchmarks.one_gpu import REHEARSAL
from benchmarks.one_gpu.timing import milliseconds

HEAD = 128  # width of a head
_SLICES = 4
_BACKENDS = {'flash': 'FLASH', 'cuDNN': 'FUSED', 'unfused': 'UNFUSED'}

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From queries of a slice, keys and values up to its end: (batch, heads, tokens, width)."""


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return attention by products, in fp32."""
    hidden = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device)
    hidden = hidden.triu(1 + k.size(2) - q.size(2))
    scores = q.float() @ k.float().mT / q.size(3) ** 0.5
    return (scores.masked_fill(hidden, float('-inf')).softmax(-1) @ v.float()).to(q.dtype)


def by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return what torch has: flash's kernel, on a GPU."""
    mask = causal_lower_right(q.size(2), k.size(2))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def by_te(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return Transformer Engine's, called as Megatron calls it for a slice."""
    from transformer_engine.pytorch import DotProductAttention

    module = DotProductAttention(
        q.size(1), q.size(3), qkv_format='sbhd', attn_mask_type='causal', attention_dropout=0.0
    )
    rows = (each.permute(2, 0, 1, 3).contiguous() for each in (q, k, v))
    found = module(*rows, attn_mask_type='causal_bottom_right')
    return found.view(q.size(2), q.size(0), q.size(1), q.size(3)).permute(1, 2, 0, 3)


def chosen(name: str) -> Attention:
    """Return the attention of that name, a backend of Transformer Engine's or torch's own."""
    if name not in _BACKENDS:
        return by_torch
    for other, word in _BACKENDS.items():
        os.environ[f'NVTE_{word}_ATTN'] = '1' if other == name else '0'
    return by_te


def inputs(tokens: int, before: int, heads: int, device: str) -> list[torch.Tensor]:
    """Return queries of a slice, and keys and values of it and of the tokens before."""
    kind = torch.bfloat16 if device == 'cuda' else torch.float32
    sizes = (tokens, before + tokens, before + tokens)
    return [
        torch.randn(1, heads, size, HEAD, dtype=kind, device=device, requires_grad=True)
        for size in sizes
    ]


def difference(run: Attention, given: list[torch.Tensor]) -> float:
    """Return the largest difference of output and gradients to plain products, relative."""
    weight = torch.randn_like(given[0])
    found, expected = (
        (output.detach(), *torch.autograd.grad(output, given, weight))
        for output in (run(*given), plain(*given))
    )
    return max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)
    )


def layer(tokens: int, hidden: int, run: Attention, device: str) -> Callable[[], None]:
    """Return forward and backward of a layer's products and attention in the last slice."""
    q, k, v = inputs(tokens, (_SLICES - 1) * tokens, hidden // HEAD, device)
    x = torch.randn(tokens, hidden, dtype=q.dtype, device=device, requires_grad=True)
    shapes = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]
    weights = [
        torch.randn(shape, dtype=q.dtype, device=device, requires_grad=True) for shape in shapes
    ]

    def both() -> None:
        into, out, up, down = weights
        attended = run(q, k, v).transpose(1, 2).reshape(tokens, hidden)
        made = (x @ into)[:, :hidden] + attended
        torch.autograd.backward((made @ out @ up @ down).sum())

    return both


def main(argv: list[str] | None = None) -> int:
    """Print what differs and what it takes; the exit status is 1 if some attention is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add('--attention', choices=['torch', *_BACKENDS], default='torch', help='(default: torch)')
    add('--tokens', default='1024,2048,4096,8192,16384', help='of slices (default: %(default)s)')
    add('--hidden', type=int, default=4096, help='size of the layer (default: %(default)s)')
    args = parser.parse_args(argv)
    sizes = [int(size) for size in args.tokens.split(',')]
    if min(sizes) < 1 or args.hidden < HEAD or args.hidden % HEAD:
        parser.error(f'--tokens and --hidden: give sizes above 0, and multiples of {HEAD}')
    real = torch.cuda.is_available()
    device, limit = ('cuda', 2e-2) if real else ('cpu', 1e-5)
    print(torch.cuda.get_device_name() if real else REHEARSAL, flush=True)
    name = args.attention
    if name in _BACKENDS and (not real or find_spec('transformer_engine') is None):
        print(f"{name}: Transformer Engine's kernels are not here: not run")
        return 0
    run = chosen(name)
    off = max(difference(run, inputs(64, before, 2, device)) for before in (0, 64, 192))
    print(f'{name}: slices differ by {off:.1e}, {"WRONG" if off > limit else "right"}', flush=True)
    for tokens in sizes:
        taken = milliseconds(layer(tokens, args.hidden, run, device), real)
        each = 1024 * taken / tokens
        print(f'{name}: {tokens} tokens {taken:.2f} ms, {each:.2f} a thousand', flush=True)
    return int(off > limit)


if __name__ == '__main__':
    sys.exit(main())
