"""The Devices page in the browser: a chart that grows, a second phone, Stop; and the machine's use beside a run."""

import re
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import TimeoutError, expect

from tests.browser.conftest import Pages

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

CHART = "document.querySelector('.live-chart')"


def begin(page: "Page", label: str) -> None:
    button = page.get_by_role("button", name=label)
    button.wait_for()
    button.click()


def choose(page: "Page", label: str, option: str) -> None:
    """Pick from a list. The page may be made anew just then, and close it."""
    for _ in range(10):
        page.get_by_role("combobox", name=label).click()
        with suppress(TimeoutError):
            page.get_by_role("option", name=option, exact=True).click(timeout=3_000)
            return
    pytest.fail(f"{label} could not be set to {option}.")


def test_a_chart_grows_as_it_is_measured_and_another_phone_shows_the_same(pages: Pages) -> None:
    page, phone = pages.open("/devices"), pages.open("/devices", viewport={"width": 390, "height": 800})
    phone.get_by_role("button", name="Measure multiplication").wait_for()
    begin(page, "Measure multiplication")
    page.wait_for_function(f"{CHART}?._fullData?.[0]?.x.length > 1")
    node = page.evaluate_handle(f"{CHART}.querySelector('.main-svg')")
    page.wait_for_function(f"{CHART}._fullData[0].x.length >= 5")
    assert node.evaluate("svg => svg.isConnected")  # updated in place
    for each in (page, phone):
        expect(each.get_by_role("button", name="Measure multiplication")).to_be_enabled()
        expect(each.get_by_role("img", name=re.compile(r"the highest is [\d,.]+ GFLOP"))).to_be_visible()
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    page.reload()
    expect(page.get_by_role("img", name=re.compile(r"the highest is [\d,.]+ GFLOP"))).to_be_visible()


def test_a_step_of_vgg16_can_be_stopped_between_two_layers(pages: Pages) -> None:
    page = pages.open("/devices", color_scheme="dark")
    page.get_by_text("It will take about 1.53 GB").wait_for()
    choose(page, "Batch size", "16")
    expect(page.get_by_text("It will take about 3.1 GB")).to_be_visible()
    begin(page, "Take one step")
    expect(page.get_by_text(re.compile(r"(Forward|Backward) pass: \w+ is done"))).to_be_visible()
    page.get_by_test_id("stMain").get_by_role("button", name="Stop").nth(2).click()
    expect(page.get_by_text("16 images on cpu · stopped")).to_be_visible()
    expect(page.get_by_role("button", name="Take one step")).to_be_enabled()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_while_a_run_trains_the_machines_use_moves_beside_its_charts(pages: Pages) -> None:
    page = pages.open("/train?epochs=500")
    begin(page, "Start training")
    machine = "document.querySelectorAll('.live-chart')[2]"
    page.wait_for_function(f"{machine}?._fullData?.[0]?.name === 'CPU' && {machine}._fullData[0].x.length > 2")
    width = "el => el.getBoundingClientRect().width"
    assert page.locator(".live-chart").nth(2).evaluate(width) > 1.5 * page.locator(".live-chart").first.evaluate(width)
    page.get_by_role("link", name="Devices").click()
    begin(page, "Measure copying")
    expect(page.get_by_role("alert")).to_contain_text("is running: it would be measured, too")
    page.get_by_role("link", name="Train").click()
    page.get_by_role("button", name="Pause").wait_for()
    page.get_by_test_id("stMain").get_by_role("button", name="Stop").click()
    expect(page.get_by_text("stopped", exact=True)).to_be_visible()
    expect(page.locator(".live-chart")).to_have_count(2)
