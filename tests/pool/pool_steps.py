"""What happens in a random life of a pool, and how often."""

import random
from typing import Any

from nagara.pool.states import MachineEvent

CHANCES = {
    "grow": 3, "order": 2, "launch_arrives": 4, "machine_changes": 4, "provider_lists": 5,
    "check_ends": 3, "order_on_machine": 2, "machine_is_suspect": 2, "claim": 14,
    "message_arrives": 3, "give_back": 10, "renew": 4, "time_passes": 9, "crash": 2,
    "the_whole_host_reboots": 1,
}  # fmt: skip


def step(life: Any, source: random.Random) -> None:
    """One thing happens, with the arguments its rule would be given."""
    what = source.choices(list(CHANCES), list(CHANCES.values()))[0]
    crash = source.choice([None] * 9 + [0, 1, 2])
    kind = source.choice("ab")
    if what == "grow":
        life.grow(kind)
    elif what == "order":
        life.order(kind, crash)
    elif what == "launch_arrives" and life.launches:
        outcome = source.choice(["yes", "yes", "no", "reset", "reset after"])
        life.launch_arrives(source, outcome, source.uniform(-1e5, 1e5), crash)
    elif what == "machine_changes" and life.world:
        life.machine_changes(source, source.choice(["boot", "cut", "heal", "cut", "vanish"]))
    elif what == "provider_lists":
        life.provider_lists(source.random() < 0.3, crash)
    elif what == "check_ends" and life.checks:
        life.check_ends(source, source.random() < 0.8, crash)
    elif what == "order_on_machine" and len(life.core.table):
        orders = [MachineEvent.RELEASE, MachineEvent.DIAGNOSE, MachineEvent.RESUME]
        life.order_on_machine(source, source.choice(orders), crash)
    elif what == "machine_is_suspect" and len(life.core.table):
        what = source.choice(["keep out", "let in", "let in", "hold", "diagnose"])
        life.machine_is_suspect(source, what, source.choice("xy"), crash)
    elif what == "claim":
        life.claim(source.choice("xyz"), source.choice([1, 1, 2]), crash, source.random() < 0.8)
    elif what == "message_arrives" and life.messages:
        life.message_arrives(source)
    elif what == "give_back" and life.leases:
        life.give_back(source, crash)
    elif what == "renew" and life.leases:
        life.renew(source.random() < 0.8)
    elif what == "time_passes":
        life.time_passes(source.choice([0.5, 1.0, 3.0, 3.0, 10.0, 20.0, 130.0, 1300.0]), crash)
    elif what == "crash":
        life.crash()
    elif what == "the_whole_host_reboots":
        life.the_whole_host_reboots()
