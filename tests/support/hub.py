"""A stand-in for the Hugging Face hub: an HTTP server that speaks what its client asks to fetch, look up and push."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_stand_in"
# A revision's commit: 40 hex digits of its contents.
_COMMIT_DIGITS = 40


@dataclass
class Hub:
    """Contents of a hub.

    Attributes:
        models: files by name of each model's revisions, by model and revision.
        gated: models whose terms nobody accepted.
        requests: methods and paths that were asked for.
    """

    models: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    address: str = ""

    def commit(self, model: str, revision: str) -> str:
        contents = repr((model, sorted(self.models[model][revision].items()))).encode()
        return hashlib.sha1(contents).hexdigest()[:_COMMIT_DIGITS]

    def revision(self, model: str, name: str) -> str | None:
        """The revision that a name or a commit stands for; None where there is none."""
        revisions = self.models[model]
        return next((each for each in revisions if name in (each, self.commit(model, each))), None)


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub on a port of this machine."""
    hub = Hub()

    class Handler(_Handler):
        contents = hub

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    contents: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0].replace("%2F", "/")
        self.contents.requests.append(f"{self.command} {path}")
        for pattern, answer in _ROUTES:
            if found := re.fullmatch(pattern, path):
                getattr(self, answer)(body, *found.groups())
                return
        self._send(404, {"error": f"the stand-in knows no {path}"})

    def _send(self, status: int, content: Any, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _found(self, model: str, revision: str) -> str | None:
        """A model's revision; where it is not given, that is answered."""
        hub = self.contents
        if model in hub.gated:
            self._send(403, {"error": "gated"}, X_Error_Code="GatedRepo")
        elif model not in hub.models:
            self._send(404, {"error": "none"}, X_Error_Code="RepoNotFound")
        elif (name := hub.revision(model, revision)) is None:
            self._send(404, {"error": "none"}, X_Error_Code="RevisionNotFound")
        else:
            return name
        return None

    def _info(self, _body: bytes, model: str, revision: str | None) -> None:
        if name := self._found(model, revision or "main"):
            files = [{"rfilename": file} for file in self.contents.models[model][name]]
            self._send(200, {"id": model, "sha": self.contents.commit(model, name), "siblings": files})

    def _tree(self, _body: bytes, model: str, revision: str) -> None:
        if name := self._found(model, revision):
            files = self.contents.models[model][name]
            self._send(200, [_entry(file, data) for file, data in files.items()])

    def _file(self, _body: bytes, model: str, revision: str, file: str) -> None:
        if name := self._found(model, revision):
            data = self.contents.models[model][name].get(file)
            commit = self.contents.commit(model, name)
            if data is None:
                self._send(404, {"error": "none"}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            else:
                self._send(200, data, ETag=f'"{_oid(data)}"', X_Repo_Commit=commit)

    def _who(self, _body: bytes) -> None:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            self._send(200, {"type": "user", "name": "tester", "orgs": []})
        else:
            self._send(401, {"error": "Invalid username or password."})

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        model = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        self.contents.models.setdefault(model, {"main": {}})
        self._send(200, {"url": f"{self.contents.address}/{model}", "name": model})

    def _preupload(self, body: bytes, _model: str, _revision: str) -> None:
        files = json.loads(body)["files"]
        plain = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
        self._send(200, {"files": plain})

    def _commit(self, body: bytes, model: str, revision: str) -> None:
        for line in body.splitlines():
            entry = json.loads(line)
            files, value = self.contents.models[model][revision], entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        commit = self.contents.commit(model, revision)
        address = f"{self.contents.address}/{model}/commit/{commit}"
        self._send(200, {"success": True, "commitOid": commit, "commitUrl": address, "hookOutput": ""})

    def _valid(self, _body: bytes) -> None:
        self._send(200, {"errors": [], "warnings": []})


_MODEL = r"([\w.-]+/[\w.-]+)"
_ROUTES = [
    (r"/api/whoami-v2", "_who"),
    (r"/api/validate-yaml", "_valid"),
    (r"/api/repos/create", "_create"),
    (rf"/api/models/{_MODEL}(?:/revision/(.+))?", "_info"),
    (rf"/api/models/{_MODEL}/tree/([^/]+)", "_tree"),
    (rf"/api/models/{_MODEL}/preupload/([^/]+)", "_preupload"),
    (rf"/api/models/{_MODEL}/commit/([^/]+)", "_commit"),
    (rf"/{_MODEL}/resolve/([^/]+)/(.+)", "_file"),
]


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _entry(file: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": file, "size": len(data), "oid": _oid(data)}
