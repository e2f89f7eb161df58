"""What every `Provider` that has machines must do, as tests.

Inherit from `ProviderConformance` in a test module and provide a fixture `provider`. Each test
has a provider of its own without machines, whose first offering has at least one in stock.
"""

import asyncio

from nagara.contract.machine import NoCapacityError, Offering, Provider, ProviderMachine

_PATIENCE = 100


async def _listed(provider: Provider, name: str) -> ProviderMachine | None:
    return next((one for one in await provider.machines() if one.name == name), None)


async def _gone(provider: Provider, name: str) -> bool:
    for _ in range(_PATIENCE):
        if await _listed(provider, name) is None:
            return True
        await asyncio.sleep(0.02)
    return False


class ProviderConformance:
    """The tests."""

    async def first(self, provider: Provider) -> Offering:
        """What the tests launch."""
        return (await provider.offerings())[0]

    async def test_offerings_name_their_provider_and_have_ids_of_their_own(
        self, provider: Provider
    ) -> None:
        offerings = await provider.offerings()
        assert offerings
        assert {one.provider for one in offerings} == {provider.name}
        assert len({one.id for one in offerings}) == len(offerings)
        for one in offerings:
            assert one.devices >= 1
            assert one.price_h >= 0
            assert one.market in ("on-demand", "spot")

    async def test_a_new_provider_lists_no_machine(self, provider: Provider) -> None:
        assert await provider.machines() == ()

    async def test_a_launched_machine_is_listed_under_its_name(self, provider: Provider) -> None:
        offering = await self.first(provider)
        await provider.launch("nagara-1", offering)
        seen = await _listed(provider, "nagara-1")
        assert seen is not None
        assert seen.offering == offering.id

    async def test_the_same_name_twice_is_one_machine(self, provider: Provider) -> None:
        offering = await self.first(provider)
        await provider.launch("nagara-1", offering)
        await provider.launch("nagara-1", offering)
        assert [one.name for one in await provider.machines()] == ["nagara-1"]

    async def test_a_released_machine_leaves_the_list(self, provider: Provider) -> None:
        await provider.launch("nagara-1", await self.first(provider))
        await provider.release("nagara-1")
        assert await _gone(provider, "nagara-1")

    async def test_releasing_twice_or_a_name_nobody_knows_is_no_error(
        self, provider: Provider
    ) -> None:
        await provider.launch("nagara-1", await self.first(provider))
        for name in ("nagara-1", "nagara-1", "nagara-2"):
            await provider.release(name)
        assert await _gone(provider, "nagara-1")

    async def test_what_was_released_can_be_had_again_under_another_name(
        self, provider: Provider
    ) -> None:
        offering = await self.first(provider)
        await provider.launch("nagara-1", offering)
        await provider.release("nagara-1")
        assert await _gone(provider, "nagara-1")
        await provider.launch("nagara-2", offering)
        assert await _listed(provider, "nagara-2") is not None

    async def test_advertised_stock_is_refused_beyond_and_leaves_nothing_behind(
        self, provider: Provider
    ) -> None:
        offering = await self.first(provider)
        if offering.stock is None:
            return
        refused = None
        for number in range(offering.stock + 1):
            try:
                await provider.launch(f"nagara-{number}", offering)
            except NoCapacityError:
                refused = f"nagara-{number}"
                break
        assert refused is not None
        assert await _listed(provider, refused) is None
