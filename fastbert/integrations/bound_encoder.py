"""An encoder of fastbert that computes with the parameters of a model of transformers.

The model of transformers is called the HF model. Nothing is copied or moved, and the HF model keeps
its modules. Before a call, the modules of fastbert receive the current parameters of the HF model's
modules. Therefore ``to``, an optimizer, ``load_state_dict``, PEFT and other tools still work on the
HF model.

If a module of the HF model deviates from the stock model, fastbert does one of three things:

- If a linear layer inside a transformer layer deviates, fastbert calls the linear layer. The input
  has the shape ``(B, L, H)``, as in the HF model, unless the linear layer computes each row
  independently; see `fastbert.integrations.row_wise`.
- If a module of the embedding deviates, fastbert calls the HF model's embedding, and removes
  padding from its output.
- If any other module deviates, the HF model runs its own code.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbert.integrations.hf_modules import (
    EMBEDDING,
    SUMMED,
    Inside,
    Leaf,
    containers_of,
    drops_of,
    layers_of,
    leaves_of,
    rounded_frequencies,
)
from fastbert.integrations.row_wise import is_row_wise
from fastbert.integrations.twin import ComparisonResult, compare, facts
from fastbert.io import families
from fastbert.modules import BertModel
from fastbert.modules.joined_linear import JoinedLinear
from fastbert.modules.layer_norm import LayerNorm
from fastbert.modules.quantized_linear import QuantizedLinear
from fastbert.modules.snapshot import Snapshot
from fastbert.modules.summed_embeddings import SummedEmbeddings
from fastbert.ops import backend as backends

# The attribute of an HF model that holds its bound encoder.
BOUND = "_fastbert_bound_encoder"


class Watch(NamedTuple):
    """The facts on which a binding depends, in a form that ``torch.compile`` can trace.

    The facts are the HF model's modules with their paths and classes, the hooks of these modules,
    and whether a module instance has a ``forward`` of its own. Further facts are which parameters
    fastbert shares with the HF model, and the ``eps`` of each layer norm in both.
    """

    modules: list[tuple[dict[str, Any], str, nn.Module, type]]
    hooks: list[tuple[dict[int, Any], list[Any]]]
    attributes: list[tuple[dict[str, Any], bool]]
    parameters: list[tuple[dict[str, Any], dict[str, Any], str]]
    norms: list[tuple[Any, Any]]

    @classmethod
    def over(cls, inside: list[Inside], leaves: list[Leaf]) -> Watch:
        """Record the current facts of the modules in `inside` and `leaves`."""
        bound = [(place, place.get()) for leaf in leaves for place in leaf.hf_places]
        places = [(place, module) for _, place, module in inside]
        present = [(place, child) for place, child in (*places, *bound) if child is not None]
        modules = [child for _, child in present]
        hooks: list[dict[int, Any]] = []
        for module in modules:
            hooks += [module._forward_hooks, module._forward_pre_hooks]
            hooks += [module._backward_hooks, module._backward_pre_hooks]
        shared = []
        for leaf in leaves:
            first, own = leaf.hf_places[0].get(), leaf.module._parameters
            is_placed = leaf.own_place.get() is leaf.module
            if is_placed and len(leaf.hf_places) == 1 and first is not None:
                shared += [(own, first._parameters, name) for name in own]
        norms = [
            (leaf.module, leaf.hf_places[0].get())
            for leaf in leaves
            if isinstance(leaf.module, LayerNorm) and not leaf.embeds
        ]
        return cls(
            [(place.siblings, place.name, child, type(child)) for place, child in present],
            [(each, list(each.values())) for each in hooks],
            [(module.__dict__, "forward" in module.__dict__) for module in modules],
            shared,
            norms,
        )

    def unchanged(self) -> bool:
        """Return whether all recorded facts are still true."""
        return (
            all(
                siblings.get(name) is child and type(child) is kind
                for siblings, name, child, kind in self.modules
            )
            and all(
                len(now) == len(then)
                and all(a is b for a, b in zip(now.values(), then, strict=True))
                for now, then in self.hooks
            )
            and all(("forward" in now) == then for now, then in self.attributes)
            and all(own[name] is hf.get(name) for own, hf, name in self.parameters)
            and all(own.eps == eps_of(hf) for own, hf in self.norms)
        )


class CachedComparison(NamedTuple):
    """The result of a comparison of an HF model with the stock model.

    Attributes:
        problem: The reason why the HF model must run its own code, or None if fastbert can run it.
        facts: The facts on which the result depends.
    """

    problem: str | None
    facts: Snapshot


class BoundModel:
    """fastbert's computation of one model of transformers.

    Args:
        hf_model: The model of transformers. The object keeps only a weak reference to it, so it can
            be freed.
        probing: Function that accelerates a model without a comparison, for `twin.compare`. With
            None, `hf_model` itself is bound without a comparison.

    Attributes:
        called: Maps the path of each module in the HF model that fastbert calls to the deviation of
            the module from the stock model.
    """

    def __init__(self, hf_model: nn.Module, probing: Callable[[nn.Module], Any] | None) -> None:
        """Refer to `hf_model`, without a comparison."""
        self._host = weakref.ref(hf_model)
        self._probing = probing
        self.called: dict[str, str] = {}
        # The result of a comparison for training mode, and one for inference.
        self._comparisons: dict[bool, CachedComparison] = {}

    def __reduce__(self) -> Any:
        """Replace this object by None in copies and pickles of the HF model.

        A copy of the HF model binds a new object at its first call.
        """
        return (_none, ())

    @property
    def hf_model(self) -> nn.Module | None:
        """The model of transformers, or None after it was freed."""
        return self._host()


class BoundEncoder(BoundModel):
    """A ``BertModel`` of fastbert that shares the parameters of an encoder of transformers.

    Args:
        hf_model: As in `BoundModel`.
        probing: As in `BoundModel`.

    Attributes:
        model: The ``BertModel``.
        whole: Whether a module in `called` may depend on padded rows, so that no padding is
            removed.
        calls_embedding: Whether the HF model's embedding is called, because a part of it deviates.
        checkpoints: Whether gradient checkpointing is on in the HF model.
        asks_gradient: Whether a hook of transformers makes the embeddings require gradients.
        frequencies: Maps the base of a rotary embedding to the HF model's frequencies if they are
            rounded. Otherwise the dictionary is empty.

    Raises:
        ValueError: If fastbert cannot compute the HF model. The message names the obstacle.
    """

    def __init__(
        self, hf_model: nn.Module, probing: Callable[[nn.Module], Any] | None = None
    ) -> None:
        """Build the ``BertModel`` on the meta device, and bind it to `hf_model`."""
        super().__init__(hf_model, probing)
        self.whole = self.calls_embedding = self.checkpoints = self.asks_gradient = False
        self.watch: Watch | None = None
        # The comparison of the last call of `bind`.
        self._in_effect: CachedComparison | None = None
        self.tables: list[tuple[str, Tensor]] = []
        self.frequencies: dict[float, Tensor] = {}
        # The tensors that a comparison reads or a binding copies: the buffers of the HF model's
        # stock modules, and the tensors of its int8 layers that are joined. Each has the number of
        # times that torch has written to it, and its address.
        self._written: list[tuple[Tensor, int, int]] = []

        @torch._dynamo.assume_constant_result
        def bind_while_traced(me: Any = weakref.ref(self)) -> str | None:  # noqa: B008
            bound = me()
            return bound._bind_anew(bound.hf_model)

        self._bind_while_traced = bind_while_traced
        self._build(hf_model)
        problem = self.bind()
        if problem is not None:
            raise ValueError(problem)

    def _build(self, hf_model: nn.Module) -> None:
        """Build the ``BertModel`` and find the modules of `hf_model`, or raise ValueError."""
        config = families.read_config(hf_model.config.to_dict())
        layers = layers_of(hf_model, config)
        stored = max(config.architecture.order(config.num_hidden_layers)) + 1
        if layers != stored:
            if config.architecture.rotary_bases or config.architecture.groups is not None:
                raise ValueError(f"config: got {layers} layers, allowed: {stored}")
            config = config.replace(num_hidden_layers=layers)
        with torch.device("meta"):
            model = BertModel(config, add_pooling_layer=False)
            if config.model_type in SUMMED:
                scaled = bool(config.extra.get("scale_embedding"))
                model.embeddings = SummedEmbeddings(config, scaled=scaled, static=True)
        leaves, drops = leaves_of(model, hf_model), drops_of(model, hf_model)
        self.model, self.leaves, self.drops = model, leaves, drops
        self.inside = list(containers_of(hf_model, model, leaves))
        parents = (hf_model, *(each.module for each in self.inside))
        self.sizes = [(module._modules, len(module._modules)) for module in parents]

    @property
    def family(self) -> families.Family:
        """The table of the family of the HF model."""
        return families.family_of(self.model.config.model_type)

    def _fits(self) -> bool:
        """Return whether the HF model still has the same modules at the same paths."""
        return all(place.get() is module for _, place, module in self.inside) and all(
            len(modules) == size for modules, size in self.sizes
        )

    def bind(self) -> str | None:
        """Give the modules of fastbert the current parameters of the HF model.

        Returns:
            The obstacle in words, or None if the encoder is bound.
        """
        hf_model = self.hf_model
        assert hf_model is not None
        if torch.compiler.is_compiling() or backends.EXTENSION is None:
            return self._bind_traced(hf_model)
        cached = self._comparisons.get(hf_model.training)
        if cached is not None and cached.facts.holds(hf_model) and self._is_unwritten():
            if cached is not self._in_effect and cached.problem is None:
                self._bind_anew(hf_model)
        else:
            problem = self._bind_anew(hf_model)
            cached = self._comparisons[hf_model.training] = CachedComparison(
                problem, snapshot(hf_model)
            )
        self._in_effect = cached
        if cached.problem is None:
            self._take_sizes()
        return cached.problem

    def _bind_traced(self, hf_model: nn.Module) -> str | None:
        """Bind while ``torch.compile`` traces, or without the extension; see `Watch`."""
        if not (self._fits() and self.watch is not None and self.watch.unchanged()):
            problem = self._bind_while_traced()
            # Each fact that is read here becomes a guard, so a change of the fact leads to a new
            # graph.
            if problem is not None or self.watch is None or not self.watch.unchanged():
                return problem or "its modules change while a graph is traced"
        self._settle_dropout()
        self._take_sizes()
        return None

    def _bind_anew(self, hf_model: nn.Module) -> str | None:
        self.watch, self.called = None, {}
        stock = [module for module in hf_model.modules() if type(module) is not QuantizedLinear]
        self._written = _versions(b for module in stock for b in module.buffers(recurse=False))
        unchecked = ComparisonResult(None, {})
        reason, called = compare(hf_model, self._probing) if self._probing else unchecked
        if reason is not None:
            return reason
        if not self._fits():
            try:
                self._build(hf_model)
            except ValueError as error:
                return str(error)
        self.called = called
        embedding = {path for leaf in self.leaves if leaf.embeds for path in leaf.paths}
        self.calls_embedding = any(
            path.partition(".")[0] == EMBEDDING or path in embedding for path in called
        )
        # The comparison reports every hook except those of transformers, so a hook that is still
        # here is the one that makes the embeddings require gradients.
        tables = [place.get() for leaf in self.leaves if leaf.embeds for place in leaf.hf_places]
        self.asks_gradient = any(table is not None and table._forward_hooks for table in tables)
        inner = [leaf for leaf in self.leaves if not leaf.embeds]
        self.whole = not all(_are_row_wise(leaf, called) for leaf in inner)
        for leaf in self.leaves:
            _bind(leaf, called)
            self._written += _versions(_copied(leaf))
        self.checkpoints = any(
            getattr(module, "gradient_checkpointing", False) for module in hf_model.modules()
        )
        self._settle_dropout()
        self._find_tables()
        self.frequencies = rounded_frequencies(hf_model, self.model.config)
        self.watch = Watch.over(self.inside, self.leaves)
        return None

    def _is_unwritten(self) -> bool:
        """Return whether no tensor that the last binding has read was written since then."""
        return all(t._version == version and t.data_ptr() == at for t, version, at in self._written)

    def must_embed(self) -> bool:
        """Return whether the HF model's embedding must be called.

        The embedding must be called if one of its modules deviates, or if the family has an
        embedding of its own. It must also be called if the word table is frozen and a hook of
        transformers makes the output of the embedding require gradients.
        """
        if self.family.own_embedding:
            return True
        if self.calls_embedding or not torch.is_grad_enabled():
            return self.calls_embedding
        words: Any = self.model.embeddings.word_embeddings
        return self.asks_gradient and not words.weight.requires_grad

    def embed(self, given: Mapping[str, Any]) -> Tensor:
        """Call the HF model's embedding, as the HF model does.

        Args:
            given: The arguments of the HF model that its embedding may take, by name.

        Returns:
            The embedding output of shape ``(B, L, hidden_size)``.
        """
        hf_model = self.hf_model
        assert hf_model is not None
        embeds = given.get("inputs_embeds")
        if self.family.own_embedding and embeds is not None:
            return embeds
        embedding: Any = hf_model._modules.get(EMBEDDING)
        if embedding is None:
            return _embed_by_tables(hf_model, given)
        names = inspect.signature(type(embedding).forward).parameters
        embedded = embedding(**{name: given[name] for name in names if name in given})
        for leaf in self.leaves:
            if leaf.path == "embeddings.projection":
                projection = leaf.hf_places[0].get()
                assert projection is not None
                embedded = projection(embedded)
        return embedded

    def _settle_dropout(self) -> None:
        """Copy the current dropout probabilities of the HF model to the modules of fastbert."""
        hf_model = self.hf_model
        assert hf_model is not None
        dropping = False
        for drop in self.drops:
            probability = drop.probability(hf_model)
            if getattr(drop.module, drop.attribute) != probability:
                setattr(drop.module, drop.attribute, probability)
            dropping |= probability > 0.0
        if self.model.training != dropping:
            self.model.training = dropping

    def _find_tables(self) -> None:
        """Collect the HF model's embedding tables, whose sizes are read before every call."""
        embeddings = self.model.embeddings
        self.tables = []
        for name, table in (
            ("vocab_size", embeddings.word_embeddings),
            ("max_position_embeddings", embeddings.position_embeddings),
            ("type_vocab_size", embeddings.token_type_embeddings),
        ):
            # A module that replaces a table may have no weight.
            weight = None if table is None else getattr(table, "weight", None)
            if isinstance(weight, Tensor):
                self.tables.append((name, weight))

    def _take_sizes(self) -> None:
        """Copy the sizes of the HF model's embedding tables, which may have grown in place."""
        config = self.model.config
        for name, weight in self.tables:
            if weight.shape[0] != getattr(config, name):
                config = config.replace(**{name: weight.shape[0]})
                self.model.config = config


