"""`python -m mnist_trainer runs …`: list, show, rename, delete, export and import runs."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import TrainConfig
from .errors import ConfigError, MnistTrainerError, RunFolderError, RunNotFoundError

if TYPE_CHECKING:
    from .run import Run

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def add_runs(commands: Any) -> None:
    """Add the command `runs` and its own commands to the parser."""
    runs = commands.add_parser("runs", help="list, show, rename, delete, export or import runs")
    runs.add_argument("--json", action="store_true", help="one JSON object a line")
    runs.set_defaults(command=_list)
    actions = runs.add_subparsers(title="commands", metavar="COMMAND", description="without one: list")

    def add(name: str, command: Any, text: str) -> Any:
        parser = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        # SUPPRESS: a default here would undo the `--json` of `runs --json list`.
        parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="JSON, an object a line")
        parser.set_defaults(command=command)
        return parser

    add("list", _list, "list the runs, newest first")
    add("show", _show, "show one run: settings, state, epochs").add_argument("run", metavar="ID", help=ID_HELP)
    rename = add("rename", _rename, "give a run a name, or a note")
    rename.add_argument("run", metavar="ID", help=ID_HELP)
    rename.add_argument("name", metavar="NAME", nargs="?", help="its new name; '' takes it away")
    rename.add_argument("--note", metavar="TEXT", help="its new note; '' takes it away")
    delete = add("delete", _delete, "delete runs for good")
    delete.add_argument("runs", metavar="ID", nargs="+")
    delete.add_argument("--yes", action="store_true", help="do not ask")
    export = add("export", _export, "write a run's folder to a zip")
    export.add_argument("run", metavar="ID", help=ID_HELP)
    export.add_argument("file", metavar="FILE", nargs="?", help="default: ID.zip, here")
    add("import", _import, "put exported runs among the runs").add_argument("files", metavar="FILE", nargs="+")


ID_HELP = "as `runs list` shows it; 'latest' is the newest"


def run_as_json(run: "Run") -> dict[str, Any]:
    """A run in one JSON object, without its steps."""
    state = run.state
    return {
        "id": run.id,
        "name": run.about.name,
        "note": run.about.note,
        "folder": str(run.folder.path),
        "created_at": run.origin.created_at,
        "parent": run.origin.parent or None,
        "status": state.status,
        "message": state.message or run.problem,
        "settings": run.config.to_json(),
        "processes": state.processes,
        "steps": run.snapshot().steps if run.is_live or state.steps is None else state.steps,
        "epochs": len(run.epochs),
        "best_val_accuracy": run.best_val_accuracy,
        "test_accuracy": state.test_accuracy,
        "test_loss": state.test_loss,
        "seconds": round(run.seconds, 3),
        "images_per_second": run.images_per_second,
    }


def settings_text(config: TrainConfig) -> str:
    """All settings in a line."""
    epochs = f"{config.epochs} epoch" + "s" * (config.epochs != 1)
    return (
        f"{config.device}, {epochs}, lr {config.learning_rate:g}, hidden {config.hidden_size}, "
        f"batch {config.batch_size}, {config.optimizer}, seed {config.seed}, {config.pipeline}"
    )


def _list(options: argparse.Namespace) -> int:
    from .runs import RunManager

    runs = RunManager()
    for run in runs.all():
        if options.json:
            print(json.dumps(run_as_json(run)))
        else:
            test = run.state.test_accuracy
            accuracy = "" if test is None else f"test accuracy {test:.2%}"
            name = f"“{run.about.name}” " if run.about.name else ""
            print(f"{run.id:24} {run.state.status:12} {accuracy:22} {name}{settings_text(run.config)}")
    for run_id, problem in runs.damaged().items():
        print(json.dumps({"id": run_id, "error": problem}) if options.json else f"{run_id:24} {'damaged':12} {problem}")
    return OK


def _show(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from .runs import RunManager

    run = RunManager().get(options.run)
    snapshot = run.snapshot()  # also finds what is wrong with it
    if options.json:
        more = {
            "epochs": [asdict(epoch) for epoch in snapshot.epochs],
            "learning_rates": [asdict(rate) for rate in snapshot.rates],
            "changes": [asdict(change) for change in run.state.changes],
        }
        print(json.dumps({**run_as_json(run), **more}))
        return OK
    print(f"{run.id}  {run.about.name}".rstrip())
    for line in (run.about.note, run.problem, run.state.message, settings_text(run.config)):
        if line:
            print(f"  {line}")
    if run.origin.parent:
        print(f"  continued from run {run.origin.parent} after step {run.origin.parent_step:,}")
    if run.state.processes > 1:
        print(f"  trained by {run.state.processes} processes together")
    for change in run.state.changes:
        print(f"  {change.at}  {change.status} at step {change.step:,}")
    if run.state.status == "interrupted":
        print("  interrupted")
    for rate in snapshot.rates:
        print(f"  learning rate {rate.learning_rate:g} after step {rate.step:,}")
    for epoch in snapshot.epochs:
        print(f"  Epoch [{epoch.epoch}], val_loss: {epoch.val_loss:.4f}, val_acc: {epoch.val_accuracy:.4f}")
    if run.state.test_accuracy is not None:
        print(f"  test accuracy {run.state.test_accuracy:.2%}, {run.seconds:.1f} s")
    return OK


def _rename(options: argparse.Namespace) -> int:
    from .runs import RunManager

    if options.name is None and options.note is None:
        raise ConfigError("Give a name, or --note with a text.")
    run = RunManager().get(options.run)
    run.set_about(options.name, options.note)
    print(json.dumps(run_as_json(run)) if options.json else f"Run {run.id} is called “{run.name}” now.")
    return OK


def _delete(options: argparse.Namespace) -> int:
    from .runs import RunManager

    if not options.yes:
        if not sys.stdin.isatty():
            raise ConfigError("Deleting asks first, and here nobody can answer. Add --yes if you mean it.")
        question = f"Delete {len(options.runs)} run{'s' * (len(options.runs) != 1)} for good? [y/N] "
        if input(question).strip().lower() not in ("y", "yes"):
            return FAILED
    runs, status = RunManager(), OK
    for run_id in options.runs:
        try:
            run_id = runs.get(run_id).id if run_id == "latest" else run_id  # noqa: PLW2901
            runs.delete(run_id)
        except MnistTrainerError as error:
            print(error, file=sys.stderr)
            status = USAGE if isinstance(error, RunNotFoundError) else FAILED
        else:
            print(json.dumps({"deleted": run_id}) if options.json else f"Deleted {run_id}.")
    runs.shutdown()
    return status


def _export(options: argparse.Namespace) -> int:
    from .archive import export_run
    from .runs import RunManager

    run = RunManager().get(options.run)
    target = Path(options.file or f"{run.id}.zip")
    try:
        with target.open("xb") as file:
            try:
                export_run(run.folder, file)
            except BaseException:
                target.unlink()
                raise
    except FileExistsError:
        raise ConfigError(f"{target} is there already. Name another file.") from None
    except OSError as error:
        raise RunFolderError(f"{target} cannot be written ({error.strerror or error}).") from error
    print(json.dumps({"exported": run.id, "file": str(target)}) if options.json else f"Wrote {target}.")
    return OK


def _import(options: argparse.Namespace) -> int:
    from .runs import RunManager

    runs, status = RunManager(), OK
    for name in options.files:
        try:
            with Path(name).open("rb") as file:
                run_id = runs.import_run(file, name).id
        except OSError as error:
            print(f"{name} cannot be read ({error.strerror or error}).", file=sys.stderr)
            status = FAILED
        except MnistTrainerError as error:
            print(error, file=sys.stderr)
            status = FAILED
        else:
            print(json.dumps({"imported": run_id, "file": name}) if options.json else f"Imported {name} as {run_id}.")
    return status
