"""Servers that nagara knows nothing of, as app files: nginx, gunicorn, Node.js.

Each writes a file before it serves and answers `/` (ready), `/kept` (what it has in memory since
its start) and `/file` (what it wrote). Their programs and settings are put into the replica's own
files by the command itself, as a start script would.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

APPS = Path(__file__).parent.parent / "apps/foreign"
_RANDOM = "$(tr -dc a-f0-9 </dev/urandom | head -c 16)"


@dataclass(frozen=True, slots=True)
class ForeignServer:
    """One kind of server: the program it needs and the script that starts it."""

    name: str
    program: str
    script: str  # for sh; `$0` is what `source` holds
    source: str

    @property
    def is_there(self) -> bool:
        """Whether its program is installed."""
        return bool(shutil.which(self.program) or shutil.which(self.program, path=_PLACES))

    def app(self, *, most: int = 3, user: str = "root") -> str:
        """An app file with the server: nothing in it but what its user would have to say.

        `user` is nginx's for its workers.
        """
        command = ["/bin/sh", "-c", self.script, self.source, "${PORT}", user]
        return "\n".join(
            [
                f"[app.{self.name}]",
                'image = "host"',
                f"command = {json.dumps(command)}",
                'ready = "/"',
                f"scale = {{max = {most}, concurrency = 1}}",
                "",
            ]
        )


_PLACES = f"{Path(sys.prefix) / 'bin'}:/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin"

SERVERS = (
    ForeignServer(
        "nginx",
        "nginx",
        f'kept={_RANDOM}; mkdir -p /srv/www; printf %s "$kept" >/srv/www/file; '
        'printf %s "$0" | sed "s/PORT/$1/; s/KEPT/$kept/; s/USER/$2/" >/srv/nginx.conf; '
        "exec nginx -c /srv/nginx.conf",
        (APPS / "nginx.conf").read_text(),
    ),
    ForeignServer(
        "gunicorn",
        "gunicorn",
        'printf %s "$0" >/srv/wsgi.py; exec gunicorn --chdir /srv --preload --workers 3 '
        '--bind "127.0.0.1:$1" --log-level warning wsgi:app',
        (APPS / "wsgi.py").read_text(),
    ),
    ForeignServer(
        "nodejs",
        "node",
        'printf %s "$0" >/srv/server.js; exec node /srv/server.js "$1"',
        (APPS / "server.js").read_text(),
    ),
)
