"""`nagara snapshot verify|push|pull|rm|quarantine`: looking after what is saved, and moving it."""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from nagara.base.errors import UsageError
from nagara.base.units import format_bytes
from nagara.cli.opened_store import find_tier, opened_catalog, tenant_option
from nagara.cli.settings import Settings
from nagara.image.shelf_tiers import (
    far_entries,
    pull_shelved,
    push_shelved,
    tier_entries,
    withdraw,
)
from nagara.snapshot.catalog import (
    Catalog,
    Listed,
    Snapshot,
    as_shelved,
    far_entry,
    is_snapshot_of,
)
from nagara.store.moving import Moved

_ASK_S = 30.0
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
_name_argument = click.argument("name", metavar="APP|SNAPSHOT")


@click.command(
    epilog="Example: nagara snapshot verify smol  reads all of it, and puts it aside if it is bad."
)
@_name_argument
@json_option
@click.pass_obj
def verify(settings: Settings, name: str, as_json: bool) -> None:
    """Read everything of a snapshot from the disk.

    Wrong objects are removed; a snapshot that has one is put in quarantine: its app starts plainly,
    until `pull` has brought the right bytes or the snapshot is made anew.
    """
    rows = []
    with opened_catalog(settings) as catalog:
        for snapshot in _readable(catalog, name):
            shelf = catalog.shelf(snapshot.tenant)
            faults = shelf.verify(as_shelved(snapshot))
            wrong = [fault.path for fault in faults if fault.is_wrong]
            if wrong and not catalog.is_quarantined(snapshot):
                catalog.quarantine(snapshot, f"verification: wrong bytes in {', '.join(wrong)}")
            absent = [fault.path for fault in faults if not fault.is_wrong]
            rows.append(_row(snapshot) | {"wrong": wrong, "not_here": absent})
    _print(rows, as_json, _verified)
    if any(row["wrong"] for row in rows):
        raise SystemExit(1)


@click.command(
    epilog="Example: nagara snapshot push smol --to zone  lets other machines of the zone restore "
    "it."
)
@_name_argument
@click.option("--to", "tier", required=True, help="The tier's name in STATE/store/settings.json.")
@json_option
@click.pass_obj
def push(settings: Settings, name: str, tier: str, as_json: bool) -> None:
    """Bring a snapshot to a tier, where other machines find it.

    It is the memory of a process: whoever may read the tier may read it, unless the tier's settings
    name a `key_folder`.
    """
    rows = []
    with opened_catalog(settings) as catalog:
        for snapshot in _readable(catalog, name):
            if catalog.is_quarantined(snapshot):
                raise UsageError(
                    "is in quarantine and is not given to others", where=snapshot.name,
                    hint=f"nagara snapshot show {snapshot.name}",
                )  # fmt: skip
            shelf, entry = catalog.shelf(snapshot.tenant), far_entry(snapshot)
            with contextlib.closing(find_tier(settings, snapshot.tenant, tier)) as far:
                moved = push_shelved(shelf, far, as_shelved(snapshot), snapshot.app, entry)
            rows.append(_row(snapshot) | _moved(moved))
    _print(rows, as_json, _sent)


@click.command(
    epilog="Example: nagara snapshot pull smol  brings all of smol's snapshots that a tier has."
)
@_name_argument
@tenant_option
@json_option
@click.pass_obj
def pull(settings: Settings, name: str, tenant: str, as_json: bool) -> None:
    """Bring snapshots of an app, or one of them, from the tiers to this machine.

    Not needed for a restore, which fetches what it lacks; it saves that restore the wait. One that
    was in quarantine because its bytes were wrong is good again afterwards.
    """
    rows = []
    with opened_catalog(settings) as catalog:
        shelf = catalog.shelf(tenant)
        if not shelf.store.transfer.tiers:
            raise UsageError("no tier is set", hint="tiers are set in STATE/store/settings.json")
        app = _app_of(catalog, name)
        found = far_entries(shelf, app, time.monotonic() + _ASK_S)
        for each in _wanted(found, app, name):
            shelved, moved = pull_shelved(shelf, each)
            snapshot = catalog.read(tenant, shelved)
            catalog.forgive(snapshot)
            rows.append(_row(snapshot) | _moved(moved))
    _print(rows, as_json, _brought)


@click.command(
    epilog="Examples: nagara snapshot rm smol  here; nagara snapshot rm smol --from zone  there."
)
@_name_argument
@click.option("--from", "tier", help="Take it out of this tier instead of this machine.")
@tenant_option
@json_option
@click.pass_obj
def rm(settings: Settings, name: str, tier: str | None, tenant: str, as_json: bool) -> None:
    """Remove an app's snapshots, or one.

    What only they needed is freed at once here (when running replicas still hold it, by `nagara
    store gc` later), and in a tier by `nagara store gc --tier`. The app's next start is a plain
    one, after which a snapshot is made anew, unless a tier has one.
    """
    with opened_catalog(settings) as catalog:
        if tier is None:
            rows = [_removed(catalog, listed) for listed in _chosen(catalog, name)]
        else:
            rows = _withdrawn(settings, catalog, name, tenant, tier)
    _print(rows, as_json, lambda row: f"{row['app']}: {row['snapshot']} removed")


