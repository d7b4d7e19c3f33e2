"""Parse the command line and run the command. Heavy modules are imported only where they are used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from expunge import __version__
from expunge.cli.audit import Audit, run_audit
from expunge.cli.bench import Bench, bench_command, run_bench
from expunge.cli.compare import Compare, run_compare
from expunge.cli.data import Data, data_command, run_data
from expunge.cli.demo import Demo, run_demo
from expunge.cli.fisher import Fisher, fisher_command, run_fisher
from expunge.cli.report import Report, report_command, run_bench_report, run_report
from expunge.cli.requests import (
    Prove,
    Undo,
    Unlearn,
    Verify,
    prove_command,
    run_prove,
    run_undo,
    run_unlearn,
    run_verify,
    undo_command,
    verify_command,
)
from expunge.cli.train import Train, run_train
from expunge.runtime.exits import ended, uninterrupted

Command = Demo | Compare | Train | Audit | Bench | Report | Data | Unlearn | Undo | Verify | Prove | Fisher
COMMANDS: dict[str, Callable[..., Any]] = {
    "demo": Demo,
    "compare": Compare,
    "train": Train,
    "audit": Audit,
    "bench": bench_command,
    "report": report_command,
    "data": data_command,
    "unlearn": Unlearn,
    "undo": undo_command,
    "verify": verify_command,
    "prove": prove_command,
    "fisher": fisher_command,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit code: 2 for a user's mistake, 1 for what broke, 130 for Ctrl-C."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    return ended(lambda: _main(args))


def _main(args: list[str]) -> int:
    if args == ["--version"]:
        print(f"expunge {__version__}")
        return 0
    with uninterrupted():
        command = _parsed(args)
    with _called_back(getattr(command, "task", None)):
        return run(command) or 0


@contextmanager
def _called_back(task: str | None) -> Iterator[None]:
    """What the code of a task file raises, as when its samples are read, is one line."""
    try:
        yield
    except (Exception, SystemExit):
        from expunge.requests.user_code import called_back

        with called_back(task):
            raise


def _parsed(args: list[str]) -> Command:
    import tyro

    # Set here, since tyro is not imported above.
    report_command.__annotations__["out"] = Annotated[str, tyro.conf.arg(aliases=("-o",))]
    for command, name in ((undo_command, "folder"), (verify_command, "receipt"), (prove_command, "folder"), (report_command, "results")):
        command.__annotations__[name] = Annotated[str, tyro.conf.arg(metavar=name.upper())]
    return tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="expunge",
        description="Take data out of a trained network. `expunge --version` prints the version.",
        args=args,
        config=(tyro.conf.DisallowNone,),  # the help of an option that may be left out: INT, not {None}|INT
    )


def run(command: Command) -> int | None:
    match command:
        case Demo():
            return run_demo(command)
        case Compare():
            return run_compare(command)
        case Train():
            run_train(command)
        case Audit():
            return run_audit(command)
        case Bench(do="report"):
            run_bench_report(command)
        case Bench():
            return run_bench(command)
        case Report():
            run_report(command)
        case Data():
            run_data(command)
        case Unlearn():
            run_unlearn(command)
        case Undo():
            run_undo(command)
        case Verify():
            return run_verify(command)
        case Prove():
            run_prove(command)
        case Fisher():
            run_fisher(command)
    return None


if __name__ == "__main__":
    sys.exit(main())
