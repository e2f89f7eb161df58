"""`nagara completion`: what a shell evaluates to complete nagara's commands and options."""

import click
from click.shell_completion import CompletionItem, get_completion_class

from nagara.base.errors import NagaraError
from nagara.cli.settings import Settings, read_settings
from nagara.control.client import connect

_VARIABLE = "_NAGARA_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what SHELL evaluates to complete nagara's commands, options and app names."""
    kind = get_completion_class(shell)
    assert kind is not None
    root = ctx.find_root()
    script = kind(root.command, {}, "nagara", _VARIABLE)
    # Not `script.source()`: it would ask bash for its version, which need not be here.
    click.echo(script.source_template % script.source_vars())


def complete_app(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Names of deployed apps; none where nagara does not run or this user may not ask."""
    settings = ctx.find_root().obj
    if not isinstance(settings, Settings):
        settings = read_settings(ctx.find_root().params.get("state"), verbose=False)
    try:
        apps = connect(settings.state).apps()
    except (NagaraError, OSError):
        return []
    return [CompletionItem(app["name"]) for app in apps if app["name"].startswith(incomplete)]
