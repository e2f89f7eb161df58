"""Grants of slots: epochs that only rise, leases that come back, slots that have to wait.

Keeps the leases of the machine table and the index of free slots in step. Called from the pool's
loop only.
"""

from collections.abc import Iterable

from nagara.contract.machine import NO_RESOURCES, Resources
from nagara.contract.replica import Lease
from nagara.pool.demandclass import DemandClass
from nagara.pool.fairness import Arbiter
from nagara.pool.inventory import Inventory, added
from nagara.pool.lease import SKEW_S, TTL_S, LeaseClock, machine_of, slot_name, split_slot
from nagara.pool.machines import HeldSlot, LeaseRow, Machine, MachineTable
from nagara.pool.states import MachineState


class Grants:
    """Slots of all machines.

    Args:
        table: the machines. On one of our own a lease has no end: the same kernel is the fence.
    """

    def __init__(self, table: MachineTable) -> None:
        self.inventory = Inventory()
        self._table = table
        self.held_devices: dict[DemandClass, int] = {}
        self._held_needs: dict[DemandClass, Resources] = {}
        self._waiting: dict[str, HeldSlot] = {}  # by slot: granted again after `free_at_s`

    def load(self, rows: Iterable[LeaseRow], now_s: float, arbiter: Arbiter) -> None:
        """Takes over what an earlier process granted: held, until adopted or its time is over."""
        for row in rows:
            name, devices = split_slot(row.slot)
            machine = self._table.get(name)
            if machine is None:
                continue
            self._prepare(machine)
            missing = max(devices) + 1 - len(machine.epochs)  # it had more of them once
            machine.epochs += [0] * missing
            for device in devices:
                machine.epochs[device] = max(machine.epochs[device], row.epoch)
            if row.app is not None:
                held = HeldSlot(
                    row.slot, row.epoch, row.app, row.needs, row.wanted, is_certain=False
                )
                held.free_at_s = now_s if machine.is_own else now_s + TTL_S + SKEW_S
                machine.held[row.slot] = held
                self._waiting[row.slot] = held
                machine.used = added(machine.used, row.needs)
                machine.free = [one for one in machine.free if one not in devices]
                self._count(held, 1)
                arbiter.held[row.app] = arbiter.held.get(row.app, 0) + 1

    def file(self, machine: Machine) -> None:
        """The machine changed: what of it may be granted now?"""
        is_ready = machine.state is MachineState.READY
        if is_ready:
            self._prepare(machine)
        is_kept_out = machine.is_kept_out or machine.is_silent
        self.inventory.file(machine, is_grantable=is_ready and not is_kept_out)

    def _prepare(self, machine: Machine) -> None:
        if not machine.epochs:
            machine.epochs = [0] * machine.offering.devices
            machine.free = list(range(machine.offering.devices))
            machine.clock = LeaseClock()

    def grant(self, machine: Machine, app: str, wanted: DemandClass, needs: Resources) -> Lease:
        """Leases that many of the machine's free devices as one slot."""
        epochs = machine.epochs
        chosen = self.inventory.lend(machine, wanted.devices)
        epoch = 1 + max([epochs[device] for device in chosen])
        for device in chosen:
            epochs[device] = epoch
        slot = slot_name(machine.name, chosen)
        held = machine.held[slot] = HeldSlot(slot, epoch, app, needs, wanted)
        self._count(held, 1)
        machine.used = added(machine.used, needs)
        self._table.write_lease(slot, held)
        return Lease(slot, epoch)

    def held(self, lease: Lease) -> HeldSlot | None:
        """The grant, if the lease is the present one of its slot."""
        machine = self._table.get(machine_of(lease.slot))
        held = machine.held.get(lease.slot) if machine is not None else None
        return held if held is not None and held.epoch == lease.epoch else None

    def adopt(self, lease: Lease, app: str) -> bool:
        """The holder has been found alive. False: the slot is not this lease's."""
        held = self.held(lease)
        if held is None or held.app != app:
            return False
        held.is_certain = True
        held.free_at_s = None
        self._waiting.pop(lease.slot, None)
        return True

    def give_back(self, held: HeldSlot, now_s: float, *, is_confirmed: bool) -> Machine:
        """Frees the slot now, or when nothing can run under the lease any more."""
        machine = self._table.named(split_slot(held.slot)[0])
        if is_confirmed:
            self.forget(machine, held)
        elif held.free_at_s is None:
            assert machine.clock is not None
            held.free_at_s = now_s if machine.is_own else machine.clock.free_at_s(now_s)
            self._waiting[held.slot] = held
        return machine

    def forget(self, machine: Machine, held: HeldSlot) -> None:
        """The lease is over; its devices are free and its epochs remembered."""
        self.inventory.unfile(machine)
        del machine.held[held.slot]
        self._count(held, -1)
        self._waiting.pop(held.slot, None)
        machine.used = added(machine.used, held.needs, -1)
        returned = {one for one in split_slot(held.slot)[1] if one < machine.offering.devices}
        machine.free = sorted(returned.union(machine.free))
        if self._table.get(machine.name) is machine:
            self._table.write_lease(held.slot, LeaseRow(held.slot, held.epoch, None))
            self.file(machine)

    def _count(self, held: HeldSlot, sign: int) -> None:
        devices = self.held_devices.get(held.wanted, 0) + sign * held.wanted.devices
        self.held_devices[held.wanted] = devices
        if held.needs is not NO_RESOURCES:
            before = self._held_needs.get(held.wanted, NO_RESOURCES)
            self._held_needs[held.wanted] = added(before, held.needs, sign)

    def mean_needs(self, wanted: DemandClass) -> Resources:
        """What one replica of the class needs, on average of those that run."""
        replicas = self.held_devices.get(wanted, 0) / wanted.devices
        together = self._held_needs.get(wanted, NO_RESOURCES)
        if not replicas or together is NO_RESOURCES:
            return NO_RESOURCES
        return Resources(
            together.cpu / replicas,
            int(together.memory_bytes / replicas),
            int(together.disk_bytes / replicas),
        )

    def expire(self, now_s: float) -> list[tuple[Machine, str]]:
        """Frees slots whose leases are over for certain; gives machines and apps."""
        over = [held for held in self._waiting.values() if (held.free_at_s or 0.0) <= now_s]
        ended = []
        for held in over:
            machine = self._table.named(split_slot(held.slot)[0])
            self.forget(machine, held)
            ended.append((machine, held.app))
        return ended
