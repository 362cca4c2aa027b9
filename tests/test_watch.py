"""`populora watch` on a terminal of the system, and the served page on its socket."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console

from tests.unfinished import as_it_was, ends
from trl_populora import __main__ as cli
from trl_populora.report.load import load_samples
from trl_populora.report.served import PageServer, ReportArguments, report
from trl_populora.report.watch import WatchArguments, _Look, excerpt, frame, sparkline, watch


def shown(run: Path, width: int = 100) -> str:
    """A frame as text."""
    out = io.StringIO()
    Console(file=out, width=width).print(frame(_Look(run), width))
    return out.getvalue()


class TestFrame:
    def test_of_a_run_that_is_not_there(self, tmp_path):
        assert shown(tmp_path / "later", 300).startswith(f"{tmp_path}/later is not there yet; waiting")

    def test_of_a_run_that_has_only_evaluated(self, finished, tmp_path):
        as_it_was(finished, tmp_path, 1)
        assert "has evaluated 1 time(s) and not logged a step yet" in re.sub(r"\s+", " ", shown(tmp_path, 300))

    def test_of_a_run_that_goes_on(self, finished, tmp_path):
        as_it_was(finished, tmp_path, 2)
        text = shown(tmp_path, 140)
        assert re.search(r"step 1 of 4 \| \d+ s so far \| \d+ s of steps to go \| last step \d+ s ago", text)

    @pytest.mark.parametrize("width", [80, 160])
    def test_of_a_finished_run_has_curves_members_and_the_last_task(self, finished, width):
        text = shown(finished, width)
        assert "step 4 of 4, finished" in text
        assert re.search(r"held-out solved +[▁-█]{3} +\d+ % +\d+ %", text)
        assert re.search(r"students' reward +[▁-█]{4} ", text)
        assert re.search(r"step 4, teacher_\d, \w+: (\d of 2 right|rejected: \w+)", text)
        members = json.loads((finished / "population.json").read_text())["members"]
        best = sorted(members, key=lambda member: -member["mu"])
        wanted = [member["name"] for role in ("teacher", "student") for member in best if member["role"] == role]
        assert re.findall(r"^ ?((?:teacher|student)_\d) +\d+\.\d ± ", text, re.MULTILINE) == wanted
        assert bool(re.search(r"range +step 4, teacher_", text)) == (width == 160), "the task is beside the curves"
        assert max(map(len, text.splitlines())) <= width

    def test_of_a_single_agent_and_of_a_kind_of_its_own(self, finished, tmp_path):
        as_it_was(finished, tmp_path, 9)
        population, metrics = tmp_path / "population.json", tmp_path / "metrics.jsonl"
        population.write_text(population.read_text().replace('"single_agent": false', '"single_agent": true'))
        metrics.write_text(metrics.read_text().replace('"curriculum/lines"', '"curriculum/open_ends"'))
        assert "| single agent" in shown(tmp_path)
        metrics.write_text(metrics.read_text().replace('"curriculum/open_ends": null', '"curriculum/open_ends": 2.5'))
        assert re.search(r"tasks: open ends +▄+ +2\.50", shown(tmp_path))

    def test_nothing_is_written(self, finished):
        before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
        shown(finished)
        assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


@pytest.mark.usefixtures("two_plots")
def test_files_that_go_away_while_they_are_read_are_read_at_the_next_look(finished, tmp_path):
    as_it_was(finished, tmp_path, 9)
    metrics, look, server = tmp_path / "metrics.jsonl", _Look(tmp_path), PageServer(tmp_path, 0)
    kept = metrics.rename(tmp_path / "kept")
    metrics.mkdir()  # it is there, and cannot be opened
    server.draw()
    assert "has not logged a step yet" in server.page
    assert look.now().history == []
    metrics.rmdir()
    kept.rename(metrics)
    server.draw()
    server.server_close()
    assert "steps: <b>4 of 4" in server.page
    assert len(look.now().history) == 4


def test_what_a_model_wrote_steers_no_terminal():
    assert excerpt("\x1b[2Jgone\r\x07[bold]\u202e\nnext\tline\nthird", 2) == "·[2Jgone··[bold]·\nnext    line\n..."


@pytest.mark.parametrize(
    ("values", "line"), [([0, 1], "▁█"), ([5, 5, 5], "▄▄▄"), ([0, 0, 1, 1, 0, 0], "▁█▁"), ([1], "▄")]
)
def test_a_line_of_blocks(values, line):
    assert sparkline(values, 3) == line


class Terminal:
    """A terminal of the system, with what was printed on it; one that nobody reads would block who writes."""

    def __init__(self) -> None:
        self.ours, theirs = os.openpty()
        self.file = os.fdopen(theirs, "w")
        self.console = Console(file=self.file, width=100)
        self.text, self.reader = b"", threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other side is closed
            while data := os.read(self.ours, 65536):
                self.text += data

    def printed(self) -> str:
        """All of it; nothing can be printed any more."""
        self.close()
        return self.text.decode()

    def close(self) -> None:
        self.file.close()
        self.reader.join(30)


ALTERNATE, NORMAL = "\x1b[?1049h", "\x1b[?1049l"


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    yield terminal
    terminal.close()
    os.close(terminal.ours)


class TestTerminal:
    def test_ctrl_c_gives_the_screen_back_and_leaves_the_last_frame(self, finished, tmp_path, terminal):
        as_it_was(finished, tmp_path, 3)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        watch(WatchArguments(str(tmp_path), seconds=0.1), terminal.console)
        screen, left = terminal.printed().split(NORMAL)
        assert ALTERNATE in screen
        assert "step 2 of 4" in left
        assert "\x1b[?25h" in screen + left, "the cursor is there again"

    def test_ends_with_the_run(self, finished, tmp_path, terminal):
        as_it_was(finished, tmp_path, 3)
        threading.Timer(0.5, ends, (finished, tmp_path)).start()
        watch(WatchArguments(str(tmp_path), seconds=0.1), terminal.console)
        screen, left = terminal.printed().split(NORMAL)
        assert "step 2 of 4" in screen
        assert "step 4 of 4, finished" in left

    def test_a_finished_run_and_once_are_one_frame(self, finished, tmp_path, terminal):
        watch(WatchArguments(str(finished)), terminal.console)
        watch(WatchArguments(str(tmp_path), once=True), terminal.console)
        text = terminal.printed()
        assert ALTERNATE not in text
        assert "step 4 of 4, finished" in text
        assert "not logged a step yet" in text


def test_the_command_prints_a_frame_where_there_is_no_terminal(finished, capsys):
    cli.main(["watch", str(finished)])
    assert "step 4 of 4, finished" in capsys.readouterr().out


def test_no_time_between_two_looks_is_refused(finished):
    with pytest.raises(SystemExit, match="^populora watch: `seconds` must be positive, got 0"):
        cli.main(["watch", str(finished), "--seconds", "0"])


def get(server: PageServer, path: str = "", **headers: str) -> tuple[str, dict]:
    with urllib.request.urlopen(urllib.request.Request(server.url + path, headers=headers)) as answer:
        return answer.read().decode(errors="replace"), dict(answer.headers)


@pytest.mark.usefixtures("two_plots")
class TestServer:
    def test_follows_a_run_from_before_its_first_step(self, finished, tmp_path):
        run = tmp_path / "run"
        with PageServer(run, 0) as server:
            server.draw()
            page, _ = get(server)
            versions = [get(server, "version")[0]]
            assert f"{run} has not logged a step yet" in page
            for lines, told in ((1, "has not logged a step yet"), (3, "steps: <b>2 of 4"), (9, "steps: <b>4 of 4")):
                as_it_was(finished, run, lines)
                server.draw()
                page, _ = get(server)
                assert told in page
                versions.append(get(server, "version")[0])
        assert len(set(versions)) == len(versions)
        assert {path.name for path in run.iterdir()} == {path.name for path in finished.iterdir()}, "it writes nothing"

    def test_draws_only_what_has_changed(self, finished):
        with PageServer(finished, 0) as server:
            server.draw()
            page = server.page
            server.draw()
            assert server.page is page

    def test_serves_rollouts_and_nothing_else(self, finished):
        with PageServer(finished, 0) as server:
            server.draw()
            page, _ = get(server)
            assert load_samples(finished)[0][0]["file"] in re.findall('<a href="([^"]+)"', page)
            with urllib.request.urlopen(server.url + "rollouts/step_00001.parquet") as answer:
                assert answer.read() == (finished / "rollouts/step_00001.parquet").read_bytes()
            for path in ("metrics.jsonl", "rollouts/../metrics.jsonl", "rollouts/step_00009.parquet", "%2e%2e/x"):
                with pytest.raises(urllib.error.HTTPError, match="404"):
                    get(server, path)

    def test_answers_no_other_name_and_runs_no_other_script(self, finished):
        with PageServer(finished, 0) as server:
            with pytest.raises(urllib.error.HTTPError, match="403"):
                get(server, Host=f"evil.example:{server.server_port}")
            page, headers = get(server, Host=f"localhost:{server.server_port}")
        (nonce,) = re.findall(r'<script nonce="([^"]+)">', page)
        assert f"script-src 'nonce-{nonce}'" in headers["Content-Security-Policy"]
        assert server.server_address[0] == "127.0.0.1"

    def test_a_port_that_is_taken_is_one_line(self, finished):
        with (
            PageServer(finished, 0) as server,
            pytest.raises(SystemExit, match="cannot be used .* leave `--port` out"),
        ):
            cli.main(["report", str(finished), "--watch", "--port", str(server.server_port)])

    def test_ctrl_c_ends_it(self, finished):
        said: list[str] = []

        def say(text: str) -> None:
            said.append(text)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

        report(ReportArguments(str(finished), watch=True), str(finished), None, say)
        (url,) = re.findall(r"http://127\.0\.0\.1:\d+/", said[0])
        with pytest.raises(urllib.error.URLError, match="refused"):
            urllib.request.urlopen(url)

    def test_writes_no_file_elsewhere(self, finished, tmp_path):
        with pytest.raises(SystemExit, match="^populora report: `--out` is where"):
            cli.main(["report", str(finished), "--watch", "--out", str(tmp_path)])
