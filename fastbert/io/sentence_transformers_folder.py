"""Reading a sentence-transformers folder: its encoder, the modules after it, and its settings.

Every setting that changes a result in sentence-transformers is returned or raises ValueError.
Settings that do not change a result (the similarity function, versions) are not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any, TypeAlias

from fastbert import json_file
from fastbert.config import integer_from, is_integer

LISTING = "modules.json"
SETTINGS = "config_sentence_transformers.json"
# The settings of the module Transformer are in the first of these files that exists.
ENCODER_SETTINGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# For each task: the output of transformers that the Transformer reads, and the feature that it
# writes.
TASKS = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
}
# The name of a pooling mode in sentence-transformers → its name in fastbert.modules.pool.
MODES = {name: name for name in ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean")} | {
    "lasttoken": "last"
}
# Older folders have one flag per pooling mode. The pooled vectors are concatenated in this order.
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# The keys for the name of the feature that a module reads, and of the feature that it writes.
FEATURES = ("module_input_name", "module_output_name")
_ACTIVATION = re.compile(r"torch\.nn\.(?:modules\.\w+\.)?(\w+)")


@dataclass(frozen=True)
class Pooling:
    """A module that reduces the hidden states of a text to one vector.

    Attributes:
        modes: Pooling modes of `fastbert.modules.pool`. The vectors of all modes are concatenated.
        include_prompt: Whether the tokens of the prompt are pooled too.
    """

    modes: tuple[str, ...] = ("mean",)
    include_prompt: bool = True


@dataclass(frozen=True)
class Dense:
    """A module that projects the vector of a text to another size.

    Attributes:
        folder: Folder of the weights.
        in_features: Size of the input.
        out_features: Size of the output.
        bias: Whether the projection has a bias.
        activation: Name of the class of ``torch.nn`` that is applied to the output.
        residual: Whether the input is added to the output.
    """

    folder: Path
    in_features: int
    out_features: int
    bias: bool = True
    activation: str = "Tanh"
    residual: bool = False


@dataclass(frozen=True)
class Normalize:
    """A module that scales the vector of a text to an L2 norm of 1."""


Module: TypeAlias = Pooling | Dense | Normalize


@dataclass(frozen=True)
class SentenceFolder:
    """The content of a sentence-transformers folder.

    Attributes:
        encoder: Folder of the encoder and its tokenizer.
        modules: The modules after the encoder, in order.
        max_length: Largest number of tokens of a text; None if the tokenizer decides.
        lowercase: Whether texts are converted to lower case.
        prompt: Text that is put before each text.
        other_prompts: Names of the nonempty prompts if the folder has no default prompt; otherwise
            an empty tuple.
        truncate_dim: Number of elements to which a vector is truncated; None keeps all elements.
        activation: Name of the class of ``torch.nn`` that a cross-encoder applies to its logits;
            None if the folder has no such setting.
    """

    encoder: Path
    modules: tuple[Module, ...] = ()
    max_length: int | None = None
    lowercase: bool = False
    prompt: str = ""
    other_prompts: tuple[str, ...] = ()
    truncate_dim: int | None = None
    activation: str | None = None


def is_one(folder: Path) -> bool:
    """Return whether `folder` has ``modules.json``, the list of modules of a model."""
    return (folder / LISTING).is_file()


def encoder_folder(folder: Path) -> Path:
    """Return the folder of the first module whose type ends in ``Transformer``.

    Raises:
        ValueError: If the list of modules is damaged or has no such module.
    """
    for kind, path in _listing(folder):
        if kind.endswith("Transformer"):
            return path
    raise ValueError(f"{folder / LISTING}: none of its modules is a Transformer")


def read(folder: Path) -> SentenceFolder:
    """Read the folder of a ``SentenceTransformer``.

    Args:
        folder: The folder.

    Returns:
        The modules and settings that determine the embedding of a text.

    Raises:
        ValueError: If a module or a setting is damaged or not supported. The message names the
            file and the module or setting.
    """
    settings = _settings(folder)
    _check_choice(folder / SETTINGS, settings, "model_type", ("SentenceTransformer",))
    first, *others = _served(folder)
    modules = tuple(_READERS[kind](path) for kind, path in others)
    poolings = [isinstance(module, Pooling) for module in modules]
    if sum(poolings) != 1 or not poolings[0]:
        names = ", ".join(["Transformer", *(kind for kind, _ in others)])
        raise ValueError(
            f"{folder / LISTING}: got {names}; allowed: Transformer, one Pooling, then any number "
            "of Dense and Normalize"
        )
    return _with_settings(folder, settings, first[1], modules, "feature-extraction")


def is_cross_encoder(folder: Path) -> bool:
    """Return whether the folder contains a ``CrossEncoder``, according to its settings."""
    return is_one(folder) and _settings(folder).get("model_type") == "CrossEncoder"


def read_cross_encoder(folder: Path) -> SentenceFolder:
    """Read the folder of a ``CrossEncoder``.

    Args:
        folder: The folder.

    Returns:
        The encoder and the settings that determine the scores of a text or of a pair of texts.

    Raises:
        ValueError: If a module or a setting is damaged or not supported. The message names the
            file and the module or setting.
    """
    settings = _settings(folder)
    first, *others = _served(folder)
    if others:
        raise ValueError(
            f"{folder / LISTING}: got a {others[0][0]} after the Transformer of a cross-encoder, "
            "allowed: none"
        )
    return _with_settings(folder, settings, first[1], (), "sequence-classification")


def activation_name(place: str, path: Any) -> str:
    """Return the class name in a path such as ``"torch.nn.modules.activation.Tanh"``.

    Raises:
        ValueError: If `path` is not the name of a class of ``torch.nn``. The message names `place`.
    """
    match = _ACTIVATION.fullmatch(path) if isinstance(path, str) else None
    if match is None:
        raise ValueError(f"{place}: got {path!r}, allowed: the name of a class of torch.nn")
    return match[1]


# The list of modules


def _listing(folder: Path) -> list[tuple[str, Path]]:
    """Return the type and the folder of each module; every folder is inside `folder`."""
    listing = folder / LISTING
    content = json_file.read(listing, list)
    listed = []
    for entry in content:
        kind, path = (entry.get(key) if isinstance(entry, dict) else None for key in _KEYS)
        if not isinstance(kind, str) or not isinstance(path, str):
            raise ValueError(f"{listing}: got {entry!r:.200}, allowed: a module's type and path")
        listed.append((kind, _inside(folder, path)))
    names = [str(entry.get("name")) for entry in content if "name" in entry]
    if len(set(names)) < len(names):
        # sentence-transformers stores modules by name, so the last of two modules with the same
        # name would replace the first.
        raise ValueError(f"{listing}: got the names {', '.join(names)}, allowed: different names")
    return listed


_KEYS = ("type", "path")


def _inside(folder: Path, path: str) -> Path:
    windows = PureWindowsPath(path)
    is_inside = not windows.anchor and ".." not in windows.parts and not re.search(r"[\\\0]", path)
    if not is_inside or not (folder / path).resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"{folder / LISTING}: got the path {path!r}, allowed: a folder inside this one"
        )
    return folder / path


def _served(folder: Path) -> list[tuple[str, Path]]:
    """Return the class and the folder of each module; the first module is the Transformer."""
    parts = []
    for kind, path in _listing(folder):
        package, _, name = kind.rpartition(".")
        if not package.startswith("sentence_transformers.") or name not in _CLASSES:
            raise ValueError(
                f"{folder / LISTING}: got the module {kind!r}, allowed: {', '.join(_CLASSES)} of "
                "sentence_transformers"
            )
        parts.append((name, path))
    names = [name for name, _ in parts]
    if names[:1] != ["Transformer"] or names.count("Transformer") > 1:
        raise ValueError(
            f"{folder / LISTING}: got {', '.join(names) or 'no module'}, allowed: one Transformer, "
            "as the first module"
        )
    return parts


# The modules after the Transformer


def _read_pooling(folder: Path) -> Pooling:
    path = folder / "config.json"
    content = json_file.read(path)
    sizes = ("word_embedding_dimension", "embedding_dimension")
    _check_keys(path, content, {*sizes, *FLAGS, "pooling_mode", "include_prompt"})
    flags = [mode for key, mode in FLAGS.items() if _flag(path, content, key, False)]
    modes = content.get("pooling_mode", flags or "mean")
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or not all(_is_in(mode, MODES) for mode in modes):
        raise ValueError(f"{path}: pooling_mode: got {modes!r}, allowed: {', '.join(MODES)}")
    names = tuple(MODES[mode] for mode in modes)
    return Pooling(names, _flag(path, content, "include_prompt", True))


def _read_dense(folder: Path) -> Dense:
    path = folder / "config.json"
    content = json_file.read(path)
    sizes = ("in_features", "out_features")
    _check_keys(path, content, {*sizes, *FEATURES, "bias", "activation_function", "use_residual"})
    _check_features(path, content)
    inputs, outputs = (_count(path, content, name) for name in sizes)
    if inputs is None or outputs is None:
        raise ValueError(
            f"{path}: the file lacks in_features or out_features, allowed: a file with both"
        )
    function = content.get("activation_function", "torch.nn.Tanh")
    return Dense(
        folder,
        inputs,
        outputs,
        _flag(path, content, "bias", True),
        activation_name(f"{path}: activation_function", function),
        _flag(path, content, "use_residual", False),
    )


def _read_normalize(folder: Path) -> Normalize:
    path = folder / "config.json"
    if path.is_file():  # Older folders do not have this file.
        _check_features(path, json_file.read(path))
    return Normalize()


def _check_features(path: Path, content: dict[str, Any]) -> None:
    """Raise ValueError unless a module reads the vector of the text and replaces it.

    This is the default of the module in sentence-transformers.
    """
    _check_choice(path, content, FEATURES[0], ("sentence_embedding",))
    _check_choice(path, content, FEATURES[1], ("sentence_embedding", None))


_READERS: dict[str, Callable[[Path], Module]] = {
    "Pooling": _read_pooling,
    "Dense": _read_dense,
    "Normalize": _read_normalize,
}
_CLASSES = ("Transformer", *_READERS)


# The settings


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS
    return json_file.read(path) if path.is_file() else {}


def _with_settings(
    folder: Path, settings: dict[str, Any], encoder: Path, modules: tuple[Module, ...], task: str
) -> SentenceFolder:
    path = folder / SETTINGS
    length, lowercase = _encoder_settings(encoder, task)
    activation = settings.get("activation_fn")
    return SentenceFolder(
        encoder,
        modules,
        length,
        lowercase,
        *_prompts(path, settings),
        _count(path, settings, "truncate_dim"),
        None if activation is None else activation_name(f"{path}: activation_fn", activation),
    )


def _prompts(path: Path, settings: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the default prompt and (); without a default, "" and the names of nonempty prompts."""
    prompts, name = settings.get("prompts", {}), settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(
        isinstance(prompt, str | None) for prompt in prompts.values()
    ):
        raise ValueError(f"{path}: prompts: got {prompts!r:.200}, allowed: texts by their names")
    if name is None:
        return "", tuple(name for name, prompt in prompts.items() if prompt)
    if not _is_in(name, prompts):
        allowed = ", ".join(prompts) or "none, because there are no prompts"
        raise ValueError(f"{path}: default_prompt_name: got {name!r:.200}, allowed: {allowed}")
    return prompts[name] or "", ()


