#!/usr/bin/env python3
"""Proves with PyTorch that what Spolia read and wrote is right: read_checkpoints.py WORK.

WORK/CASE/ is what make_checkpoints.py made, with
  digest.json            what `spolia digest --json` says of it
  written/RESULT/        what Spolia wrote from it, in any format; from its "model" alone where RESULT has that word
  written/RESULT.json    what `spolia digest --json` says of that
Prints a line for each checkpoint and a summary; exits with 1 where anything differs."""
import io
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import ranks
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from content import describe, describe_tensor, differences, nested_differences, tensors
from model import sharded_model, train_step, training_state
from spolia_folder import read_folder
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.device_mesh import init_device_mesh

NOT_IN_SAFETENSORS = {"complex128"}
NOT_IN_TORCH_READER = {"float8_e8m0fnu"}  # HuggingFaceStorageReader of PyTorch 2.14 fails on the whole folder
MESHES = [(3,), (2, 2)]  # to load on


class Written:
    """A folder that Spolia wrote, and what should be in it."""

    def __init__(self, folder):
        self.folder = folder
        self.name = f"{folder.parent.parent.name} -> {folder.name}"
        self.digest = json.loads(folder.with_suffix(".json").read_text())
        self.made = json.loads((folder.parent.parent / "expected.json").read_text())
        self.content = self.made["content"]
        self.is_model = "model" in folder.name.split("-")
        if self.is_model:
            self.content = self.content["dict"]["model"]
        self.tensors = tensors(self.content)
        self.format = format_of(folder)
        if self.format == "safetensors":
            self.tensors = {name: tensor for name, tensor in self.tensors.items()
                            if tensor["dtype"] not in NOT_IN_SAFETENSORS}


def format_of(folder):
    if (folder / ".metadata").exists():
        return "dcp"
    return "spolia" if (folder / "spolia.json").exists() else "safetensors"


def problems_of(check, *arguments):
    """What the check finds. An exception is a finding like others: whatever is raised is what we are here for."""
    try:
        return [f"{check.__name__}: {line}" for line in check(*arguments)]
    except (Exception, CheckpointException) as error:  # the latter is none of the former
        return [f"{check.__name__}: {type(error).__name__}: {error}"]


def digest_is_right(written):
    return differences(written.digest, written.tensors)


# ---- DCP

def metadata_is_sound(written):
    """Chunks lie in their tensors and have as many elements as these; everything is stored, once, in the files."""
    metadata = dcp.FileSystemReader(written.folder).read_metadata()
    due = set()
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            due.add(MetadataIndex(name))
            continue
        due |= {MetadataIndex(name, chunk.offsets) for chunk in entry.chunks}
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            yield f"the chunks of {name!r} have more or fewer elements than it"
        for chunk in entry.chunks:
            if any(o + s > size for o, s, size in zip(chunk.offsets, chunk.sizes, entry.size, strict=True)):
                yield f"a chunk of {name!r} leaves it: {chunk}"
    if metadata.storage_data.keys() != due:
        yield f"stored or described, but not both: {metadata.storage_data.keys() ^ due}"
    if metadata.planner_data.keys() != metadata.state_dict_metadata.keys():
        yield "planner_data has other names than the rest"
    yield from stray_items(written.folder, metadata.storage_data.values())


def stray_items(folder, stored):
    ends = defaultdict(int)
    for info in sorted(stored, key=lambda info: (info.relative_path, info.offset)):
        if info.offset < ends[info.relative_path]:
            yield f"{info} overlaps what is before it"
        ends[info.relative_path] = info.offset + info.length
    for file, end in ends.items():
        if end > (folder / file).stat().st_size:
            yield f"{file} ends before what should be in it"


