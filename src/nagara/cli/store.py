"""`nagara store`: looks after the objects of this machine and the tiers behind them."""

import json
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from nagara.base.errors import UsageError
from nagara.base.units import format_bytes, parse_duration_s, parse_size_bytes
from nagara.cli.opened_store import find_tier, opened_folder, opened_store, tenant_option
from nagara.cli.output import json_option, tell
from nagara.cli.progress import arriving, working
from nagara.cli.settings import Settings
from nagara.image.lazy_layer import DaemonError, ask_daemon
from nagara.store.collecting import Collection, collect_local, collect_tier
from nagara.store.moving import Moved, pull, push
from nagara.store.names import ObjectName, parse_name
from nagara.store.roots import fetch_root, list_roots, read_root
from nagara.store.scrubbing import Scrub, pace_for, stopping

_TIER_S = 3600.0


@click.group()
def store() -> None:
    """List, verify, collect and move the objects of this machine."""


@store.command()
@tenant_option
@click.option("--objects", is_flag=True, help="List every object instead of the roots.")
@json_option
@click.pass_obj
def ls(settings: Settings, tenant: str, objects: bool, as_json: bool) -> None:
    """List the roots (images, models, ...) that keep objects."""
    with opened_store(settings, tenant) as opened:
        if objects:
            rows = list(opened.local.folder.ledger.names(tenant))
            found = [{"name": str(name), "bytes": space} for name, space, _ in rows]
            lines = [f"{space:>14} {name}" for name, space, _ in rows]
        else:
            lines = [f"{root.kind}/{root.name}" for root in list_roots(opened.local)]
            found = [{"root": line} for line in lines]
    tell(found, *lines, as_json=as_json)


@store.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def stat(settings: Settings, as_json: bool) -> None:
    """Show how much is here, of whom, and what pins it."""
    with opened_folder(settings) as folder:
        tenants = {name: folder.ledger.count(name) for name in folder.tenant_names()}
        total = folder.ledger.total_bytes()
        document: dict[str, Any] = {
            "path": str(folder.path),
            "total_bytes": total,
            "limit_bytes": folder.limit_bytes,
            "tenants": {name: {"objects": n, "bytes": size} for name, (n, size) in tenants.items()},
            "pins": [pin._asdict() for pin in folder.ledger.pins()],
            "daemons": _daemon_reports(settings),
        }
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    bound = format_bytes(folder.limit_bytes) if folder.limit_bytes else "no bound"
    click.echo(f"{document['path']}: {format_bytes(total)}, {bound}")
    for name, (count, size) in tenants.items():
        click.echo(f"  {name}: {count} objects, {format_bytes(size)}")
    for tenant, reports in document["daemons"].items():
        for report in reports:
            click.echo(f"  {tenant}'s file daemon, {_figures(report)}")


@store.command()
@tenant_option
@click.option(
    "--rate", default="0", show_default=True, help="Bytes a second, for a slow scrub; 0: no bound."
)
@json_option
@click.pass_obj
def verify(settings: Settings, tenant: str, rate: str, as_json: bool) -> None:
    """Read every object; wrong ones are removed and will be fetched again."""
    bytes_per_s = parse_size_bytes(rate)
    checked, wrong = 0, []
    with opened_store(settings, tenant) as opened:
        for text, space, _ in list(opened.local.folder.ledger.names(tenant)):
            name: ObjectName = parse_name(text)
            if not opened.local.path(name).exists():
                opened.local.discard(name)
                continue
            checked += 1
            if not opened.local.verify(name):
                wrong.append(text)
            if bytes_per_s:
                time.sleep(space / bytes_per_s)
    lines = [f"{checked} objects read, {len(wrong)} wrong", *(f"removed: {each}" for each in wrong)]
    tell({"objects": checked, "removed": wrong}, *lines, as_json=as_json)
    if wrong:
        raise SystemExit(1)


