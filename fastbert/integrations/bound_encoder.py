"""An encoder of fastbert that computes with the parameters of a model of transformers.

The model of transformers is called the host. Nothing is copied or moved, and the host keeps its
modules. Before every call, the modules of fastbert receive the current parameters of the host's
modules. Therefore ``to``, an optimizer, ``load_state_dict``, PEFT and other tools still work on the
host.

In the names of this file, ``ours`` is a module of fastbert and ``theirs`` is a module of the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from fastbert.io import families
from fastbert.modules import BertModel
from fastbert.modules.joined_linear import JoinedLinear
from fastbert.modules.layer_norm import LayerNorm
from fastbert.modules.plain import deviation

try:
    from transformers.activations import ACT2FN
except ImportError as error:
    raise ImportError(
        f"fastbert.accelerate needs transformers >= 5 ({error}): "
        "pip install 'fastbert[transformers]'"
    ) from error

# The hooks of this module of transformers collect hidden states and attention weights. The bound
# encoder returns both itself, so these hooks need not run.
COLLECTING_HOOKS = "transformers.utils.output_capturing"
# These packages define the classes of a stock model's modules.
KNOWN = ("transformers.", "torch.nn.modules.")


class Place(NamedTuple):
    """The place of a module: its parent and its name in the parent."""

    parent: nn.Module
    name: str

    def get(self) -> nn.Module | None:
        """Return the module that is at the place now, or None."""
        return self.parent._modules.get(self.name)


class Inside(NamedTuple):
    """A module inside the host that is not called, with its path in the host and its place."""

    path: str
    place: Place
    module: nn.Module


class Leaf(NamedTuple):
    """A module of fastbert with parameters, its place, and the places of the host's modules."""

    ours: Place
    module: nn.Module
    theirs: tuple[Place, ...]


class Drop(NamedTuple):
    """A module of fastbert with a ``dropout_p``, and the source of its value in the host.

    The source is the dropout module called ``name`` in ``theirs``, or a number of that name.
    """

    ours: Any
    theirs: nn.Module
    name: str

    def probability(self) -> float:
        """Return the host's dropout probability, which is 0 outside training mode."""
        module = self.theirs._modules.get(self.name)
        if module is None:
            return getattr(self.theirs, self.name) if self.theirs.training else 0.0
        return getattr(module, "p", 0.0) if module.training else 0.0


class Watch(NamedTuple):
    """The facts on which a binding depends, in a form that is quick to check.

    The facts are the host's modules with their places and classes, the hooks of these modules, and
    their attributes, among which a ``forward`` may appear. Further facts are the shared parameters
    on both sides, and the norms on both sides, which have an ``eps``.
    """

    modules: list[tuple[dict[str, Any], str, nn.Module, type]]
    hooks: list[dict[int, Any]]
    attributes: list[dict[str, Any]]
    parameters: list[tuple[dict[str, Any], dict[str, Any], str]]
    norms: list[tuple[Any, Any]]

    @classmethod
    def over(cls, inside: list[Inside], leaves: list[Leaf]) -> Watch:
        """Record the present facts of the modules in `inside` and `leaves`."""
        theirs = [(place, place.get()) for leaf in leaves for place in leaf.theirs]
        places = [(place, module) for _, place, module in inside]
        found = [(place, child) for place, child in (*places, *theirs) if child is not None]
        modules = [child for _, child in found]
        hooks: list[dict[int, Any]] = []
        for module in modules:
            hooks += [module._forward_hooks, module._forward_pre_hooks]
            hooks += [module._backward_hooks, module._backward_pre_hooks]
        shared = []
        for leaf in leaves:
            first, ours = leaf.theirs[0].get(), leaf.module._parameters
            ours_is_placed = leaf.ours.get() is leaf.module
            if ours_is_placed and len(leaf.theirs) == 1 and first is not None:
                shared += [(ours, first._parameters, name) for name in ours]
        return cls(
            [(place.parent._modules, place.name, child, type(child)) for place, child in found],
            hooks,
            [module.__dict__ for module in modules],
            shared,
            [(x.module, x.theirs[0].get()) for x in leaves if isinstance(x.module, LayerNorm)],
        )

    def unchanged(self) -> bool:
        """Return whether the facts still hold and no module has a hook or a forward of its own."""
        return (
            all(
                parent.get(name) is child and type(child) is kind
                for parent, name, child, kind in self.modules
            )
            and not any(self.hooks)
            and not any("forward" in attributes for attributes in self.attributes)
            and all(ours[name] is theirs.get(name) for ours, theirs, name in self.parameters)
            and all(ours.eps == theirs.eps for ours, theirs in self.norms)
        )


