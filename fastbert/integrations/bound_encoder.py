"""An encoder of fastbert that computes with the parameters of a model of transformers.

The model of transformers is called the host. Nothing is copied or moved, and the host keeps its
modules. Before a call, the modules of fastbert receive the current parameters of the host's
modules. Therefore ``to``, an optimizer, ``load_state_dict``, PEFT and other tools still work on the
host.

A module of the host that deviates from the stock model is treated in one of three ways:

- A linear layer inside a layer is called. It receives ``(B, L, H)`` as the host calls it, unless it
  computes each row by itself; see `fastbert.integrations.row_wise`.
- If a module of the embedding deviates, the host's embedding is called, and padding is removed
  after it.
- For every other module, the host runs its own code.

In the names of this file, ``ours`` is a module of fastbert and ``theirs`` is a module of the host.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert.integrations.host_parts import (
    EMBEDDING,
    Inside,
    Leaf,
    containers_of,
    drops_of,
    layers_of,
    leaves_of,
)
from fastbert.integrations.row_wise import is_row_wise
from fastbert.io import families
from fastbert.modules import BertModel
from fastbert.modules.joined_linear import JoinedLinear
from fastbert.modules.layer_norm import LayerNorm
from fastbert.modules.plain import deviation
from fastbert.modules.snapshot import Snapshot
from fastbert.ops import backend as backends

try:
    from transformers.activations import ACT2FN
except ImportError as error:
    raise ImportError(
        f"fastbert.accelerate needs transformers >= 5 ({error}): "
        "pip install 'fastbert[transformers]'"
    ) from error

# The attribute of a host that holds its bound encoder.
BOUND = "_fastbert_bound_encoder"
# The hooks of this module of transformers collect hidden states and attention weights. The bound
# encoder returns both itself, so these hooks need not run.
COLLECTING_HOOKS = "transformers.utils.output_capturing"
# These packages define the classes of a stock model's modules.
KNOWN = ("transformers.", "torch.nn.modules.")


class Watch(NamedTuple):
    """The facts on which a binding depends, in a form that ``torch.compile`` can trace.

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
            [(place.siblings, place.name, child, type(child)) for place, child in found],
            hooks,
            [module.__dict__ for module in modules],
            shared,
            [(x.module, x.theirs[0].get()) for x in leaves if isinstance(x.module, LayerNorm)],
        )

    def unchanged(self) -> bool:
        """Return whether the facts still hold and no module has a hook or a forward of its own."""
        return (
            all(
                siblings.get(name) is child and type(child) is kind
                for siblings, name, child, kind in self.modules
            )
            and not any(self.hooks)
            and not any("forward" in attributes for attributes in self.attributes)
            and all(ours[name] is theirs.get(name) for ours, theirs, name in self.parameters)
            and all(ours.eps == theirs.eps for ours, theirs in self.norms)
        )


class Verdict(NamedTuple):
    """The result of a comparison of a host with the stock model.

    Attributes:
        problem: The reason in words why the host must run its own code, or None.
        facts: The facts on which the verdict depends, or None where they cannot be recorded.
    """

    problem: str | None
    facts: Snapshot | None


