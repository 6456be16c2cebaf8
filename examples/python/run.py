"""Runs one command in a session, and exits as "sandbox-agent exec" does.

    python3 examples/python/run.py [--socket PATH] [--exec-id ID] [--timeout SECONDS] SESSION -- 'COMMAND'
"""

import argparse
import sys

from sandbox_agent import Agent, NotStarted, Uncertain

CODES = {"TIMED_OUT": 124, "KILLED": 123, "CANCELLED": 121, "NOT_STARTED": 122}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--socket", default="/run/sandbox-agent/exec.sock")
    p.add_argument("--exec-id")
    p.add_argument("--timeout", type=float)
    p.add_argument("session")
    p.add_argument("command")
    a = p.parse_args()
    try:
        result = Agent(a.socket).exec(a.session, a.command, exec_id=a.exec_id, timeout_seconds=a.timeout)
    except (NotStarted, Uncertain) as e:
        print(e, file=sys.stderr)
        if isinstance(e, Uncertain):
            return 120
        return 122 if e.result else 125
    sys.stdout.buffer.write(result["stdout"])
    sys.stderr.buffer.write(result["stderr"])
    if result["status"] == "EXITED":
        return result["exitCode"]
    if result["status"] == "SIGNALED":
        return 128 + result["signal"]
    return CODES[result["status"]]


if __name__ == "__main__":
    sys.exit(main())
