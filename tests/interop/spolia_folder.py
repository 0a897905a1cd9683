"""Reads a folder of Spolia's own format by docs/formats/spolia.md, with nothing of Spolia's."""
import ast
import hashlib
import json
import re
import zlib

import safetensors.torch
import torch
from content import bytes_of


def read_folder(folder):
    """All tensors, whole, by name. Raises ValueError where a hash or checksum is wrong, or an element is not
    stored exactly once."""
    manifest = json.loads((folder / "spolia.json").read_text())
    entries = manifest["tensors"]
    whole = [torch.zeros(entry["shape"], dtype=getattr(torch, entry["dtype"])) for entry in entries]
    times_stored = [torch.zeros(entry["shape"], dtype=torch.int64) for entry in entries]
    for part in manifest["parts"]:
        text = (folder / part["file"]).read_bytes()
        require(hashlib.sha256(text).hexdigest() == part["sha256"], f"the hash of {part['file']}")
        for index, box, data in read_part(folder, manifest, part["writer"], json.loads(text)):
            whole[index][box] = elements(data, whole[index].dtype).reshape(whole[index][box].shape)
            times_stored[index][box] += 1
    for entry, times in zip(entries, times_stored):
        require(bool((times == 1).all()), f"how often elements of {entry['name']!r} are stored")
    return {entry["name"]: tensor for entry, tensor in zip(entries, whole)}


def read_part(folder, manifest, rank, part):
    """What a rank wrote, chunk for chunk: the tensor's index, the box as slices, its bytes."""
    path = folder / part["data"]["file"]
    file, opened = path.read_bytes(), safetensors.torch.load_file(path)
    to_come = {}  # of tensors whose boxes follow from a layout: the elements that are still to come
    for chunk, (name, stored) in zip(part["chunks"], chunks_of(file), strict=True):
        entry = manifest["tensors"][chunk["tensor"]]
        data = file[stored["begin"]:stored["end"]]
        require(chunk["offset"] == stored["begin"], f"the offset of {name!r}")
        require(bytes_of(opened[name]) == data, f"what safetensors reads of {name!r}")
        require(chunk.get("crc32", "") == crcs(data, manifest["block_bytes"]), f"the checksums of {name!r}")
        if "box" in chunk:
            offsets, sizes = chunk["box"]
        elif "replica" not in entry:
            offsets, sizes = [0] * len(entry["shape"]), entry["shape"]
        else:
            if chunk["tensor"] not in to_come:
                to_come[chunk["tensor"]] = held(manifest["layouts"][entry["layout"]], rank, entry["shape"])
            # Where safetensors lacks the dtype, the bytes of an element are one dim more.
            sizes = stored["shape"][:len(entry["shape"])]
            offsets, to_come[chunk["tensor"]] = next_box(to_come[chunk["tensor"]], sizes, entry["shape"])
        yield chunk["tensor"], tuple(slice(o, o + s) for o, s in zip(offsets, sizes)), data
    for index, elements_left in to_come.items():
        require(not len(elements_left), f"the chunks of {manifest['tensors'][index]['name']!r} of rank {rank}")


def chunks_of(file):
    """The tensors in a safetensors file, in the order of their bytes: name, shape, where they begin and end."""
    header_end = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:header_end])
    header.pop("__metadata__", None)
    chunks = [(name, {"shape": entry["shape"], "begin": header_end + entry["data_offsets"][0],
                      "end": header_end + entry["data_offsets"][1]}) for name, entry in header.items()]
    return sorted(chunks, key=lambda chunk: (chunk[1]["begin"], chunk[1]["end"]))


def next_box(to_come, sizes, shape):
    """The box of these sizes that starts at the first of the elements, and the elements outside it."""
    numbers = numbered(shape)
    offsets = [int(i) for i in torch.unravel_index(to_come[0], shape)] if len(to_come) else [0] * len(shape)
    box = numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))].reshape(-1)
    return offsets, to_come[~torch.isin(to_come, box)]


# ---- layouts

def held(layout, rank, shape):
    """The numbers of the elements that a rank holds, in the order of its buffer. `layout` is a text like
    "[strided(0, 2), shard(0)] over 2x2 (dp, tp) on [0, 1, 2, 3]"."""
    placements, mesh = layout.split(" over ")
    sizes = [int(size) for size in re.match(r"[\dx]+", mesh)[0].split("x")]
    ranks = ast.literal_eval(mesh.split(" on ")[1]) if " on " in mesh else list(range(torch.Size(sizes).numel()))
    place = [int(i) for i in torch.unravel_index(torch.tensor(ranks.index(rank)), sizes)]
    local = numbered(shape)
    for (kind, arguments), count, i in zip(parse(placements), sizes, place, strict=True):
        if kind != "replicate":
            local = PARTS[kind](local, count, i, *arguments)
    return local.reshape(-1)


def parse(placements):
    """The word and the arguments of each."""
    for word, arguments in re.findall(r"([a-z]+)(?:\(([^()]*)\))?", placements[1:-1]):
        yield word, ast.literal_eval("[" + re.sub(r"[a-z]+", r"'\g<0>'", arguments) + "]")


def shard(local, count, i, dim, split="ceil"):
    size, larger = divmod(local.shape[dim], count)
    if split == "balanced":
        return cut(local, dim, i * size + min(i, larger), (i + 1) * size + min(i + 1, larger))
    size += larger > 0
    return cut(local, dim, i * size, (i + 1) * size)


def strided(local, count, i, dim, factor, split="aligned"):
    chunk = -(-local.shape[dim] // factor)
    pieces = []
    for c in range(factor):
        part = cut(local, dim, c * chunk, (c + 1) * chunk)
        size = -(-(chunk if split == "aligned" else part.shape[dim]) // count)
        pieces.append(cut(part, dim, i * size, (i + 1) * size))
    return torch.cat(pieces, dim)


def ragged(local, count, i, dims, units):
    flat = local.flatten(0, len(dims) - 1)
    unit = flat.shape[0] // sum(units)
    return cut(flat, 0, sum(units[:i]) * unit, sum(units[:i + 1]) * unit)


PARTS = {"shard": shard, "strided": strided, "ragged": ragged}


def cut(tensor, dim, begin, end):
    size = tensor.shape[dim]
    return tensor.narrow(dim, min(begin, size), min(end, size) - min(begin, size))


def numbered(shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


# ---- bytes

def elements(data, dtype):
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def crcs(data, block):
    """The CRC-32 of each block, in hex, one after the other; none where there are no checksums."""
    starts = range(0, len(data), block) if block else ()
    return "".join(f"{zlib.crc32(data[start:start + block]):08x}" for start in starts)


def require(right, what):
    if not right:
        raise ValueError(f"wrong: {what}")
