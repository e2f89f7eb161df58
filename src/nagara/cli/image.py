"""`nagara image`: brings file trees into the store and mounts them."""

import json
import os
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from nagara.base.errors import UsageError
from nagara.base.units import format_bytes
from nagara.cli.opened_store import opened_mounts, opened_store, tenant_option
from nagara.cli.output import json_option, tell
from nagara.cli.progress import counting
from nagara.cli.settings import Settings
from nagara.image.images import (
    Image,
    diff_trees,
    find_image,
    list_images,
    load_tree,
    remove_image,
    verify_image,
)
from nagara.image.mounts import unmount_if_mounted
from nagara.image.registry import Credentials
from nagara.image.sources import RegistryAccess, import_image
from nagara.image.tree import Node, printable, walk


@click.group()
def image() -> None:
    """Import, list, compare, mount and verify images."""


@image.command(name="import")
@click.argument("source")
@click.option("--name", required=True, help="What to call it.")
@click.option("--mirror", "mirrors", multiple=True, help="A host to ask before the registry.")
@click.option("--plain-http", is_flag=True, help="Ask the registry without TLS.")
@click.option("--user", help="USER for the registry; the password is read from REGISTRY_PASSWORD.")
@tenant_option
@json_option
@click.pass_obj
def import_(
    settings: Settings,
    source: str,
    name: str,
    mirrors: tuple[str, ...],
    plain_http: bool,
    user: str | None,
    tenant: str,
    as_json: bool,
) -> None:
    """Import SOURCE: dir:PATH, venv:PATH, oci:PATH[:TAG], docker-archive:PATH[:IMAGE],
    registry:HOST/NAME[:TAG], model:PATH or layer:PATH."""
    credentials = None
    if user is not None:
        password = os.environ.get("REGISTRY_PASSWORD")
        if password is None:
            raise UsageError("--user needs the password in REGISTRY_PASSWORD")
        credentials = Credentials(user, password)
    access = RegistryAccess(mirrors, plain_http, credentials)
    with opened_store(settings, tenant) as store, counting(f"importing {source}") as watch:
        added, missing = import_image(
            store, source, name, access,
            watch=lambda writer: watch(lambda: (writer.files, writer.bytes)),
        )  # fmt: skip
    figures = {
        "files": added.image.files,
        "size_bytes": added.image.size_bytes,
        "index_bytes": added.index_bytes,
        "inline_files": added.inline_files,
        "objects": added.objects,
        "object_bytes": added.object_bytes,
        "new_objects": added.new_objects,
        "new_bytes": added.new_bytes,
        "fingerprint": added.image.fingerprint,
        "missing": list(missing),
    }
    if as_json:
        click.echo(json.dumps(figures, indent=2))
        return
    click.echo(
        f"{name}: {added.image.files} files, {format_bytes(added.image.size_bytes)}; "
        f"index {format_bytes(added.index_bytes)}, {added.inline_files} files inside it"
    )
    shared = added.object_bytes - added.new_bytes
    click.echo(
        f"{added.objects} objects, {format_bytes(added.object_bytes)}: "
        f"{format_bytes(added.new_bytes)} new, {format_bytes(shared)} were there already"
    )
    for line in missing:
        click.echo(f"warning: this machine does not have {line}", err=True)


@image.command()
@tenant_option
@json_option
@click.pass_obj
def ls(settings: Settings, tenant: str, as_json: bool) -> None:
    """List the images of this machine."""
    with opened_store(settings, tenant) as store:
        found = list_images(store.local)
    if as_json:
        click.echo(json.dumps([_described(each) for each in found], indent=2))
        return
    width = max((len(each.name) for each in found), default=0)
    for each in found:
        size = format_bytes(each.size_bytes)
        click.echo(f"{each.name:<{width}}  {size:>7}  {each.files:>7} files  {each.source}")
    if not found:
        click.echo("no images yet; `nagara image import dir:… --name …` adds one", err=True)


@image.command()
@click.argument("name")
@click.option("--tree", is_flag=True, help="List its files.")
@tenant_option
@json_option
@click.pass_obj
def show(settings: Settings, name: str, tree: bool, tenant: str, as_json: bool) -> None:
    """Show what is known of the image NAME, as JSON in any case, or its files."""
    with opened_store(settings, tenant) as store:
        found = find_image(store, name)
        if not tree:
            click.echo(json.dumps(_described(found), indent=2))
            return
        lines = [_line(path, node) for path, node in walk(load_tree(store, found))]
    tell(lines, *lines, as_json=as_json)


