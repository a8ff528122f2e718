"""Download a source distribution from the package index, without building it."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from pathlib import Path

from pip._internal.commands import create_command
from pip._internal.network.download import Downloader
from pip._vendor.packaging.specifiers import SpecifierSet


def fetch(name: str, version: str, folder: Path) -> Path:
    """Download the source distribution of ``name``, and check it against the index's digest.

    ``pip download`` would build the distribution to read its metadata. This function therefore
    calls pip's index reader, which respects pip's configuration and environment variables.

    Raises:
        SystemExit: If the index has no such distribution. If the digest differs, pip raises its own
            HashMismatch.
    """
    command = create_command("download")
    options, _ = command.parse_args(["--no-binary", ":all:", "--no-deps"])
    folder.mkdir(parents=True, exist_ok=True)
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)
        best = finder.find_best_candidate(name, SpecifierSet(f"=={version}")).best_candidate
        if best is None:
            raise SystemExit(f"{name} {version}: the package index has no source distribution")
        path = Path(Downloader(session, "off")(best.link, str(folder))[0])
        hashes = best.link.as_hashes()
        if hashes is not None:
            hashes.check_against_path(str(path))
    return path


def unpacked(
    name: str, version: str, cache: Path, parts: tuple[str, ...], stubs: Mapping[str, str]
) -> Path:
    """Return the folder with parts of a source distribution, which is downloaded only once.

    Args:
        name: Name of the distribution.
        version: Version of the distribution.
        cache: Folder for downloaded distributions.
        parts: Folders of the distribution to unpack.
        stubs: Content of files to add that the distribution lacks, by their path.
    """
    folder = cache / f"{name.replace('-', '_')}-{version}"
    if not (folder / "complete").exists():
        archive = fetch(name, version, cache)
        with tarfile.open(archive) as tar:
            wanted = tuple(f"{folder.name}/{part}/" for part in parts)
            members = [m for m in tar.getmembers() if m.name.startswith(wanted)]
            tar.extractall(cache, members, filter="data")
        for path, content in stubs.items():
            stub = folder / path
            stub.parent.mkdir(parents=True, exist_ok=True)
            if not stub.exists():
                stub.write_text(content, encoding="utf-8")
        (folder / "complete").touch()
    return folder
