"""The page of a run on a local address, drawn anew while the run goes on: `populora report --watch`."""

from __future__ import annotations

import re
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from trl_populora.report.load import load_figures, load_run, load_samples, stamp
from trl_populora.report.page import page, write_report
from trl_populora.report.plots import draw_plots


ADDRESS = "127.0.0.1"
EVERY = 5.0  # seconds between two looks at the files; a page takes a few to draw

# Puts what has changed in the place of the page's body, so that nobody loses their place; what was unfolded stays so.
SCRIPT = """
let seen = "VERSION";
setInterval(async () => {
  try {
    const version = await (await fetch("version", {cache: "no-store"})).text();
    if (version !== seen) {
      if (!document.querySelector("figure")) return location.reload();
      const text = await (await fetch(".", {cache: "no-store"})).text();
      const open = [...document.querySelectorAll("details[open]")].map(each => each.id);
      document.body.replaceChildren(...new DOMParser().parseFromString(text, "text/html").body.childNodes);
      for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    }
    seen = version;
    document.title = document.title.replace(/^not served any more: /, "");
  } catch {
    if (!document.title.startsWith("not served")) document.title = "not served any more: " + document.title;
  }
}, 3000);
"""


@dataclass
class ReportArguments:
    """What `populora report` needs."""

    run: str = field(metadata={"help": "Directory of a run, finished or not, or the Hub name of a population."})
    out: str | None = field(default=None, metadata={"help": "Where report.html and plots/ go; the run by default."})
    watch: bool = field(default=False, metadata={"help": "Serve the page on this machine and keep it up to date."})
    port: int = field(default=0, metadata={"help": "Port of --watch; a free one by default."})


def report(options: ReportArguments, run: str, out: str | None, say: Callable[[str], None]) -> None:
    """
    Writes the report of the local directory `run` into `out` (the run itself when `None`), or serves it.

    Raises:
        `ValueError`: If the run has not logged a step yet and is not watched, a file is broken, the port is taken, or
            `--out` is given together with `--watch`, which writes no file.
    """
    if not options.watch:
        name = None if Path(options.run).is_dir() else options.run
        say(f"Report written to {write_report(run, out, name)}.")
        return
    if options.out is not None:
        raise ValueError("`--out` is where a report is written to; `--watch` serves it and writes nothing.")
    try:
        server = PageServer(Path(run), options.port)
    except OSError as error:
        raise ValueError(
            f"port {options.port} cannot be used ({error}); leave `--port` out for a free one."
        ) from error
    with server:
        try:
            server.draw()
            say(f"The report of {run} is at {server.url}; Ctrl-C ends it. {_elsewhere(server.server_port)}")
            server.keep_up_to_date()
        except KeyboardInterrupt:  # the usual way out
            pass


def _elsewhere(port: int) -> str:
    return f"From another machine: `ssh -L {port}:{ADDRESS}:{port} <this machine>`."


class PageServer(ThreadingHTTPServer):
    """
    Serves the page of one run and its rollouts, on this machine only.

    As a context it answers requests in a thread of its own.

    Args:
        run (`Path`): The run's directory, also before its first step.
        port (`int`): 0 for a free one.

    Raises:
        `OSError`: If the port is taken.
    """

    daemon_threads = True

    def __init__(self, run: Path, port: int):
        super().__init__((ADDRESS, port), _Handler)
        self.run = run
        self.page, self.version = _waiting(run), "0"
        self._drawn: tuple | None = None

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def __enter__(self) -> PageServer:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self.shutdown()
        self.server_close()

    def keep_up_to_date(self) -> None:
        """Draws the page whenever the run has logged something; returns at Ctrl-C only."""
        while True:
            time.sleep(EVERY)
            self.draw()

    def draw(self) -> None:
        """Draws the page if the run has logged something since the last time."""
        seen = stamp(self.run)
        if seen == self._drawn:
            return
        try:
            begun = load_figures(self.run).history
            self.page = self._drawn_page() if begun else _waiting(self.run)
        except OSError:  # a run from the start has just moved an earlier one's files aside
            return
        self._drawn, self.version = seen, str(hash(seen))

    def _drawn_page(self) -> str:
        records, samples = load_run(self.run), load_samples(self.run)
        with tempfile.TemporaryDirectory() as place:  # not in the run, into which its own process draws
            return page(records, draw_plots(records, Path(place)), samples)


def _waiting(run: Path) -> str:
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>PopuLoRA report</title></head><body>'
        f"<p>{escape(str(run))} has not logged a step yet. The report appears here after its first one.</p>"
        "</body></html>"
    )


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if host not in (ADDRESS, "localhost"):  # a web page elsewhere whose name was made to lead here
            self.send_error(403)
        elif self.path == "/":
            nonce, version = secrets.token_urlsafe(), self.server.version
            script = f'<script nonce="{nonce}">{SCRIPT.replace("VERSION", version)}</script></head>'
            self._send(self.server.page.replace("</head>", script, 1).encode(), "text/html; charset=utf-8", nonce)
        elif self.path == "/version":
            self._send(self.server.version.encode(), "text/plain")
        elif re.fullmatch(r"/rollouts/step_[\w-]+\.parquet", self.path) and self._rollouts().is_file():
            self._send(self._rollouts().read_bytes(), "application/vnd.apache.parquet")
        else:
            self.send_error(404)

    def _rollouts(self) -> Path:
        return self.server.run / self.path.lstrip("/")

    def _send(self, body: bytes, kind: str, nonce: str = "") -> None:
        self.send_response(200)
        # Our script and no other, should a model's text ever get through as one.
        policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; connect-src 'self'"
        self.send_header("Content-Security-Policy", f"{policy}; script-src 'nonce-{nonce}'")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments) -> None:
        """A line per request is no use to anybody."""
