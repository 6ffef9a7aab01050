"""What thirty pages share: payloads made once, and refreshes that slow down as pages grow."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mnist_trainer.ui import live
from mnist_trainer.ui.live import KEPT_PAYLOADS, SEEN_SECONDS, Panel, Tile, live_data, refresh_seconds, shared


@pytest.fixture(autouse=True)
def _nobody() -> Iterator[None]:
    live._payloads.clear()
    live._seen.clear()
    yield
    live._payloads.clear()
    live._seen.clear()


def test_thirty_pages_at_once_have_it_made_once() -> None:
    made, got = list[dict[str, Any]](), list[dict[str, Any]]()
    together = threading.Barrier(30)

    def make() -> dict[str, Any]:
        made.append({"number": len(made)})
        return made[-1]

    def look(version: int) -> None:
        together.wait(timeout=30)
        got.append(shared("run", version, make, is_moving=True))

    threads = [threading.Thread(target=look, args=(version,)) for version in range(30)]  # each sees a newer step
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(got) == 30
    assert len(made) == 1
    assert all(each is made[0] for each in got)


def test_what_stands_still_is_made_anew_as_soon_as_it_changes_and_never_before() -> None:
    first = shared("run", "step 1", dict[str, Any]({"a": 1}).copy, is_moving=False)
    assert shared("run", "step 1", dict, is_moving=False) is first
    assert shared("run", "step 2", dict[str, Any]({"a": 2}).copy, is_moving=False) == {"a": 2}
    assert shared("other options", "step 2", dict[str, Any]({"a": 3}).copy, is_moving=False) == {"a": 3}


def test_what_moves_is_made_anew_after_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    first = shared("run", 1, dict[str, Any]({"a": 1}).copy, is_moving=True)
    assert shared("run", 2, dict[str, Any]({"a": 2}).copy, is_moving=True) is first
    monkeypatch.setattr(live, "TICK_SECONDS", 0.0)
    assert shared("run", 2, dict[str, Any]({"a": 2}).copy, is_moving=True) == {"a": 2}


def test_memory_does_not_grow_with_the_runs_that_are_looked_at() -> None:
    for number in range(3 * KEPT_PAYLOADS):
        shared(number, 0, dict[str, Any]({"a": 1}).copy, is_moving=False)
    assert len(live._payloads) == KEPT_PAYLOADS


def test_the_more_pages_the_more_seldom_each_refreshes_and_closed_ones_do_not_count() -> None:
    seconds = [refresh_seconds(f"page {number}", now=100.0) for number in range(30)]
    assert seconds[0] == 0.5
    assert seconds == sorted(seconds)
    assert 1.0 < seconds[-1] < 2.0
    assert refresh_seconds("page 0", now=100.1) == seconds[-1]  # the same page again is not one more
    assert refresh_seconds("page 0", now=100.2 + SEEN_SECONDS) == 0.5


def test_a_panel_holds_what_it_shows_as_plain_values() -> None:
    figure = {"data": [{"x": [1, 2], "y": [0.5, 0.25], "name": "training", "color": 0}], "layout": {"xaxis": {}}}
    data = live_data([(figure, "Loss.")], "run step", [Panel([Tile("Time", "1.0 s")], (0.25, "Epoch 1"), "Left", 1)])
    (chart,) = data["charts"]
    assert chart["traces"][0]["x"] == {"dtype": "f4", "bdata": "AACAPwAAAEA="}
    assert (chart["description"], chart["layout"]) == ("Loss.", {"xaxis": {}})
    assert data["panels"] == [
        {"title": "Left", "progress": (0.25, "Epoch 1"), "tiles": [("Time", "1.0 s", "")], "color": 1}
    ]


def test_bars_keep_their_names() -> None:
    data = live_data([({"data": [{"x": [1.0], "y": ["CPU"]}], "layout": {}}, "Time.")], "bars")
    assert data["charts"][0]["traces"][0]["y"] == ["CPU"]
