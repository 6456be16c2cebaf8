"""A client of sandbox-agent for Python 3.9 or newer: the standard library, JSON over the unix socket, nothing else.

    agent = Agent("/run/sandbox-agent/exec.sock")
    agent.call("SessionService/CreateSession", {"sessionId": "s1", "workspace": {...}})
    result = agent.exec("s1", "make test", exec_id="job-17-test")

It never runs anything twice: exec() asks a lost connection again with the same id and request. It verifies each receipt with
its sandbox's key (ed25519.py), and compares the answer with it. The key is what the agent said of the sandbox when it was
first seen, and is pinned from then on: a program that may be restarted stores Agent.keys and puts it back.

The protocol is Connect's: POST /sandbox.v1.SERVICE/METHOD with a JSON body; an error has another HTTP status than 200 and
the body {"code": ..., "message": ...}. Numbers of 64 bits are strings in JSON, bytes are base64, and fields that are zero
are left out: no "exitCode" is exit code 0.
"""

import base64
import hashlib
import http.client
import json
import secrets
import socket
import struct
import time

import ed25519


class AgentError(Exception):
    """The agent's answer to a call is an error. code is Connect's, for example "not_found"."""

    def __init__(self, code, message):
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


class NoAgent(Exception):
    """The socket can't be dialled: nothing was sent."""


class ConnectionLost(Exception):
    """There was no answer: whether the agent did what it was asked for is not known."""


class ExecError(Exception):
    """A command whose end is not known as a fact: NotStarted or Uncertain. result is the agent's answer, if there is one."""

    def __init__(self, exec_id, why, result=None):
        super().__init__(f"exec {exec_id}: {why}")
        self.exec_id, self.result = exec_id, result


class NotStarted(ExecError):
    """It certainly did not run. With a result its id is used up; without one it may be used again."""


class Uncertain(ExecError):
    """It may have run, wholly, partly or not at all: look before you repeat it, or ask again with the same id and request."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost")
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)


class Agent:
    """Calls one agent. Each call has a connection of its own, so threads may share it."""

    def __init__(self, path="/run/sandbox-agent/exec.sock", retry_for=60.0):
        self.path, self.retry_for = path, retry_for
        self.keys = {}  # the public keys of sandboxes by (session, sandbox), base64

    def call(self, method, request):
        """One call, for example "SessionService/GetSession". It is never repeated by itself."""
        connection = _UnixConnection(self.path)
        try:
            try:
                connection.connect()
            except OSError as e:
                raise NoAgent(f"{self.path}: {e}") from e
            try:
                connection.request("POST", "/sandbox.v1." + method, json.dumps(request), {"Content-Type": "application/json"})
                response = connection.getresponse()
                body = json.loads(response.read())
            except (OSError, http.client.HTTPException, ValueError) as e:
                raise ConnectionLost(f"{method}: {e!r}") from e
            if response.status != 200:
                raise AgentError(body.get("code", "unknown"), body.get("message", ""))
            return body
        finally:
            connection.close()

    def exec(self, session, command, exec_id=None, timeout_seconds=None, labels=None, owner_epoch=0):
        """Runs a command and waits until nothing of it is left, or gives the answer of the exec that has this id.

        The answer has "stdout" and "stderr" as bytes. A non-zero exit code is no exception. Raises NotStarted or Uncertain.
        """
        exec_id = exec_id or f"x-{secrets.token_hex(8)}"
        request = {"sessionId": session, "execId": exec_id, "command": command, "labels": labels or {}, "ownerEpoch": owner_epoch}
        if timeout_seconds is not None:
            request["timeoutSeconds"] = timeout_seconds
        return self._read(request, self._ask(request))

    def _ask(self, request):
        exec_id, asked, since, wait = request["execId"], False, None, 0.05
        while True:
            try:
                return self.call("ExecService/Exec", request)["result"]
            except NoAgent as e:
                error, step = e, "again" if asked else "refused"
            except ConnectionLost as e:
                error, step = e, "again"
            except AgentError as e:
                error, step = e, self._after(e.code, asked, request)
            if step == "refused":
                raise NotStarted(exec_id, error) from error
            asked, since = True, since or time.monotonic()
            if step == "unknown" or time.monotonic() - since > self.retry_for:
                raise Uncertain(exec_id, error) from error
            time.sleep(wait)
            wait = min(2 * wait, 2.0)

    def _after(self, code, asked, request):
        """What follows from a refusal. asked: an earlier attempt was lost, and may have started the command."""
        if code == "already_exists":  # the id is another request's
            return "refused"
        if code == "failed_precondition" or code == "unavailable" and not asked:
            return self._look_up(request)
        if code in ("unavailable", "resource_exhausted") and asked:
            return "again"
        if code in ("invalid_argument", "not_found", "permission_denied", "resource_exhausted", "unimplemented"):
            return "unknown" if asked else "refused"
        return "unknown"

    def _look_up(self, request):
        """The record says whether what was refused had run all the same."""
        try:
            self.call("ExecService/GetExec", {"sessionId": request["sessionId"], "execId": request["execId"]})
        except (NoAgent, ConnectionLost):
            pass
        except AgentError as e:
            if e.code == "not_found":
                return "refused"
            if e.code in ("failed_precondition", "data_loss"):  # it ran, and its record has expired or is damaged
                return "unknown"
        return "again"

    def _read(self, request, result):
        exec_id, status = request["execId"], result.get("status", "")
        for stream in ("stdout", "stderr"):
            result[stream] = base64.b64decode(result.get(stream, ""))
        result.setdefault("exitCode", 0)
        try:
            _compare(request, result)
            if "receipt" in result:
                self._verify(request["sessionId"], result)
        except (AgentError, NoAgent, ConnectionLost) as e:
            raise Uncertain(exec_id, f"the key of its sandbox can't be had: {e}") from e
        except (ValueError, KeyError, TypeError) as e:
            raise Uncertain(exec_id, f"the answer is not its receipt's: {e!r}") from e
        if status in ("EXITED", "SIGNALED", "TIMED_OUT", "KILLED", "CANCELLED"):
            return result
        kind = NotStarted if status == "NOT_STARTED" else Uncertain
        raise kind(exec_id, f"{status}: {result.get('reason', '')}", result)


    def _verify(self, session, result):
        """Refuses a receipt that its sandbox has not signed."""
        name = (session, result["sandboxId"])
        if name not in self.keys:
            found = self.call("SessionService/GetSession", {"sessionId": session, "sandboxId": result["sandboxId"]})
            self.keys[name] = found["sandboxKey"]["publicKey"]
        if not signed_by(base64.b64decode(self.keys[name]), base64.b64decode(result["receipt"])):
            raise ValueError("the receipt's signature is not its sandbox's")


def signed_by(key, envelope):
    """Says whether a DSSE envelope, for example the file of a receipt, has a signature of the key (32 bytes)."""
    e = json.loads(envelope)
    kind, payload = e["payloadType"].encode(), base64.b64decode(e["payload"])
    message = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
    return any(ed25519.verify(key, message, base64.b64decode(s["sig"])) for s in e["signatures"])


def receipt(result):
    """What a result's receipt says; exec() has verified it."""
    return json.loads(base64.b64decode(json.loads(base64.b64decode(result["receipt"]))["payload"]))["predicate"]


