"""Checkpoints of encoder–decoders in the format of transformers' ``MarianMTModel``.

A folder has ``config.json``, ``generation_config.json`` and ``model.safetensors``. transformers
computes every Marian model with layer norms after each residual addition. A model with its layer
norms first therefore has another ``model_type``, which the Auto classes of transformers refuse.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fastbert import json_file
from fastbert.config import check
from fastbert.io import checkpoint, commit
from fastbert.io.names import QKV
from fastbert.transformer_config import TransformerConfig

Content = dict[str, Any]

GENERATION = "generation_config.json"
KINDS = MARIAN, PRE_NORM = "marian", "fastbert_transformer"
# The values of keys that the config.json of a Marian model may lack. The first group has the
# defaults of transformers' MarianConfig. transformers does not read the second group.
DEFAULTS: Content = {
    "vocab_size": 58101,
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "activation_function": "gelu",
    "max_position_embeddings": 1024,
    "scale_embedding": False,
    "pad_token_id": 58100,
    "eos_token_id": 0,
    "decoder_start_token_id": 58100,
    "forced_eos_token_id": 0,
} | {
    "static_position_embeddings": True,
    "normalize_before": False,
    "label_smoothing": 0.0,
}  # fmt: skip
# transformers reads these keys as other names of fields.
ALIASES = {
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "hidden_size": "d_model",
}
# Keys of options that are not implemented, with the value that is allowed.
FIXED: Content = {
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "add_bias_logits": False,
    "force_bos_token_to_be_generated": False,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "is_encoder_decoder": True,
}

# Names of modules in fastbert, and their names in a checkpoint. The names of the norms after the
# last layer are those of transformers' mBART.
_LAYER = {
    **{f"attention.self.{part}": f"self_attn.{part[0]}_proj" for part in QKV},
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "self_attn_layer_norm",
    "intermediate.dense": "fc1",
    "output.dense": "fc2",
    "output.LayerNorm": "final_layer_norm",
}
_CROSS = {
    **{f"cross_attention.self.{part}": f"encoder_attn.{part[0]}_proj" for part in QKV},
    "cross_attention.output.dense": "encoder_attn.out_proj",
    "cross_attention.output.LayerNorm": "encoder_attn_layer_norm",
}
_STACKS = {"encoder": _LAYER, "decoder": {**_LAYER, **_CROSS}}
_MODULES = {
    **{f"{s}_embeddings.word_embeddings": f"model.{s}.embed_tokens" for s in _STACKS},
    **{f"{s}_embeddings.position_embeddings": f"model.{s}.embed_positions" for s in _STACKS},
    **{f"{s}.final_norm": f"model.{s}.layer_norm" for s in _STACKS},
    "head.decoder": "lm_head",
}
_SHARED, _SOURCE_WORDS = "model.shared.weight", "encoder_embeddings.word_embeddings.weight"
_POSITIONS = "position_embeddings.weight"
_BIAS, _STORED_BIAS = "head.bias", "final_logits_bias"


# Settings


def read_config(content: Content) -> TransformerConfig:
    """Build a configuration from the content of a ``config.json``.

    Args:
        content: The content.

    Returns:
        The configuration.

    Raises:
        ValueError: If the file describes another model, an option that is not implemented, or a
            value that is not allowed. The message names the key.
    """
    kind = content.get("model_type")
    check("model_type", kind, ", ".join(KINDS), kind in KINDS)
    for name, allowed in FIXED.items():
        value = content.get(name, allowed)
        check(name, value, repr(allowed), value == allowed)
    content = (DEFAULTS if kind == MARIAN else {}) | content
    for alias, name in ALIASES.items():
        value = content.pop(alias, None)
        same = value is None or value == content.get(name, value)
        check(alias, value, f"{content.get(name)!r}, as {name}", same)
    before = content.get("normalize_before", False)
    allowed = f"{kind == PRE_NORM}, because model_type is {kind}"
    check("normalize_before", before, allowed, before == (kind == PRE_NORM))
    return TransformerConfig.from_dict(content)


def write_config(config: TransformerConfig) -> Content:
    """Return the content of ``config.json`` for a configuration; the inverse of `read_config`."""
    pre_norm = config.normalize_before
    return {
        **config.to_dict(),
        "model_type": PRE_NORM if pre_norm else MARIAN,
        "architectures": ["Transformer" if pre_norm else "MarianMTModel"],
        "is_encoder_decoder": True,
    }


# Reading and writing


def config_of(stored: checkpoint.Stored) -> TransformerConfig:
    """Build the configuration of a checkpoint; as `read_config`, but errors name the file."""
    with checkpoint.naming_config(stored.folder):
        return read_config(stored.content)


def read(path_or_hub_id: str | os.PathLike[str]) -> tuple[checkpoint.Stored, Content | None]:
    """Read the checkpoint of a folder, or of a hub id if there is no such folder.

    Args:
        path_or_hub_id: Folder or hub id.

    Returns:
        The checkpoint, and the content of ``generation_config.json`` or None. Without this file,
        the settings of generation are keys of ``config.json``.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If the checkpoint is damaged. The message names the file and the reason.
        OSError: As in ``checkpoint.read``.
    """
    folder = checkpoint.find(path_or_hub_id)

    def read_all() -> tuple[checkpoint.Stored, Content | None]:
        path = folder / GENERATION
        return checkpoint.read(folder), json_file.read(path) if path.is_file() else None

    return commit.consistent(folder, read_all)


def write(
    folder: str | os.PathLike[str],
    config: TransformerConfig,
    tensors: Mapping[str, Tensor],
    generation: Content,
    dtype: str,
) -> None:
    """Write a checkpoint that transformers opens as a ``MarianMTModel``.

    Args:
        folder: Folder, which is created if it does not exist.
        config: The configuration.
        tensors: The state dict without the second names of tied parameters.
        generation: Content of ``generation_config.json``.
        dtype: Name of the dtype of the parameters, such as ``"float32"``.

    Raises:
        ValueError: If `folder` is a file.
        OSError: If a file cannot be written.
    """
    content = write_config(config)
    content.pop("torch_dtype", None)
    content["dtype"] = dtype
    files = {checkpoint.CONFIG: content, GENERATION: generation}
    checkpoint.write_files(Path(folder), to_marian(tensors, config), files)


# Weights


def _names(config: TransformerConfig) -> dict[str, str]:
    """Map the names of modules in fastbert to their names in a checkpoint."""
    names = dict(_MODULES)
    for stack, modules in _STACKS.items():
        for layer in range(getattr(config, f"{stack}_layers")):
            for ours, stored in modules.items():
                names[f"{stack}.layer.{layer}.{ours}"] = f"model.{stack}.layers.{layer}.{stored}"
    return names


def to_marian(tensors: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Rename the tensors of a state dict to their names in a checkpoint.

    Args:
        tensors: The state dict without the second names of tied parameters.
        config: The configuration.

    Returns:
        The tensors by their new names, without sinusoids, which are computed.
    """
    names, renamed = _names(config), {}
    for name, tensor in tensors.items():
        if name == _BIAS:
            renamed[_STORED_BIAS] = tensor.unsqueeze(0)
            continue
        module, _, kind = name.rpartition(".")
        if not (config.static_position_embeddings and name.endswith(_POSITIONS)):
            renamed[f"{names[module]}.{kind}"] = tensor
    if config.share_encoder_decoder_embeddings:
        renamed[_SHARED] = renamed.pop("model.encoder.embed_tokens.weight")
    return renamed


