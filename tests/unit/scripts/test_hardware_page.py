"""The measured part of docs/hardware.md: made of the lines that scripts/bench/gpu writes."""

import json

import pytest
from checks.hardware_page import BEGIN, END, page

MACHINE = {
    "part": "machine",
    "figures": {
        "device": "NVIDIA H200",
        "gpu_gb": 150.1,
        "cores": 16,
        "torch": "2.11",
        "vllm": "0.32.0",
        "commit": "abc1234",
        "size": "4B",
        "date": "2026-01-02",
    },
}
STEP = {"tokens_per_s": 20_000.0, "share": 0.41, "device_tflops": 790.0, "peak_gb": 44.7, "computed_gb": 43.1}
LINES = [
    MACHINE,
    {"part": "model", "seconds": 9.6, "figures": {"parameters": 4_022_468_096}},
    {"part": "server", "seconds": 124.2, "figures": {}},
    {
        "part": "scoring",
        "figures": {"end": {"ms_per_turn": 9.0}, "floor": {"ms_per_turn": 10.0}},
        "error": "stopped after its budget of 60 s",
    },
    {"part": "pushes", "figures": {"files": {"error": "ServerMemoryError: no memory"}}},
    {"part": "trainer", "figures": {"4B, adapters": {**STEP, "micro_tokens": 8192}}},
]
PAGE = f"# Hardware\n{BEGIN}\nold\n{END}\nrest\n"


def text_of(*lines: object) -> str:
    return "\n".join(map(json.dumps, lines)) + "\n"


def test_each_part_has_rows_and_says_on_which_card() -> None:
    made = page(PAGE, {"h200.jsonl": text_of(*LINES)})
    assert made.startswith(f"# Hardware\n{BEGIN}\n\n### NVIDIA H200, 150 GB, 16 cores: 4B\n")
    assert made.endswith(f"{END}\nrest\n")
    for row in (
        "| model | random weights | 4,022.5 million, 10 s |",
        "| server | ready after | 124 s |",
        "| scoring | end | 9.0 ms a turn, 0.90 of reading alone |",
        "| scoring | failed | stopped after its budget of 60 s |",
        "| pushes | files | failed |",
        "| trainer | 4B, adapters | 20,000 tokens/s, 41.0% of 790 TFLOP/s; peak 44.7 GB (computed 43.1), "
        "parts of 8,192 tokens |",
    ):
        assert f"\n{row}\n" in made
    assert "nothing about a GPU" not in made
    assert page(made, {"h200.jsonl": text_of(*LINES)}) == made


def test_figures_of_a_cpu_are_marked() -> None:
    figures = {**MACHINE["figures"], "device": "CPU", "gpu_gb": 0.0}  # type: ignore[dict-item]
    assert "says nothing about a GPU" in page(PAGE, {"cpu.jsonl": text_of({"part": "machine", "figures": figures})})


def test_what_does_not_begin_with_a_machine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"docs/hardware/h\.jsonl does not begin with a machine"):
        page(PAGE, {"h.jsonl": text_of(LINES[1])})
    with pytest.raises(ValueError, match=r"docs/hardware\.md lacks the lines"):
        page("# Hardware\n", {})