def eps_of(norm: Any) -> float:
    """Return the term that a layer norm of an HF model adds to the variance."""
    return norm.eps if hasattr(norm, "eps") else norm.variance_epsilon


def _versions(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int, int]]:
    """Return each tensor with the number of writes to it, and its address.

    Tensors that were made in inference mode count no writes and are left out.
    """
    return [(t, t._version, t.data_ptr()) for t in tensors if not t.is_inference()]


def _copied(leaf: Leaf) -> Iterator[Tensor]:
    """Yield the tensors of the HF model that a joined int8 layer in place of `leaf` copies."""
    if isinstance(leaf.module, JoinedLinear) and leaf.own_place.get() is not leaf.module:
        for part in leaf.module.parts:
            yield from part.buffers()
            yield from part.parameters()


def _embed_by_tables(hf_model: Any, given: Mapping[str, Any]) -> Tensor:
    """Call the tables of an HF model without an embedding module, as its ``forward`` does.

    Args:
        hf_model: The encoder of transformers. Marian adds a table of positions to the scaled word
            embeddings, and Marian and T5 apply dropout.
        given: ``input_ids`` of shape ``(B, L)`` or ``inputs_embeds`` of shape ``(B, L, H)``, and
            ``position_ids`` or None.

    Returns:
        The embedding output of shape ``(B, L, H)``.
    """
    embedded = given.get("inputs_embeds")
    if embedded is None:
        embedded = hf_model.embed_tokens(given["input_ids"]) * getattr(hf_model, "embed_scale", 1.0)
    table = getattr(hf_model, "embed_positions", None)
    if table is not None:
        embedded = embedded + table(embedded.shape[:-1], position_ids=given.get("position_ids"))
    dropout = getattr(hf_model, "dropout", 0.0)
    if isinstance(dropout, nn.Module):
        return dropout(embedded)
    return F.dropout(embedded, dropout, hf_model.training)


