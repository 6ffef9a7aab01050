"""Drawing on the canvas as a hand would."""

from typing import TYPE_CHECKING

from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

Stroke = list[tuple[float, float]]  # fractions of the canvas's sides

SEVEN: list[Stroke] = [[(0.3, 0.25), (0.7, 0.25), (0.45, 0.8)]]
ONE: list[Stroke] = [[(0.5, 0.15), (0.48, 0.85)]]
ZERO: list[Stroke] = [
    [(0.5, 0.2), (0.36, 0.3), (0.3, 0.5), (0.36, 0.7), (0.5, 0.8), (0.64, 0.7), (0.7, 0.5), (0.64, 0.3), (0.5, 0.2)]
]
FOUR: list[Stroke] = [[(0.35, 0.2), (0.3, 0.55), (0.7, 0.55)], [(0.65, 0.2), (0.62, 0.85)]]


def pad(page: "Page") -> "Locator":
    return page.get_by_role("img", name="Drawing area")


def draw(page: "Page", strokes: list[Stroke]) -> None:
    """With the mouse."""
    pad(page).wait_for()
    pad(page).scroll_into_view_if_needed()
    for stroke in strokes:
        (first, *rest) = places(page, stroke)
        page.mouse.move(*first)
        page.mouse.down()
        for point in rest:
            page.mouse.move(*point, steps=6)
        page.mouse.up()


def touch(page: "Page", strokes: list[Stroke]) -> None:
    """With a finger."""
    finger = page.context.new_cdp_session(page)
    for stroke in strokes:
        for kind, point in zip(["touchStart"] + ["touchMove"] * (len(stroke) - 1), places(page, stroke), strict=True):
            finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": point[0], "y": point[1]}]})
        finger.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


def places(page: "Page", stroke: Stroke) -> Stroke:
    box = pad(page).bounding_box()
    assert box
    return [(box["x"] + box["width"] * u, box["y"] + box["height"] * v) for u, v in stroke]


def expect_digit(page: "Page", digit: str) -> None:
    """The answer; "–" for none."""
    expect(page.locator(".answer .digit")).to_have_text(digit)


def ink(page: "Page") -> int:
    """Number of pixels on the canvas that are white."""
    pixels = "c.getContext('2d').getImageData(0, 0, c.width, c.height).data"
    count: int = pad(page).evaluate(f"c => {pixels}.filter((value, i) => i % 4 == 3 && value > 127).length")
    return count