def _removed(catalog: Catalog, listed: Listed) -> dict[str, Any]:
    catalog.remove(listed)
    return {"app": listed.app, "tenant": listed.tenant, "snapshot": listed.name}


def _withdrawn(
    settings: Settings, catalog: Catalog, name: str, tenant: str, tier: str
) -> list[dict[str, Any]]:
    shelf, app = catalog.shelf(tenant), _app_of(catalog, name)
    with contextlib.closing(find_tier(settings, tenant, tier)) as far:
        found = tier_entries(shelf, far, app, time.monotonic() + _ASK_S)
        wanted = _wanted(found, app, name)
        for each in wanted:
            withdraw(shelf, far, each, app)
    return [{"app": app, "tenant": tenant, "snapshot": each.rpartition(".")[2]} for each in wanted]


@click.command(
    epilog="Examples: nagara snapshot quarantine smol --reason 'answers slowly'; nagara snapshot "
    "quarantine smol --lift"
)
@_name_argument
@click.option("--reason", default="set aside by hand", show_default=True, help="Said by `show`.")
@click.option("--lift", is_flag=True, help="Let it be used again.")
@json_option
@click.pass_obj
def quarantine(settings: Settings, name: str, reason: str, lift: bool, as_json: bool) -> None:
    """Put a snapshot aside, or let it be used again: its app starts plainly meanwhile."""
    rows = []
    with opened_catalog(settings) as catalog:
        for snapshot in _readable(catalog, name):
            if lift:
                catalog.forgive(snapshot)
            elif not catalog.is_quarantined(snapshot):
                catalog.quarantine(snapshot, reason)
            rows.append(_row(snapshot) | {"in_quarantine": not lift})
    said = "may be used again" if lift else "is in quarantine"
    _print(rows, as_json, lambda row: f"{row['app']}: {row['snapshot']} {said}")


COMMANDS = (verify, push, pull, rm, quarantine)


def _chosen(catalog: Catalog, name: str) -> list[Listed]:
    found = [each for each in catalog.everything() if name in (each.app, each.name)]
    if not found:
        raise UsageError(f"no app with a snapshot and no snapshot is called {name!r}",
                         hint="nagara snapshot ls")  # fmt: skip
    return found


def _readable(catalog: Catalog, name: str) -> Iterator[Snapshot]:
    for listed in _chosen(catalog, name):
        if listed.snapshot is None:
            raise UsageError(
                "its description cannot be read", where=listed.name,
                hint=f"nagara snapshot rm {listed.name}",
            )  # fmt: skip
        yield listed.snapshot


def _app_of(catalog: Catalog, name: str) -> str:
    """Tiers know snapshots by their apps."""
    return next((each.app for each in catalog.everything() if each.name == name), name)


def _wanted(entries: Iterable[str], app: str, name: str) -> list[str]:
    """Those of a tier's snapshots of an app that are meant. Raises `UsageError`."""
    found = [
        each
        for each in entries
        if is_snapshot_of(each, app) and name in (app, each.rpartition(".")[2])
    ]
    if not found:
        raise UsageError(
            f"no tier that was asked has a snapshot of {name!r}",
            hint="push one: nagara snapshot push APP --to TIER",
        )
    return found


def _row(snapshot: Snapshot) -> dict[str, Any]:
    return {"app": snapshot.app, "tenant": snapshot.tenant, "snapshot": snapshot.name}


def _moved(moved: Moved) -> dict[str, Any]:
    return {
        "objects": moved.objects,
        "moved_objects": moved.moved_objects,
        "moved_bytes": moved.moved_bytes,
    }


def _print(
    rows: list[dict[str, Any]], as_json: bool, text: Callable[[dict[str, Any]], str]
) -> None:
    if as_json:
        click.echo(json.dumps({"snapshots": rows}, indent=2))
        return
    for row in rows:
        click.echo(text(row))


def _verified(row: dict[str, Any]) -> str:
    if row["wrong"]:
        return f"{row['app']}: {row['snapshot']} is in quarantine: wrong: {', '.join(row['wrong'])}"
    absent = f"; {len(row['not_here'])} objects are not here" if row["not_here"] else ""
    return f"{row['app']}: {row['snapshot']} is right{absent}"


def _sent(row: dict[str, Any]) -> str:
    return f"{row['app']}: {row['snapshot']} is there; {_figures(row)} sent"


def _brought(row: dict[str, Any]) -> str:
    return f"{row['app']}: {row['snapshot']} is here; {_figures(row)} brought"


def _figures(row: dict[str, Any]) -> str:
    return f"{row['moved_objects']} of {row['objects']} objects, {format_bytes(row['moved_bytes'])}"
