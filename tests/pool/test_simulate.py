"""The simulation, the rivals held against vectors worked out by hand, and the picture."""

import xml.etree.ElementTree as ET

import pytest

from nagara.contract.machine import Offering
from nagara.pool.providers.simulated import Trait, a_market
from nagara.pool.simulate.claims import Claim, DemandShape, generate
from nagara.pool.simulate.comparison import Comparison, Point, compare
from nagara.pool.simulate.market import World, WorldShape, outages
from nagara.pool.simulate.picture import draw
from nagara.pool.simulate.result import Result, Sample
from nagara.pool.simulate.rivals import Reserves, fixed_target, sized_target
from nagara.pool.simulate.shared import SharedPool
from nagara.pool.sizing import Policy
from nagara.pool.solver import solve

HOUR = 3600.0


def plain_world() -> World:
    """One offering of 1 an hour whose machines take exactly 100 s."""
    world = World(WorldShape())
    kind = Offering("k", "k", "k", "h100", 1, 1.0)
    world.markets = {"k": a_market([(kind, Trait(boot_s=100.0, boot_spread=0.0))], name="k")}
    return world


def run(count: int, spares: int, claims: list[Claim], until_s: float = HOUR) -> Result:
    return Reserves("r", plain_world(), count, fixed_target(spares), 0.0).run(claims, until_s)


def test_a_fixed_reserve_serves_as_many_at_once_as_it_holds() -> None:
    claims = [Claim(1800.0 + n, 0, 600.0) for n in range(5)]
    result = run(1, 3, claims)
    # Three are free; two wait. The next round is at 1860 s, boots 100 s and checks 20 s.
    assert (result.claims, result.served_at_once) == (5, 3)
    assert result.waited_s == [pytest.approx(177.0), pytest.approx(176.0)]
    assert result.held_hours == pytest.approx(5 * 600 / HOUR)


def test_a_fixed_reserve_is_paid_for_whether_used_or_not() -> None:
    result = run(1, 3, [])
    assert result.cost == pytest.approx(3.0)
    assert result.idle_hours == pytest.approx(3.0)


def test_machines_beyond_the_reserve_are_given_back() -> None:
    # Five are held at 1800 s and three ordered beside; all five come back at 1900 s.
    result = run(1, 3, [Claim(1800.0 + n / 10, 0, 100.0) for n in range(3)])
    assert result.served_at_once == 3
    assert result.paid_hours < 3.0 + 3 * (300.0 / HOUR)


def test_reserves_per_app_do_not_help_each_other() -> None:
    claims = [Claim(1800.0 + n, 0, 60.0) for n in range(4)]
    assert run(1, 4, claims).served_at_once == 4
    apart = run(4, 1, claims)
    assert apart.served_at_once == 1
    assert apart.idle_hours > 3.5


def test_sized_reserves_follow_the_apps_own_rates() -> None:
    target = sized_target([1 / 60, 1 / 6000], 1.0, 0.99, 600.0)
    assert target(0) > 10
    assert target(1) == 1


def test_a_rival_goes_on_to_the_next_place_when_one_is_sold_out() -> None:
    world = World(WorldShape(has_stockouts=True))
    result = Reserves("r", world, 1, fixed_target(2), 0.0).run([Claim(9000.0, 0, 60.0)], 3 * HOUR)
    assert result.served_at_once == 1


def test_stock_comes_and_goes_by_hours() -> None:
    stock = outages(1)
    seen = [stock(600.0 * n) > 0 for n in range(1000)]
    assert 0.3 < sum(seen) / len(seen) < 0.7
    assert sum(a != b for a, b in zip(seen, seen[1:], strict=False)) < 60  # noqa: RUF007


# -- the planned pool ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare(
        DemandShape(days=0.75, apps=20, claims_h=300.0, hold_s=400.0, seed=2),
        solve,
        Policy(),
        lambda _: None,
        grids=((40, 80, 120), (10, 40), (0.99,)),
    )


def test_the_planned_pool_serves_at_once_also_with_stockouts_and_lies(
    comparison: Comparison,
) -> None:
    assert comparison.planned.service >= 0.98
    assert {name for name, one in comparison.variants.items() if one.service >= 0.97} == {
        "stock_outs", "stock_outs_and_lies",
    }  # fmt: skip


def test_the_shared_pool_idles_at_most_a_third_of_reserves_per_app(comparison: Comparison) -> None:
    good = [one for one in comparison.per_app if one.result.service >= comparison.planned.service]
    best = good or comparison.per_app
    assert comparison.planned.idle_hours <= min(one.result.idle_hours for one in best) / 3


def test_the_document_names_every_policy_with_its_cost(comparison: Comparison) -> None:
    document = comparison.document()
    policies = document["policies"]
    assert isinstance(policies, dict)
    assert set(policies) == {"planned_shared", "fixed_same_cost", "per_app"}
    for one in policies.values():
        assert {"served_at_once", "idle_machine_hours", "cost"} <= set(one)
    assert document["simulated"] is True


def test_books_are_kept_right(comparison: Comparison) -> None:
    for result in (comparison.planned, *(one.result for one in comparison.fixed)):
        assert 0 <= result.served_at_once <= result.claims
        assert result.served_at_once + len(result.waited_s) + result.never_served >= result.claims
        assert 0 < result.held_hours < result.paid_hours
    hours = {round(one.result.held_hours) for one in comparison.fixed}
    assert max(hours) - min(hours) <= 0.02 * max(hours)


def test_the_best_points_of_rivals_are_chosen_for_them() -> None:
    def result(service: int, idle: float, cost: float) -> Result:
        return Result("r", claims=100, served_at_once=service, paid_hours=idle, cost=cost)

    chosen = Comparison(
        100, 20.0, result(95, 10.0, 50.0),
        fixed=[Point("a", result(90, 1, 40.0)), Point("b", result(97, 1, 49.0)),
               Point("c", result(99, 1, 60.0))],
        per_app=[Point("d", result(94, 5.0, 1)), Point("e", result(96, 90.0, 1)),
                 Point("f", result(95, 70.0, 1))],
        variants={},
    )  # fmt: skip
    assert chosen.same_cost.setting == "b"
    assert chosen.best_per_app.setting == "f"


def test_two_runs_of_one_seed_are_one() -> None:
    shape = DemandShape(days=0.2, apps=5, claims_h=200.0)

    def once() -> dict[str, object]:
        pool = SharedPool(World(WorldShape()), solve, Policy(), 3600.0)
        return pool.run(generate(shape), 0.2 * 86_400, lambda _: None).document()

    assert once() == once()


def test_the_picture_is_well_formed_and_shows_every_miss() -> None:
    result = Result("planned_shared")
    result.samples = [
        Sample(60.0 * n, 10, 4, 6, 1, 11.0, 3, 2 if n == 4567 else 0) for n in range(10_080)
    ]
    root = ET.fromstring(draw(result, "a <week>"))
    lines = [one for one in root.iter() if one.tag.endswith("polyline")]
    assert len(lines) == 4
    marks = [one for one in root.iter() if one.get("stroke") == "#d55e00"]
    assert len(marks) == 1
