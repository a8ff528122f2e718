"""Run the tests of ``test_modeling_common.py`` for one family of encoders, stock or accelerated.

``transformers_suite.py`` runs this file and names the family and the mode in environment variables.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import unittest
import weakref
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto as auto
from transformers.testing_utils import torch_device

from tests import test_modeling_common as common

FAMILY, MODE = os.environ["CONFORMANCE_FAMILY"], os.environ["CONFORMANCE_MODE"]
# Family → first part of the names of its classes in transformers.
NAMES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "data2vec-text": "Data2VecText",
    "ernie": "Ernie",
    "layoutlm": "LayoutLM",
    "roberta-prelayernorm": "RobertaPreLayerNorm",
    "xlm-roberta-xl": "XLMRobertaXL",
    "megatron-bert": "MegatronBert",
    "gte": "Gte",
    "jina_embeddings_v3": "JinaEmbeddingsV3",
    "distilbert": "DistilBert",
    "albert": "Albert",
    "electra": "Electra",
    "mpnet": "MPNet",
    "modernbert": "ModernBert",
    "nomic_bert": "NomicBert",
    "deberta-v2": "DebertaV2",
    "deberta": "Deberta",
    "esm": "Esm",
    "roformer": "RoFormer",
    "eurobert": "EuroBert",
    "t5": "T5",
    "marian": "Marian",
    "xlnet": "XLNet",
}
HEADS = (
    "Model",
    "EncoderModel",
    "ForConditionalGeneration",
    "MTModel",
    "ForMaskedLM",
    "ForPreTraining",
    "ForNextSentencePrediction",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)
if FAMILY == "xlnet":
    HEADS = (*HEADS, "LMHeadModel", "ForQuestionAnsweringSimple")
SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 16,
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
OWN: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16, "num_hidden_groups": 2},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 37},
    "electra": {"embedding_size": 16},
    "roformer": {"embedding_size": 16},
    "esm": {"position_embedding_type": "rotary", "mask_token_id": 3, "token_dropout": True},
    "deberta-v2": {
        "relative_attention": True,
        "position_buckets": 4,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    "deberta": {
        "relative_attention": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    # Layers that attend to 4 tokens on each side alternate with layers that attend to all tokens.
    "modernbert": {
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "cls_token_id": None,
        "sep_token_id": None,
    },
    "eurobert": {"num_key_value_heads": 2, "hidden_act": "silu", "attention_dropout": 0.1},
    "t5": {"d_kv": 8, "d_ff": 37, "decoder_start_token_id": 0},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 37, "mem_len": 10},
    "marian": {
        **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 37 for side in ("encoder", "decoder")},
        "d_model": 32,
        "activation_function": "gelu",
        "attention_dropout": 0.1,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
    },
}


def classes() -> tuple[Any, ...]:
    names = [NAMES[FAMILY] + head for head in HEADS]
    return tuple(getattr(transformers, name) for name in names if hasattr(transformers, name))


class Tester:
    """The small configuration and the random batch that transformers' test mixin requests."""

    batch_size, seq_length, num_choices, is_training = 13, 7, 4, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4

    def get_config(self) -> Any:
        kind = getattr(transformers, f"{NAMES[FAMILY]}Config")
        known = kind().to_dict()
        sizes = {name: value for name, value in SIZES.items() if name in known}
        return kind(**sizes | OWN.get(FAMILY, {}))

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        shape, config = [self.batch_size, self.seq_length], self.get_config()
        batch = {
            "input_ids": common.ids_tensor(shape, config.vocab_size),
            "attention_mask": common.random_attention_mask(shape),
        }
        if getattr(config, "type_vocab_size", 0) > 1:
            batch["token_type_ids"] = common.ids_tensor(shape, config.type_vocab_size)
        if config.is_encoder_decoder:
            batch["decoder_input_ids"] = common.ids_tensor(shape, config.vocab_size)
            batch["decoder_attention_mask"] = common.random_attention_mask(shape)
        return config, batch


class Conformance(common.ModelTesterMixin, unittest.TestCase):
    """All tests of the mixin. In both modes, each test starts from the same seeds."""

    all_model_classes = classes()
    is_encoder_decoder = FAMILY in ("marian", "t5")

    def setUp(self) -> None:
        self.model_tester = Tester()
        transformers.set_seed(0)
        common.global_rng = random.Random(0)
        if MODE == "fast":
            _warn_once.cache_clear()

    def _prepare_for_class(self, inputs: Any, kind: Any, return_labels: bool = False) -> Any:
        """Add the labels for pre-training, which the mixin leaves to the tests of each model."""
        prepared = super()._prepare_for_class(inputs, kind, return_labels)
        known = auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES.values()
        if return_labels and kind.__name__ in known and "ForPreTraining" in kind.__name__:
            rows = (self.model_tester.batch_size, self.model_tester.seq_length)
            prepared["labels"] = torch.zeros(rows, dtype=torch.long, device=torch_device)
            related = {"bert": "next_sentence_label", "albert": "sentence_order_label"}
            if FAMILY in related:
                whole = torch.zeros(rows[0], dtype=torch.long, device=torch_device)
                prepared[related[FAMILY]] = whole
        return prepared


def accelerate_every_encoder() -> None:
    """Accelerate each encoder of the family when its model moves to the device of the tests.

    ``accelerate`` compares the code that a call reaches with the code in transformers' files, so
    this function cannot replace a Python method. It replaces the function of torch's C++ code that
    reads the arguments of ``Module.to``. A refused encoder remains stock, and the table counts the
    warning.
    """
    name = "XLNetModel" if FAMILY == "xlnet" else ACCELERATED[FAMILY].model
    read = torch._C._nn._parse_to
    kind = getattr(sys.modules[Conformance.all_model_classes[0].__module__], name)
    tried: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(read)
    def read_after_accelerating(*args: Any, **kwargs: Any) -> Any:
        moved = sys._getframe(1).f_locals.get("self")
        if isinstance(moved, transformers.PreTrainedModel):
            for module in moved.modules():
                if isinstance(module, kind) and module not in tried:
                    tried.add(module)
                    fastbert.accelerate(module, strict=False)
        return read(*args, **kwargs)

    torch._C._nn._parse_to = read_after_accelerating


if MODE == "fast":
    import fastbert
    from fastbert.integrations.accelerate import _warn_once
    from fastbert.io.families import ACCELERATED

    accelerate_every_encoder()
elif MODE != "stock":
    sys.exit(f"CONFORMANCE_MODE: got {MODE!r}, allowed: stock, fast")
