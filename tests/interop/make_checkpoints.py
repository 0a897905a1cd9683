#!/usr/bin/env python3
"""Makes PyTorch write checkpoints of many kinds: make_checkpoints.py OUT [--seed S].

OUT/CASE/checkpoint (a folder) or checkpoint.pt, checkpoint.safetensors is what PyTorch wrote, and
OUT/CASE/expected.json what it holds (content.py), taken from the tensors themselves. Sizes, placements and
bytes follow from the seed."""
import argparse
import json
import random
from pathlib import Path

import ranks
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from content import describe, tensors
from model import sharded_model, train_step, training_state
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool, torch.complex128,
          torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
          torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


# ---- what is in them

def any_bits(rng, dtype, shape):
    """A tensor of random bytes: every NaN, infinity and subnormal may be among its elements."""
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.tensor([rng.random() < 0.5 for _ in range(count)], dtype=dtype).reshape(shape)
    data = bytearray(rng.randbytes(count * dtype.itemsize))
    return (torch.frombuffer(data, dtype=dtype) if count else torch.empty(0, dtype=dtype)).reshape(shape)


def any_shape(rng):
    return [rng.randint(1, 9) for _ in range(rng.randint(1, 3))]


def one_of_each_dtype(rng):
    return {str(dtype).removeprefix("torch."): {"matrix": any_bits(rng, dtype, [rng.randint(1, 9) for _ in "xy"]),
                                                "other": any_bits(rng, dtype, any_shape(rng)),
                                                "scalar": any_bits(rng, dtype, [])}
            for dtype in DTYPES}


def settings(rng):
    """Values of every kind that a trainer keeps beside its tensors."""
    return {"step": rng.randrange(10**6), "large": -(1 << 70), "loss": rng.random(), "tiny": 5e-324,
            "odd": [float("nan"), float("inf"), -0.0], "name": "Größe \U0001f5ff", "done": False, "none": None,
            "betas": (0.9, 0.999), "mixed": [1, "two", (3.0, b"\x00\xff")], "raw": rng.randbytes(9), 3: "three",
            "empty": [], "deep": {"er": {"key.with.dots": "a/b"}}}


def mixed_state(rng):
    """Tensors of many shapes and dtypes amid dicts, lists and values."""
    return {"dtypes": one_of_each_dtype(rng),
            # Ragged shards need sizes that their units divide.
            "even": {"matrix": any_bits(rng, torch.float32, [12, rng.randint(1, 9)]),
                     "cube": any_bits(rng, torch.int16, [4, 3, rng.randint(1, 9)])},
            "shapes": {"empty": torch.empty(0, 4), "no columns": torch.empty(3, 0, dtype=torch.int64),
                       "one": torch.ones(1, 1, 1), "wide": any_bits(rng, torch.bfloat16, [2, 301])},
            "list": [torch.ones(2), {"tensor": torch.zeros(3), "number": 2}, "text"],
            "settings": settings(rng)}


def map_tensors(state, function):
    if isinstance(state, torch.Tensor):
        return function(state)
    if isinstance(state, dict):
        return {key: map_tensors(part, function) for key, part in state.items()}
    if isinstance(state, list):
        return [map_tensors(part, function) for part in state]
    return state


# ---- how they are written

def write_expected(folder, made_by, state, **more):
    content = describe(state)  # gathers sharded tensors, so on all ranks
    if not dist.is_initialized() or dist.get_rank() == 0:
        expected = {"made_by": made_by, "tensors": tensors(content), "content": content, **more}
        Path(folder, "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


def fsdp(folder, seed, world):
    sizes = [101, 18 + seed % 7, 30 + seed % 5]
    model, optimizer = sharded_model(sizes, seed, init_device_mesh("cpu", (world,)))
    train_step(model, optimizer, sizes[0])
    state = training_state(model, optimizer, flat=False) | {"trainer": settings(random.Random(seed))}
    state["trainer"]["arguments"] = argparse.Namespace(lr=1e-3, betas=(0.9, 0.999))
    dcp.save(state, checkpoint_id=folder / "checkpoint")
    write_expected(folder, f"FSDP2 on {world} ranks, AdamW", state, sizes=sizes, flat=False)


def fsdp_and_tensor_parallel(folder, seed, data, tensor):
    sizes = [67, 24 + 2 * (seed % 7), 36]
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))
    model, optimizer = sharded_model(sizes, seed, mesh["dp"], mesh["tp"])
    train_step(model, optimizer, sizes[0])
    state = training_state(model, optimizer, flat=True)
    dcp.save(state, checkpoint_id=folder / "checkpoint")
    write_expected(folder, f"FSDP2 {data} x tensor parallel {tensor}, AdamW", state, sizes=sizes, flat=True)


