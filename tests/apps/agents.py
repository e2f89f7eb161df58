"""Starts node agents as processes of their own, quickly: each is forked off with all code loaded.

A line of JSON `{"state", "env"}` starts an agent that serves at `agent.sock` in its state folder;
its pid is printed.
"""

import asyncio
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from nagara.cli.agent import _serve, agent_socket
from nagara.node.build import build_node

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.environ.update(order["env"])
        sys.stdout = sys.stderr
        state = Path(order["state"])
        try:
            served = _serve(
                build_node(state), state, agent_socket(state), None, None, end_with_input=False
            )
            asyncio.run(served)
        except BaseException:  # noqa: BLE001 - told, and the process ends
            traceback.print_exc()
        finally:
            os._exit(0)
    print(pid, flush=True)