class BoundEncoder:
    """A ``BertModel`` of fastbert that shares the parameters of an encoder of transformers.

    The attribute ``model`` is the ``BertModel``.

    Args:
        host: The encoder of transformers.

    Raises:
        ValueError: If fastbert cannot compute the host. The message names the obstacle.
    """

    def __init__(self, host: nn.Module) -> None:
        """Build the ``BertModel`` without memory of its own, and bind it to `host`."""
        self.host = host
        content = host.config.to_dict()
        config = families.read_config(content)
        layers = self._layers(config)
        if layers != max(config.architecture.order(config.num_hidden_layers)) + 1:
            if config.architecture.rotary_bases or config.architecture.groups is not None:
                raise ValueError(f"config: got {layers} layers, allowed: num_hidden_layers")
            config = config.replace(num_hidden_layers=layers)
        with torch.device("meta"):
            self.model = BertModel(config, add_pooling_layer=False)
        self.leaves = [self._leaf(ours, theirs) for ours, theirs in self._pairs()]
        self.drops = list(self._drops())
        self.inside = list(self._containers())
        self.sizes = [(m, len(m._modules)) for m in (host, *(each.module for each in self.inside))]
        self._check_activations()
        self.watch: Watch | None = None
        problem = self.bind()
        if problem is not None:
            raise ValueError(problem)

    def __reduce__(self) -> Any:
        """Make every copy and every pickle None, because a copied host binds its own encoder."""
        return (_none, ())

    def fits(self) -> bool:
        """Return whether the host still has the same modules: none added, removed or replaced."""
        return all(place.get() is module for _, place, module in self.inside) and all(
            len(module._modules) == size for module, size in self.sizes
        )

    def bind(self) -> str | None:
        """Give the modules of fastbert the current parameters of the host.

        Returns:
            The obstacle in words, or None if the encoder is bound.
        """
        if self.watch is not None and self.watch.unchanged():
            self._take_sizes()
            return None
        self.watch = None
        problem = self._bind_anew()
        if problem is None:
            watch = Watch.over(self.inside, self.leaves)
            # A module with hooks is bound in another way after its hooks are removed. The binding
            # is therefore repeated at every call until then.
            self.watch = watch if watch.unchanged() else None
        return problem

    def _bind_anew(self) -> str | None:
        for path, _, module in self.inside:
            reason = _called_from_outside(module)
            if reason is not None:
                return f"{path} {reason}"
        for leaf in self.leaves:
            problem = _bind(leaf)
            if problem is not None:
                return problem
        self._take_sizes()
        return None

    def settle_dropout(self) -> None:
        """Take over the current dropout probabilities of the host."""
        dropping = False
        for drop in self.drops:
            probability = drop.probability()
            if drop.ours.dropout_p != probability:
                drop.ours.dropout_p = probability
            dropping |= probability > 0.0
        self.model.training = dropping

    def _take_sizes(self) -> None:
        """Take over the sizes of the host's tables, which may have grown."""
        config, embeddings = self.model.config, self.model.embeddings
        for name, table in (
            ("vocab_size", embeddings.word_embeddings),
            ("max_position_embeddings", embeddings.position_embeddings),
            ("type_vocab_size", embeddings.token_type_embeddings),
        ):
            if table is not None and table.weight.shape[0] != getattr(config, name):
                self.model.config = config = config.replace(**{name: table.weight.shape[0]})

    # The modules of fastbert and of the host

    def _layers(self, config: Any) -> int:
        """Return the number of stored layers of the host."""
        family = families.family_of(config.model_type)
        path = family.modules["encoder.layer.{layer}.output.dense"][0]
        container = self.host.get_submodule(path.partition(".{")[0])
        inner = config.architecture.group_size
        return len(container) * inner

    def _pairs(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        for ours, theirs in families.pairs(self.model.config):
            parent, _, name = ours.rpartition(".")
            if ours != "pooler.dense" and self.model.get_submodule(parent)._modules.get(name):
                yield ours, theirs

    def _leaf(self, ours: str, theirs: tuple[str, ...]) -> Leaf:
        place = _place(self.model, ours)
        places = tuple(_place(self.host, path) for path in theirs)
        module = place.get()
        if len(places) > 1:
            module = JoinedLinear([nn.Identity() for _ in places])
            place.parent._modules[place.name] = module
        assert module is not None
        return Leaf(place, module, places)

    def _drops(self) -> Iterator[Drop]:
        for module in self.model.modules():
            if "dropout_p" in module.__dict__:
                module.dropout_p = 0.0
        config = self.model.config
        names = families.family_of(config.model_type).dropouts
        stored = range(len(self.model.encoder.layer))
        for ours, theirs in names.items():
            for layer in stored if "{layer}" in ours else (0,):
                parent, name = _place(self.host, families.place(theirs, layer, config))
                yield Drop(self.model.get_submodule(ours.format(layer=layer)), parent, name)

    def _containers(self) -> Iterator[Inside]:
        """Find the host's modules that are not called.

        Four kinds of modules are left out: leaves, the modules inside leaves, the pooler, which is
        called, and modules that a subclass added.
        """
        family = families.family_of(self.model.config.model_type)
        paths = [path for theirs in family.modules.values() for path in theirs]
        roots = {path.partition(".")[0] for path in (*paths, *family.dropouts.values())}
        leaves = {id(place.get()) for leaf in self.leaves for place in leaf.theirs}

        def walk(parent: nn.Module, before: str) -> Iterator[Inside]:
            for name, child in parent._modules.items():
                if child is None or id(child) in leaves or name.startswith("pooler"):
                    continue
                if parent is self.host and name not in roots:
                    continue
                yield Inside(before + name, Place(parent, name), child)
                yield from walk(child, f"{before}{name}.")

        return walk(self.host, "")

    def _check_activations(self) -> None:
        """Raise ValueError if a module without parameters is not of the class that is expected.

        The class of the activation is the class that ``config.json`` names.
        """
        expected = type(ACT2FN[self.model.config.hidden_act])
        plain = (nn.Dropout, nn.Identity, nn.ModuleList, expected)
        for path, _, child in self.inside:
            lone = not child._modules and not child._parameters and not child._buffers
            if lone and not isinstance(child, plain):
                raise ValueError(
                    f"{path}: got {type(child).__name__}, allowed: {expected.__name__}"
                )


def _none() -> None:
    return None


def _place(root: nn.Module, path: str) -> Place:
    parent, _, name = path.rpartition(".")
    try:
        return Place(root.get_submodule(parent), name)
    except AttributeError as error:
        raise ValueError(f"{parent}: {error}") from error


def _called_from_outside(module: nn.Module) -> str | None:
    """Return the reason why `module` must be called, or None if there is no reason."""
    kind = type(module)
    if not kind.__module__.startswith(KNOWN):
        return f"is a {kind.__module__}.{kind.__qualname__}"
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for hook in hooks.values():
            if getattr(hook, "__module__", None) != COLLECTING_HOOKS:
                return "has forward hooks"
    if module._backward_hooks or module._backward_pre_hooks:
        return "has backward hooks"
    return "has a forward of its own" if "forward" in module.__dict__ else None


def _bind(leaf: Leaf) -> str | None:
    ours, module, theirs = leaf
    parts = [place.get() for place in theirs]
    first = parts[0]
    if isinstance(module, JoinedLinear):
        for number, part in enumerate(parts):
            if module.parts._modules[str(number)] is not part:
                module.parts._modules[str(number)] = part
        return None
    if isinstance(module, nn.Identity):
        return None if type(first) is nn.Identity else f"{theirs[0].name} was replaced"
    if isinstance(module, LayerNorm):
        problem = deviation(first, nn.LayerNorm) if first is not None else "is missing"
        if problem is None:
            module.eps = first.eps  # type: ignore[union-attr]
            _share(module, first)
        return None if problem is None else f"{theirs[0].name} {problem}"
    if first is None:
        return f"{theirs[0].name} is missing"
    kind = nn.Embedding if isinstance(module, nn.Embedding) else nn.Linear
    plain = deviation(first, kind) is None
    if not plain and kind is nn.Embedding and ours.name != "word_embeddings":
        return f"{theirs[0].name} {deviation(first, kind)}"
    placed = module if plain else first
    if ours.get() is not placed:
        ours.parent._modules[ours.name] = placed
    if plain:
        _share(module, first)
    return None


def _share(ours: nn.Module, theirs: nn.Module) -> None:
    for name in ("weight", "bias"):
        parameter = theirs._parameters.get(name)
        if name in ours._parameters and ours._parameters[name] is not parameter:
            ours._parameters[name] = parameter