def mesh_of_any_placements(folder, seed, *shape):
    mesh = init_device_mesh("cpu", shape)
    rng = random.Random(seed)
    state = mixed_state(rng)

    def placed(tensor):
        dims = [rng.randint(-1, tensor.ndim - 1) for _ in shape]
        return ranks.shard(tensor, mesh, [Replicate() if dim < 0 else Shard(dim) for dim in dims])
    dcp.save(map_tensors(state, placed), checkpoint_id=folder / "checkpoint")
    write_expected(folder, f"mesh {'x'.join(map(str, shape))}, any placements", state)


def rank_files(folder, seed, world):
    model, _ = sharded_model([53, 17 + seed % 5, 22], seed, init_device_mesh("cpu", (world,)))
    state = model.state_dict()
    (folder / "checkpoint").mkdir(exist_ok=True)
    torch.save(state, folder / "checkpoint" / f"model_world_size_{world}_rank_{dist.get_rank()}.pt")
    write_expected(folder, f"a torch.save file of DTensors for each of {world} ranks", state)


def hugging_face_shards(folder, seed, world):
    mesh, rng = init_device_mesh("cpu", (world,)), random.Random(seed)
    state = {f"layers.{i}.weight": any_bits(rng, torch.bfloat16, [rng.randint(1, 19), rng.randint(4, 9)])
             for i in range(5)}
    sharded = {name: ranks.shard(tensor, mesh, [Shard(i % 2)]) for i, (name, tensor) in enumerate(state.items())}
    dcp.save(sharded, storage_writer=dcp.HuggingFaceStorageWriter(path=str(folder / "checkpoint"),
                                                                  save_distributed=True))
    write_expected(folder, f"DCP's Hugging Face writer on {world} ranks", state)


def torch_save(folder, seed):
    state = mixed_state(random.Random(seed))
    base = torch.arange(60.0).reshape(6, 10)
    state["views"] = {"base": base, "tied": base, "transposed": base.t(), "row": base[3], "steps": base[1::2, ::3],
                      "expanded": base[:1].expand(4, 10), "permuted": torch.rand(2, 3, 4).permute(2, 0, 1),
                      "parameter": nn.Parameter(base[2:, :5])}
    torch.save(state, folder / "checkpoint.pt")
    write_expected(folder, "torch.save, with views and tied tensors", state)


def flat_state(rng):
    state = {f"{name}.{part}": tensor for name, parts in one_of_each_dtype(rng).items()
             for part, tensor in parts.items() if name not in ("complex128", "float8_e8m0fnu")}
    return state | {"empty": torch.empty(0, 3), "größe": torch.rand(5)}


def one_safetensors_file(folder, seed):
    state = flat_state(random.Random(seed))
    safetensors.torch.save_file(state, folder / "checkpoint.safetensors", metadata={"format": "pt"})
    write_expected(folder, "one safetensors file", state)


def hugging_face(folder, seed, suffix, save):
    """A model's folder of two files and their index."""
    state = flat_state(random.Random(seed))
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    (folder / "checkpoint").mkdir()
    weight_map = {}
    for i in (0, 1):
        file = f"{stem}-{i + 1:05}-of-00002.{suffix}"
        part = dict(list(state.items())[i::2])
        save(part, folder / "checkpoint" / file)
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "checkpoint" / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    write_expected(folder, f"a Hugging Face folder of {suffix} files", state)


# Each case: how many ranks write it (0: no job), and how.
CASES = {
    "fsdp-5": (5, fsdp, 5),
    "fsdp-tp-3x2": (6, fsdp_and_tensor_parallel, 3, 2),
    "mesh-3": (3, mesh_of_any_placements, 3),
    "mesh-2x2": (4, mesh_of_any_placements, 2, 2),
    "mesh-2x3": (6, mesh_of_any_placements, 2, 3),
    "rank-files-3": (3, rank_files, 3),
    "hugging-face-shards-4": (4, hugging_face_shards, 4),
    "torch-save": (0, torch_save),
    "safetensors": (0, one_safetensors_file),
    "hugging-face": (0, hugging_face, "safetensors", safetensors.torch.save_file),
    "hugging-face-bin": (0, hugging_face, "bin", torch.save),
}


def make(out, seed, names):
    for name in names:
        _, function, *arguments = CASES[name]
        function(out / name, seed, *arguments)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for name in CASES:
        (arguments.out / name).mkdir(parents=True)
    for world in sorted({case[0] for case in CASES.values()}):
        names = [name for name, case in CASES.items() if case[0] == world]
        if world:
            ranks.in_ranks(world, make, arguments.out, arguments.seed, names)
        else:
            make(arguments.out, arguments.seed, names)


if __name__ == "__main__":
    main()