@image.command()
@click.argument("before")
@click.argument("after")
@tenant_option
@json_option
@click.pass_obj
def diff(settings: Settings, before: str, after: str, tenant: str, as_json: bool) -> None:
    """Print what came (+), went (-) and changed (~) from image BEFORE to AFTER."""
    with opened_store(settings, tenant) as store:
        trees = [load_tree(store, find_image(store, name)) for name in (before, after)]
    found = [(mark, printable(path) or "/") for mark, path in diff_trees(*trees)]
    document = [{"change": mark, "path": path} for mark, path in found]
    tell(document, *(f"{mark} {path}" for mark, path in found), as_json=as_json)


@image.command()
@click.argument("name")
@tenant_option
@json_option
@click.pass_obj
def verify(settings: Settings, name: str, tenant: str, as_json: bool) -> None:
    """Read everything of the image NAME that is here; wrong objects are removed."""
    with opened_store(settings, tenant) as store:
        done = verify_image(store, find_image(store, name))
    tell(
        {**asdict(done), "wrong": [str(each) for each in done.wrong]},
        f"{done.objects} objects, {format_bytes(done.bytes)} are right; {done.absent} not here, "
        f"{len(done.wrong)} wrong",
        *(f"removed: {wrong}" for wrong in done.wrong),
        as_json=as_json,
    )
    if done.wrong:
        raise SystemExit(1)


@image.command()
@click.argument("name")
@tenant_option
@json_option
@click.pass_obj
def rm(settings: Settings, name: str, tenant: str, as_json: bool) -> None:
    """Forget the image NAME; `nagara store gc` frees what only it needed."""
    with opened_store(settings, tenant) as store:
        remove_image(store.local, name)
    tell({"removed": name}, f"{name} removed", as_json=as_json)


@image.command()
@click.argument("name")
@click.argument("target", type=click.Path(path_type=Path, file_okay=False))
@click.option("--upper", type=click.Path(path_type=Path, file_okay=False), help="Writable layer.")
@click.option("--fill", is_flag=True, help="Fetch the rest of it behind the mount.")
@tenant_option
@click.pass_obj
def mount(
    settings: Settings, name: str, target: Path, upper: Path | None, fill: bool, tenant: str
) -> None:
    """Mount the image NAME at TARGET, read-only or with a writable --upper. Needs root."""
    if os.geteuid() != 0:
        raise UsageError("mounting needs root")
    target = target.absolute()
    target.mkdir(parents=True, exist_ok=True)
    work = None
    if upper is not None:
        upper = upper.absolute()
        work = upper.with_name(upper.name + ".work")
        for folder in (upper, work):
            folder.mkdir(parents=True, exist_ok=True)
    with opened_mounts(settings) as mounts:
        found = find_image(mounts.store(tenant), name)
        mounted = mounts.mount(tenant, found, str(target))
        try:
            mounts.mount_at(mounted, target, upper=upper, work=work)
        except BaseException:
            mounts.release(str(target))
            raise
        if fill:
            mounts.fill(mounted)
    click.echo(f"{name} mounted at {target}, {'lazy' if mounted.is_lazy else 'local'}")


@image.command()
@click.argument("target", type=click.Path(path_type=Path, file_okay=False))
@click.pass_obj
def umount(settings: Settings, target: Path) -> None:
    """Unmount what `nagara image mount` mounted at TARGET."""
    target = target.absolute()
    with opened_mounts(settings) as mounts:
        was_mounted = unmount_if_mounted(target)
        mounts.release(str(target))
    if not was_mounted:
        raise UsageError("nothing is mounted there", where=str(target))


def _described(found: Image) -> dict[str, Any]:
    described = asdict(found)
    for key in ("index", "list", "trace", "trace_list"):
        value = getattr(found, key)
        described[key] = str(value) if value is not None else None
    return described


def _line(path: bytes, node: Node) -> str:
    what = f" → {printable(node.target)}" if node.target is not None else ""
    mode = stat.filemode(node.mode)
    return f"{mode} {node.uid}:{node.gid} {node.size:>12} {printable(path) or '/'}{what}"
