"""Small machines run these tests beside others: one thread is enough."""

import torch

torch.set_num_threads(1)
