from nagara.pool.actions import Granted, NoSlot
from nagara.pool.demandclass import DemandClass
from nagara.pool.fairness import REMEMBERED_S, Arbiter, Claimant
from nagara.testing.pools import a_core, an_offering, make_ready

ANY = DemandClass()


def test_a_free_slot_is_left_to_the_app_of_higher_priority_that_waits() -> None:
    core = a_core()
    high, low = Claimant("high", priority=1), Claimant("low")
    assert isinstance(core.claim(high, ANY, 0.0), NoSlot)
    make_ready(core, an_offering(devices=1))
    assert isinstance(core.claim(low, ANY, 1.0), NoSlot)
    assert isinstance(core.claim(high, ANY, 1.0), Granted)


def test_nobody_waits_for_ever_for_one_that_no_longer_asks() -> None:
    core = a_core()
    core.claim(Claimant("high", priority=1), ANY, 0.0)
    make_ready(core, an_offering(devices=1))
    assert isinstance(core.claim(Claimant("low"), ANY, REMEMBERED_S + 0.1), Granted)


def test_of_equal_priority_the_one_with_less_of_its_share_goes_first() -> None:
    arbiter = Arbiter()
    heavy, light = Claimant("heavy", weight=2.0), Claimant("light", weight=1.0)
    arbiter.held = {"heavy": 2, "light": 2}
    arbiter.missed(heavy, 2, 0.0)
    arbiter.missed(light, 2, 0.0)
    # Shares after the next grant: heavy 3/2 and 4/2, light 3/1.
    assert arbiter.ahead_of(light, 1.0) == 2
    assert arbiter.ahead_of(heavy, 1.0) == 0


def test_weights_decide_how_slots_are_divided() -> None:
    arbiter = Arbiter()
    apps = [Claimant("one", weight=1.0), Claimant("three", weight=3.0)]
    for free in range(40, 0, -1):
        for app in apps:
            arbiter.missed(app, 40, 0.0)
        del free
        arbiter.served(next(app for app in apps if arbiter.ahead_of(app, 0.0) == 0).app)
    assert arbiter.held == {"one": 10, "three": 30}
