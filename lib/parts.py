"""The geometry of DTensors: this rank's part of a tensor, and where it lies in the whole.

Other tensors count as one part."""

import math

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. One process makes none, and is spared their import, which takes half a second."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def sharding(tensor: Tensor) -> tuple[int, int, int]:
    """-> (dimension that is divided, number of parts, this rank's part)"""
    if not is_sharded(tensor):
        return 0, 1, 0
    return tensor.placements[-1].dim, tensor.device_mesh.size(-1), tensor.device_mesh.get_coordinate()[-1]


def part_slices(shape: torch.Size, dim: int, parts: int, part: int, rows: slice | None = None) -> tuple[slice, ...]:
    """Where a part lies in the whole tensor, or these rows of the part. The last parts may be short, or empty."""
    if not shape:  # a scalar
        return ()
    step, out = -(-shape[dim] // parts), [slice(0, n) for n in shape]
    out[dim] = slice(min(part * step, shape[dim]), min((part + 1) * step, shape[dim]))
    if rows is not None:
        first = out[0]
        out[0] = slice(min(first.start + rows.start, first.stop), min(first.start + rows.stop, first.stop))
    return tuple(out)


def local_start(tensor: Tensor) -> int:
    """The position of this rank's first element in the whole tensor."""
    slices = part_slices(tensor.shape, *sharding(tensor))
    return sum(s.start * math.prod(tensor.shape[d + 1 :]) for d, s in enumerate(slices))


def owns(tensor: Tensor) -> bool:
    """Whether this rank saves its part: the first of all ranks with the same part does."""
    if not is_sharded(tensor):
        return True
    places = zip(tensor.placements, tensor.device_mesh.get_coordinate(), strict=True)
    return all(coordinate == 0 for placement, coordinate in places if placement.is_replicate())
