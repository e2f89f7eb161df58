import json
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nagara.contract.machine import (
    NoCapacityError,
    Offering,
    Presence,
    Provider,
    ProviderError,
    ProviderRefusedError,
)
from nagara.pool.providers.command import CommandProvider
from nagara.pool.providers.local import LocalProvider
from nagara.pool.providers.simulated import SimulatedProvider, Trait, a_market
from nagara.pool.providers.skypilot import SkypilotProvider
from nagara.testing.clock import JumpingClock
from nagara.testing.pools import an_offering
from nagara.testing.provider_conformance import ProviderConformance

SCRIPT = """
import json, pathlib, sys
folder, verb = pathlib.Path(sys.argv[1]), sys.argv[2]
def given(): return json.load(sys.stdin)
if verb == "offerings":
    print(json.dumps([{"id": "m1", "region": "rack", "type": "h100", "devices": 2,
                       "price_h": 3.5, "stock": 2 - len(list(folder.glob("*.m")))}]))
elif verb == "launch":
    wanted = given()
    assert wanted["offering"]["id"] == "m1"
    path = folder / (wanted["name"] + ".m")
    if not path.exists() and len(list(folder.glob("*.m"))) >= 2:
        print("rack is full", file=sys.stderr)
        sys.exit(75)
    path.touch()
elif verb == "release":
    (folder / (given()["name"] + ".m")).unlink(missing_ok=True)
else:
    print(json.dumps([{"name": p.stem, "offering": "m1", "address": "10.0.0.1"}
                      for p in folder.glob("*.m")]))
"""


def scripts(folder: Path, code: str = SCRIPT) -> dict[str, list[str]]:
    path = folder / "script.py"
    path.write_text(code)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {
        verb: [sys.executable, str(path), str(folder), verb]
        for verb in ("offerings", "launch", "release", "machines")
    }


class TestLocal(ProviderConformance):
    @pytest.fixture
    def provider(self, tmp_path: Path) -> Provider:
        return LocalProvider(4, tmp_path)


class TestCommand(ProviderConformance):
    @pytest.fixture
    def provider(self, tmp_path: Path) -> Provider:
        return CommandProvider("rack", scripts(tmp_path))


class TestSimulated(ProviderConformance):
    @pytest.fixture
    def provider(self) -> Provider:
        market = a_market([(an_offering(), Trait(stock=lambda _: 2))], name="p")
        return SimulatedProvider(market, JumpingClock())


async def test_the_local_machine_is_remembered_by_another_process(tmp_path: Path) -> None:
    provider = LocalProvider(1, tmp_path)
    (offering,) = await provider.offerings()
    await provider.launch("nagara-1", offering)
    again = LocalProvider(1, tmp_path)
    assert [one.name for one in await again.machines()] == ["nagara-1"]
    with pytest.raises(NoCapacityError):
        await again.launch("nagara-2", offering)


async def test_a_damaged_note_of_the_local_machine_is_an_unknown_outcome(tmp_path: Path) -> None:
    (tmp_path / "local-machine.json").write_text("{")
    with pytest.raises(ProviderError, match="not readable"):
        await LocalProvider(1, tmp_path).machines()


async def test_what_a_script_offers_is_read_whole(tmp_path: Path) -> None:
    (offering,) = await CommandProvider("rack", scripts(tmp_path)).offerings()
    assert offering == Offering("rack/m1", "rack", "rack", "h100", 2, 3.5, stock=2)


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        ("import sys; print('no quota', file=sys.stderr); sys.exit(77)",
         ProviderRefusedError, "no quota"),
        ("import sys; sys.exit(75)", NoCapacityError, "exit 75"),
        ("import sys; sys.exit(3)", ProviderError, "exit 3"),
        ("import time; time.sleep(60)", ProviderError, "longer than"),
    ],
)  # fmt: skip
async def test_how_a_launch_script_ends_says_what_is_known(
    tmp_path: Path, code: str, error: type[ProviderError], text: str
) -> None:
    provider = CommandProvider("rack", scripts(tmp_path, code), limit_s=1.0)
    with pytest.raises(ProviderError, match=text) as caught:
        await provider.launch("nagara-1", an_offering("rack/m1"))
    assert type(caught.value) is error


@pytest.mark.parametrize(
    "out", ["[" * 60_000, "", "{", "{}", "[1]", '[{"name": 1}]', '[{"id": "x"}]']
)
async def test_nonsense_of_a_script_is_an_error_and_no_list(tmp_path: Path, out: str) -> None:
    provider = CommandProvider("rack", scripts(tmp_path, f"print({out!r})"))
    with pytest.raises(ProviderError):
        await provider.machines()
    with pytest.raises(ProviderError):
        await provider.offerings()


async def test_a_script_lists_also_what_will_not_come_and_why(tmp_path: Path) -> None:
    listed = [{"name": "nagara-1", "offering": "m1", "presence": "refused", "problem": "outbid"}]
    provider = CommandProvider("rack", scripts(tmp_path, f"print({json.dumps(listed)!r})"))
    (machine,) = await provider.machines()
    assert (machine.presence, machine.problem) == (Presence.REFUSED, "outbid")


async def test_a_script_that_does_not_exist_is_refused_for_certain() -> None:
    commands = {verb: ["/nonexistent"] for verb in ("launch", "machines")}
    with pytest.raises(ProviderRefusedError):
        await CommandProvider("rack", commands).launch("n", an_offering())


def entry(**changes: object) -> SimpleNamespace:
    values: dict[str, object] = {
        "cloud": "AWS", "region": "us-east-1", "instance_type": "p5.48xlarge",
        "accelerator_count": 8.0, "cpu_count": 192.0, "memory": 2048.0, "price": 98.32,
        "spot_price": float("nan"),
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


async def test_a_catalogue_gives_offerings_and_nothing_to_launch() -> None:
    catalogue = {
        "H100": [entry(), entry(cloud="GCP", spot_price=40.0)],
        "T4": [entry(accelerator_count=1.0)],
    }
    provider = SkypilotProvider("clouds", ("h100",), lambda: catalogue)
    offerings = await provider.offerings()
    assert [(one.region, one.market, one.price_h) for one in offerings] == [
        ("aws/us-east-1", "on-demand", 98.32),
        ("gcp/us-east-1", "on-demand", 98.32),
        ("gcp/us-east-1", "spot", 40.0),
    ]
    assert {one.devices for one in offerings} == {8}
    assert await provider.machines() == ()
    with pytest.raises(ProviderRefusedError, match="cannot be launched"):
        await provider.launch("nagara-1", offerings[0])


async def test_without_the_package_the_catalogue_says_what_to_install() -> None:
    pytest.importorskip("nagara")
    try:
        import sky  # noqa: F401
    except ImportError:
        with pytest.raises(ProviderError, match="not installed"):
            await SkypilotProvider("clouds").offerings()


def test_a_simulated_market_is_the_same_again_with_the_same_seed() -> None:
    def run() -> list[object]:
        market = a_market(
            [(an_offering(), Trait(dead_share=0.3, reclaims_h=1.0))], name="p", seed=4
        )
        for number in range(30):
            market.launch(f"m{number}", "a")
        taken = [market.advance(600.0 * step) for step in range(20)]
        return [taken, market.cost, json.dumps([one.name for one in market.listing()])]

    assert run() == run()


def test_simulated_machines_cost_what_they_cost_at_the_time() -> None:
    market = a_market([(an_offering(price_h=3.0), Trait())], name="p")
    market.launch("m", "a")
    market.advance(7200.0)
    assert market.cost == pytest.approx(6.0)
    assert market.paid_hours == pytest.approx(2.0)
