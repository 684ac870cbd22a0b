"""What autograd hands the parameters of DistributedDataParallel: each gradient must be defined.

Autograd orders no stream behind an undefined one. On a GPU the hooks of DistributedDataParallel run
on the stream on which it was built, and would reduce `main_grad` before it is computed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock


@dataclass
class Seen:
    defined: int = 0  # how many were
    fused: int = 0  # of how many of those a kernel had added the real one to `main_grad`
    # names of parameters that got one that was not
    undefined: list[str] = field(default_factory=list)

    def note(self, name: str, parameter: Any, gradients: tuple) -> None:
        if gradients[0] is None:
            self.undefined.append(name)
            return
        self.defined += 1
        self.fused += getattr(parameter, 'grad_added_to_main_grad', False)


def watch(model: Any, seen: Seen) -> Seen:
    """Note in `seen` from now on what each parameter of a DistributedDataParallel gets."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for (name, parameter), node in zip(trained, model.grad_accs, strict=True):
        node.register_prehook(
            lambda gradients, name=name, p=parameter: seen.note(name, p, gradients)
        )
    return seen


@contextmanager
def watched(training: Any) -> Iterator[Seen]:
    """An event of NVIDIA's loop, see `events`: watches every chunk that it builds."""
    from megatron.core.distributed import DistributedDataParallel

    seen, original = Seen(), DistributedDataParallel.__init__

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        watch(self, seen)

    with mock.patch.object(DistributedDataParallel, '__init__', __init__):
        yield seen


def require_defined(reported: tuple[Seen, ...], fused: bool = False) -> None:
    """Hold that gradients came on each rank, all defined, and some fused ones if asked."""
    for seen in reported:
        assert not seen.undefined, f'autograd got None for {sorted({*seen.undefined})}'
        assert seen.defined and bool(seen.fused) >= fused, seen
