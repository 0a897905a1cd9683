"""Several processes of this machine as the ranks of one job, and tensors that they share."""
import os
import pickle
import tempfile
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

torch.set_num_threads(1)


def in_ranks(world, function, *arguments):
    """Calls function(*arguments) on `world` ranks at once; returns what each returned."""
    with tempfile.TemporaryDirectory() as folder:
        # Forked, the ranks need not import PyTorch again.
        mp.start_processes(_be_rank, (world, folder, function, arguments), nprocs=world, start_method="fork")
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(world)]


def _be_rank(rank, world, folder, function, arguments):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world,
                            timeout=timedelta(seconds=60))
    result = function(*arguments)
    Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def shard(tensor, mesh, placements):
    """The DTensor of a tensor that every rank has whole. Nothing is sent: any dtype will do."""
    if tensor.ndim == 0:
        placements = [Replicate()] * mesh.ndim
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = tensor
    for dim, (size, offset) in enumerate(zip(sizes, offsets)):
        local = local.narrow(dim, min(offset, tensor.shape[dim]), size)
    return DTensor.from_local(local.clone(), mesh, placements, run_check=False,
                              shape=tensor.shape, stride=tensor.contiguous().stride())


def shard_dim(tensor, dim):
    """The placement that cuts `dim`, or the last one where the tensor has fewer."""
    return Shard(min(dim, tensor.ndim - 1)) if tensor.ndim else Replicate()
