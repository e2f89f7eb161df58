"""A FastAPI server with a torch model that takes part in its snapshots.

Run by `examples/fastapi_torch/nagara.toml`. Its start is slow where starts are: importing torch and
making the model. The snapshot is taken after that, so a restored replica has paid for neither.
"""

import os

import torch
from fastapi import FastAPI
from pydantic import BaseModel

from nagara.snapshot import after_restore, before_snapshot, listen

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4)
).eval()
scratch = torch.zeros(1_000_000)  # something that need not be saved
calls = {"before": 0, "after": 0}
app = FastAPI()


class Features(BaseModel):
    values: list[float]


@before_snapshot
def rest() -> None:
    """Gives up what every replica can make anew: it would only make the snapshot larger."""
    global scratch
    scratch = torch.zeros(0)
    calls["before"] += 1


@after_restore
def wake() -> None:
    """Runs in each restored replica before it serves. Connections would be opened here."""
    global scratch
    scratch = torch.zeros(1_000_000)
    calls["after"] += 1


listen()  # once, after the heavy imports; does nothing outside nagara


@app.get("/health")
def health() -> dict[str, str]:
    return {"status": "ok"}


@app.post("/predict")
def predict(features: Features) -> dict[str, object]:
    row = torch.tensor(features.values[:64])
    row = torch.nn.functional.pad(row, (0, 64 - row.numel()))
    with torch.inference_mode():
        scores = model(row)
    return {"scores": [round(float(score), 4) for score in scores]}


@app.get("/who")
def who() -> dict[str, object]:
    """Which replica this is, and what its hooks have done."""
    return {"replica": os.environ.get("NAGARA_REPLICA"), "calls": calls}
