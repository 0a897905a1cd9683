"""A small model with the parts of a large one, sharded by FSDP2 and, where a mesh for it is given, by tensor
parallelism."""
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, words, width, inner):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sharded_model(sizes, seed, data_mesh, tensor_mesh=None):
    """A Model of these sizes (words, width, inner), and its AdamW."""
    torch.manual_seed(seed)
    model = Model(*sizes)
    if tensor_mesh is not None:
        for block in model.blocks:
            parallelize_module(block, tensor_mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for block in model.blocks:
        fully_shard(block, mesh=data_mesh)
    fully_shard(model, mesh=data_mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(model, optimizer, words):
    tokens = torch.randint(0, words, (2, 7))
    loss = model(tokens).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def training_state(model, optimizer, flat):
    """Flat: the optimizer's keys name parameters, as all ways to shard a model have them."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    return {"model": model_state, "optimizer": optimizer_state}
