"""OpenStack Swift with its S3 interface as one process: a real object store, of one replica.

    /usr/bin/python3 swift_server.py FOLDER BUCKET      prints the port of the S3 interface

Run by the distribution's interpreter, which has `python3-swift`. Account, container and object
server keep what they hold in FOLDER; accounts and keys are in the proxy's configuration.
"""

import logging
import os
import sys
from pathlib import Path

import eventlet
import eventlet.wsgi

eventlet.monkey_patch()

FOLDER, BUCKET = Path(sys.argv[1]), sys.argv[2]
KINDS = ("account", "container", "object")
STORAGE = """
[DEFAULT]
devices = {folder}/disks
mount_check = false
swift_dir = {folder}
user = {user}
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
allow_versions = true
"""
PROXY = """
[DEFAULT]
swift_dir = {folder}
user = {user}
[pipeline:main]
pipeline = catch_errors gatekeeper cache listing_formats bulk s3api tempauth slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:9
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:bulk]
use = egg:swift#bulk
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_nagara_tester = testing .admin
[filter:slo]
use = egg:swift#slo
"""


def listening() -> "eventlet.greenio.GreenSocket":
    return eventlet.listen(("127.0.0.1", 0), backlog=256)


def configure(ports: dict[str, int]) -> None:
    """Rings of one device each, and the configuration files."""
    from swift.common import utils
    from swift.common.ring import RingBuilder

    (FOLDER / "disks/d").mkdir(parents=True)
    (FOLDER / "swift.conf").write_text(
        "[swift-hash]\nswift_hash_path_suffix = a\nswift_hash_path_prefix = b\n"
        "[storage-policy:0]\nname = one\ndefault = yes\n"
    )
    utils.SWIFT_CONF_FILE = str(FOLDER / "swift.conf")
    utils.HASH_PATH_SUFFIX, utils.HASH_PATH_PREFIX = b"a", b"b"
    user = {"folder": FOLDER, "user": os.environ.get("USER", "root")}
    for kind in KINDS:
        builder = RingBuilder(2, 1, 0)
        place = {"region": 1, "zone": 1, "weight": 1.0, "device": "d"}
        where = {"ip": "127.0.0.1", "port": ports[kind]}
        back = {"replication_ip": "127.0.0.1", "replication_port": ports[kind]}
        builder.add_dev({**place, **where, **back})
        builder.rebalance()
        builder.get_ring().save(str(FOLDER / f"{kind}.ring.gz"))
        (FOLDER / f"{kind}.conf").write_text(STORAGE.format(kind=kind, **user))
    (FOLDER / "proxy.conf").write_text(PROXY.format(**user))


def main() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    sockets = {kind: listening() for kind in (*KINDS, "proxy")}
    configure({kind: socket.getsockname()[1] for kind, socket in sockets.items()})
    from swift.common.swob import Request
    from swift.common.wsgi import SwiftHttpProtocol, loadapp

    quiet = logging.getLogger("requests")
    quiet.propagate = False
    pool = eventlet.GreenPool()
    apps = {kind: loadapp(str(FOLDER / f"{kind}.conf")) for kind in sockets}
    for kind, socket in sockets.items():
        pool.spawn_n(
            eventlet.wsgi.server, socket, apps[kind], quiet,
            protocol=SwiftHttpProtocol, custom_pool=eventlet.GreenPool(256), log_output=False,
        )  # fmt: skip
    # From within: an operator needs no key.
    inside = {"REQUEST_METHOD": "PUT", "swift.authorize_override": True}
    made = Request.blank(f"/v1/AUTH_nagara/{BUCKET}", inside).get_response(apps["proxy"])
    assert made.status_int == 201, made.status
    print(sockets["proxy"].getsockname()[1], flush=True)
    pool.waitall()


if __name__ == "__main__":
    main()
