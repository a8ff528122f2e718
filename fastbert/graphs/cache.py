"""The graphs of a model, one for each bucket and autocast state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch

from fastbert.graphs.buckets import Bucket, PaddedBucket
from fastbert.graphs.recording import Recorder

Graph = TypeVar("Graph")


class Autocast(NamedTuple):
    """The caller's autocast state on one type of device, under which a graph is recorded."""

    device_type: str
    dtype: torch.dtype
    enabled: bool

    @classmethod
    def current(cls, device: torch.device) -> Autocast:
        """Return the autocast state of the calling thread for `device`."""
        kind = device.type
        return cls(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def uncached(self) -> torch.autocast:
        """Return a context manager with this autocast state and no cache of converted weights.

        Autocast's cache is freed at the end of the caller's autocast block, but a graph that was
        recorded with the cache would still read the cache's memory.
        """
        return torch.autocast(
            self.device_type, self.dtype, enabled=self.enabled, cache_enabled=False
        )


class GraphCache(Generic[Graph]):
    """Graphs by bucket and autocast state, in the order of their last use, with their recorder.

    Args:
        most: Largest number of graphs. If there are this many graphs, a new graph replaces the
            graph whose last use is the earliest.
        new_recorder: Function that returns the recorder for a device.
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
        """Return the graph of `bucket` and `autocast`; if it is missing, `make` records it.

        Before `make` is called, the graphs whose last use is the earliest are freed until fewer
        than `most` graphs remain.
        """
        key = (bucket, autocast)
        if key not in self.graphs:
            while len(self.graphs) >= self.most:
                self.recorder.finish()
                self.graphs.popitem(last=False)
            self.graphs[key] = make()
        self.graphs.move_to_end(key)
        return self.graphs[key]

    def clear(self, device: torch.device) -> None:
        """Free all graphs and make a new recorder for `device`."""
        self.recorder.finish()
        self.graphs.clear()
        self.recorder = self._new_recorder(device)
