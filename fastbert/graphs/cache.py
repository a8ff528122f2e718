"""The graphs of a model, one for each bucket and precision."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch

from fastbert.graphs.buckets import Bucket, PaddedBucket
from fastbert.graphs.recording import Recorder

Graph = TypeVar("Graph")


class Autocast(NamedTuple):
    """The caller's autocast on one type of device, of which a recording is made."""

    device_type: str
    dtype: torch.dtype
    enabled: bool

    @classmethod
    def current(cls, device: torch.device) -> Autocast:
        """Return the autocast of the calling block for `device`."""
        kind = device.type
        return cls(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def uncached(self) -> torch.autocast:
        """Return the context manager of this autocast, without the cache of converted weights.

        The cache ends with the caller's block, and a graph would go on reading its memory.
        """
        return torch.autocast(
            self.device_type, self.dtype, enabled=self.enabled, cache_enabled=False
        )


class GraphCache(Generic[Graph]):
    """Graphs by bucket and autocast, in the order of their last use, with their recorder.

    Args:
        most: Largest number of graphs. A new graph then replaces the graph whose last use is the
            earliest.
        new_recorder: Makes the recorder for a device.
        device: The device of the model.
    """

    def __init__(
        self, most: int, new_recorder: Callable[[torch.device], Recorder], device: torch.device
    ) -> None:
        """Make the recorder; there is no graph yet."""
        self.most = most
        self.recorder = new_recorder(device)
        self.graphs: OrderedDict[tuple[Bucket | PaddedBucket, Autocast], Graph] = OrderedDict()
        self._new_recorder = new_recorder

    def find(
        self, bucket: Bucket | PaddedBucket, autocast: Autocast, make: Callable[[], Graph]
    ) -> Graph:
        """Return a graph; a missing graph is made after there is room for it."""
        key = (bucket, autocast)
        if key not in self.graphs:
            while len(self.graphs) >= self.most:
                self.recorder.finish()
                self.graphs.popitem(last=False)
            self.graphs[key] = make()
        self.graphs.move_to_end(key)
        return self.graphs[key]

    def clear(self, device: torch.device) -> None:
        """Forget all graphs and make a recorder for `device`."""
        self.recorder.finish()
        self.graphs.clear()
        self.recorder = self._new_recorder(device)
