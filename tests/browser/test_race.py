"""A race in the browser: from the button to the verdict, at once, stopped, found again."""

import re
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Pages
from tests.browser.test_train import stop_button

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

VERDICT = re.compile(r"(DataLoader|On-device) is [\d.]+ × faster|are equally fast")
PANELS = "[...document.querySelectorAll('.live.large .panel')]"
WIDTHS = "[...document.querySelectorAll('.live.large .bar div')].map(bar => parseFloat(bar.style.width))"


def start(page: "Page") -> None:
    page.get_by_role("button", name="Start race").click()
    expect(stop_button(page)).to_be_enabled()
    expect(page.get_by_text("it has no result")).to_have_count(0)  # that of the race before
    expect(page.locator(".live.large .panel")).to_have_count(2)


def stop(page: "Page") -> None:
    stop_button(page).click()
    expect(page.get_by_text("it has no result")).to_be_visible()


def hidden_size(page: "Page") -> "Locator":
    """That of the first lane; where there was a race before, the settings are out of the way."""
    control = page.get_by_label("Hidden size", exact=True).first
    control.wait_for(state="attached")
    if not control.is_visible():
        page.get_by_text("Settings of the lanes").click()
    return control


def lane(page: "Page", number: int) -> str:
    return page.locator(".live.large .panel").nth(number - 1).inner_text()


def test_a_race_shows_both_lanes_the_verdict_and_where_the_time_went(pages: Pages) -> None:
    page = pages.open("/race?both_epochs=1&batch1=512&batch2=512")
    start(page)
    expect(page.get_by_text("Begins when DataLoader has finished")).to_be_visible()
    page.wait_for_function(f"{WIDTHS}[0] > 0")
    assert page.evaluate(WIDTHS)[1] == 0
    expect(page.locator(".live-chart")).to_have_count(2)
    expect(page.get_by_role("heading", name=VERDICT)).to_be_visible()
    expect(page.get_by_text("both read")).to_be_visible()
    for number, name in ((1, "DataLoader"), (2, "On-device")):
        assert name in lane(page, number)
        assert re.search(r"Finished\s+Time\s+[\d.]+ s\s+[\d,]+ images/s", lane(page, number))
        assert "validation 8" in lane(page, number) or "validation 9" in lane(page, number)
    assert page.evaluate(WIDTHS) == [100, 100]
    expect(page.get_by_role("heading", name="Where the time of a step goes")).to_be_visible()
    page.wait_for_function("document.querySelectorAll('.live-chart .barlayer .point').length >= 9")
    page.get_by_role("button", name="Compare them on the Runs page").click()
    expect(page.get_by_test_id("stDataFrame").nth(1)).to_be_visible()  # of their differences
    assert page.url.count("run=") == 2


def test_at_once_both_lanes_move_and_their_settings_stay(pages: Pages) -> None:
    page = pages.open("/race?both_epochs=500&pipeline1=on-device")
    hidden_size(page).fill("16")
    page.get_by_text("At once").click()
    expect(page.get_by_text("Dramatic, but less fair")).to_be_visible()
    start(page)
    page.wait_for_function(f"{WIDTHS}.every(width => width > 0)")
    expect(hidden_size(page)).to_have_value("16")
    assert "hidden1=16" in page.url
    assert "mode=At+once" in page.url
    stop(page)


def test_a_reload_and_another_tab_find_the_race_and_may_stop_it(pages: Pages) -> None:
    waiting = pages.open("/race")
    waiting.get_by_role("button", name="Start race").wait_for()
    page = pages.open("/race?both_epochs=500&pipeline1=on-device")
    start(page)
    page.wait_for_function(f"{WIDTHS}[0] > 0")
    page.reload()
    page.wait_for_function(f"{WIDTHS}[0] > 0")
    waiting.wait_for_function(f"{WIDTHS}[0] > 0")  # a page that was open before follows it
    stop_button(waiting).click()
    for each in (waiting, page):
        expect(each.get_by_text("it has no result")).to_be_visible()
        expect(each.get_by_role("button", name="Start race")).to_be_enabled()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_the_lanes_stand_below_each_other_and_nothing_is_cut_off(pages: Pages, scheme: str) -> None:
    page = pages.open(
        "/race?both_epochs=500&pipeline1=on-device", color_scheme=scheme, viewport={"width": 390, "height": 800}
    )
    start(page)
    page.wait_for_function(f"{WIDTHS}[0] > 0")
    first, second = page.evaluate(f"{PANELS}.map(panel => panel.getBoundingClientRect().toJSON())")
    assert second["top"] >= first["bottom"] > first["top"]
    assert first["right"] <= 390
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    stop(page)
