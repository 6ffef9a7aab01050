"""The command line's `bench`: a table of how fast it trains here."""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .cli_runs import OK
from .config import TrainConfig

if TYPE_CHECKING:
    from .bench import Parts, Row

DESCRIPTION = """\
Measure an epoch of networks 784 -> hidden -> 10 here, in batches of 128 with SGD, validation included, each way
in turn and again:

  article      as in the tutorial: DataLoader with two workers, ToTensor, images one by one
  plain loop   the plainest PyTorch loop over data that lie on the device
  run          the same as the dashboard trains it, with history, checkpoint and stop
  products     nothing but the matrix products: what no loop can beat

Takes a minute or two. Close what else keeps the machine busy.
"""


def add_bench(commands: Any) -> None:
    """Add `bench` to the command line."""
    bench = commands.add_parser(
        "bench",
        help="measure how fast it trains here, and where the time goes",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument("--device", metavar="NAME", help="only this one (default: each that is available)")
    bench.add_argument("--hidden", metavar="N,N", default="32,128,512", help="hidden sizes (default 32,128,512)")
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    bench.set_defaults(command=_bench)


def _bench(options: argparse.Namespace) -> int:
    hidden_sizes = [TrainConfig.from_text({"hidden_size": text}).hidden_size for text in options.hidden.split(",")]

    from .bench import REPEATS, bench
    from .devices import all_devices, check_fits, find_device
    from .machine import this_machine

    available = [device for device in all_devices() if device.is_available]
    devices = [find_device(options.device)] if options.device else available
    for device in devices:
        for hidden_size in hidden_sizes:
            check_fits(TrainConfig(hidden_size=hidden_size), device.name)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill clears up as Ctrl-C does
    with progress_bar() as report:
        rows, parts = bench([device.name for device in devices], hidden_sizes, REPEATS, report)
    if options.json:
        tables: dict[str, Sequence[Any]] = {"devices": devices, "rows": rows, "parts": parts}
        result = {name: [asdict(value) for value in values] for name, values in tables.items()}
        print(json.dumps({"machine": asdict(this_machine()), **result}))
    else:
        print("\n".join([*_table(rows), "", *_parts_table(parts)]))
    return OK


@contextmanager
def progress_bar() -> Iterator[Callable[[float, str], None]]:
    """On standard error: gives what tells it the share that is done, and of what."""
    from tqdm import tqdm

    layout = "{l_bar}{bar}| {elapsed}"
    with tqdm(total=100, disable=None, file=sys.stderr, bar_format=layout, leave=False) as bar:

        def report(share: float, text: str) -> None:
            bar.set_description_str(f"{text:36}", refresh=False)
            bar.update(100 * share - bar.n)

        yield report


def _table(rows: "Sequence[Row]") -> list[str]:
    lines = ["device     hidden  threads  way         s an epoch   images/s  × article  of products"]
    for row in rows:
        lines.append(
            f"{row.device:9} {row.hidden_size:7,} {row.threads:8}  {row.way:10} {row.seconds:11.3f}"
            f" {row.images_per_second:10,.0f} {row.times_article:10.1f} {row.of_products:12.1%}"
        )
    return lines


def _parts_table(parts: "Sequence[Parts]") -> list[str]:
    """Milliseconds of a step, each part waited for."""
    names = list(parts[0].times.parts)
    lines = ["ms a step".ljust(28) + "".join(f"{name:>10}" for name in names)]
    for row in parts:
        figures = "".join(f"{1000 * seconds:10.3f}" for seconds in row.times.parts.values())
        lines.append(f"{row.device:9} {row.hidden_size:7,}  {row.pipeline:9}{figures}")
    return lines
