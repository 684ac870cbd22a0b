"""Transformer Engine's linear modules: what they put off, run by our W passes.

A TE module built with `delay_wgrad_compute` puts the computation of its weight gradients into a
queue of its own (`wgrad_store`), and `backward_dw()` runs the oldest. Here, what it puts off goes
to our `WeightGradStore` instead, and `backward_dw` gets it from there: so W passes may come in any
order, and an error leaves nothing behind. Where our store does not defer, the module is told that
it does not delay, and is stock.

While a module computes for us it finds aliases in place of its weights and biases, leaves of their
own: what autograd does with those in B reaches no parameter and no hook on it. Of what B leaves in
`.grad` of an alias only that of a bias is real, which FP8 computes there; GroupedLinear's weights
get memory that W is still to fill.

`backward_dw` leaves gradients in `.grad` of the aliases, or adds to `main_grad` when fused; W hands
the former to autograd. Of a module with one weight, what was put off returns its gradient and the
bias's, and W takes them there: `backward_dw` adds nothing but a third of the host's time.
"""

from megatron_zbpp.mcore.patches.transformer_engine.chunk import (
    Delaying,
    delaying_modules,
    left_over,
    strays,
)
from megatron_zbpp.mcore.patches.transformer_engine.settings import delay_weight_gradients, patches

__all__ = [
    'Delaying',
    'delay_weight_gradients',
    'delaying_modules',
    'left_over',
    'patches',
    'strays',
]
