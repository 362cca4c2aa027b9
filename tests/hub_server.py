"""A small Hub on the loopback interface, for the real `huggingface_hub` client: create, upload (LFS too), download."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse


LFS = (".safetensors", ".parquet", ".pt", ".png")


API = r"/api/(models|datasets|spaces)/([^/]+/[^/]+)"  # of a repository


def _repo(match: re.Match) -> str:
    return match[2] if match[1] == "models" else f"{match[1]}/{match[2]}"


class HubServer(ThreadingHTTPServer):
    """
    Repositories in memory.

    Attributes:
        repos (`dict[str, dict[str, bytes]]`): Contents of the main branch by repository and path; a dataset's name
            begins with `datasets/`.
        tokens (`dict[str, str]`): `"write"` or `"read"` by token.
        messages (`list[str]`): Commit messages, in order.
        asked (`dict[str, dict]`): How each repository was asked for.
        dies_at (`str` or `None`): `"commit"` or `"lfs"`: the connection is closed there, without an answer.
        delays (`list[float]`): Seconds that the next commits take, in the order in which they arrive.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.tokens = {"hf_writer": "write", "hf_reader": "read"}
        self.messages: list[str] = []
        self.asked: dict[str, dict[str, Any]] = {}
        self.dies_at: str | None = None
        self.delays: list[float] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        pass  # clients that hang up are part of the tests


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        path = unquote(urlparse(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if self._role() is None:
            return self._json({"error": "Invalid credentials"}, 401)
        if self._role() != "write":
            return self._json({"error": "You don't have the rights to write"}, 403)
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if asked.get("type", "model") != "model":
                repo = f"{asked['type']}s/{repo}"
            self.server.asked[repo] = asked
            self.server.repos.setdefault(repo, {})
            return self._json({"url": f"{self.server.url}/{repo}", "name": repo})
        if match := re.fullmatch(API + r"/paths-info/[^/]+", path):
            asked = parse_qs(body.decode())["paths"] if b"paths=" in body else json.loads(body)["paths"]
            return self._json([entry for entry in self._entries(_repo(match)) if entry["path"] in asked])
        if match := re.fullmatch(API + r"/preupload/main", path):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LFS) else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for file in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [self._lfs_object(asked["oid"], asked["size"]) for asked in json.loads(body)["objects"]]
            return self._json({"transfer": "basic", "objects": objects}, kind="application/vnd.git-lfs+json")
        if match := re.fullmatch(API + r"/commit/main", path):
            return self._commit(_repo(match), body)
        return self._json({"error": f"unknown {path}"}, 404)

    def _lfs_object(self, oid: str, size: int) -> dict[str, Any]:
        known = {} if oid in self.server.objects else {"actions": {"upload": {"href": f"{self.server.url}/lfs/{oid}"}}}
        return {"oid": oid, "size": size, **known}

    def do_PUT(self):
        if self.server.dies_at == "lfs":
            return self._hang_up()
        content = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == oid
        self.server.objects[oid] = content
        return self._json({})

    def _commit(self, repo: str, body: bytes):
        if self.server.dies_at == "commit":
            return self._hang_up()
        if self.server.delays:
            time.sleep(self.server.delays.pop(0))
        lines = [json.loads(line) for line in body.splitlines()]
        files = self.server.repos[repo]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.server.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        sha = self._sha(repo)
        return self._json({"commitUrl": f"{self.server.url}/{repo}/commit/{sha}", "commitOid": sha, "success": True})

    def do_GET(self):
        url = urlparse(self.path)
        path = unquote(url.path)
        if match := re.fullmatch(API + r"(/revision/[^/]+)?", path):
            repo = _repo(match)
            if repo not in self.server.repos:
                return self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            names = [{"rfilename": name} for name in self.server.repos[repo]]
            return self._json({"id": match[2], "sha": self._sha(repo), "siblings": names, "private": False})
        if match := re.fullmatch(API + r"/tree/[^/]+", path):
            return self._json(self._entries(_repo(match)))
        if match := re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            return self._file(match[1], match[2])
        return self._json({"error": f"unknown {path}"}, 404)

    do_HEAD = do_GET

    def _entries(self, repo: str) -> list[dict[str, Any]]:
        """All files of a repository; it is flat enough to be listed whole."""
        files = self.server.repos[repo]
        return [{"type": "file", "path": n, "size": len(c), "oid": "0" * 40} for n, c in files.items()]

    def _file(self, repo: str, name: str):
        content = self.server.repos.get(repo, {}).get(name)
        if content is None:
            code = "EntryNotFound" if repo in self.server.repos else "RepoNotFound"
            return self._json({"error": code}, 404, {"X-Error-Code": code})
        etag = hashlib.sha256(content).hexdigest()
        return self._send(
            content, 200, "application/octet-stream", {"ETag": f'"{etag}"', "X-Repo-Commit": self._sha(repo)}
        )

    def _hang_up(self):
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)  # closing is not enough: the handler's own files keep it open

    def _sha(self, repo: str) -> str:
        state = json.dumps({n: hashlib.sha256(c).hexdigest() for n, c in sorted(self.server.repos[repo].items())})
        return hashlib.sha1(state.encode()).hexdigest()

    def _role(self) -> str | None:
        return self.server.tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def _json(self, value: Any, status: int = 200, headers: dict | None = None, kind: str = "application/json"):
        self._send(json.dumps(value).encode(), status, kind, headers or {})

    def _send(self, content: bytes, status: int, kind: str, headers: dict):
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
