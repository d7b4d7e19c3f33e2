"""Start commands in processes that are forked from one which has imported all: a start takes milliseconds, and 100 kills half a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import expunge

PATIENCE = 120.0
SOURCE = str(Path(expunge.__file__).resolve().parents[1])
SERVER = """
import json, os, sys
import expunge.cli.commands
from expunge.training import keeping

main, answers = expunge.cli.commands.main, os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
keeping.EVERY = keeping.SHARE = keeping.WORTH = 0.0  # every state is written, of trainings of milliseconds too
for line in sys.stdin:
    asked = json.loads(line)
    if "wait" in asked:
        _, status = os.waitpid(asked["wait"], 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), file=answers, flush=True)
        continue
    if asked["warm"]:  # what is imported at the first use, is here
        os.chdir(asked["folder"])
        print(json.dumps(main(asked["command"])), file=answers, flush=True)
        continue
    child = os.fork()
    if not child:
        code = 70
        try:
            log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1), os.dup2(log, 2)
            os.chdir(asked["folder"])
            code = main(asked["command"])
            sys.stdout.flush(), sys.stderr.flush()
        finally:
            os._exit(code)
    print(json.dumps(child), file=answers, flush=True)
"""


class Running:
    """A command that was started."""

    def __init__(self, commands: Commands, process: int) -> None:
        self.commands, self.process = commands, process

    def is_alive(self) -> bool:
        """Whether it has not ended; its number is its own until it is waited for."""
        state = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"

    def kill(self) -> None:
        os.kill(self.process, 9)

    def wait(self) -> int:
        """Its exit code, -9 where it was killed."""
        deadline = time.monotonic() + PATIENCE
        while self.is_alive():
            assert time.monotonic() < deadline, "it does not end"
            time.sleep(0.001)
        return self.commands.asked({"wait": self.process})


def server() -> subprocess.Popen[str]:
    """The process that has imported all; a context, at whose end it ends."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE}
    return subprocess.Popen([sys.executable, "-c", SERVER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class Commands:
    """Starts commands of expunge in a folder."""

    def __init__(self, server: subprocess.Popen[str], folder: Path) -> None:
        self.server, self.folder, self.log = server, folder, folder.parent / f"{folder.name}.log"

    def asked(self, what: dict[str, object]) -> int:
        self.server.stdin.write(json.dumps(what) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def start(self, *command: str) -> Running:
        return Running(self, self.asked({"command": command, "folder": str(self.folder), "log": str(self.log), "warm": False}))

    def warm(self, *command: str) -> None:
        """Run a command in the process from which others are forked."""
        assert self.asked({"command": command, "folder": str(self.folder), "warm": True}) == 0

    def run(self, *command: str) -> float:
        """To the end; its seconds."""
        began = time.monotonic()
        assert self.start(*command).wait() == 0, self.log.read_text()
        return time.monotonic() - began
