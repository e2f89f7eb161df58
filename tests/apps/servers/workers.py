"""A WSGI app for three gunicorn workers, knowing nothing of nagara. `/draw` names its worker.

Each worker loads it by itself; `/` is refused until all have, so that none is saved half-loaded.
"""

import json
import os
import random
import uuid
from pathlib import Path

import numpy
import torch

torch.manual_seed(7)
random.seed(7)
numpy.random.seed(7)
LOADED = Path("/srv/app/loaded")
LOADED.mkdir(exist_ok=True)
(LOADED / str(os.getpid())).touch()


def app(environ, start_response):
    status, answer = "200 OK", {"kept": "the same"}
    if environ["PATH_INFO"] == "/draw":
        answer = {
            "worker": os.getpid(),
            "uuid4": uuid.uuid4().hex,
            "random": random.random(),
            "urandom": os.urandom(8).hex(),
            "numpy": numpy.random.random(),
            "torch": torch.rand(1).item(),
        }
    elif len(list(LOADED.iterdir())) < 3:
        status, answer = "503 Service Unavailable", {"loaded": "not by all"}
    body = json.dumps(answer).encode()
    start_response(status, [("content-length", str(len(body)))])
    return [body]