@store.command()
@tenant_option
@click.option("--within", default="30d", show_default=True, help="How long one pass may take.")
@click.option("--once", is_flag=True, help="End with the pass at hand.")
@click.pass_obj
def scrub(settings: Settings, tenant: str, within: str, once: bool) -> None:
    """Read every object again and again, slowly, from the disk itself; for a service.

    Wrong ones are removed and will be fetched again. Goes on where it was stopped.
    """
    within_s = parse_duration_s(within)
    if within_s <= 0:
        raise UsageError("--within must be longer than nothing")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with opened_folder(settings) as folder:
        local = folder.tenant(tenant)
        while not stop.is_set():
            begun_s = time.monotonic()
            done = Scrub(local, pace_for(local, within_s), stopping(stop)).run_pass()
            said = "read again" if done.is_whole else "read again before the stop"
            click.echo(f"{done.objects} objects {said}, {len(done.wrong)} wrong")
            for text in done.wrong:
                click.echo(f"removed: {text}")
            if once:
                return
            stop.wait(max(0.0, within_s - (time.monotonic() - begun_s)))


@store.command()
@tenant_option
@click.option("--grace", default="1d", show_default=True, help="Keep what was used since.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--tier", help="Collect this tier instead of this machine.")
@json_option
@click.pass_obj
def gc(
    settings: Settings, tenant: str, grace: str, dry_run: bool, tier: str | None, as_json: bool
) -> None:
    """Remove the objects that no root names."""
    grace_s = parse_duration_s(grace)
    done: Collection
    if tier is not None:
        far = find_tier(settings, tenant, tier)
        done = collect_tier(far, grace_s, time.monotonic() + _TIER_S, is_dry=dry_run)
        far.close()
    else:
        with opened_store(settings, tenant) as opened:
            done = collect_local(opened.local, grace_s, is_dry=dry_run)
    verb = "would go" if dry_run else "removed"
    line = f"{done.removed} objects {verb}, {format_bytes(done.removed_bytes)}; {done.kept} kept"
    tell({**asdict(done), "is_dry": dry_run}, line, as_json=as_json)


@store.command(name="push")
@click.argument("root")
@click.option("--to", "tier", required=True, help="The tier's name in the settings.")
@tenant_option
@json_option
@click.pass_obj
def push_(settings: Settings, root: str, tier: str, tenant: str, as_json: bool) -> None:
    """Put ROOT (e.g. images/NAME) and all it names into a tier."""
    kind, name = _root(root)
    far = find_tier(settings, tenant, tier)
    with opened_store(settings, tenant) as opened, working(f"putting {root} into {tier}"):
        moved = push(opened, far, read_root(opened.local, kind, name))
    far.close()
    tell(asdict(moved), _moved(moved), as_json=as_json)


@store.command(name="pull")
@click.argument("root")
@tenant_option
@json_option
@click.pass_obj
def pull_(settings: Settings, root: str, tenant: str, as_json: bool) -> None:
    """Bring ROOT (e.g. images/NAME) and all it names to this machine."""
    kind, name = _root(root)
    with opened_store(settings, tenant) as opened:
        with arriving(f"bringing {root}") as arrived:
            moved = pull(opened, fetch_root(opened, kind, name), arrived)
        reports = [asdict(report) for report in opened.reports()]
    lines = [_moved(moved), *(f"  {_figures(report)}" for report in reports[1:])]
    tell({**asdict(moved), "tiers": reports}, *lines, as_json=as_json)


def _daemon_reports(settings: Settings) -> dict[str, list[dict[str, Any]]]:
    """What the running file daemons had from each tier, by tenant."""
    found = {}
    for path in sorted((settings.state / "files").glob("*.sock")):
        try:
            found[path.stem] = ask_daemon(path, {"op": "stats"}, time_limit_s=2.0)["tiers"]
        except DaemonError:
            continue  # it ended, or belongs to another user
    return found


def _figures(report: Mapping[str, Any]) -> str:
    p50, p99 = report["p50_ms"] or 0.0, report["p99_ms"] or 0.0
    return (
        f"{report['tier']}: {report['hits']} hits, {report['misses']} misses, "
        f"{report['faults']} faults, {format_bytes(report['read_bytes'])}, "
        f"p50 {p50:.1f} ms, p99 {p99:.1f} ms"
    )


def _root(text: str) -> tuple[str, str]:
    kind, slash, name = text.partition("/")
    if not slash:
        raise UsageError(f"{text!r} is no root", hint="write KIND/NAME as `nagara store ls` does")
    return kind, name


def _moved(moved: Moved) -> str:
    size = format_bytes(moved.moved_bytes)
    return f"{moved.moved_objects} of {moved.objects} objects moved, {size}"
