"""State of a run while the plugin is enabled; nothing that Megatron is patched with is here."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_zbpp.guests.base import Guest
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.mcore.faces import Face, face_of
from megatron_zbpp.mcore.options import ARGUMENTS, Names
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import Filler
from megatron_zbpp.runtime.groups import beside
from megatron_zbpp.runtime.guard import agreement, watchdog_for
from megatron_zbpp.runtime.log import job_log
from megatron_zbpp.runtime.measure import Figures, Interval, Iteration
from megatron_zbpp.runtime.weight_grads import WeightGradStore

if TYPE_CHECKING:
    from megatron_zbpp.post_validation.protocol import PostValidation
    from megatron_zbpp.runtime.activations.store import ActivationStore
    from megatron_zbpp.runtime.collectives import Collectives


class Session:
    """The state of one run on one rank."""

    def __init__(self, settings: Settings, programs: Programs | None = None) -> None:
        self.settings = settings
        self.programs = programs or Programs(settings)
        self.names: Names = ARGUMENTS  # of options, as the user spells them
        self.store = WeightGradStore()  # the weight gradients that wait for their W
        self.watchdog = watchdog_for(
            settings.watchdog_timeout or 0, settings.watchdog_pause_timeout
        )
        self.post_validation: PostValidation | None = None
        if settings.post_validation is not None:
            from megatron_zbpp.post_validation.protocol import EarlyStepPolicy, PostValidation

            policy = EarlyStepPolicy(settings.post_validation)
            self.post_validation = PostValidation(policy, self.watchdog.collective, job_log.info)
        # of the program, alike on all ranks: compared before groups are made
        self.flags: Mapping[str, object] = {}
        self.latest: Iteration | None = None  # of this rank
        self.interval = Interval()  # iterations of training since the last line of the log
        self.announced = False  # the user has been told of the schedule
        # models whose layers the ranks have compared with the placement
        self.compared: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        # models that have had their first iteration of training
        self.trained: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._faces: dict[str, Face | None] = {}
        self._activations: dict[torch.device, ActivationStore] = {}
        self._channels: dict[tuple, Channels] = {}
        self._beside: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        self._collectives: dict[tuple[dist.ProcessGroup, tuple], Collectives] = {}
        self._agreed: set[tuple] = set()
        # by the first chunk of a model: messages of its edges, by Megatron's own
        self.edges: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.guests: list[Guest] = []  # asked in this order
        for guest in self.programs.guests:
            self.invite(guest)

    @functools.cached_property
    def faces(self) -> tuple[Face, ...]:
        """Faces of the techniques that are known before the number of ranks is."""
        return self.faces_of(self.programs.trained)

    def faces_of(self, names: Iterable[str]) -> tuple[Face, ...]:
        """Return the faces of these techniques, the innermost first; each is made once."""
        for name in {*names} - self._faces.keys():
            self._faces[name] = face_of(name, self)
        found = (self._faces[name] for name in names)
        return tuple(sorted(filter(None, found), key=lambda face: face.nest))

    def invite(self, guest: Guest) -> None:
        """Let a guest watch the training; it takes the place of another of its kind."""
        others = [other for other in self.guests if type(other) is not type(guest)]
        self.guests = [*others, guest]
        guest.join(self)

    @property
    def filler(self) -> Filler | None:
        """Steps that run while this rank waits; None: there are none."""
        return next((guest.filler for guest in self.guests if guest.filler is not None), None)

    def agree(self, settings: Mapping[str, object], group: dist.ProcessGroup) -> None:
        """Check that all ranks of `group` have these settings: a collective where they are new.

        Settings that are new on some ranks only are a stall, for the watchdog.
        """
        settings = {'schedule': self.programs.key, **settings}
        what = f'handshake about {agreement.fingerprint(settings)}'  # some 900 flags say less
        if group is dist.group.WORLD:
            settings |= self.flags
        # as text, as they are compared: some are lists
        key = (group, *((name, agreement.fingerprint(v)) for name, v in settings.items()))
        if key not in self._agreed:
            with self.collective(what):
                gathered = agreement.gather(settings, group)
            agreement.compare(gathered)
            self._agreed.add(key)

    def channels(
        self,
        pp_group: dist.ProcessGroup,  # the pipeline's
        placement: Placement,  # of the stages
        device: torch.device,  # where messages live
        shapes: bool,  # whether they can tell shapes
    ) -> Channels:
        """Return the channels of this rank between neighbouring stages; made once a group."""
        neighbours = itertools.chain(*map(itertools.pairwise, placement.routes))
        steps = [(a, b) for a, b in neighbours if a != b]
        pairs = frozenset((*steps, *((b, a) for a, b in steps)))
        return self._between(pp_group, pairs, device, shapes=shapes)

    def _between(
        self, pp_group: dist.ProcessGroup, pairs: frozenset, device: torch.device, **kind: bool
    ) -> Channels:
        key = (pp_group, pairs, *kind.items())
        if key not in self._channels:
            more: dict[str, Any] = {'kernels': self.settings.kernels, **kind}
            self._channels[key] = Channels(pp_group, pairs, device, self.collective, **more)
        return self._channels[key]

    def collectives(
        self, pp_group: dist.ProcessGroup, messages: Mapping[str, tuple[Message, ...]]
    ) -> Collectives:
        """Return the collectives among the ranks of a pipeline; made once a group and messages.

        The messages of each name are by slice, all on one device.
        """
        from megatron_zbpp.runtime.collectives import Collectives

        key = tuple(messages.items())
        device = next(iter(messages.values()))[0].device
        with self.collective('making of the group for collectives of the pipeline'):
            if pp_group not in self._beside:
                self._beside[pp_group] = beside(pp_group, device, self.settings.kernels)
            if (pp_group, key) not in self._collectives:
                ranks = dist.get_process_group_ranks(pp_group)
                made = Collectives(self._beside[pp_group], ranks, device, messages)
                self._collectives[pp_group, key] = made
        return self._collectives[pp_group, key]

    def activations(
        self,
        device: torch.device,  # where they are
        pp_group: dist.ProcessGroup | None = None,  # the pipeline's, where some go to other ranks
        partners: frozenset[tuple[int, int]] = frozenset(),  # of it, who sends to whom
    ) -> ActivationStore:
        """Return the mover of activations of `device`; made once."""
        from megatron_zbpp.runtime.activations.store import ActivationStore

        if device not in self._activations:
            self._activations[device] = ActivationStore(device)
        store = self._activations[device]
        if pp_group is not None and partners:
            store.join(self._between(pp_group, partners, device, shapes=True, saved=True))
        return store

    def figures(self) -> Figures | None:
        """Return the mean since this was last asked: a collective of the pipeline.

        None where no iteration of training has ended since.
        """
        early = self.post_validation
        with self.collective('figures of the pipeline for the log'):
            return self.interval.figures(early and (early.early, early.taken_back))

    def on_iteration_end(self, iteration: Iteration) -> None:
        """Tell the guests of an iteration of training; make the changes that they ask for."""
        self.latest = iteration
        self.interval.add(iteration)
        for guest in self.guests:
            change = guest.after(iteration, self)
            if change is None:
                continue
            if change.schedule is not None:
                self.programs.replace(change.schedule)
            elif change.costs is not None:
                self.programs.copy_what_is_free(change.costs)
            for other in self.guests:
                other.changed(change)

    @property
    def counting(self) -> bool:
        """True while bytes are worth counting, for what is still to be planned."""
        return any(guest.counting for guest in self.guests)

    @property
    def overlaps(self) -> bool:
        return self.post_validation is not None and self.post_validation.agreed

    def collective(self, what: str) -> AbstractContextManager[None]:
        return self.watchdog.collective(what)

    def copy_times(self) -> dict[int, float]:
        times = (store.copy_times() for store in self._activations.values())
        return dict(itertools.chain.from_iterable(each.items() for each in times))

    def without_copies(self, schedule: Schedule) -> Schedule:
        return self.programs.without_copies(schedule.num_ranks, schedule.num_microbatches)
