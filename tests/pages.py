"""What the tests of the pages share."""

import json
from typing import Any

from streamlit.testing.v1 import AppTest

PAGE_TIMEOUT_SECONDS = 60.0


def open_page(path: str, **query: str) -> AppTest:
    """The page at `path`, reached from the home page as a user would; `query` is its address's."""
    app = AppTest.from_file("../app.py", default_timeout=PAGE_TIMEOUT_SECONDS).run()
    app.switch_page(path)
    for key, value in query.items():
        app.query_params[key] = value
    return rerun(app)


def rerun(app: AppTest) -> AppTest:
    """Run the page again, as its timer would; it must not fail."""
    app.run()
    assert not app.exception, app.exception
    return app


def click(app: AppTest, label: str) -> AppTest:
    """Press the button with this label."""
    button(app, label).click()
    return rerun(app)


def button(app: AppTest, label: str) -> Any:
    return next(each for each in app.button if each.label == label)


def text(app: AppTest) -> str:
    """All that the page says in sentences, captions and figures."""
    elements = (*app.markdown, *app.caption, *app.info, *app.warning, *app.error)
    figures = [f"{each.label}: {each.value}" for each in app.metric]
    for index in range(len(app.get("bidi_component"))):
        for panel in component_data(app, index).get("panels", ()):
            figures += [f"{label}: {value}" for label, value, _ in panel["tiles"]]
    return "\n".join([str(each.value) for each in elements] + figures)


def component_data(app: AppTest, index: int = 0) -> dict[str, Any]:
    """What was sent to a component's JavaScript."""
    data: dict[str, Any] = json.loads(app.get("bidi_component")[index].proto.json)
    return data
