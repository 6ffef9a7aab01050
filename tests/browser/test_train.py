"""A run in the browser: live charts, reloads, second tabs, stopping, and Ctrl-C on the server."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from mnist_trainer.runs import RunManager
from tests.browser.conftest import Pages, start_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.browser

CHART = "document.querySelector('.live-chart')"


def start(page: "Page") -> None:
    button = page.get_by_role("button", name="Start training")
    button.wait_for()
    button.click()
    expect(page.get_by_text("running", exact=True)).to_be_visible()
    page.locator(".live-chart .main-svg").first.wait_for()


def stop_button(page: "Page") -> "Locator":
    # Not Streamlit's own "Stop", which it shows while a page's script is busy.
    return page.get_by_test_id("stMain").get_by_role("button", name="Stop")


def stop(page: "Page") -> None:
    stop_button(page).click()
    expect(page.get_by_text("stopped", exact=True)).to_be_visible()


def wait_for_more_points(page: "Page") -> None:
    last = f"({CHART}._fullData?.[0]?.x?.at(-1) ?? 0)"
    now = page.evaluate(last)
    page.wait_for_function(f"{last} > {now}")


def test_charts_move_and_keep_zoom_and_legend_choices(pages: Pages) -> None:
    page = pages.open("/train?epochs=500")
    start(page)
    wait_for_more_points(page)
    plot = page.locator(".live-chart .nsewdrag").first.bounding_box()
    assert plot
    page.mouse.move(plot["x"] + 60, plot["y"] + 60)
    page.mouse.down()
    page.mouse.move(plot["x"] + 200, plot["y"] + 60, steps=5)
    page.mouse.up()
    page.locator(".live-chart .legendtoggle").first.click()
    page.wait_for_function(f"{CHART}._fullData[0].visible === 'legendonly'")
    zoom = page.evaluate(f"{CHART}._fullLayout.xaxis.range")
    node = page.evaluate_handle(f"{CHART}.querySelector('.main-svg')")
    for _ in range(3):
        wait_for_more_points(page)
    assert page.evaluate(f"{CHART}._fullLayout.xaxis.range") == zoom
    assert page.evaluate(f"{CHART}._fullData[0].visible") == "legendonly"
    assert node.evaluate("svg => svg.isConnected")  # updated in place: nothing flickers
    stop(page)


def test_reload_and_second_tab_find_the_run_and_moved_controls_do_not_disturb_it(pages: Pages) -> None:
    page = pages.open("/train?epochs=500&hidden=48")
    start(page)
    assert "run=" in page.url
    run_id = re.search(r"run=([\w.-]+)", page.url)
    assert run_id
    page.reload()
    expect(page.get_by_text(re.compile(f"{run_id[1]} ·"))).to_be_visible()
    expect(page.get_by_label("Hidden size", exact=True)).to_have_value("48")
    other = pages.open("/train")
    expect(other.get_by_text(re.compile(f"{run_id[1]} ·"))).to_be_visible()
    expect(other.get_by_label("Hidden size", exact=True)).to_have_value("32")
    step = steps_shown(page)
    page.get_by_label("Epochs", exact=True).fill("3")
    page.get_by_label("Learning rate", exact=True).fill("0.1")
    page.get_by_text("Log scale for loss").click()
    page.get_by_role("radio", name="epoch").click()
    page.wait_for_function(f"{CHART}._fullLayout.xaxis.title.text === 'epoch'")
    wait_for_more_points(page)
    assert steps_shown(page) >= step
    expect(page.get_by_label("Epochs", exact=True)).to_have_value("3")
    stop(other)
    expect(page.get_by_text("stopped", exact=True)).to_be_visible()


def steps_shown(page: "Page") -> int:
    text = page.get_by_text(re.compile(r"step [\d,]+ of")).inner_text()
    found = re.search(r"step ([\d,]+) of", text)
    assert found
    return int(found[1].replace(",", ""))


def test_a_tab_opened_before_the_run_follows_it(pages: Pages) -> None:
    waiting = pages.open("/train")
    waiting.get_by_role("button", name="Start training").wait_for()
    page = pages.open("/train?epochs=500")
    start(page)
    expect(waiting.get_by_text("running", exact=True)).to_be_visible()
    stop(page)
    expect(waiting.get_by_text("stopped", exact=True)).to_be_visible()


def test_a_finished_run_shows_its_test_accuracy_and_leads_to_drawing(pages: Pages) -> None:
    page = pages.open("/train?epochs=1")
    start(page)
    expect(page.get_by_text("finished", exact=True)).to_be_visible()
    expect(page.locator(".live dl div").filter(has_text="Test accuracy")).to_contain_text(re.compile(r"9\d\.\d\d%"))
    page.get_by_role("button", name="Draw a digit").click()
    expect(page.get_by_role("img", name="Drawing area")).to_be_visible()


def test_start_stop_and_page_changes_in_quick_succession_leave_one_sound_panel(pages: Pages) -> None:
    page = pages.open("/train?epochs=900")
    button = page.get_by_role("button", name="Start training")
    for _ in range(10):
        expect(button).to_be_enabled()
        expect(stop_button(page)).to_be_disabled()  # what is shown is what the server has
        page.keyboard.press("Control+Shift+S")
        expect(stop_button(page)).to_be_enabled()
        page.get_by_role("link", name="Draw").click()
        page.get_by_role("link", name="Home").click()
        page.get_by_role("link", name="Train").click()
        stop_button(page).click()
        expect(page.get_by_text("stopped", exact=True)).to_be_visible()
    expect(page.locator(".live-chart")).to_have_count(2)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_bad_value_gets_a_sentence_and_what_was_typed_stays(pages: Pages) -> None:
    page = pages.open("/train")
    page.get_by_label("Epochs", exact=True).fill("0")
    page.get_by_label("Hidden size", exact=True).fill("48")
    page.get_by_role("button", name="Start training").click()
    expect(page.get_by_role("alert")).to_contain_text("Epochs must be a whole number from 1 to 1,000; 0 is not.")
    expect(page.get_by_label("Epochs", exact=True)).to_have_value("0")
    expect(page.get_by_label("Hidden size", exact=True)).to_have_value("48")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_are_readable_in_both_themes_and_on_a_phone(pages: Pages, scheme: str) -> None:
    page = pages.open("/train", color_scheme=scheme, viewport={"width": 390, "height": 800})
    page.locator(".live-chart .main-svg").first.wait_for()
    text = page.evaluate(f"{CHART}._fullLayout.font.color")
    assert text == page.evaluate(f"getComputedStyle({CHART}).getPropertyValue('--st-text-color').trim()")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    # Changing the theme while the page is open reaches a finished chart too.
    page.emulate_media(color_scheme="dark" if scheme == "light" else "light")
    page.wait_for_function(f"{CHART}._fullLayout.font.color !== '{text}'")


def test_ctrl_c_during_a_run_ends_the_server_with_status_0_and_keeps_the_run(
    browser: "Browser", own_home: Path
) -> None:
    server = start_server(own_home)
    pages = Pages(browser, server.url)
    page = pages.open("/train?epochs=900")
    start(page)
    wait_for_more_points(page)
    assert server.stop() == 0, server.log.read_text()
    for context in pages.contexts:
        context.close()
    run = RunManager(own_home).latest()
    assert run is not None
    assert run.state.status == "stopped"
    assert run.snapshot().steps > 0
    assert "Traceback" not in server.log.read_text()
