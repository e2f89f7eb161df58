"""A FastAPI server with torch; it says itself when it can be saved, by a module of its own folder.

`/kept` and `/infer` are the same in all clones, `/draw` is not.
"""

import os
import random
import uuid

import nagara_hooks
import numpy
import torch
from fastapi import FastAPI

torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 4))
kept = uuid.uuid4().hex
woken = []
app = FastAPI()


@nagara_hooks.before_snapshot
def rest():
    woken.append("rested")


@nagara_hooks.after_restore
def wake():
    woken.append(os.environ["NAGARA_REPLICA"])


random.random(), numpy.random.random(), torch.rand(1)  # all generators are in use before
nagara_hooks.listen()


@app.get("/")
def ready():
    return "ready"


@app.get("/kept")
def what_was_kept():
    return kept


@app.get("/infer")
def infer():
    with torch.inference_mode():
        return model(torch.ones(256)).tolist()


@app.get("/woken")
def what_was_woken():
    return woken


@app.get("/draw")
def draw():
    return {
        "uuid4": uuid.uuid4().hex,
        "random": random.random(),
        "urandom": os.urandom(8).hex(),
        "numpy": numpy.random.random(),
        "torch": torch.rand(1).item(),
    }
