"""Curves: what a person reads off them, and what a reader without eyes or colours is told."""

import re
from xml.etree import ElementTree

from agentic_opd.report.curves import HEIGHT, WIDTH, HintedTurns, correction_curve, score_curve
from agentic_opd.wire.brake import Evaluation


def figure_of(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html)


def test_a_score_is_higher_on_the_page_if_it_is_higher_and_a_roll_back_is_a_cross() -> None:
    rows = [Evaluation(0, 0.2, 32, False), Evaluation(5, 0.6, 32, False), Evaluation(10, 0.1, 32, True)]
    figure = figure_of(score_curve("a <learner>", [*rows, Evaluation(12, 1.0, 32, False)]))
    points = [float(circle.get("cy", "")) for circle in figure.iter("circle")]
    assert points == sorted(points, reverse=True)
    (cross,) = figure.iter("path")
    assert [title.text for title in cross] == ["version 10: 0.100 over 32 tasks, rolled back"]
    (line,) = figure.iter("polyline")
    assert len(line.get("points", "").split()) == 3, "the line leaves out what was rolled back"
    (drawing,) = figure.iter("svg")
    described = drawing.get("aria-label", "")
    assert described.startswith("Held-out score of a <learner>. version 0: 0.200 over 32 tasks; ")
    numbers = [float(number) for number in re.findall(r'(?:[xy][12]?|c[xy])="([-0-9.]+)"', score_curve("", rows))]
    assert 0 <= min(numbers) <= max(numbers) <= max(WIDTH, HEIGHT)
    table = [[cell.text or "" for cell in row] for row in figure.iter("tr")]
    assert table[3] == ["10", "0.100", "32", "rolled back"]


def test_many_sessions_are_a_few_means_and_none_is_said() -> None:
    sessions = [HintedTurns(4, 2)] * 50 + [HintedTurns(4, 0)] * 50
    figure = figure_of(correction_curve("", sessions))
    rows = [[cell.text for cell in row] for row in figure.iter("tr")][1:]
    assert len(rows) == 20
    assert (rows[0], rows[-1]) == (["1 to 5", "2.00", "20"], ["96 to 100", "0.00", "20"])
    (single,) = list(figure_of(correction_curve("", [HintedTurns(2, 0)])).iter("circle"))
    assert 0 < float(single.get("cx", "")) < WIDTH
    assert "nothing to show yet" in correction_curve("", [])
