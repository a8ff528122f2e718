"""Error messages name a module by the name of its class."""

from __future__ import annotations

import fastbert
from fastbert.modules.class_name import class_name


def test_classes_of_the_same_name_are_told_apart() -> None:
    ours = fastbert.BertModel(fastbert.BertConfig.preset("tiny", vocab_size=50))
    stock_class = type("BertModel", (), {"__module__": "transformers.models.bert.modeling_bert"})
    assert class_name(ours) == "BertModel of fastbert"
    assert class_name(stock_class()) == "BertModel of transformers"
    assert class_name(stock_class) == "the class BertModel of transformers"
    assert class_name("a name") == "str"