def from_marian(
    stored: checkpoint.Stored,
    config: TransformerConfig,
    expected: Mapping[str, Tensor],
    tied: Mapping[str, str],
) -> dict[str, Tensor]:
    """Rename the tensors of a checkpoint to the names of the state dict.

    Args:
        stored: The checkpoint.
        config: The configuration.
        expected: The state dict of the model, which may be on the meta device.
        tied: Map from the second names of tied parameters to their first names.

    Returns:
        The tensors by their new names, without the second names of tied parameters. The bias of the
        logits and the sinusoids are absent if the checkpoint lacks them.

    Raises:
        ValueError: If a weight is missing, unknown or has a wrong shape or dtype.
    """
    ours = {name: module for module, name in _names(config).items()}
    tensors: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in stored.tensors.items():
        module, _, kind = name.rpartition(".")
        own = f"{ours.get(module)}.{kind}"
        if name == _STORED_BIAS:
            tensors[_BIAS] = tensor.flatten()
        elif own in expected:
            tensors[own] = tensor
        elif not (name == _SHARED and config.share_encoder_decoder_embeddings):
            unknown.append(name)
    if config.share_encoder_decoder_embeddings and _SHARED in stored.tensors:
        tensors[_SOURCE_WORDS] = stored.tensors[_SHARED]
    for name, target in tied.items():
        second = tensors.pop(name, None)
        if second is not None:
            tensors.setdefault(target, second)
    lacks = expected.keys() - tensors.keys() - tied.keys() - {_BIAS}
    if config.static_position_embeddings:
        lacks = {name for name in lacks if not name.endswith(_POSITIONS)}
    checkpoint.check_names(stored.folder, lacks, unknown)
    checkpoint.check_shapes(stored.folder, tensors, dict(expected))
    return tensors
