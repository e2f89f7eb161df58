"""`nagara secret`: values that apps get when they run, and snapshots never hold."""

import sys

import click

from nagara.cli.output import json_option, tell
from nagara.cli.settings import Settings
from nagara.control.app import DEFAULT_TENANT
from nagara.control.app_secrets import AppSecrets


@click.group()
def secret() -> None:
    """Set, list and remove the values of apps' secrets.

    An app file names those that the app gets: secrets = ["HF_TOKEN"].
    """


@secret.command(name="set")
@click.argument("name")
@click.pass_obj
def set_(settings: Settings, name: str) -> None:
    """Read the value of NAME from the terminal, or all of standard input, and keep it.

    A newline at its end is taken off. Replicas that start from now on get it.
    """
    if sys.stdin.isatty():
        value = click.prompt(name, hide_input=True)
    else:
        value = sys.stdin.read().removesuffix("\n")
    settings.state.mkdir(parents=True, exist_ok=True)
    AppSecrets(settings.state).put(DEFAULT_TENANT, name, value)


@secret.command()
@json_option
@click.pass_obj
def ls(settings: Settings, as_json: bool) -> None:
    """List the names of those that are set."""
    names = list(AppSecrets(settings.state).names(DEFAULT_TENANT))
    tell({"secrets": names}, *names, as_json=as_json)


@secret.command()
@click.argument("name")
@click.pass_obj
def rm(settings: Settings, name: str) -> None:
    """Forget NAME. Running replicas keep what they have."""
    AppSecrets(settings.state).remove(DEFAULT_TENANT, name)
