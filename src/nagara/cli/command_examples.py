"""An example for each command, shown at the end of its help. Data only, and how it is shown.

By the command's words. Tests see to it that there is one for every command and that each can be
parsed by the command it is of.
"""

import click

EXAMPLES: dict[str, str] = {
    "demo": "nagara demo",
    "up": "sudo nagara up examples/smollm2.toml --port 8080",
    "machines": "nagara machines --json",
    "agent": "sudo nagara agent --socket /run/nagara/agent.sock --allow-user nagara",
    "deploy": "nagara deploy nagara.toml",
    "apps": "nagara apps --json",
    "logs": "nagara logs smollm2 --follow",
    "trace": "nagara trace smollm2 --all",
    "top": "nagara top",
    "init": "nagara init --name smol --model smollm2 nagara.toml",
    "exec": "sudo nagara exec smollm2-1f2e3d4c -- ps aux",
    "versions": "nagara versions smollm2",
    "rollback": "nagara rollback smollm2 --to 3",
    "delete": "nagara delete smollm2",
    "usage": "nagara usage --json",
    "snapshot ls": "sudo nagara snapshot ls",
    "snapshot show": "sudo nagara snapshot show smollm2",
    "snapshot rm": "sudo nagara snapshot rm smollm2",
    "snapshot verify": "sudo nagara snapshot verify smollm2",
    "snapshot quarantine": "sudo nagara snapshot quarantine smollm2",
    "snapshot push": "sudo nagara snapshot push smollm2 --to zone",
    "snapshot pull": "sudo nagara snapshot pull smollm2",
    "snapshot hooks": "nagara snapshot hooks > nagara_hooks.py",
    "secret set": "nagara secret set HF_TOKEN < token.txt",
    "secret ls": "nagara secret ls",
    "secret rm": "nagara secret rm HF_TOKEN",
    "device status": "nagara device status --json",
    "device selftest": "sudo nagara device selftest",
    "backup save": "sudo nagara backup save nagara.tar.gz",
    "backup restore": "sudo nagara backup restore nagara.tar.gz",
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
    "bench apps": "nagara bench apps --count 1000",
    "bench autoscale": "nagara bench autoscale --trace gen:bursts --cold-start 5",
    "bench gateway": "nagara bench gateway --rounds 3",
    "bench cluster": "sudo nagara bench cluster --machines 3 --json",
    "bench fleet": "nagara bench fleet --machines 1000 --replicas 5000 --json",
    "bench clones": "sudo nagara bench clones --clones 8",
    "bench device": "nagara bench device --device sim",
    "bench weights": "nagara bench weights --runs 3",
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
    shown = f"\b\nExample:\n  {example}"
    if example is not None and not (command.epilog or "").startswith(shown):
        command.epilog = f"{shown}\n\n{command.epilog or ''}".rstrip()
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            with_example(below, f"{words} {name}")
    return command
