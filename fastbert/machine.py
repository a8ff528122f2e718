"""The header of every measurement: the machine, the versions and the date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass

import torch

import fastbert.version
from fastbert.ops import backend

REPORTED = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "numpy",
    "flash-attn",
    "openvino",
    "onnxruntime",
)


@dataclass(frozen=True)
class Machine:
    """The machine, the versions and the date of a measurement.

    ``cores`` counts the cores that this process may use, and ``threads`` the threads of torch.
    ``isa`` is the CPU instruction set that the C++ operators use; if the extension is not built,
    ``isa`` is the instruction set that torch uses.
    ``gpu`` is None without a GPU. ``driver`` is None without a GPU, or if nvidia-smi does not
    report a version.
    """

    cpu: str
    cores: int
    threads: int
    isa: str
    gpu: str | None
    system: str
    versions: dict[str, str | None]
    date: str
    driver: str | None = None

    def lines(self) -> list[str]:
        """Return the header as two lines of text: the machine, and the versions with the date."""
        versions = ", ".join(f"{name} {v}" for name, v in self.versions.items() if v)
        driver = f" (driver {self.driver})" if self.driver else ""
        return [
            f"{self.cpu}, {self.cores} cores, {self.threads} threads, {self.isa}; "
            f"GPU: {self.gpu or 'none'}{driver}; {self.system}",
            f"{versions}; {self.date}",
        ]


def version_of(distribution: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Return the name of the processor as the operating system reports it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.lower().startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # Only Linux has this file. On other systems, `platform` returns a generic name.
    return platform.processor() or platform.machine()


def cpu_cores() -> int:
    """Return the number of cores that this process may use, ignoring CPU quotas of containers."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_driver() -> str | None:
    """Return the version of the NVIDIA driver, or None if nvidia-smi is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (subprocess.SubprocessError, OSError):
        return None
    return answer.stdout.split("\n", 1)[0].strip() or None


def describe() -> Machine:
    """Describe the machine of this process, with the current date and time in UTC."""
    if backend.EXTENSION is not None:
        isa = f"{backend.EXTENSION.cpu_isa()} (extension)"
    else:
        isa = f"{torch.backends.cpu.get_cpu_capability()} (torch)"
    versions: dict[str, str | None] = {
        "fastbert": fastbert.version.__version__,
        "python": platform.python_version(),
    }
    versions |= {name: version_of(name) for name in REPORTED}
    versions["torch"] = torch.__version__
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        versions["CUDA"] = torch.version.cuda
        versions["cuDNN"] = str(torch.backends.cudnn.version())
    return Machine(
        cpu=cpu_model(),
        cores=cpu_cores(),
        threads=torch.get_num_threads(),
        isa=isa,
        gpu=torch.cuda.get_device_name() if has_gpu else None,
        system=f"{platform.system()} {platform.release()}",
        versions=versions,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        driver=gpu_driver() if has_gpu else None,
    )
