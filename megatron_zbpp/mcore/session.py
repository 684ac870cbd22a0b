"""What a run knows while the plugin is enabled; nothing that Megatron is patched with is here.

Takes from this room only what is a value: what was asked for, and its programs.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Mapping

import torch
import torch.distributed as dist

from megatron_zbpp.analysis.offloading import FREE
from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import AUTO, Settings
from megatron_zbpp.post_validation.policy import EarlyStepPolicy
from megatron_zbpp.post_validation.protocol import PostValidation
from megatron_zbpp.runtime.activations.free_amount import FreeAmount
from megatron_zbpp.runtime.activations.store import ActivationStore
from megatron_zbpp.runtime.autotune import AutoPlan
from megatron_zbpp.runtime.channels import Channels
from megatron_zbpp.runtime.freezing import FreezeRun
from megatron_zbpp.runtime.guard import agreement
from megatron_zbpp.runtime.guard.watchdog import Watchdog
from megatron_zbpp.runtime.observe.interval import Interval
from megatron_zbpp.runtime.observe.measure import Figures, Iteration
from megatron_zbpp.runtime.observe.trace import Tracer
from megatron_zbpp.runtime.side_work import SideWork
from megatron_zbpp.runtime.weight_grads import WeightGradStore


class Session:
    """The state of one run on one rank.

    Args:
        settings: what was asked for.

    Attributes:
        settings: those.
        programs: of the schedule, for each number of microbatches.
        store: the weight gradients that wait for their W.
        watchdog: ends this process if the pipeline no longer moves.
        post_validation: of the optimizer steps, where that is asked for.
        auto: plans, where that is asked for.
        amount: finds out how much is offloaded, where that is asked for.
        tracer: draws an iteration, where that is asked for.
        flags: of the program, that all ranks must have alike: compared before groups are made.
        latest: the latest iteration of this rank.
        interval: the iterations of training since the last line of the log.
        announced: whether the user has been told what runs.
        freezing: leaves weight gradients out, where that is asked for.
        side: what this rank does while it waits, where that is asked for.
        compared: models whose layers the ranks have compared with the placement.

    Raises:
        ValueError: settings that make no sense.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.programs = Programs(settings)
        self.store = WeightGradStore()
        self.watchdog = Watchdog(settings.watchdog_timeout or 0)
        if settings.watchdog_pause_timeout is not None:
            self.watchdog.limit_pauses(settings.watchdog_pause_timeout)
        self.post_validation: PostValidation | None = None
        if settings.post_validation is not None:
            policy = EarlyStepPolicy(settings.post_validation)
            self.post_validation = PostValidation(policy, self.watchdog.collective, say)
        self.auto: AutoPlan | None = None
        if settings.schedule == AUTO:
            objective = 'makespan' if self.post_validation is None else 'window'
            self.auto = AutoPlan(settings.profile_iters, settings.memory_limit, objective=objective)
        self.amount = FreeAmount(settings.profile_iters) if settings.offload == FREE else None
        self.tracer = None if settings.trace_dir is None else Tracer(settings.trace_dir)
        self.flags: Mapping[str, object] = {}
        self.latest: Iteration | None = None
        self.interval = Interval()
        self.freezing: FreezeRun | None = None
        if settings.freeze is not None:
            self.freezing = self.store.left_out = FreezeRun(settings.freeze, say)
        self.side: SideWork | None = None
        self.announced = False
        self.compared: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._activations: dict[torch.device, ActivationStore] = {}
        self._channels: dict[tuple[dist.ProcessGroup, Placement, bool], Channels] = {}
        self._between_partners: dict[tuple[dist.ProcessGroup, frozenset], Channels] = {}
        self._agreed: set[tuple] = set()

    def agree(self, settings: Mapping[str, object], group: dist.ProcessGroup) -> None:
        """Return if all ranks of `group` have these settings: a collective where they are new.

        Settings that are new on some ranks only are a stall, for the watchdog.

        Raises:
            DisagreementError: they have not.
        """
        settings = {'schedule': self.programs.key, **settings}
        what = f'handshake about {agreement.fingerprint(settings)}'  # some 900 flags say less
        if group is dist.group.WORLD:
            settings |= self.flags
        # as text, as they are compared: some are lists
        key = (group, *((name, agreement.fingerprint(v)) for name, v in settings.items()))
        if key not in self._agreed:
            with self.watchdog.collective(what):
                gathered = agreement.gather(settings, group)
            agreement.compare(gathered)
            self._agreed.add(key)

    def channels(
        self,
        pp_group: dist.ProcessGroup,
        placement: Placement,
        device: torch.device,
        shapes: bool,
    ) -> Channels:
        """Return the channels of this rank between neighbouring stages; made once a group.

        Args:
            pp_group: the pipeline's.
            placement: of the stages.
            device: where messages live.
            shapes: whether they can tell shapes.
        """
        key = (pp_group, placement, shapes)
        if key not in self._channels:
            ranks = placement.ranks
            steps = [(a, b) for a, b in itertools.pairwise(ranks) if a != b]
            pairs = {*steps, *((b, a) for a, b in steps)}
            self._channels[key] = Channels(
                pp_group,
                pairs,
                device,
                self.watchdog.collective,
                shapes=shapes,
                kernels=self.settings.kernels,
            )
        return self._channels[key]

    def activations(
        self,
        device: torch.device,
        pp_group: dist.ProcessGroup | None = None,
        partners: frozenset[tuple[int, int]] = frozenset(),
    ) -> ActivationStore:
        """Return what moves activations of `device`; made once.

        Args:
            device: where they are.
            pp_group: the pipeline's, where some go to other ranks.
            partners: of it, who sends to whom.
        """
        if device not in self._activations:
            self._activations[device] = ActivationStore(device)
        store = self._activations[device]
        if pp_group is not None and partners:
            key = pp_group, partners
            if key not in self._between_partners:
                self._between_partners[key] = Channels(
                    pp_group,
                    partners,
                    device,
                    self.watchdog.collective,
                    shapes=True,
                    saved=True,
                    kernels=self.settings.kernels,
                )
            store.join(self._between_partners[key])
        return store

    def figures(self) -> Figures | None:
        """Return the mean since this was last asked: a collective of the pipeline.

        None where no iteration of training has ended since.
        """
        early = self.post_validation
        with self.watchdog.collective('figures of the pipeline for the log'):
            return self.interval.figures(early and (early.early, early.taken_back))

    def on_iteration_end(self, iteration: Iteration) -> None:
        """Take note of an iteration of training; run what auto has planned from now on."""
        self.latest = iteration
        self.interval.add(iteration)
        if self.freezing is not None:
            self.freezing.after(iteration)
        if self.side is not None:
            with self.watchdog.collective('times of the pipeline for a side task'):
                early = self.post_validation
                self.side.after(iteration, early is not None and early.agreed)
        if self.tracer is not None:
            self.tracer.after(iteration)
        self._settle_amount(iteration)
        auto = self.auto
        planned = None if auto is None else auto.after(iteration)
        if auto is not None and planned is not None:
            self.programs.replace(planned)
            if self.tracer is not None:
                self.tracer.switched(auto.costs)

    @property
    def counting(self) -> bool:
        """Whether bytes are worth counting, for what is still to be planned."""
        auto, amount = self.auto, self.amount
        return (auto is not None and auto.counting) or (amount is not None and not amount.settled)

    def _settle_amount(self, iteration: Iteration) -> None:
        """Leave on the device what copies would cost time for, once that is known."""
        if self.amount is None:
            return
        schedule = iteration.schedule
        costs = self.amount.after(
            iteration,
            lambda: {
                stage: seconds
                for store in self._activations.values()
                for stage, seconds in store.copy_times().items()
            },
            lambda: self.programs.on_the_device(schedule.num_ranks, schedule.num_microbatches),
        )
        if costs is not None:
            self.programs.offload_within(costs)
            if self.tracer is not None:
                self.tracer.switched(costs)


def say(message: str) -> None:
    """Tell the user, once for all ranks."""
    if dist.get_rank() == 0:
        print(f'megatron_zbpp: {message}', file=sys.stderr, flush=True)
