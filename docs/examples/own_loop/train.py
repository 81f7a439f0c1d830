"""A training loop of one's own: python train.py FOLDER [ADDRESS OF A NODE]; the first one begins the run."""

import sys
from pathlib import Path

import torch

import p2pdiloco

folder, join = Path(sys.argv[1]), sys.argv[2:]
folder.mkdir(parents=True, exist_ok=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
truth = torch.arange(8.0).view(8, 1) / 8
if not join and not (folder / "run.toml").exists():
    sizes = {"tokens_per_step": 64, "inner_steps": 16, "fragments": 2}
    p2pdiloco.new_run(model, folder / "run.toml", "own", data_dir=folder / "node", **sizes)

run = "own" if join else folder / "run.toml"
with p2pdiloco.Session(model, optimizer, run, join, data_dir=folder / "node") as session:
    while session.inner_step < 20_000:
        inputs = torch.randn(64, 8)
        optimizer.zero_grad()
        with session.computing():
            loss = (model(inputs) - inputs @ truth).square().mean()
            loss.backward()
        optimizer.step()
        if not session.step(tokens=64, loss=loss.item()):
            break
print(f"loss {loss.item():.6f} after {session.inner_step} inner steps")
