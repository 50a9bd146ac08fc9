"""A fleet planned for one period: which pod has which devices from which minute to which.

A small scheduler plays the period from event to event: runs start, wait until they fit, end, and
are ended by failures. Everything happens at whole minutes since the start of the period, so that
the plan's sums are whole nanoseconds. Everything random comes from the seed.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from itertools import count
from math import cos, pi
from random import Random
from typing import Final, NamedTuple

from gpuledger.clock import NS_PER_DAY, NS_PER_HOUR, NS_PER_MINUTE
from gpuledger.keys import key_in
from gpuledger_simulator import identities
from gpuledger_simulator.device import DeviceFacts, describe_gpu
from gpuledger_simulator.fleet.schema import FlakyNode, Fleet, LostGpu, Pool, Workload
from gpuledger_simulator.gpu_models import SimulatedInstance
from gpuledger_simulator.schema import GpuGroup, ScenarioMigLayout

MINUTES_A_DAY: Final = 1_440
MINUTES_AN_HOUR: Final = 60
_REPLACED_AFTER_MINUTES: Final = 10
"""Time after which its controller has replaced a pod that a failure ended."""
_PAUSED_AT_START: Final = 0.3
"""Part of the workloads with repeated runs that pause when the period begins."""
_THURSDAY: Final = 3
"""The day of the week of 1970-01-01, counted from Monday."""
_WORKDAYS: Final = 5
_BUSIEST_HOUR: Final = 14
_GIB: Final = 1 << 30


@dataclass(frozen=True, kw_only=True, eq=False)
class FleetDevice:
    """A GPU or MIG instance that pods get, whole or in slots."""

    gpu: DeviceFacts
    """The physical GPU."""
    instance: SimulatedInstance | None
    """The MIG instance; `None` for a whole GPU."""
    slots: int
    """Number of parts: time slices or GiB of a shared GPU, otherwise 1."""

    @property
    def profile(self) -> str | None:
        """The MIG profile; `None` for a whole GPU."""
        return self.instance.profile if self.instance else None

    @property
    def size(self) -> Fraction:
        """The device's part of the physical GPU."""
        instance = self.instance
        return (
            Fraction(1)
            if instance is None
            else Fraction(instance.compute_slices, instance.mig_gpu.compute)
        )


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A GPU that does not respond, and the restart of its node. Times are in minutes."""

    gpu: int
    """Index of the GPU."""
    start: int
    """Time of the failure."""
    restart: int
    """Time at which the node is restarted."""
    back: int
    """Time at which the node is back."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FleetNode:
    """A node of a pool."""

    pool: Pool
    """Its pool."""
    name: str
    """Its name."""
    gpus: list[DeviceFacts]
    """Its GPUs in the driver's order."""
    devices: list[FleetDevice]
    """The devices that pods get, in the same order."""
    losses: list[Loss]
    """Its lost GPUs in order of time."""
    cordons: list[tuple[int, int]]
    """Start and end, in minutes, of the times in which it is cordoned."""

    @property
    def key(self) -> str:
        """The node's key."""
        return key_in(self.pool.cluster, self.name)

    @property
    def is_shared(self) -> bool:
        """Whether pods share its GPUs."""
        return self.pool.sharing != "none"

    def is_down(self, minute: int) -> bool:
        """Return whether the node is being restarted in a minute."""
        return any(loss.restart <= minute < loss.back for loss in self.losses)

    def is_cordoned(self, minute: int) -> bool:
        """Return whether the node is cordoned in a minute."""
        return any(start <= minute < end for start, end in self.cordons)

    def is_lost(self, gpu: int, minute: int) -> bool:
        """Return whether a GPU does not respond in a minute."""
        return any(loss.gpu == gpu and loss.start <= minute < loss.restart for loss in self.losses)

    def responding(self, gpu: int, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of the time from `start` to `end` in which a GPU responds."""
        for loss in self.losses:
            if loss.gpu == gpu and start < loss.restart and loss.start < end:
                if start < loss.start:
                    yield start, loss.start
                start = min(end, loss.restart)
        if start < end:
            yield start, end


class Slots(NamedTuple):
    """The slots of a device that a pod has."""

    device: int
    """Position of the device in the node's `devices`."""
    numbers: tuple[int, ...]
    """Numbers of the slots; one slot unless pods share the device."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FleetRequest:
    """A pod, which may still wait for a node. Times are in minutes."""

    workload: Workload
    """The workload of the pod."""
    name: str
    """Name, which no other pod of the period has."""
    uid: str
    """UID."""
    container_id: str
    """The runtime's id of the pod's only container."""
    number: int
    """Number of the pod in the fleet, from 0."""
    created: int
    """Creation of the pod."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FleetPod(FleetRequest):
    """A pod with its devices."""

    node: FleetNode
    """Its node."""
    slots: list[Slots]
    """Its devices."""
    start: int
    """Start: until then, the pod waited for a node."""
    end: int
    """End; the end of the period if it then still runs."""

    @property
    def waited(self) -> int:
        """The time for which it waited for its node."""
        return self.start - self.created

    @property
    def used_slots(self) -> list[Slots]:
        """The devices on which it runs processes."""
        count = self.workload.used_units
        return self.slots if count is None else self.slots[:count]


@dataclass(frozen=True, kw_only=True)
class FleetXid:
    """An XID of a flaky node."""

    minute: int
    """Time in minutes."""
    node: FleetNode
    """The node."""
    gpu: int
    """Index of the GPU."""
    xid: int
    """The code."""
    pods: list[FleetPod]
    """The pods that the XID has ended; empty if the GPU was not allocated."""


class PodTruth(NamedTuple):
    """The true time of a pod on its devices, in nanoseconds of device time."""

    allocated_ns: int
    """Time for which devices or parts of devices were allocated to it."""
    unresponsive_ns: int
    """Part of the allocated time in which the devices did not respond."""
    used_ns: int
    """Time in which its kernels ran."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FleetPlan:
    """The plan of one period."""

    fleet: Fleet
    """The fleet."""
    begin_ns: int
    """Start of the period: the start of a UTC day, in nanoseconds since the epoch."""
    days: int
    """Length of the period."""
    nodes: list[FleetNode]
    """All nodes."""
    pods: list[FleetPod]
    """All pods that got a node, in order of their start."""
    waiting: list[FleetRequest]
    """The pods that still wait for a node at the end of the period."""
    xids: list[FleetXid]
    """The XIDs of flaky nodes in order of time."""

    @property
    def minutes(self) -> int:
        """The length of the period in minutes."""
        return self.days * MINUTES_A_DAY

    def time_ns(self, minute: int) -> int:
        """Return a time in nanoseconds since the epoch."""
        return self.begin_ns + minute * NS_PER_MINUTE

    @cached_property
    def pods_of(self) -> dict[FleetNode, list[FleetPod]]:
        """The pods of each node in order of their start."""
        found: dict[FleetNode, list[FleetPod]] = {node: [] for node in self.nodes}
        for pod in self.pods:
            found[pod.node].append(pod)
        return found

    def busy_ppm(self, pod: FleetPod, hour: int) -> int:
        """Return the part of each used device's time in which a pod's kernels run in an hour.

        In parts per million. On a shared GPU, this is at most the pod's part of the GPU.
        """
        low, high = pod.workload.busy
        random = Random(f"{self.fleet.seed}/{pod.uid}/{hour}")  # noqa: S311  # a load, no secret
        weight = random.random()
        if pod.workload.pattern == "office":
            # Noise of a quarter on top of the curve of the day.
            weight = 0.75 * _office_weight(self.begin_ns // NS_PER_HOUR + hour) + 0.25 * weight
        if random.random() < pod.workload.idle_hours:
            return 0
        first = pod.slots[0]
        device = pod.node.devices[first.device]
        ppm = round(10_000 * (low + (high - low) * weight)) * 100
        return ppm * len(first.numbers) // device.slots

    def truth(self, pod: FleetPod) -> PodTruth:
        """Return the true time of a pod."""
        allocated = unresponsive = used = 0
        working = pod.used_slots
        for slots in pod.slots:
            device = pod.node.devices[slots.device]
            # Exact if the number of slots divides a minute of nanoseconds, as 4 and 24 do.
            part_ns = NS_PER_MINUTE * len(slots.numbers) // device.slots
            responded = 0
            for start, end in pod.node.responding(device.gpu.index, pod.start, pod.end):
                responded += end - start
                if slots in working:
                    used += self._used_ns(pod, start, end)
            allocated += (pod.end - pod.start) * part_ns
            unresponsive += (pod.end - pod.start - responded) * part_ns
        return PodTruth(allocated, unresponsive, used)

    def _used_ns(self, pod: FleetPod, start: int, end: int) -> int:
        hours = range(start // MINUTES_AN_HOUR, -(-end // MINUTES_AN_HOUR))
        return sum(
            self.busy_ppm(pod, hour)
            * (min(end, (hour + 1) * MINUTES_AN_HOUR) - max(start, hour * MINUTES_AN_HOUR))
            * (NS_PER_MINUTE // 1_000_000)
            for hour in hours
        )


def _office_weight(hour: int) -> float:
    """Return the load of an hour since 1970 between 0 and 1: high by day, low at night."""
    day, of_day = divmod(hour, 24)
    curve = (1 + cos(2 * pi * (of_day - _BUSIEST_HOUR) / 24)) / 2
    is_workday = (day + _THURSDAY) % 7 < _WORKDAYS
    return curve if is_workday else 0.3 * curve


def plan_fleet(fleet: Fleet, *, begin_ns: int, days: int) -> FleetPlan:
    """Return the plan of `days` days from `begin_ns`, the start of a UTC day.

    Raises `UserError` if a GPU model does not support a pool's MIG layout.
    """
    if begin_ns % NS_PER_DAY or days < 1:
        raise ValueError(f"{begin_ns} is not the start of a day, or {days} is not positive")
    nodes = plan_nodes(fleet, minutes=days * MINUTES_A_DAY)
    scheduler = _Scheduler(fleet, nodes, begin_ns=begin_ns, minutes=days * MINUTES_A_DAY)
    scheduler.run()
    return FleetPlan(
        fleet=fleet,
        begin_ns=begin_ns,
        days=days,
        nodes=nodes,
        pods=sorted(scheduler.pods, key=lambda pod: (pod.start, pod.number)),
        waiting=[request for _, request in scheduler.waiting],
        xids=scheduler.xids,
    )


def plan_nodes(fleet: Fleet, *, minutes: int) -> list[FleetNode]:
    """Return the nodes of a fleet in a period of this length.

    Raises `UserError` if a GPU model does not support a pool's MIG layout.
    """
    return [
        _node(fleet, pool, number, minutes=minutes)
        for pool in fleet.pools
        for number in range(pool.nodes)
    ]


def _node(fleet: Fleet, pool: Pool, number: int, *, minutes: int) -> FleetNode:
    name = node_name(pool.name, number)
    layout = [ScenarioMigLayout(instances=list(pool.mig))] if pool.mig else []
    group = GpuGroup(model=pool.model, mig=layout)
    gpus = [
        describe_gpu(
            group,
            uuid=identities.gpu_uuid(fleet.seed, key_in(pool.cluster, name), index),
            index=index,
        )
        for index in range(pool.gpus)
    ]
    return FleetNode(
        pool=pool,
        name=name,
        gpus=gpus,
        devices=[device for gpu in gpus for device in _devices_of(pool, gpu)],
        losses=sorted(
            (
                _loss(lost, minutes=minutes)
                for lost in fleet.lost_gpus
                if (lost.pool, lost.node) == (pool.name, number)
            ),
            key=lambda loss: loss.start,
        ),
        cordons=[
            (start, min(minutes, start + round(each.hours * MINUTES_AN_HOUR)))
            for each in fleet.cordoned_nodes
            if (each.pool, each.node) == (pool.name, number)
            for start in [int(each.at * minutes)]
        ],
    )


def _devices_of(pool: Pool, gpu: DeviceFacts) -> Iterator[FleetDevice]:
    if gpu.cuts:
        for instance in gpu.cuts[0].instances:
            yield FleetDevice(gpu=gpu, instance=instance, slots=1)
        return
    slots = {
        "none": 1,
        "time-slicing": pool.time_slices,
        # Like the plugin, which reports whole GiB.
        "memory": gpu.memory_bytes // _GIB,
    }
    yield FleetDevice(gpu=gpu, instance=None, slots=slots[pool.sharing])


def _loss(lost: LostGpu, *, minutes: int) -> Loss:
    start = int(lost.at * minutes)
    restart = min(minutes, start + round(lost.hours * MINUTES_AN_HOUR))
    return Loss(
        gpu=lost.gpu,
        start=start,
        restart=restart,
        back=min(minutes, restart + lost.restart_minutes),
    )


@dataclass(kw_only=True, eq=False)
class _Place:
    """A place in a workload, in which one pod after the other runs."""

    workload: Workload
    random: Random
    left: int
    """Number of minutes that the current run still needs."""


@dataclass(kw_only=True, eq=False)
class _Running:
    """A pod that runs."""

    place: _Place
    request: FleetRequest
    node: FleetNode
    slots: list[Slots]
    start: int


class _Scheduler:
    """The state of the fleet at one minute."""

    def __init__(
        self, fleet: Fleet, nodes: list[FleetNode], *, begin_ns: int, minutes: int
    ) -> None:
        self._fleet, self._nodes, self._begin_ns, self._minutes = fleet, nodes, begin_ns, minutes
        self.pods: list[FleetPod] = []
        self.xids: list[FleetXid] = []
        self._now = 0
        self._events: list[tuple[int, int, int, Callable[[], None]]] = []
        self._orders = count()
        self._free = {node: [set(range(device.slots)) for device in node.devices] for node in nodes}
        self.waiting: list[tuple[_Place, FleetRequest]] = []
        self._numbers = count()
        self._running: dict[FleetNode, list[_Running]] = {node: [] for node in nodes}

    def run(self) -> None:
        """Play the period."""
        for node in self._nodes:
            for loss in node.losses:
                self._at(loss.restart, partial(self._interrupt_all, node))
                self._at(loss.back, self._place_waiting)
            for _, end in node.cordons:
                self._at(end, self._place_waiting)
        for flaky in self._fleet.flaky_nodes:
            self._plan_xids(flaky)
        for workload in self._fleet.workloads:
            for number in range(workload.grows_to or workload.pods):
                self._open(workload, number)
        while self._events and self._events[0][0] < self._minutes:
            self._now, _, _, act = heapq.heappop(self._events)
            act()
        self._now = self._minutes
        for running in [each for of_node in self._running.values() for each in of_node]:
            self._end(running)

    def _at(self, minute: int, act: Callable[[], None], *, is_start: bool = False) -> None:
        """Plan an action; at the same minute, ends come before starts."""
        heapq.heappush(self._events, (minute, is_start, next(self._orders), act))

    def _open(self, workload: Workload, number: int) -> None:
        """Plan the first run in a place."""
        seed = f"{self._fleet.seed}/{workload.namespace}/{workload.name}/{number}"
        random = Random(seed)  # noqa: S311  # a load, no secret
        place, first = _Place(workload=workload, random=random, left=self._minutes), 0
        if workload.run_hours is not None:
            # In the middle of a run or of a pause, as in a fleet that has been running for long.
            place.left = random.randint(1, _draw_minutes(random, workload.run_hours))
            if random.random() < _PAUSED_AT_START:
                first = random.randint(1, _draw_minutes(random, workload.pause_hours))
        if workload.grows_to and number >= workload.pods:
            added, of = number - workload.pods + 1, workload.grows_to - workload.pods + 1
            first += self._minutes * added // of
        self._at(first, partial(self._request_run, place), is_start=True)

    def _request_run(self, place: _Place) -> None:
        workload, number = place.workload, next(self._numbers)
        key = f"{workload.namespace}/{workload.name}/{number}"
        container = identities.container_id(self._fleet.seed, self._begin_ns, key)
        request = FleetRequest(
            workload=workload,
            name=f"{workload.name}-{container[:10]}-{container[10:15]}",
            uid=identities.run_uuid(self._fleet.seed, self._begin_ns, f"pod/{key}"),
            container_id=container,
            number=number,
            created=self._now,
        )
        self.waiting.append((place, request))
        self._place_waiting()

    def _place_waiting(self) -> None:
        """Start all waiting runs that fit; a smaller run may overtake a larger one."""
        waiting, self.waiting = self.waiting, []
        for place, request in waiting:
            found = self._find_room(place.workload)
            if found is None:
                self.waiting.append((place, request))
                continue
            node, slots = found
            for device, numbers in slots:
                self._free[node][device] -= set(numbers)
            running = _Running(
                place=place, request=request, node=node, slots=slots, start=self._now
            )
            self._running[node].append(running)
            self._at(self._now + place.left, partial(self._finish, running))

    def _find_room(self, workload: Workload) -> tuple[FleetNode, list[Slots]] | None:
        """Return the pool's choice of the nodes on which a pod fits, and its slots there."""
        best: tuple[int, FleetNode, list[Slots]] | None = None
        for node in self._nodes:
            is_closed = node.is_down(self._now) or node.is_cordoned(self._now)
            if node.pool.name != workload.pool or is_closed:
                continue
            free = {
                number: sorted(self._free[node][number])
                for number, device in enumerate(node.devices)
                if device.profile == workload.profile
                and not node.is_lost(device.gpu.index, self._now)
            }
            left = sum(map(len, free.values()))
            if not node.is_shared:
                found = [Slots(number, (0,)) for number, slots in free.items() if slots]
                found = found[: workload.units]
                fits = len(found) == workload.units
            else:
                fitting = [(len(s), n) for n, s in free.items() if len(s) >= workload.units]
                fits = bool(fitting)
                fullest = min(fitting)[1] if fits else 0
                found = [Slots(fullest, tuple(free.get(fullest, ())[: workload.units]))]
            rank = left if node.pool.placement == "pack" else -left
            if fits and (best is None or rank < best[0]):
                best = rank, node, found
        return None if best is None else best[1:]

    def _finish(self, running: _Running) -> None:
        """End a run after its time, unless a failure has ended its pod or made it hang."""
        node = running.node
        if running not in self._running[node] or any(
            node.is_lost(node.devices[slots.device].gpu.index, self._now) for slots in running.slots
        ):
            return
        self._end(running)
        place = running.place
        workload = place.workload
        if workload.run_hours is not None:
            pause = _draw_minutes(place.random, workload.pause_hours)
            place.left = _draw_minutes(place.random, workload.run_hours)
            self._at(self._now + pause, partial(self._request_run, place), is_start=True)
        self._place_waiting()

    def _interrupt(self, running: _Running) -> FleetPod | None:
        """End a pod because of a failure; its controller replaces it after some minutes."""
        place = running.place
        place.left = max(1, place.left - (self._now - running.start))
        pod = self._end(running)
        again = self._now + _REPLACED_AFTER_MINUTES
        self._at(again, partial(self._request_run, place), is_start=True)
        return pod

    def _interrupt_all(self, node: FleetNode) -> None:
        for running in list(self._running[node]):
            self._interrupt(running)
        self._place_waiting()

    def _plan_xids(self, flaky: FlakyNode) -> None:
        (node,) = (each for each in self._nodes if each.name == node_name(flaky.pool, flaky.node))
        random = Random(f"{self._fleet.seed}/xids/{node.key}")  # noqa: S311  # no secret
        number = max(1, round(flaky.per_day * self._minutes / MINUTES_A_DAY))
        for minute in sorted(random.sample(range(self._minutes), number)):
            gpu, xid = random.randrange(len(node.gpus)), random.choice(flaky.xids)
            self._at(minute, partial(self._end_by_xid, node, gpu, xid))

    def _end_by_xid(self, node: FleetNode, gpu: int, xid: int) -> None:
        """End the pods of a GPU because of an XID."""
        if node.is_down(self._now) or node.is_lost(gpu, self._now):
            return
        ended = [
            self._interrupt(running)
            for running in list(self._running[node])
            if any(node.devices[slots.device].gpu.index == gpu for slots in running.slots)
        ]
        pods = [pod for pod in ended if pod is not None]
        self.xids.append(FleetXid(minute=self._now, node=node, gpu=gpu, xid=xid, pods=pods))
        self._place_waiting()

    def _end(self, running: _Running) -> FleetPod | None:
        """Free the devices of a pod and return the pod; `None` if it ends when it starts."""
        node = running.node
        self._running[node].remove(running)
        for device, numbers in running.slots:
            self._free[node][device] |= set(numbers)
        if running.start == self._now:
            return None
        pod = FleetPod(
            **vars(running.request),
            node=node,
            slots=running.slots,
            start=running.start,
            end=self._now,
        )
        self.pods.append(pod)
        return pod


def node_name(pool: str, number: int) -> str:
    """Return the name of a pool's node."""
    return f"{pool}-{number}"


def _draw_minutes(random: Random, hours: tuple[float, float]) -> int:
    return max(1, round(random.uniform(*hours) * MINUTES_AN_HOUR))
