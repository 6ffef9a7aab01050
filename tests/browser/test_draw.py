"""Drawing and being read, by mouse, touch and keyboard."""

import pytest
from playwright.sync_api import expect

from tests.browser.canvas import FOUR, ONE, SEVEN, ZERO, Stroke, draw, expect_digit, ink, pad, touch
from tests.browser.conftest import Pages
from tests.browser.test_train import start, stop

pytestmark = pytest.mark.browser


@pytest.mark.parametrize(("digit", "strokes"), [("7", SEVEN), ("1", ONE), ("0", ZERO), ("4", FOUR)])
def test_a_digit_drawn_with_the_mouse_is_read(pages: Pages, digit: str, strokes: list[Stroke]) -> None:
    page = pages.open("/draw")
    draw(page, strokes)
    expect_digit(page, digit)
    expect(page.get_by_role("listitem", name=f"{digit}: ")).to_have_class("bar top")
    expect(page.get_by_text("of the validation images right")).to_be_visible()


def test_undo_and_clear_take_the_answer_back_with_the_ink(pages: Pages) -> None:
    page = pages.open("/draw")
    expect(page.get_by_role("button", name="Undo")).to_be_disabled()
    draw(page, SEVEN)
    expect_digit(page, "7")
    seven = ink(page)
    draw(page, [[(0.1, 0.9), (0.9, 0.9)], [(0.1, 0.1), (0.1, 0.9)]])
    assert ink(page) > seven
    page.keyboard.press("Control+z")
    page.get_by_role("button", name="Undo").click()
    expect_digit(page, "7")
    assert ink(page) == seven
    page.get_by_role("button", name="Clear").click()
    expect_digit(page, "–")
    assert ink(page) == 0
    expect(page.get_by_role("listitem", name="7: –")).to_be_visible()
    expect(page.get_by_text("Draw a digit.", exact=True)).to_be_visible()


def test_the_answer_appears_while_the_pen_is_still_down(pages: Pages) -> None:
    page = pages.open("/draw")
    pad(page).wait_for()
    box = pad(page).bounding_box()
    assert box
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.15 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.48 * box["width"], box["y"] + 0.85 * box["height"], steps=20)
    expect_digit(page, "1")
    page.mouse.up()


def test_a_drawing_survives_a_reload_and_a_change_of_page(pages: Pages) -> None:
    page = pages.open("/draw")
    draw(page, SEVEN)
    expect_digit(page, "7")
    page.reload()
    expect_digit(page, "7")
    page.get_by_role("link", name="Train").click()
    page.get_by_role("button", name="Start training").wait_for()
    page.get_by_role("link", name="Draw").click()
    expect_digit(page, "7")
    draw(page, [[(0.1, 0.9), (0.9, 0.9)]])
    page.get_by_role("button", name="Undo").click()
    expect_digit(page, "7")


def test_a_stroke_that_leaves_the_canvas_goes_on(pages: Pages) -> None:
    page = pages.open("/draw")
    draw(page, [[(0.5, 0.1), (0.5, 0.5), (1.3, 0.6), (0.5, 0.7), (0.5, 0.9)]])
    row = "c => c.getContext('2d').getImageData(c.width / 2, c.height * 0.85, 1, 1).data[3]"
    assert pad(page).evaluate(row) == 255


def test_the_brush_sets_the_width_of_the_ink(pages: Pages) -> None:
    page = pages.open("/draw")
    draw(page, ONE)
    thin = ink(page)
    page.get_by_role("button", name="Clear").click()
    page.get_by_label("Brush").fill("40")
    draw(page, ONE)
    assert ink(page) > 1.5 * thin


def test_a_finger_draws_on_a_phone_and_does_not_scroll_the_page(pages: Pages) -> None:
    page = pages.open("/draw", viewport={"width": 390, "height": 700}, has_touch=True, is_mobile=True)
    pad(page).wait_for()
    pad(page).scroll_into_view_if_needed()
    top = "document.querySelector('[data-testid=stMain]').scrollTop"
    page.evaluate(f"{top} = 60")  # strokes must land under the finger on a scrolled page too
    before = page.evaluate(top)
    touch(page, SEVEN)
    expect_digit(page, "7")
    assert page.evaluate(top) == before
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_theme_changes_neither_ink_nor_answer(pages: Pages) -> None:
    seen = []
    for scheme in ("light", "dark"):
        page = pages.open("/draw", color_scheme=scheme)
        draw(page, SEVEN)
        expect_digit(page, "7")
        background = page.evaluate("getComputedStyle(document.querySelector('.stApp')).backgroundColor")
        seen.append((background, ink(page)))
    (light, light_ink), (dark, dark_ink) = seen
    assert light != dark
    assert light_ink == dark_ink


def test_a_network_that_is_training_answers_and_its_epoch_moves_on(pages: Pages) -> None:
    page = pages.open("/train?epochs=200")
    start(page)
    page.get_by_role("link", name="Draw").click()
    draw(page, SEVEN)
    expect_digit(page, "7")
    said = page.get_by_text("The answer comes from run")
    first = said.inner_text()
    expect(said).not_to_have_text(first)
    expect_digit(page, "7")
    page.get_by_role("link", name="Train").click()
    stop(page)
