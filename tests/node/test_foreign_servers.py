"""Servers that are not nagara's: deployed, captured and put back with the files they wrote."""

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from nagara.contract.replica import Canary, StartKind

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

NGINX = """
mkdir -p /srv/nginx/logs /srv/nginx/html
echo -n "a page" > /srv/nginx/html/index.html
cat > /srv/nginx/nginx.conf <<END
daemon off; worker_processes 2; pid /srv/nginx/nginx.pid; error_log /srv/nginx/logs/error.log info;
user root; events { worker_connections 64; }
http {
    access_log /srv/nginx/logs/access.log; client_body_temp_path /srv/nginx/body;
    proxy_temp_path /srv/nginx/proxy; fastcgi_temp_path /srv/nginx/fastcgi;
    uwsgi_temp_path /srv/nginx/uwsgi; scgi_temp_path /srv/nginx/scgi;
    server {
        listen 127.0.0.1:$LISTEN;
        location / { root /srv/nginx/html; }
        location /logs/ { alias /srv/nginx/logs/; }
    }
}
END
exec nginx -c /srv/nginx/nginx.conf -e /srv/nginx/logs/error.log
"""

GUNICORN = """
mkdir -p /srv/app && cd /srv/app
cat > app.py <<END
import os
def app(environ, start):
    if environ["PATH_INFO"] == "/logs/access.log":
        body = open("/srv/app/access.log", "rb").read()
    elif environ["PATH_INFO"] == "/worker":
        body = str(os.getpid()).encode()
    else:
        body = b"a page"
    start("200 OK", [("content-length", str(len(body)))])
    return [body]
END
exec gunicorn --workers 3 --bind 127.0.0.1:$LISTEN --pid /srv/app/pid \
    --access-logfile /srv/app/access.log app:app
"""

NODE = """
mkdir -p /srv/app
cat > /srv/app/server.js <<END
const http = require("http"), fs = require("fs");
const log = fs.createWriteStream("/srv/app/access.log", { flags: "a" });
setInterval(() => fs.writeFileSync("/srv/app/tick", String(Date.now())), 50);
http.createServer((request, response) => {
    log.write(request.url + "\\n");
    if (request.url === "/logs/access.log")
        setTimeout(() => response.end(fs.readFileSync("/srv/app/access.log")), 20);
    else response.end("a page");
}).listen(Number(process.env.LISTEN), "127.0.0.1");
END
exec node /srv/app/server.js
"""


@pytest.mark.parametrize(
    ("program", "script"),
    [("nginx", NGINX), ("gunicorn", GUNICORN), ("node", NODE)],
    ids=["nginx", "gunicorn", "node"],
)
async def test_a_server_is_put_back_with_its_files(shared, program, script):
    own = str(Path(sys.executable).parent)  # replicas find this environment's programs, too
    if shutil.which(program, path=f"{own}:{os.environ['PATH']}") is None:
        pytest.skip(f"needs {program}")
    spec = shared.spec(
        app=program, command=("sh", "-ec", script), canary=Canary("/"), start_timeout_s=60.0
    )
    plain = await shared.start(spec)
    assert (await shared.ask(plain.replica)).body == b"a page"
    await shared.stop(plain.replica)
    assert (await shared.capture(spec)).reason is None
    reports = await asyncio.gather(*(shared.start(spec) for _ in range(3)))
    assert [(r.kind, r.fallback) for r in reports] == [(StartKind.RESTORED, None)] * 3
    for report in reports:
        answers = await asyncio.gather(*(shared.ask(report.replica) for _ in range(10)))
        assert {answer.body for answer in answers} == {b"a page"}
        log = await shared.ask(report.replica, "/logs/access.log")
        # Requests of before the capture (readiness, canary) and of this clone, in one file.
        assert len(log.body.splitlines()) >= 13
    await shared.stop(*(report.replica for report in reports))
    assert shared.leftovers() == []
