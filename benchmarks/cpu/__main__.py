"""Time fastbert and its peers on the CPU; write a Markdown page, JSON files and plots to a folder.

    python -m benchmarks.cpu --out out/cpu                  # all sections
    python -m benchmarks.cpu bert-base training             # some sections
    python -m benchmarks.cpu --quick                        # tiny shapes, only to try the programs

A peer is another implementation of the model, such as transformers or ONNX Runtime. The command
first prints how long it will take. The page names each peer that is not installed. The exit status
is 1 if an implementation of fastbert is wrong or cannot run. A ratio of speeds below its floor is
printed, but does not change the exit status.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu import accuracy, arrivals, breakdown, encoder, report, tasks, tiles, training
from benchmarks.cpu.ceilings import Ceilings, measure
from benchmarks.cpu.contest import LEFT_OUT, TOO_LONG_S, CpuRow, Setting, padded_flops
from benchmarks.cpu.runtimes import BF16, BY_NAME, RUNTIMES
from fastbert.bench.contest import to_dict
from fastbert.machine import cpu_cores, describe

# The order of the run: `tiles` chooses the schedule of the kernels that all other sections time.
SECTIONS = ("tiles", *(name for name in report.ORDER if name != "tiles"))
# Seconds of timing for one shape in inference, for the training step, and for the times of the
# single operations at one shape.
TURNS_S, STEPS_S, BREAKDOWN_S = 5.0, 10.0, 2.0
# Seconds in which all AMX schedules of the kernels together are timed on one call.
TILES_S = 1.5
# Seconds that the estimate assumes for the start and the parity check of a worker, for a conversion
# to ONNX or OpenVINO, and for a compilation.
START_S, CONVERT_S, COMPILE_S = 2.5, 25.0, 80.0
# Seconds until a process has imported sentence-transformers and loaded a model.
IMPORT_S = 6.0
# Mean number of calls of an implementation at a shape: a slow implementation is called twice,
# another four times.
CALLS = 3.5


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument(
        "--out", type=Path, default=Path("out/cpu"), help="folder that receives the results"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of every engine")
    parser.add_argument(
        "--engine", action="append", default=[], help="time only this engine; may be repeated"
    )
    parser.add_argument(
        "--quick", action="store_true", help="time tiny shapes; the times are no result"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(SECTIONS):
        allowed = ", ".join(SECTIONS)
        parser.error(f"SECTION: got {', '.join(sorted(unknown))}, allowed: {allowed}")
    if unknown := set(arguments.engine) - {engine.name for engine in RUNTIMES}:
        allowed = ", ".join(engine.name for engine in RUNTIMES)
        parser.error(f"--engine: got {', '.join(sorted(unknown))}, allowed: {allowed}")
    if not 1 <= arguments.threads <= cpu_cores():
        parser.error(f"--threads: got {arguments.threads}, allowed: 1 … {cpu_cores()}")
    wanted = [name for name in SECTIONS if name in (arguments.sections or SECTIONS)]
    return run(wanted, arguments.out, arguments.threads, arguments.engine, quick=arguments.quick)


def say(text: str) -> None:
    print(text, flush=True)


def run(
    wanted: Sequence[str],
    folder: Path,
    threads: int,
    engines: Sequence[str] = (),
    *,
    quick: bool = False,
    notify: Callable[[str], None] = say,
) -> int:
    """Run the sections and return the exit status: 1 if `is_fault` is true for a row, else 0."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"size": 64, "copied": 1 << 20} if quick else {}
    ceilings = measure(threads, **sizes)
    machine = describe()
    header = [*machine.lines(), *ceilings.lines()]
    if quick:
        header.append("--quick: tiny shapes, the times mean nothing")
    for text in header:
        notify(text)
    for engine in RUNTIMES:
        if (reason := engine.missing()) is not None:
            notify(f"{engine.name}: {reason}")
    if not quick:
        minutes = sum(estimate(name, ceilings) for name in wanted) / 60
        notify(f"{', '.join(wanted)}: this takes about {minutes:.0f} minutes")
    faults = []
    for section in wanted:
        start = time.monotonic()
        setting = Setting(section, 0.0 if quick else TURNS_S, notify, ceilings=ceilings)
        content, rows = measured(section, setting, threads, engines, quick=quick)
        content |= {
            "section": section,
            "quick": quick,
            "seconds": round(time.monotonic() - start, 1),
            "header": header,
            "machine": dataclasses.asdict(machine),
            "ceilings": dataclasses.asdict(ceilings),
        }
        report.write(folder, content, machine)
        faults += [f"{row.label} {row.contender}: {row.refused}" for row in rows if is_fault(row)]
        notify(f"[{section}] {content['seconds']} s")
    notify(f"written: {folder}")
    for fault in sorted(set(faults)):
        notify(f"FAULT: {fault}")
    return 1 if faults else 0