def _none() -> None:
    return None


def snapshot(hf_model: nn.Module) -> Snapshot:
    """Record the facts on which the binding of an HF model depends."""
    outside = facts(hf_model)
    dicts = [vars(hf_model.config), *outside.dicts]
    return Snapshot(hf_model, BOUND, dicts, outside.classes, outside.functions)


def _are_row_wise(leaf: Leaf, called: Mapping[str, str]) -> bool:
    """Return whether the HF modules of `leaf` that fastbert calls compute each row independently.

    fastbert calls the modules whose paths are in `called`.
    """
    pairs = zip(leaf.paths, leaf.hf_places, strict=True)
    modules = [place.get() for path, place in pairs if path in called]
    return all(module is not None and is_row_wise(module) for module in modules)


def _bind(leaf: Leaf, called: Mapping[str, str]) -> None:
    """Give `leaf.module` the parameters of the HF model, or let fastbert call the HF module.

    fastbert calls a module of the HF model if its path is in `called`. The parts of a
    `JoinedLinear` are always the modules of the HF model themselves. If all parts have int8
    weights, a `QuantizedLinear` with the weights of all parts takes the place of the
    `JoinedLinear`.
    """
    module = leaf.module
    parts = [place.get() for place in leaf.hf_places]
    if isinstance(module, JoinedLinear):
        for number, part in enumerate(parts):
            if module.parts._modules[str(number)] is not part:
                module.parts._modules[str(number)] = part
        int8 = [part for part in parts if type(part) is QuantizedLinear and is_row_wise(part)]
        leaf.own_place.put(QuantizedLinear.joined(int8) if len(int8) == len(parts) else module)
        return
    if isinstance(module, nn.Identity):
        return
    hf_module = parts[0]
    assert hf_module is not None
    if leaf.paths[0] in called:
        leaf.own_place.put(hf_module)
        return
    leaf.own_place.put(module)
    if isinstance(module, LayerNorm):
        module.eps = eps_of(hf_module)
    if isinstance(module, nn.Embedding):
        module.padding_idx = hf_module.padding_idx
    _share(module, hf_module)


def _share(module: nn.Module, hf_module: nn.Module) -> None:
    for name in module._parameters:
        parameter = hf_module._parameters.get(name)
        if module._parameters[name] is not parameter:
            module._parameters[name] = parameter