class BoundEncoder:
    """A ``BertModel`` of fastbert that shares the parameters of an encoder of transformers.

    Args:
        host: The encoder of transformers. The bound encoder keeps a weak reference to it, so the
            host is freed with its last other reference.

    Attributes:
        model: The ``BertModel``.
        called: The modules of the host that are called because they deviate from the stock model:
            the path of the module → the deviation in words.
        whole: Whether a called module receives padding, so that no padding is removed.
        calls_embedding: Whether the host's embedding is called, because a part of it deviates.
        checkpoints: Whether gradient checkpointing is on in the host.

    Raises:
        ValueError: If fastbert cannot compute the host. The message names the obstacle.
    """

    def __init__(self, host: nn.Module) -> None:
        """Build the ``BertModel`` without memory of its own, and bind it to `host`."""
        self._host = weakref.ref(host)
        self.called: dict[str, str] = {}
        self.whole = self.calls_embedding = self.checkpoints = False
        self.watch: Watch | None = None
        # One verdict for training mode and one for inference, and the one that is in effect.
        self._verdicts: dict[bool, Verdict] = {}
        self._in_effect: Verdict | None = None
        self._build(host)
        problem = self.bind()
        if problem is not None:
            raise ValueError(problem)

    def __reduce__(self) -> Any:
        """Make every copy and every pickle None, because a copied host binds its own encoder."""
        return (_none, ())

    @property
    def host(self) -> nn.Module | None:
        """The encoder of transformers, or None after it was freed."""
        return self._host()

    def _build(self, host: nn.Module) -> None:
        """Build the ``BertModel`` and find the modules of `host`, or raise ValueError."""
        config = families.read_config(host.config.to_dict())
        layers = layers_of(host, config)
        if layers != max(config.architecture.order(config.num_hidden_layers)) + 1:
            if config.architecture.rotary_bases or config.architecture.groups is not None:
                raise ValueError(f"config: got {layers} layers, allowed: num_hidden_layers")
            config = config.replace(num_hidden_layers=layers)
        with torch.device("meta"):
            model = BertModel(config, add_pooling_layer=False)
        leaves, drops = leaves_of(model, host), drops_of(model, host)
        self.model, self.leaves, self.drops = model, leaves, drops
        self.inside = list(containers_of(host, model, leaves))
        parents = (host, *(each.module for each in self.inside))
        self.sizes = [(module._modules, len(module._modules)) for module in parents]

    def _fits(self) -> bool:
        """Return whether the host still has the same modules: none added, removed or replaced."""
        return all(place.get() is module for _, place, module in self.inside) and all(
            len(modules) == size for modules, size in self.sizes
        )

    def bind(self) -> str | None:
        """Give the modules of fastbert the current parameters of the host.

        Returns:
            The obstacle in words, or None if the encoder is bound.
        """
        host = self.host
        assert host is not None
        if torch.compiler.is_compiling() or backends.EXTENSION is None:
            return self._bind_traced(host)
        verdict = self._verdicts.get(host.training)
        if verdict is not None and verdict.facts is not None and verdict.facts.holds(host):
            if verdict is not self._in_effect and verdict.problem is None:
                self._bind_anew(host)
        else:
            problem = self._bind_anew(host)
            facts = Snapshot(host, BOUND, _others(host))
            verdict = self._verdicts[host.training] = Verdict(problem, facts)
        self._in_effect = verdict
        if verdict.problem is None:
            self._take_sizes()
        return verdict.problem

    def _bind_traced(self, host: nn.Module) -> str | None:
        """Bind in a traced graph, where each fact that is read becomes a guard of the graph."""
        if self._fits() and self.watch is not None and self.watch.unchanged():
            self._settle_dropout()
            self._take_sizes()
            return None
        problem = self._bind_anew(host)
        if problem is None:
            self._take_sizes()
        return problem

    def _bind_anew(self, host: nn.Module) -> str | None:
        try:
            if not self._fits():
                self._build(host)
        except ValueError as error:
            return str(error)
        self.watch, self.called = None, {}
        for path, _, module in self.inside:
            reason = _called_from_outside(module)
            if reason is not None and not path.startswith(EMBEDDING):
                return f"{path} {reason}"
            if reason is not None:
                self.called[path] = reason
        problem = self._activation_problem()
        if problem is not None:
            return problem
        whole = False
        for leaf in self.leaves:
            problem = self._deviation(leaf)
            if problem is not None and not leaf.embeds and isinstance(leaf.module, LayerNorm):
                return f"{leaf.paths[0]} {problem}"
            whole |= problem is not None and not leaf.embeds and not _are_row_wise(leaf)
            _bind(leaf, self.called)
        self.whole = whole
        embedding = {path for leaf in self.leaves if leaf.embeds for path in leaf.paths}
        self.calls_embedding = any(
            path.startswith(EMBEDDING) or path in embedding for path in self.called
        )
        self.checkpoints = any(
            getattr(module, "gradient_checkpointing", False) for module in host.modules()
        )
        self._settle_dropout()
        watch = Watch.over(self.inside, self.leaves)
        # A module with hooks is bound in another way after its hooks are removed. The binding is
        # therefore repeated at every call until then.
        self.watch = watch if not self.called and watch.unchanged() else None
        return None

    def _deviation(self, leaf: Leaf) -> str | None:
        """Return how the host's modules of a leaf deviate, and enter them among the called."""
        problem = None
        for path, place in zip(leaf.paths, leaf.theirs, strict=True):
            own = _leaf_deviation(leaf.module, place.get())
            if own is not None:
                self.called[path] = own
                problem = problem or own
        return problem

    def embed(self, given: Mapping[str, Any]) -> Tensor:
        """Call the host's embedding, as the host does.

        Args:
            given: The arguments of the host that its embedding may take, by name.

        Returns:
            The embedding output of shape ``(B, L, hidden_size)``.
        """
        host = self.host
        assert host is not None
        embedding: Any = host._modules[EMBEDDING]
        names = inspect.signature(type(embedding).forward).parameters
        embedded = embedding(**{name: given[name] for name in names if name in given})
        for leaf in self.leaves:
            if leaf.path == "embeddings.projection":
                projection = leaf.theirs[0].get()
                assert projection is not None
                embedded = projection(embedded)
        return embedded

    def _settle_dropout(self) -> None:
        """Take over the current dropout probabilities of the host."""
        dropping = False
        for drop in self.drops:
            probability = drop.probability()
            if drop.ours.dropout_p != probability:
                drop.ours.dropout_p = probability
            dropping |= probability > 0.0
        if self.model.training != dropping:
            self.model.training = dropping

    def _take_sizes(self) -> None:
        """Take over the sizes of the host's tables, which may have grown."""
        config, embeddings = self.model.config, self.model.embeddings
        for name, table in (
            ("vocab_size", embeddings.word_embeddings),
            ("max_position_embeddings", embeddings.position_embeddings),
            ("type_vocab_size", embeddings.token_type_embeddings),
        ):
            # A module in the place of a table may have no weight.
            weight = None if table is None else getattr(table, "weight", None)
            if isinstance(weight, Tensor) and weight.shape[0] != getattr(config, name):
                self.model.config = config = config.replace(**{name: weight.shape[0]})

    def _activation_problem(self) -> str | None:
        """Return in words which module without parameters is not of the expected class, or None.

        The class of the activation is the class that ``config.json`` names.
        """
        expected = type(ACT2FN[self.model.config.hidden_act])
        plain = (nn.Dropout, nn.Identity, nn.ModuleList, expected)
        for path, _, child in self.inside:
            lone = not child._modules and not child._parameters and not child._buffers
            if lone and not isinstance(child, plain):
                return f"{path}: got {type(child).__name__}, allowed: {expected.__name__}"
        return None


