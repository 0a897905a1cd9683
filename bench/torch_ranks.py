"""PyTorch's saving and loading from two ranks, for the table beside bench/ranks_bench.cc: torch_ranks.py FOLDER [GIB] [ROUNDS].

Run it where PyTorch is; ranks are processes with gloo. A save syncs its files, a load finds them in the page cache.
"""

import os
import shutil
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 2


def state(mesh, dim, gib):
    """64 matrices of float32."""
    rows = int(gib * (1 << 30) / 64 / 4 / 2048)
    return {f"t{i:02}": distribute_tensor(torch.rand(rows, 2048), mesh, [Shard(dim)]) for i in range(64)}


def run(rank, folder, gib, rounds):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK=str(rank), WORLD_SIZE=str(RANKS), USE_LIBUV="0")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    rows, columns = state(mesh, 0, gib), state(mesh, 1, gib)
    times = {"save, synced": [], "load, the same shards": [], "load, shard(0) to shard(1)": []}

    def timed(name, work):
        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        times[name].append(time.perf_counter() - start)

    for i in range(rounds):
        path = f"{folder}/torch-{i}"
        timed("save, synced", lambda: dcp.save(rows, checkpoint_id=path))
        timed("load, the same shards", lambda: dcp.load(rows, checkpoint_id=path))
        timed("load, shard(0) to shard(1)", lambda: dcp.load(columns, checkpoint_id=path))
        if rank == 0:
            shutil.rmtree(path)
    if rank == 0:
        print(f"PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {gib} GiB, {RANKS} ranks")
        for name, seconds in times.items():
            print(f"{name:30} median {statistics.median(seconds):.3f} s, least {min(seconds):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 1.0,
                   int(sys.argv[3]) if len(sys.argv) > 3 else 5), nprocs=RANKS)
