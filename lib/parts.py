"""The geometry of DTensors. A tensor is divided along one dimension into shards of equal height; the last shards may be
shorter, or empty. Each rank holds one shard. A tensor that is not divided counts as one shard."""

import math

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. isinstance would import DTensor, which takes half a second; most single processes have
    none."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def sharding(tensor: Tensor) -> tuple[int, int, int]:
    """-> (dimension that is divided, number of shards, index of this rank's shard)"""
    if not is_sharded(tensor):
        return 0, 1, 0
    return tensor.placements[-1].dim, tensor.device_mesh.size(-1), tensor.device_mesh.get_coordinate()[-1]


def shard_slices(shape: torch.Size, dim: int, shards: int, index: int) -> tuple[slice, ...]:
    """Where a shard lies in the whole tensor."""
    if not shape:  # a scalar
        return ()
    height, out = -(-shape[dim] // shards), [slice(0, n) for n in shape]
    out[dim] = slice(min(index * height, shape[dim]), min((index + 1) * height, shape[dim]))
    return tuple(out)


def local_start(tensor: Tensor) -> int:
    """The position of this rank's first element in the whole tensor."""
    slices = shard_slices(tensor.shape, *sharding(tensor))
    return sum(s.start * math.prod(tensor.shape[d + 1 :]) for d, s in enumerate(slices))
