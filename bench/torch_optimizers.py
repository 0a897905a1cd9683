"""PyTorch's Newton-Schulz, Muon's scratch work, and fused AdamW on one core: what optim_bench's figures stand beside.

usage: PYTHON bench/torch_optimizers.py, with a Python that has torch, or in the Debian root of scripts/interop.sh:
chroot build/torch python3 - < bench/torch_optimizers.py, with /proc mounted there: without it PyTorch takes scalar code.
Times are the thread's own, the least of several rounds.
"""

import time

import torch
from torch.optim._muon import _zeropower_via_newtonschulz

torch.set_num_threads(1)
print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")


def least(work, rounds):
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return min(times) * 1e3


for batch, rows, columns in [(1, 1024, 1024), (1, 1024, 4096), (64, 128, 512)]:
    for dtype in (torch.float32, torch.bfloat16):
        matrices = [torch.randn(rows, columns).to(dtype) for _ in range(batch)]

        def orthogonalise():
            for matrix in matrices:
                _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)

        print(f"newton-schulz {batch} x {rows} x {columns}, {dtype} in: {least(orthogonalise, 5):.1f} ms")

for size in (1024,):
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        print(f"product {size}, {dtype}: {2 * size ** 3 / least(lambda: a @ b, 10) * 1e-6:.1f} GF/s")

for dtype in (torch.float32, torch.bfloat16):
    for fused in (False, True):
        p = torch.nn.Parameter(torch.full((1 << 25,), 0.01, dtype=dtype))
        p.grad = torch.full_like(p, 0.01)
        optimizer = torch.optim.AdamW([p], fused=fused)
        optimizer.step()
        print(f"adamw, everything {dtype}, 2^25 elements, fused={fused}: {least(optimizer.step, 7):.1f} ms")
