"""The benchmark of guessing: what it reads from the metrics, and its table."""

from scripts.bench.speculation import Figures, Row, format_table, sum_guesses

METRICS = """# TYPE treadle_gateway_draft_tokens_total counter
treadle_gateway_draft_tokens_total{surface="chat"} 4.0
treadle_gateway_draft_tokens_total{surface="completion"} 6.0
treadle_gateway_accepted_tokens_total{surface="completion"} 5.0
treadle_gateway_draft_tokens_created{surface="completion"} 1.7e+09
"""


def test_guesses_of_all_surfaces_are_added_up() -> None:
    assert sum_guesses(METRICS) == {"draft": 10.0, "accepted": 5.0}


def test_table_shows_medians_of_the_rounds_and_the_share_that_came_true() -> None:
    row = Row("edit", 8, 4, 0.0)
    plain = {"edit c8": [Figures(10.0, 8.0, 0, 0), Figures(30.0, 4.0, 0, 0), Figures(20.0, 5.0, 0, 0)]}
    guessing = {"edit c8": [Figures(30.0, 3.0, 60, 30), Figures(10.0, 9.0, 40, 30), Figures(40.0, 2.0, 100, 90)]}
    line = format_table([row], plain, guessing).splitlines()[-1]
    assert line == "| edit c8 | 20.0 | 30.0 | 1.50 × | 5.00 | 3.00 | 75% of 200 |"


def test_row_without_guesses_says_so() -> None:
    figures = {"ids c1": [Figures(10.0, 8.0, 0, 0)]}
    assert format_table([Row("ids", 1, 4, 1.0)], figures, figures).endswith("| none guessed |")