def measured(
    section: str, setting: Setting, threads: int, engines: Sequence[str], *, quick: bool
) -> tuple[dict[str, Any], list[CpuRow]]:
    """Run a section; return its JSON content, and the rows if it compares implementations."""
    if section in tasks.TASKS:
        rows = tasks.run(setting, threads, engines, quick=quick)
    elif section == "arrivals":
        rows = arrivals.run(setting, threads, engines, quick=quick)
    elif section in encoder.SCALES:
        scale = encoder.QUICK if quick else encoder.SCALES[section]
        rows = encoder.run(scale, setting, threads, engines)
    elif section == "training":
        setting.seconds = 0.0 if quick else STEPS_S
        rows = training.run(training.QUICK if quick else training.SHAPE, setting, threads)
    elif section == "breakdown":
        setting.seconds = 0.0 if quick else BREAKDOWN_S
        scale = encoder.QUICK if quick else encoder.SCALES["bert-base"]
        return {"rows": breakdown.run(scale, setting, threads)}, []
    elif section == "tiles":
        content = tiles.run(0.0 if quick else TILES_S, setting.notify, quick=quick)
        if content["fastest"] is not None and not quick:
            tiles.keep(content["fastest"], describe())
            setting.notify(f"written: {tiles.CHOICE}: {content['fastest']}")
        return content, []
    else:
        return {"result": accuracy.run(setting.notify, 16 if quick else accuracy.MOST)}, []
    return {"rows": [to_dict(row) for row in rows]}, rows


# A missing feature raises NotImplementedError.
NO_FAULT = ("NotImplementedError", LEFT_OUT)


def is_fault(row: CpuRow) -> bool:
    """Whether fastbert was refused, except for a feature that is missing or a row left out."""
    reason = row.refused
    return row.ours and reason is not None and not any(said in reason for said in NO_FAULT)


def estimate(section: str, ceilings: Ceilings) -> float:
    """Estimate the duration of a section in seconds, from the rates of torch's matmul here."""
    fp32, bf16 = ceilings.torch_fp32, ceilings.torch_bf16
    if section in tasks.TASKS:
        return _estimate_task(section, ceilings)
    if section == "arrivals":
        return arrivals.estimate(ceilings, START_S) + CONVERT_S
    if section in encoder.SCALES:
        scale = encoder.SCALES[section]
        shapes = [match.shape for match in encoder.matches(scale)]
        seconds = CONVERT_S * scale.config.num_hidden_layers / 12
        setting = Setting(section, 0.0, ceilings=ceilings)
        for engine in RUNTIMES:
            if engine.missing() or encoder.left_out(engine, setting):
                continue
            seconds += START_S + (COMPILE_S if engine.kind == "compiled" else 0.0)
            for shape in shapes:
                slow = engine.form == BF16 and not engine.ours and engine.kind != "openvino"
                flops = shape.flops if engine.ours else padded_flops(shape)
                once = flops / (bf16 if slow else fp32)
                # A much slower implementation is called once, or never if a call takes too long.
                is_behind = slow and bf16 < fp32 / 3
                seconds += once * (
                    0 if is_behind and once > TOO_LONG_S else 1 if is_behind else CALLS
                )
        return seconds
    if section == "training":
        step = 3 * padded_flops(training.SHAPE)
        return 6 * START_S + step * (
            2 * CALLS * 2 / fp32 + 2 * (1 if bf16 < fp32 / 3 else 3) / bf16
        )
    if section == "tiles":
        return TILES_S * (2 * len(tiles.PRODUCTS) + len(tiles.ATTENTION)) * tiles.has_tiles()
    if section == "breakdown":
        flops = sum(m.shape.flops for m in encoder.matches(encoder.SCALES["bert-base"]))
        return 2 * (2 * START_S + 5.5 * flops / fp32 + 4 * BREAKDOWN_S)
    return 30.0


def _estimate_task(section: str, ceilings: Ceilings) -> float:
    task, setting = tasks.TASKS[section], Setting(section, 0.0, ceilings=ceilings)
    engines = [BY_NAME[name] for name in task.engines]
    engines = [e for e in engines if not (e.missing() or tasks.left_out(e, setting))]
    # Two processes start at a time.
    seconds = IMPORT_S * len(engines) / 2 + CONVERT_S * any(engine.reads for engine in engines)
    for match in task.matches(False):
        once = match.flops / ceilings.torch_fp32
        seconds += CALLS * once * len(engines) if once < TOO_LONG_S else 0.0
    return seconds


if __name__ == "__main__":
    sys.exit(main())
