"""The gather of a column-parallel module's input, which its backward leaves to W."""

from __future__ import annotations

from typing import Any

# by which the backward of TE's Linear, and that of its LayerNormLinear, decides whether to gather
_FLAGS = 'backward_input_needs_gather', 'ln_out_needs_gather'


def leave_gather_to_w(output: Any) -> None:
    """Let the backward behind `output` put off this rank's rows of the input, not the whole.

    Under sequence parallelism TE gathers the input beside the product that gives its gradient, for
    the weight gradient. W gathers it again, so that B need not. FP8 data is left alone: there the
    whole waits for W, for its scales and its layout are made with the gather.

    Args:
        output: of a module; where it is nobody's that TE's autograd functions made, it stays.
    """
    first = output[0] if isinstance(output, tuple) else output
    node = first.grad_fn
    context = getattr(node, 'backward_objects', node)  # of TE's Linear from 2.9 on
    if getattr(context, 'fp8', True) or getattr(context, 'debug', False):
        return
    for flag in _FLAGS:
        if hasattr(context, flag):
            setattr(context, flag, False)