def request_digest(request):
    """The digest of a request as a receipt holds it: each text preceded by its length, 8 bytes, big-endian."""
    h = hashlib.sha256()

    def number(n):
        h.update(struct.pack(">Q", n))

    def text(s):
        number(len(s.encode()))
        h.update(s.encode())

    labels = request.get("labels", {})
    text("sandbox-agent/request/v1")
    text(request["sessionId"])
    text(request["command"])
    number(int(request.get("timeoutSeconds", 0) * 1000 + 0.5))
    number(len(labels))
    for key in sorted(labels, key=str.encode):
        text(key)
        text(labels[key])
    return h.hexdigest()


def _compare(request, result):
    """Refuses an answer that is another exec's, or whose output is not what was hashed."""
    if (result["sessionId"], result["execId"]) != (request["sessionId"], request["execId"]):
        raise ValueError("it is about another exec")
    if "receipt" not in result:
        if result.get("status") in ("EXITED", "SIGNALED", "TIMED_OUT", "KILLED") or result["stdout"] or result["stderr"]:
            raise ValueError("there is no receipt")
        return
    signed = receipt(result)
    if signed["sandboxId"] != result["sandboxId"] or result.get("nonce", signed["nonce"]) != signed["nonce"]:
        raise ValueError("sandbox or nonce differ")
    said = [result["sessionId"], result["execId"], request_digest(request), int(result["generation"]), result["exitCode"]]
    if said != [signed[k] for k in ("sessionId", "execId", "requestDigest", "generation", "exitCode")]:
        raise ValueError("session, exec, request, generation or exit code differ")
    if not signed.get("cancelled") and result["status"] != signed["status"]:
        raise ValueError("the status differs")
    for stream in ("stdout", "stderr"):
        if hashlib.sha256(result[stream]).hexdigest() != signed[stream]["keptSha256"]:
            raise ValueError(f"{stream} differs")