def _none() -> None:
    return None


def _others(host: nn.Module) -> list[Any]:
    """Return the objects beside the modules of a host whose attributes are facts."""
    names = {type(module).__module__ for module in host.modules()}
    known = [sys.modules[name] for name in sorted(names) if name.startswith(KNOWN)]
    return [host.config, *known]


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


def _leaf_deviation(ours: nn.Module, theirs: nn.Module | None) -> str | None:
    """Return how a module of the host with parameters deviates from the stock module, or None."""
    if theirs is None:
        return "is missing"
    if isinstance(ours, nn.Identity):
        return None if type(theirs) is nn.Identity else "was replaced"
    if isinstance(ours, LayerNorm):
        problem = deviation(theirs, nn.LayerNorm)
        if problem is not None or theirs._parameters.get("weight") is not None:
            return problem
        return "has no weight"
    if isinstance(ours, nn.Embedding):
        return deviation(theirs, nn.Embedding) or _option(theirs)
    return deviation(theirs, nn.Linear) or _backward_hooks(theirs)


def _backward_hooks(module: nn.Module) -> str | None:
    hooks = module._backward_hooks or module._backward_pre_hooks
    return "has backward hooks" if hooks else None


def _option(table: Any) -> str | None:
    """Return an option of an embedding table that the kernels do not have, or None."""
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(table, name):
            return f"has {name}={getattr(table, name)}"
    return _backward_hooks(table)


def _are_row_wise(leaf: Leaf) -> bool:
    """Return whether the host's modules of a leaf compute each row by itself."""
    modules = [place.get() for place in leaf.theirs]
    return all(
        module is not None and (_leaf_deviation(leaf.module, module) is None or is_row_wise(module))
        for module in modules
    )


def _bind(leaf: Leaf, called: Mapping[str, str]) -> None:
    """Share the parameters of the host's modules, or put a module that is called in our place."""
    module = leaf.module
    parts = [place.get() for place in leaf.theirs]
    if isinstance(module, JoinedLinear):
        for number, part in enumerate(parts):
            if module.parts._modules[str(number)] is not part:
                module.parts._modules[str(number)] = part
        return
    if isinstance(module, nn.Identity):
        return
    theirs = parts[0]
    assert theirs is not None
    if leaf.paths[0] in called:
        leaf.ours.put(theirs)
        return
    leaf.ours.put(module)
    if isinstance(module, LayerNorm):
        module.eps = theirs.eps
    if isinstance(module, nn.Embedding):
        module.padding_idx = theirs.padding_idx
    _share(module, theirs)


def _share(ours: nn.Module, theirs: nn.Module) -> None:
    for name in ("weight", "bias"):
        parameter = theirs._parameters.get(name)
        if name in ours._parameters and ours._parameters[name] is not parameter:
            ours._parameters[name] = parameter