def _encoder_settings(encoder: Path, task: str) -> tuple[int | None, bool]:
    """Read ``max_seq_length`` and ``do_lower_case`` of the Transformer in the folder `encoder`."""
    path = next((p for name in ENCODER_SETTINGS if (p := encoder / name).is_file()), None)
    if path is None:
        _check_task(encoder / ENCODER_SETTINGS[0], {}, task)
        return None, False
    content = json_file.read(path)
    _check_task(path, content, task)
    served = {"transformer_task", "modality_config", "module_output_name"}
    # unpad_inputs does not change a result. An unknown key is allowed if its value is null, false,
    # 0 or empty.
    set_keys = {key: value for key, value in content.items() if value}
    _check_keys(path, set_keys, {*served, "max_seq_length", "do_lower_case", "unpad_inputs"})
    return _count(path, content, "max_seq_length"), _flag(path, content, "do_lower_case", False)


def _check_task(path: Path, content: dict[str, Any], task: str) -> None:
    """Raise ValueError unless the Transformer's settings allow `task` on texts.

    The Transformer must also write the feature that `TASKS` names for the task.
    """
    output, feature = TASKS[task]
    _check_choice(
        path, {"transformer_task": "feature-extraction"} | content, "transformer_task", (task,)
    )
    _check_choice(path, content, "module_output_name", (feature,))
    texts = {"method": "forward", "method_output_name": output}
    _check_choice(path, content, "modality_config", ({"text": texts},))


# Single values


def _check_keys(path: Path, content: dict[str, Any], allowed: set[str]) -> None:
    unknown = sorted(content.keys() - allowed)
    if unknown:
        raise ValueError(f"{path}: got {unknown[0]}, allowed: {', '.join(sorted(allowed))}")


def _check_choice(path: Path, content: dict[str, Any], name: str, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError if the key `name` is present and its value is not in `allowed`."""
    if name in content and content[name] not in allowed:
        choices = " or ".join(map(repr, allowed))
        raise ValueError(f"{path}: {name}: got {content[name]!r:.200}, allowed: {choices}")


def _flag(path: Path, content: dict[str, Any], name: str, default: bool) -> bool:
    value = content.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{path}: {name}: got {value!r}, allowed: true or false")
    return value


def _count(path: Path, content: dict[str, Any], name: str) -> int | None:
    value = content.get(name)
    if value is not None and not is_integer(value, 1):
        raise ValueError(f"{path}: {name}: got {value!r:.200}, allowed: {integer_from(1)}")
    return value


def _is_in(name: Any, names: dict[str, Any]) -> bool:
    return isinstance(name, str) and name in names
