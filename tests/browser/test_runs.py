"""The Runs page in the browser: ticks, downloads, deletion; and a run steered from two tabs."""

import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from playwright.sync_api import expect

from mnist_trainer.archive import export_run
from mnist_trainer.config import TrainConfig
from mnist_trainer.runs import RunManager
from tests.browser.conftest import Pages, start_server
from tests.browser.test_train import start, stop, stop_button, wait_for_more_points

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

CHARTS = "[...document.querySelectorAll('.live-chart')]"


@pytest.fixture
def home(own_home: Path) -> Path:
    """A data folder with three runs."""
    manager = RunManager(own_home)
    for learning_rate, hidden_size in ((0.5, 32), (0.1, 2048), (0.02, 32)):
        config = TrainConfig(
            device="cpu", epochs=1, batch_size=1000, learning_rate=learning_rate, hidden_size=hidden_size
        )
        run = manager.start(config)
        assert run.ended.wait(120)
        run.set_about(f"rate {learning_rate:g}")
    return own_home


def tick(page: "Page", row: int) -> None:
    """Tick a row of the table, counted from 0; it is drawn on a canvas."""
    box = page.get_by_test_id("stDataFrame").first.bounding_box()
    assert box
    height = 37
    page.mouse.click(box["x"] + 16, box["y"] + height * (row + 1.5))


def assert_downloads_are_whole(page: "Page") -> None:
    assert len(downloaded(page, "History (CSV)").read_text().splitlines()) == 51
    assert len(zipfile.ZipFile(downloaded(page, "Folder (zip)")).namelist()) >= 6
    assert torch.load(downloaded(page, "Model"), weights_only=True)["linear1.weight"].shape == (32, 784)
    assert "def fit(" in downloaded(page, "Take it home").read_text()


def downloaded(page: "Page", label: str) -> Path:
    with page.expect_download() as download:
        page.get_by_role("button", name=label, exact=True).click()
    return Path(download.value.path())


def wait_for_lines(page: "Page", names: str) -> None:
    expect(page.locator(".live-chart .main-svg").first).to_be_visible()
    shown = f"{CHARTS}[0]?._fullData?.filter(t => t.showlegend).map(t => t.name).join()"
    page.wait_for_function(f"{shown} === '{names}'")


def test_runs_are_ticked_compared_named_downloaded_deleted_and_put_back(browser: "Browser", home: Path) -> None:
    server = start_server(home)
    pages = Pages(browser, server.url)
    page = pages.open("/runs", accept_downloads=True)
    page.get_by_test_id("stDataFrame").first.wait_for()
    page.wait_for_timeout(500)
    tick(page, 0)
    wait_for_lines(page, "rate 0.02")
    tick(page, 2)
    wait_for_lines(page, "rate 0.02,rate 0.5")
    assert len(re.findall("run=", page.url)) == 2
    page.reload()  # a link shares a comparison
    wait_for_lines(page, "rate 0.02,rate 0.5")

    # A run that comes in on top moves no tick to another.
    other = pages.open("/train?epochs=900")
    start(other)
    stop(other)
    page.get_by_label("Filter").fill("rate")
    page.get_by_label("Filter").press("Enter")
    page.wait_for_timeout(1500)
    page.get_by_label("Filter").fill("")
    page.get_by_label("Filter").press("Enter")
    page.wait_for_timeout(1500)
    wait_for_lines(page, "rate 0.02,rate 0.5")
    tick(page, 3)  # "rate 0.5" has gone one down
    wait_for_lines(page, "rate 0.02")

    page.get_by_label("Name", exact=True).fill("Ours")
    page.get_by_role("button", name="Save").click()
    wait_for_lines(page, "Ours")
    assert_downloads_are_whole(page)

    large = RunManager(home).all()[2]
    zipped = home / "large.zip"
    with zipped.open("wb") as file:
        export_run(large.folder, file)
    assert zipped.stat().st_size > 5_000_000
    page.get_by_role("button", name="Import").click()
    page.set_input_files("input[type=file]", zipped)
    wait_for_lines(page, "rate 0.1")  # what was imported is ticked
    assert len(RunManager(home).all()) == 5

    page.get_by_role("button", name="Delete", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Delete").click()
    expect(dialog).to_be_hidden()
    expect(page.get_by_text("It can be put back until the server stops")).to_be_visible()
    assert len(RunManager(home).all()) == 4
    page.get_by_role("button", name="Undo delete").click()
    expect(page.get_by_text("It can be put back until the server stops")).to_be_hidden()
    assert len(RunManager(home).all()) == 5
    pages.close()
    assert server.stop() == 0, server.log.read_text()
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(pages: Pages, scheme: str) -> None:
    page = pages.open("/runs", color_scheme=scheme, viewport={"width": 390, "height": 800})
    page.get_by_test_id("stDataFrame").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_run_is_paused_stepped_and_moved_from_two_tabs(pages: Pages) -> None:
    page = pages.open("/train?epochs=500")
    start(page)
    wait_for_more_points(page)
    other = pages.open("/train")
    main = page.get_by_test_id("stMain")
    main.get_by_role("button", name="Pause").click()
    expect(page.get_by_text("paused", exact=True)).to_be_visible()
    expect(other.get_by_text("paused", exact=True)).to_be_visible()

    steps = steps_shown(page)
    main.get_by_role("button", name="Step", exact=True).click()
    expect(page.get_by_text(f"step {steps + 1:,} of")).to_be_visible()
    expect(other.get_by_text(f"step {steps + 1:,} of")).to_be_visible()

    slider = page.get_by_role("slider", name="Learning rate now")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    expect(other.get_by_test_id("stMain").get_by_text("0.2", exact=True)).to_be_visible()
    page.wait_for_function(f"{CHARTS}[0]._fullLayout.annotations[0]?.text === 'lr 0.2'")

    other.get_by_test_id("stMain").get_by_role("button", name="Go on").click()
    expect(page.get_by_text("running", exact=True)).to_be_visible()
    wait_for_more_points(page)
    page.get_by_role("button", name="Queue it").click()
    expect(page.get_by_text("place 1 of 1 in the queue")).to_be_visible()
    page.get_by_test_id("stMain").get_by_role("button", name="Withdraw").click()
    expect(page.get_by_text("stopped", exact=True)).to_be_visible()
    stop_button(other).click()
    expect(other.get_by_text("stopped", exact=True)).to_be_visible()
    other.get_by_role("button", name="Resume").click()
    expect(other.get_by_text("running", exact=True)).to_be_visible()
    wait_for_more_points(other)
    stop(other)


def steps_shown(page: "Page") -> int:
    found = re.search(r"step ([\d,]+) of", page.get_by_text(re.compile(r"step [\d,]+ of")).inner_text())
    assert found
    return int(found[1].replace(",", ""))
