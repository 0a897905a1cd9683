"""What a state dict holds, as JSON: two states are equal where their descriptions are."""
import hashlib

import torch
from torch.distributed.tensor import DTensor


def describe(value):
    """Tensors by dtype, shape and the SHA-256 of their row-major bytes; everything else by what it is.

    Keys become text, and dicts without anything in them are passed over: DCP stores neither."""
    if isinstance(value, torch.Tensor):
        return describe_tensor(value)
    if isinstance(value, dict):
        return {"dict": {str(key): describe(part) for key, part in value.items() if not is_empty_dict(part)}}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [describe(part) for part in value]}
    return {"value": f"{type(value).__name__} {value!r}"}


def is_empty_dict(value):
    return isinstance(value, dict) and not value


def describe_tensor(tensor):
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape),
            "sha256": hashlib.sha256(bytes_of(tensor)).hexdigest()}


def bytes_of(tensor):
    """Row-major, little-endian."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def tensors(description, name=""):
    """The tensors of a description, under DCP's flat names: the keys on the way, joined by dots."""
    if "sha256" in description:
        return {name: description}
    if "dict" in description:
        parts = description["dict"].items()
    else:
        parts = enumerate(description.get("list", []))
    return {flat: tensor for key, part in parts
            for flat, tensor in tensors(part, f"{name}.{key}" if name else str(key)).items()}


def differences(found, expected):
    """How two dicts differ, a line a key."""
    lines = [f"{key!r} is missing" for key in sorted(expected.keys() - found.keys())]
    lines += [f"{key!r} should not be there" for key in sorted(found.keys() - expected.keys())]
    lines += [f"{key!r} is {found[key]}, not {expected[key]}"
              for key in sorted(found.keys() & expected.keys()) if found[key] != expected[key]]
    return lines


def nested_differences(found, expected, name=""):
    """How two descriptions differ, and where."""
    if found == expected:
        return []
    if "dict" in found and "dict" in expected:
        lines = []
        for key in sorted(found["dict"].keys() | expected["dict"].keys()):
            parts = found["dict"].get(key, {}), expected["dict"].get(key, {})
            lines += nested_differences(*parts, f"{name}.{key}" if name else key)
        return lines
    return [f"{name!r} is {found}, not {expected}"]
