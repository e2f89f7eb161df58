"""An example for each command, shown at the end of its help. Data only, and how it is shown.

By the command's words. Tests see to it that there is one for every command and that each can be
parsed by the command it is of.
"""

import click

EXAMPLES: dict[str, str] = {
    "demo": "nagara demo",
    "up": "sudo nagara up examples/smollm2.toml --port 8080",
    "agent": "sudo nagara agent --socket /run/nagara/agent.sock --allow-user nagara",
    "deploy": "nagara deploy nagara.toml",
    "apps": "nagara apps --json",
    "logs": "nagara logs smollm2 --follow",
    "trace": "nagara trace smollm2 --all",
    "top": "nagara top",
    "init": "nagara init --name smol --model smollm2 nagara.toml",
    "exec": "sudo nagara exec smollm2-1f2e3d4c -- ps aux",
    "delete": "nagara delete smollm2",
    "snapshot ls": "sudo nagara snapshot ls",
    "snapshot show": "sudo nagara snapshot show smollm2",
    "snapshot hooks": "nagara snapshot hooks > nagara_hooks.py",
    "image import": "nagara image import venv:/srv/app/.venv --name app-env",
    "image ls": "nagara image ls",
    "image show": "nagara image show app-env --tree",
    "image diff": "nagara image diff app-1 app-2",
    "image verify": "nagara image verify app-env",
    "image rm": "nagara image rm app-env",
    "image mount": "sudo nagara image mount app-env /mnt/app",
    "image umount": "sudo nagara image umount /mnt/app",
    "store ls": "nagara store ls",
    "store stat": "nagara store stat --json",
    "store verify": "nagara store verify --rate 50MB",
    "store scrub": "nagara store scrub --within 30d",
    "store gc": "nagara store gc --grace 1d --dry-run",
    "store push": "nagara store push images/app --to zone",
    "store pull": "nagara store pull images/app",
    "cache serve": "nagara cache serve --host 10.0.0.5 --tokens /etc/nagara/tokens.json",
    "models add": "nagara models add ./my-model --name my-model",
    "models ls": "nagara models ls",
    "models rm": "nagara models rm my-model",
    "engine serve": "nagara engine serve ./my-model --port 8000",
    "pool status": "nagara pool status",
    "pool plan": "nagara pool plan --file pool.toml",
    "pool explain": "nagara pool explain",
    "pool drain": "nagara pool drain rack-7 --resume",
    "pool simulate": "nagara pool simulate --days 7 --apps 50 --plot week.svg",
    "pool diagnose": "nagara pool diagnose --kind medium",
    "bench planner": "nagara bench planner --runs 3 --json",
    "bench coldstart": "sudo nagara bench coldstart --runs 5 --image venv",
    "bench rounds": "sudo nagara bench rounds --rounds 100 --requests 4",
    "bench files": "sudo nagara bench files --quick",
    "bench overlap": "nagara bench overlap --batch 32",
    "bench engine": "nagara bench engine --runs 3",
    "doctor": "sudo nagara doctor --json",
    "setup": "sudo nagara setup",
    "setup criu": "sudo nagara setup criu",
    "setup runc": "sudo nagara setup runc",
    "setup erofs": "sudo nagara setup erofs",
    "setup kernel": "nagara setup kernel",
    "errors": "nagara errors --messages",
    "completion": 'eval "$(nagara completion bash)"',
    "version": "nagara version",
}


def with_example(command: click.Command, words: str) -> click.Command:
    """The command, and those below it, with their examples at the end of their help."""
    example = EXAMPLES.get(words)
    if example is not None and command.epilog is None:
        command.epilog = f"\b\nExample:\n  {example}"
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            with_example(below, f"{words} {name}")
    return command
