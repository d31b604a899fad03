"""The measured part of docs/hardware.md, made of the lines that scripts/bench/gpu wrote: docs/hardware/*.jsonl."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PAGE, FOLDER = Path("docs/hardware.md"), Path("docs/hardware")
BEGIN = "<!-- Made by scripts/checks/doc_pages from docs/hardware/*.jsonl: -->"
END = "<!-- End of what was made. -->"

Row = tuple[str, str, str]
"""Part, what, figures."""


def page(text: str, files: Mapping[str, str]) -> str:
    """Return the page with its measured part made anew.

    Args:
        text: The page.
        files: Contents of the files of lines, by name.

    Raises:
        ValueError: the page has no place for it, or a file does not begin with a machine.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} lacks the lines {BEGIN!r} and {END!r}")
    tables = "\n\n".join(table(name, content) for name, content in sorted(files.items()))
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def current_page() -> str:
    """Return the page as it should be, from the files below the current folder."""
    return page(PAGE.read_text(), {path.name: path.read_text() for path in FOLDER.glob("*.jsonl")})


def table(name: str, content: str) -> str:
    """Return a heading and a table for the lines of one machine."""
    first, *lines = [json.loads(line) for line in content.splitlines()]
    if first["part"] != "machine":
        raise ValueError(f"docs/hardware/{name} does not begin with a machine")
    machine = first["figures"]
    gpu = f"{machine['device']}, {machine['gpu_gb']:.0f} GB" if machine["gpu_gb"] else "no GPU"
    heading = f"### {gpu}, {machine['cores']} cores: {machine['size']}"
    versions = f"vLLM {machine['vllm']}, torch {machine['torch']}, commit {machine['commit']}, {machine['date']}"
    note = "" if machine["gpu_gb"] else " **It shows that the command runs, and says nothing about a GPU.**"
    rows = [row for line in lines for row in rows_of(line)]
    cells = ["| part | what | measured |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([heading, "", f"{versions}; [{name}](hardware/{name}).{note}", "", *cells])


def rows_of(line: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of a part: its figures, and why it failed."""
    part, figures = line["part"], line.get("figures", {})
    if part == "server":
        yield part, "ready after", f"{line['seconds']:.0f} s"
    elif part == "model":
        yield part, "random weights", f"{figures['parameters'] / 1e6:,.1f} million, {line['seconds']:.0f} s"
    else:
        yield from _ROWS[part](figures)
    if error := line.get("error"):
        yield part, "failed", " ".join(str(error).split())[-160:].replace("|", "/")


def _scoring(figures: Mapping[str, Any]) -> Iterator[Row]:
    floor = figures["floor"]["ms_per_turn"] if "floor" in figures else None
    for method, sample in figures.items():
        ratio = f", {sample['ms_per_turn'] / floor:.2f} of reading alone" if floor and method != "floor" else ""
        yield "scoring", method, f"{sample['ms_per_turn']:.1f} ms a turn{ratio}"


def _sampling(figures: Mapping[str, Any]) -> Iterator[Row]:
    for name, rate in figures.items():
        if kind := name.removesuffix("_per_s") if name.endswith("_per_s") else None:
            ratio = f", {figures[f'{kind}_ratio']:.2f} of plain" if kind != "plain" else ""
            yield "sampling", f"log-probabilities: {kind}", f"{rate:,.0f} tokens/s{ratio}"


def _rollouts(figures: Mapping[str, Any]) -> Iterator[Row]:
    for run in figures.values():
        yield "rollouts", "whole runs, of the engine alone", f"{run['ratio']:.2f} ({run['requests']:,.0f} requests)"
        yield "rollouts", "processor time an episode", f"{1e3 * run['own_cpu_s_per_rollout']:.0f} ms"
        lag = ", ".join(f"{1e3 * run[f'loop_lag_s_{part}']:.0f}" for part in ("p50", "p99", "max"))
        yield "rollouts", "lag of the event loop, ms: p50, p99, largest", lag


def _check_gpu(figures: Mapping[str, Any]) -> Iterator[Row]:
    for name, checked in figures.items():
        if not isinstance(checked, Mapping) or name == "server":
            continue
        if "mean" in checked:
            torch = f", torch {checked['torch_mean']:.2g}" if "torch_mean" in checked else ""
            measured = f"mean {checked['mean']:.2g}{torch}, largest {checked['max']:.2g} nats"
        else:
            measured = ", ".join(
                f"{key.replace('_', ' ')} {f'{value:,.4g}' if isinstance(value, float) else value}"
                for key, value in checked.items()
                if key != "error"
            )
        yield "check_gpu", name, measured + (": failed" if "error" in checked else "")


def _pushes(figures: Mapping[str, Any]) -> Iterator[Row]:
    for kind, push in figures.items():
        if "error" in push:
            yield "pushes", kind, "failed"
            continue
        off = f"rows off by {push['difference_rms']:.1e} (rms), {push['difference']:.1e} nats"
        yield "pushes", kind, f"{push['gigabytes']:.3g} GB in {push['written_s']:.2f} s; {off}"


def _trainer(figures: Mapping[str, Any]) -> Iterator[Row]:
    for kind, step in figures.items():
        if "error" in step:
            yield "trainer", kind, "failed"
            continue
        speed = f"{step['tokens_per_s']:,.0f} tokens/s, {step['share']:.1%} of {step['device_tflops']:.3g} TFLOP/s"
        memory = f"peak {step['peak_gb']:.1f} GB (computed {step['computed_gb']:.1f})"
        yield "trainer", kind, f"{speed}; {memory}, parts of {step['micro_tokens']:,.0f} tokens"


_ROWS = {
    "scoring": _scoring,
    "sampling": _sampling,
    "rollouts": _rollouts,
    "check_gpu": _check_gpu,
    "pushes": _pushes,
    "trainer": _trainer,
}
