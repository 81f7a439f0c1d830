"""A training loop of one's own in several processes, which together are one learner:
torchrun --nproc-per-node 2 train.py ddp|accelerate|fsdp2 FOLDER [ADDRESS OF A NODE]"""

import os
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import p2pdiloco

way, folder, join = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
distributed.init_process_group()
rank, ranks = distributed.get_rank(), distributed.get_world_size()
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
truth = torch.arange(8.0, device=device).view(8, 1) / 8
if rank == 0 and not join and not (folder / "run.toml").exists():  # before the model is cut up
    folder.mkdir(parents=True, exist_ok=True)
    most = 64 * ranks
    sizes = {"tokens_per_step": most, "inner_steps": 16, "fragments": 2}
    p2pdiloco.new_run(model, folder / "run.toml", "own", data_dir=folder / "node", **sizes)

if way == "fsdp2":
    for part in (model[0], model):
        fully_shard(part).set_force_sum_reduction_for_comms(device == "cpu")  # gloo has no means
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if way == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
elif way == "accelerate":
    from accelerate import Accelerator

    model, optimizer = Accelerator(cpu=device == "cpu").prepare(model, optimizer)

run = "own" if join else folder / "run.toml"
with p2pdiloco.Session(model, optimizer, run, join, data_dir=folder / "node") as session:
    while session.inner_step < 20_000:
        inputs = torch.randn(64, 8, device=device)  # every rank has its own
        optimizer.zero_grad()
        with session.computing():
            loss = (model(inputs) - inputs @ truth).square().mean()
            loss.backward()
        optimizer.step()
        if not session.step(tokens=64, loss=loss.item()):  # the same answer in every rank
            break
print(f"rank {rank}: loss {loss.item():.6f} after {session.inner_step} inner steps")
distributed.destroy_process_group()