def load_flat(folder, shard=None):
    """All that is in it, under flat names: whole, or in parts on all ranks of the job, as `shard` makes them of
    whole, empty tensors."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    empty = {name: torch.empty(entry.size, dtype=entry.properties.dtype)
             for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
    state = dict.fromkeys(metadata.state_dict_metadata)
    state |= {name: shard(tensor) for name, tensor in empty.items()} if shard else empty
    dcp.load(state, checkpoint_id=folder, no_dist=shard is None)
    return state


def only_tensors(state):
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def loads_whole(written):
    return differences(describe_all(load_flat(written.folder)), written.tensors)


def describe_all(state):
    return {name: describe_tensor(tensor) for name, tensor in only_tensors(state).items()}


def loads_nested(written):
    """By dcp_to_torch_save, which builds dicts and lists; the values are compared as well."""
    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(written.folder, f"{folder}/state.pt")
        state = torch.load(f"{folder}/state.pt", weights_only=False)
    return nested_differences(describe(state), written.content)


def items_are_archives(written):
    """Each chunk and each value by itself is something that torch.load reads."""
    whole = load_flat(written.folder)
    for index, info in dcp.FileSystemReader(written.folder).read_metadata().storage_data.items():
        item = io.BytesIO((written.folder / info.relative_path).read_bytes()[info.offset:][:info.length])
        value = whole[index.fqn]
        if isinstance(value, torch.Tensor):
            loaded = torch.load(item, weights_only=True)
            value = value[tuple(slice(o, o + s) for o, s in zip(index.offset, loaded.shape))]
        else:
            loaded = torch.load(item, weights_only=False)
        if describe(loaded) != describe(value):
            yield f"{index} is {describe(loaded)}, not {describe(value)}"


# ---- DCP, on several ranks

def loads_in_parts(written, mesh):
    """By columns on a mesh of one dim; by columns, then rows on one of two."""
    def shard(tensor):
        return ranks.shard(tensor, mesh, [ranks.shard_dim(tensor, 1), ranks.shard_dim(tensor, 0)][:mesh.ndim])
    expected = {name: shard(tensor) for name, tensor in only_tensors(load_flat(written.folder)).items()}
    return differences(describe_local(load_flat(written.folder, shard)), describe_local(expected))


def describe_local(state):
    return {name: describe_tensor(tensor.to_local()) for name, tensor in only_tensors(state).items()}


def training_resumes(written, mesh):
    """A trainer with another number of ranks takes it up, and goes on."""
    sizes, flat = written.made["sizes"], written.made["flat"]
    model, optimizer = sharded_model(sizes, 0, mesh)
    state = training_state(model, optimizer, flat)
    dcp.load(state, checkpoint_id=written.folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found = tensors(describe(training_state(model, optimizer, flat)))
    yield from differences(found, written.tensors)
    train_step(model, optimizer, sizes[0])


def check_on_ranks(dcp_folders, mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    problems = []
    for written in dcp_folders:
        found = problems_of(loads_in_parts, written, mesh)
        if "sizes" in written.made and not written.is_model and mesh.ndim == 1:
            found += problems_of(training_resumes, written, mesh)
        problems.append(found)
    return problems


def check_on_meshes(dcp_folders):
    """For each of them, the problems that any rank of any mesh found."""
    problems = [[] for _ in dcp_folders]
    for mesh_shape in MESHES:
        for rank, found in enumerate(ranks.in_ranks(torch.Size(mesh_shape).numel(), check_on_ranks,
                                                    dcp_folders, mesh_shape)):
            for i, lines in enumerate(found):
                problems[i] += [f"rank {rank} of mesh {mesh_shape}: {line}" for line in lines]
    return problems


# ---- the other formats

def safetensors_reads_it(written):
    files = {file.name: safetensors.torch.load_file(file) for file in written.folder.glob("*.safetensors")}
    found = {name: describe_tensor(tensor) for file in files.values() for name, tensor in file.items()}
    yield from differences(found, written.tensors)
    index = json.loads((written.folder / "model.safetensors.index.json").read_text())
    yield from differences(index["weight_map"], {name: file for file, state in files.items() for name in state})
    if index["metadata"]["total_size"] != sum(t.nbytes for state in files.values() for t in state.values()):
        yield "the index has another total_size"


def hugging_face_reader_reads_it(written):
    """DCP's own."""
    if NOT_IN_TORCH_READER & {tensor["dtype"] for tensor in written.tensors.values()}:
        return []
    reader = dcp.HuggingFaceStorageReader(str(written.folder))
    state = {name: torch.empty(tensor["shape"], dtype=getattr(torch, tensor["dtype"]))
             for name, tensor in written.tensors.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return differences(describe_all(state), written.tensors)


def stranger_reads_it(written):
    return differences(describe_all(read_folder(written.folder)), written.tensors)


CHECKS = {
    "dcp": [metadata_is_sound, loads_whole, loads_nested, items_are_archives],
    "spolia": [stranger_reads_it],
    "safetensors": [safetensors_reads_it, hugging_face_reader_reads_it],
}


WHAT_IS_PROVED = """\
  dcp: sound metadata; loads whole, nested with all values, chunk for chunk, on 3 ranks, on 2x2 ranks;
       where it has an optimizer, training resumes on 3 ranks
  spolia: a reader of 150 lines of Python finds every tensor and checksum; safetensors opens the data files
  safetensors: safetensors and DCP's Hugging Face reader find every tensor; the index is right
  all: the digests of Spolia are right"""


# ---- what is printed

class Proofs:
    def __init__(self):
        self.held = self.failed = 0

    def tell(self, what, problems):
        print(f"{'differs' if problems else 'equal'}  {what}")
        for line in problems[:10]:
            print(f"    {line}")
        if len(problems) > 10:
            print(f"    and {len(problems) - 10} more")
        self.failed += bool(problems)
        self.held += not problems


def main():
    work, proofs = Path(sys.argv[1]), Proofs()
    print(f"Spolia reads what PyTorch {torch.__version__} wrote (sha256 of every tensor):")
    for case in sorted(path.parent for path in work.glob("*/expected.json")):
        made = json.loads((case / "expected.json").read_text())
        digest = json.loads((case / "digest.json").read_text())
        proofs.tell(f"{case.name}: {made['made_by']}; {len(digest)} tensors", differences(digest, made["tensors"]))

    print("PyTorch and safetensors read what Spolia wrote:")
    print(WHAT_IS_PROVED, flush=True)
    written = [Written(folder) for folder in sorted(work.glob("*/written/*")) if folder.is_dir()]
    dcp_folders = [one for one in written if one.format == "dcp"]
    on_meshes = dict(zip(dcp_folders, check_on_meshes(dcp_folders)))
    for one in written:
        problems = on_meshes.get(one, [])
        for check in [digest_is_right, *CHECKS[one.format]]:
            problems += problems_of(check, one)
        proofs.tell(f"{one.name}: {one.format}, {len(one.tensors)} tensors", problems)

    print(f"{proofs.held} checkpoints equal, {proofs.failed} not")
    sys.exit(1 if proofs.failed or not written else 0)


if __name__ == "__main__":
    main()
