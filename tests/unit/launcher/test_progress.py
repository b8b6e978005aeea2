"""Progress display: in place on a terminal, few lines elsewhere."""

import io

from services.launcher.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_prints_at_most_one_line_a_tenth_when_not_on_a_terminal() -> None:
    stream = io.StringIO()
    with ProgressBar(stream) as progress:
        progress.start("fetching")
        for done in range(0, 1001):
            progress.update(done << 20, 1000 << 20)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "fetching"
    assert lines[1] == "fetching: 0% (0.0 of 1000.0 MiB)"
    assert lines[-1] == "fetching: 100% (1000.0 of 1000.0 MiB)"
    assert len(lines) == 12


def test_progress_redraws_one_line_on_a_terminal() -> None:
    stream = Terminal()
    with ProgressBar(stream) as progress:
        progress.start("fetching")
        progress.update(1 << 20, 2 << 20)
        progress.update(2 << 20, 2 << 20)
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith("100% 2.0 of 2.0 MiB\n")


def test_progress_shows_no_figure_when_the_total_is_unknown() -> None:
    stream = io.StringIO()
    with ProgressBar(stream) as progress:
        progress.start("fetching")
        progress.update(5, 0)
    assert stream.getvalue() == "fetching\n"
