"""The correspondence between the modules of an HF model and the modules of fastbert.

An HF model is a model of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert.config import BertConfig
from fastbert.io import families
from fastbert.modules import BertModel
from fastbert.modules.joined_linear import JoinedLinear
from fastbert.modules.positions import frequencies

# The HF model's module that embeds the tokens. In some families, the tables are direct children of
# the HF model instead. In those of SUMMED, the HF model adds two tables.
EMBEDDING = "embeddings"
SUMMED = ("marian",)


class Place(NamedTuple):
    """The place of a module: the dictionary of the parent's submodules and the name of the module.

    A place holds no reference to the parent, so the HF model can be freed while places exist.
    """

    siblings: dict[str, nn.Module | None]
    name: str

    def get(self) -> nn.Module | None:
        """Return the module that is at the place now, or None if there is none."""
        return self.siblings.get(self.name)

    def put(self, module: nn.Module) -> None:
        """Put a module at the place."""
        if self.siblings.get(self.name) is not module:
            self.siblings[self.name] = module


class Inside(NamedTuple):
    """A module of the HF model that fastbert replaces and does not call, with path and place."""

    path: str
    place: Place
    module: nn.Module


class Leaf(NamedTuple):
    """A module of fastbert with parameters, and the HF model's modules whose parameters it shares.

    `path` and `own_place` belong to the module of fastbert, and `paths` and `hf_places` to the
    modules of the HF model.
    """

    path: str
    own_place: Place
    module: nn.Module
    paths: tuple[str, ...]
    hf_places: tuple[Place, ...]

    @property
    def embeds(self) -> bool:
        """Whether the module is part of the embedding or is the projection after it."""
        return self.path.startswith(EMBEDDING)


class Drop(NamedTuple):
    """An attribute of a module of fastbert with a dropout probability, and its source.

    The source is the attribute `name` of `hf_module`: a dropout module or a number. If `hf_module`
    is None, the source is an attribute of the HF model itself, to which a `Drop` has no reference.
    """

    module: Any
    attribute: str
    hf_module: nn.Module | None
    name: str

    def probability(self, hf_model: nn.Module) -> float:
        """Return the HF model's dropout probability, which is 0 outside training mode."""
        source = hf_model if self.hf_module is None else self.hf_module
        dropout = source._modules.get(self.name)
        if dropout is None:
            return getattr(source, self.name) if source.training else 0.0
        return getattr(dropout, "p", 0.0) if dropout.training else 0.0


def layers_of(hf_model: nn.Module, config: Any) -> int:
    """Return the number of layers whose parameters the HF model stores."""
    family = families.family_of(config.model_type)
    path = family.modules["encoder.layer.{layer}.output.dense"][0]
    container = hf_model.get_submodule(path.partition(".{")[0])
    return len(container) * config.architecture.group_size


def leaves_of(model: BertModel, hf_model: nn.Module) -> list[Leaf]:
    """Return the modules of fastbert that share the parameters of the HF model's modules.

    A module of fastbert that stands for several modules of the HF model becomes a `JoinedLinear`.

    Raises:
        ValueError: If the HF model lacks a module.
    """
    leaves = []
    present = {name for name, _ in model.named_modules()}
    for path, hf_paths in families.pairs(model.config):
        if path == "pooler.dense" or path not in present:
            continue
        place, places = _place(model, path), tuple(_place(hf_model, each) for each in hf_paths)
        if len(places) > 1:
            place.put(JoinedLinear([nn.Identity() for _ in places]))
        module = place.get()
        assert module is not None
        leaves.append(Leaf(path, place, module, hf_paths, places))
    return leaves


def drops_of(model: BertModel, hf_model: nn.Module) -> list[Drop]:
    """Set all dropout probabilities of `model` to 0, and return a `Drop` for each dropout.

    The dropouts are those of the model family in ``fastbert.io.families``.
    """
    for module in model.modules():
        for attribute in ("dropout_p", "output_dropout_p"):
            if attribute in module.__dict__:
                setattr(module, attribute, 0.0)
    config, modules = model.config, dict(model.named_modules())
    drops = []
    for path, hf_path in families.family_of(config.model_type).dropouts.items():
        for layer in range(len(model.encoder.layer)) if "{layer}" in path else (0,):
            parent, _, name = families.place(hf_path, layer, config).rpartition(".")
            ours, attribute = path.format(layer=layer), "dropout_p"
            if ours not in modules:
                ours, _, attribute = ours.rpartition(".")
            if attribute not in modules[ours].__dict__:
                continue  # DeBERTa may have no positions in its attention.
            hf_module = _submodule(hf_model, parent) if parent else None
            drops.append(Drop(modules[ours], attribute, hf_module, name))
    return drops


def containers_of(hf_model: nn.Module, model: BertModel, leaves: list[Leaf]) -> Iterator[Inside]:
    """Yield the modules of the HF model that fastbert replaces and does not call.

    Four kinds of modules are left out: the modules whose parameters `leaves` share, the modules
    inside these modules, the pooler (fastbert calls it), and modules that a subclass added.
    """
    family = families.family_of(model.config.model_type)
    paths = [path for group in family.modules.values() for path in group]
    roots = {path.partition(".")[0] for path in (*paths, *family.dropouts.values())}
    ends = {id(place.get()) for leaf in leaves for place in leaf.hf_places}

    def walk(parent: nn.Module, before: str) -> Iterator[Inside]:
        for name, child in parent._modules.items():
            if child is None or id(child) in ends or name.startswith("pooler"):
                continue
            if parent is hf_model and name not in roots:
                continue
            yield Inside(before + name, Place(parent._modules, name), child)
            yield from walk(child, f"{before}{name}.")

    return walk(hf_model, "")


def rounded_frequencies(hf_model: nn.Module, config: BertConfig) -> dict[float, Tensor]:
    """Return the rotary frequencies in the buffers of an HF model, if they are rounded.

    ``hf_model.to(torch.bfloat16)`` rounds the buffers, and a later ``hf_model.float()`` does not
    undo the rounding.

    Returns:
        The frequencies by the base of the rotary embedding, or an empty dictionary if no buffer is
        rounded. Buffers on the meta device have no values yet and are ignored.
    """
    bases = sorted(set(config.architecture.rotary_bases))
    buffers: dict[float, Tensor] = {}
    for name, buffer in hf_model.named_buffers():
        if not bases or not name.endswith("inv_freq") or "original_" in name or buffer.is_meta:
            continue
        exact = {base: frequencies(base, config.head_dim, buffer.device) for base in bases}
        buffers[min(bases, key=lambda base: float((exact[base] - buffer).abs().max()))] = buffer
    rounded = any(
        not torch.allclose(buffer.float(), exact[base], rtol=1e-6, atol=0.0)
        for base, buffer in buffers.items()
    )
    return buffers if rounded else {}


def _place(root: nn.Module, path: str) -> Place:
    parent, _, name = path.rpartition(".")
    return Place(_submodule(root, parent)._modules, name)


def _submodule(root: nn.Module, path: str) -> nn.Module:
    try:
        return root.get_submodule(path)
    except AttributeError as error:
        raise ValueError(f"{path}: {error}") from error
