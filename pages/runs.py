"""The Runs page: every run in a table; ticked ones compared, or one of them in full."""

import io
from collections.abc import Callable
from dataclasses import astuple
from datetime import datetime
from typing import Any

import streamlit as st

from mnist_trainer.archive import export_run
from mnist_trainer.charts import MAX_COMPARED, comparison_figures
from mnist_trainer.config import differing
from mnist_trainer.errors import MnistTrainerError
from mnist_trainer.run import Run
from mnist_trainer.runs import RunManager
from mnist_trainer.state import MAX_NAME, MAX_NOTE
from mnist_trainer.takeaway import has_onnx, model_file, onnx_file, script_of, snippet
from mnist_trainer.ui.frame import errors_shown, page, plain, status_badge
from mnist_trainer.ui.live import chart_looks, chart_options, live, live_data

REFRESH_SECONDS = 2.0
MAX_ROWS_WHOLE = 12  # more are scrolled through
TICKED, TABLE, ROWS = "run", "runs_table", "runs_rows"  # in the address; the table; whose rows it shows
NOTICES = "runs_notices"  # what went wrong with the last click

COLUMNS: dict[str, Any] = {
    "name": st.column_config.TextColumn("Name", pinned=True),
    "state": st.column_config.TextColumn("State"),
    "val": st.column_config.NumberColumn("Best validation", format="%.2f%%", help="accuracy of its best epoch"),
    "test": st.column_config.NumberColumn("Test", format="%.2f%%", help="accuracy on the 10,000 test images"),
    "seconds": st.column_config.NumberColumn("Time (s)", format="%.1f", help="of training, pauses left out"),
    "speed": st.column_config.NumberColumn("Images/s", format="localized"),
    "epochs": st.column_config.NumberColumn("Epochs"),
    "learning_rate": st.column_config.NumberColumn(
        "Learning rate", format="%g", help="the last one, where it was moved while the run trained"
    ),
    "hidden_size": st.column_config.NumberColumn("Hidden size", format="localized"),
    "batch_size": st.column_config.NumberColumn("Batch", format="localized"),
    "optimizer": "Optimizer",
    "device": "Device",
    "pipeline": "Pipeline",
    "seed": st.column_config.NumberColumn("Seed", format="%d"),
    "note": "Note",
    "id": "ID",
    "created": st.column_config.DatetimeColumn("Started", format="YYYY-MM-DD HH:mm:ss"),
}


def main(runs: RunManager) -> None:
    st.header("Runs")
    for notice in st.session_state.pop(NOTICES, []):
        st.error(plain(notice), icon=":material/error:")
    undo_bar(runs)
    every = runs.all()
    damaged_runs(runs)
    if not every:
        st.info("No run yet. Train one, or import one that somebody exported.")
        import_button(runs)
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        wanted = st.text_input(
            "Filter", placeholder="name, state, note, optimizer …", key="filter", width=320, persist_state="session"
        )
        import_button(runs)
    is_live = any(run.is_live for run in every)
    st.fragment(table, run_every=REFRESH_SECONDS if is_live else None)(runs, wanted)
    ticked = [run for run in every if run.id in ticked_ids()]
    if gone := [run_id for run_id in ticked_ids() if run_id not in {run.id for run in ticked}]:
        st.warning(plain(f"There is no run '{gone[0][:60]}' any more, or it cannot be read. It is left out."))
    if not ticked:
        st.caption("Tick a run for its details, downloads and name; tick several to compare them.")
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        st.button("Untick all", icon=":material/close:", on_click=tick, args=([],))
        label = "Delete" if len(ticked) == 1 else f"Delete {len(ticked)} runs"
        if st.button(label, icon=":material/delete:"):
            confirm_deletion(runs, [run.id for run in ticked])
    if len(ticked) == 1:
        details(runs.get(ticked[0].id))
    else:
        differences(ticked)
    is_live = any(run.is_live for run in ticked)
    st.fragment(comparison, run_every=REFRESH_SECONDS if is_live else None)(runs, [run.id for run in ticked])
    chart_options()


def ticked_ids() -> list[str]:
    """The ticked runs, as the address has them: a link shares a comparison."""
    return st.query_params.get_all(TICKED)


def tick(run_ids: list[str]) -> None:
    st.query_params[TICKED] = run_ids
    st.session_state.pop(ROWS, None)  # the table ticks them anew


def table(runs: RunManager, wanted: str) -> None:
    """The runs that the filter lets through. Only this refreshes by itself."""
    with errors_shown():
        rows = [row for row in map(as_row, runs.all()) if all(word in words(row) for word in wanted.lower().split())]
        ids = [row["id"] for row in rows]
        if st.session_state.get(ROWS) != ids:
            # Rows are ticked by their place: a new run on top would move the ticks to others.
            st.session_state[ROWS] = ids
            places = [ids.index(run_id) for run_id in ticked_ids() if run_id in ids]
            st.session_state[TABLE] = {"selection": {"rows": places, "columns": [], "cells": []}}
        if not rows:
            st.info(f"No run has “{plain(wanted)}” in its name, state, note or settings.")
            return
        shown: Any = st.dataframe(
            {name: [row[name] for row in rows] for name in COLUMNS},
            column_config=COLUMNS,
            hide_index=True,
            key=TABLE,
            on_select="rerun",
            selection_mode="multi-row",
            height="content" if len(rows) <= MAX_ROWS_WHOLE else 480,
            placeholder="–",
            alt="All runs, newest first, with their settings and results.",
        )
        hidden = [run_id for run_id in ticked_ids() if run_id not in ids]
        ticked = [ids[place] for place in shown.selection.rows if place < len(ids)] + hidden
        if set(ticked) != set(ticked_ids()):
            st.query_params[TICKED] = ticked
            st.rerun()


def as_row(run: Run) -> dict[str, Any]:
    """A run as the table shows it."""
    state, config = run.state, run.config
    share = f" {run.snapshot().steps / config.total_steps:.0%}" if state.status in ("running", "paused") else ""
    return {
        "id": run.id,
        "name": run.name,
        "state": "damaged history" if run.history_problem else state.status + share,
        "val": in_percent(run.best_val_accuracy),
        "test": in_percent(state.test_accuracy),
        "seconds": run.seconds or None,
        "speed": run.images_per_second and round(run.images_per_second),
        **config.to_json(),
        "learning_rate": float(f"{run.learning_rate:g}"),
        "device": state.device_label or config.device,
        "note": run.about.note,
        "created": local_time(run.origin.created_at),
    }


def local_time(text: str) -> datetime | None:
    """A time of a run's folder, as clocks near the server show it; None if it is none."""
    try:
        return datetime.fromisoformat(text).astimezone().replace(tzinfo=None, microsecond=0)
    except (ValueError, OverflowError, OSError):
        return None


def in_percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def words(row: dict[str, Any]) -> str:
    """All that the filter looks in."""
    return " ".join(str(value) for value in row.values()).lower()


def undo_bar(runs: RunManager) -> None:
    """What was deleted last can be put back, until the server stops."""
    if deleted := runs.deleted:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.button("Undo delete", icon=":material/undo:", on_click=undelete, args=(runs, deleted[-1:]))
            if len(deleted) > 1:
                st.button(f"Undo all {len(deleted)}", on_click=undelete, args=(runs, deleted))
            more = f" and {len(deleted) - 1} more" if len(deleted) > 1 else ""
            st.caption(f"Deleted: {plain(deleted[-1])}{more}. It can be put back until the server stops.")


def undelete(runs: RunManager, run_ids: list[str]) -> None:
    with_each(run_ids, runs.undelete)


def damaged_runs(runs: RunManager) -> None:
    """Runs that cannot be read are not hidden: what is wrong, and a way to be rid of them."""
    for run_id, problem in runs.damaged().items():
        with st.container(horizontal=True, vertical_alignment="center"):
            st.warning(plain(problem), width="stretch")
            if st.button("Delete", icon=":material/delete:", key=f"delete {run_id}"):
                confirm_deletion(runs, [run_id])


@st.dialog("Delete?", icon=":material/delete:")
def confirm_deletion(runs: RunManager, run_ids: list[str]) -> None:
    st.markdown("\n".join(f"- {plain(run_id)}" for run_id in run_ids))
    st.caption("Until the server stops, this can be undone.")
    with st.container(horizontal=True):
        is_meant = st.button("Delete", type="primary", key="really", on_click=delete, args=(runs, run_ids))
        if st.button("Keep") or is_meant:
            st.rerun()


def delete(runs: RunManager, run_ids: list[str]) -> None:
    def delete_one(run_id: str) -> None:
        runs.delete(run_id)
        tick([ticked for ticked in ticked_ids() if ticked != run_id])

    with_each(run_ids, delete_one)


def with_each(run_ids: list[str], act: Callable[[str], None]) -> None:
    """Do it with each of them; where it cannot be done, say why, and go on with the next."""
    for run_id in run_ids:
        try:
            act(run_id)
        except MnistTrainerError as error:
            tell(error)


def tell(error: MnistTrainerError) -> None:
    """Say what went wrong with a click, on the page that is made anew after it."""
    st.session_state.setdefault(NOTICES, []).append(str(error))


def import_button(runs: RunManager) -> None:
    """Import what somebody exported: checked by `archive`, each file once."""
    turn = st.session_state.setdefault("import_turn", 0)
    with st.popover("Import", icon=":material/upload:"):
        files = st.file_uploader(
            "Runs, as zips that this page made (larger ones: `runs import` on the command line)",
            type="zip",
            accept_multiple_files=True,
            key=f"import {turn}",
        )
    if not files:
        return
    imported = []
    for file in files:
        try:
            imported.append(runs.import_run(file, file.name).id)
        except MnistTrainerError as error:
            tell(error)
    st.session_state["import_turn"] += 1  # an empty uploader
    if imported:
        tick(imported)
        st.toast(f"Imported {len(imported)} run{'s' * (len(imported) != 1)}.", icon=":material/check:")
    st.rerun()


def details(run: Run) -> None:
    """One run: what people call it, how it stands, and what can be taken along."""
    with st.container(horizontal=True, vertical_alignment="center"):
        status_badge(run)
        st.markdown(f"**{plain(run.name)}**")
        if st.button("Open on the Train page", icon=":material/model_training:"):
            st.switch_page("pages/train.py", query_params={"run": run.id})
        if run.has_weights and st.button("Draw a digit", icon=":material/draw:"):
            st.switch_page("pages/draw.py", query_params={"run": run.id})
    run.snapshot()  # finds what is wrong with its history
    for message in filter(None, (run.state.message, run.problem)):
        st.warning(plain(message))
    left, right = st.columns(2)
    with left, st.form(f"about {run.id}"):
        name = st.text_input("Name", run.about.name, max_chars=MAX_NAME, placeholder=run.id)
        note = st.text_area("Note", run.about.note, max_chars=MAX_NOTE, height=100)
        if st.form_submit_button("Save", icon=":material/save:"):
            with errors_shown():
                run.set_about(name, note)
                st.rerun()
    with right:
        downloads(run)
        course(run)


def course(run: Run) -> None:
    """When it changed, and from what it was continued."""
    changes, origin = run.state.changes, run.origin
    lines = [f"- {local_time(at) or at} · {status}, step {step:,}" for status, at, step in map(astuple, changes)]
    lines += [f"- after step {rate.step:,}: learning rate {rate.learning_rate:g}" for rate in run.snapshot().rates]
    if origin.parent:
        lines.insert(0, f"- continued from {origin.parent} after step {origin.parent_step:,}")
    with st.expander("Its course"):
        st.markdown("\n".join(map(plain, lines)) or "Not recorded: it is of an older version.")


def downloads(run: Run) -> None:
    """All that can be taken along; each file is made when it is asked for."""
    with st.container(horizontal=True):
        download("History (CSV)", f"{run.id}-steps.csv", lambda: run.folder.read_bytes("steps.csv"), "text/csv")
        download("Epochs (CSV)", f"{run.id}-epochs.csv", lambda: run.folder.read_bytes("epochs.csv"), "text/csv")
        download("Folder (zip)", f"{run.id}.zip", lambda: zipped(run), "application/zip")
        if run.has_weights:
            download("Model", "model.pt", lambda: model_file(run.weights()), "application/octet-stream")
            if has_onnx():
                download("ONNX", "model.onnx", lambda: onnx_file(run.weights()), "application/octet-stream")
        if not run.is_live and run.has_weights:
            download("Take it home", "mnist_at_home.py", lambda: script_of(run).encode(), "text/x-python")
    if run.has_weights:
        with st.expander("How to use the model"):
            st.code(snippet(), language="python")
            if not has_onnx():
                st.caption("For an ONNX file too, install the package on the server: `pip install onnx`.")
    if not run.is_live and run.has_weights:
        with errors_shown(), st.expander("Take it home: this run as one Python file"):
            st.caption("Needs nothing but torch and torchvision, and gives the same accuracy.")
            st.code(script_of(run), language="python", height=400)


def download(label: str, file_name: str, data: Any, mime: str) -> None:
    st.download_button(label, data, file_name, mime, key=label, on_click="ignore", icon=":material/download:")


def zipped(run: Run) -> bytes:
    buffer = io.BytesIO()
    export_run(run.folder, buffer)
    return buffer.getvalue()


def differences(ticked: list[Run]) -> None:
    """A table of just the settings in which the ticked runs differ, with what came of them."""
    names = [name for name in differing([run.config for run in ticked]) if name != "learning_rate"]
    rates = [run.rates_text for run in ticked]
    settings = {name.replace("_", " "): [str(getattr(run.config, name)) for run in ticked] for name in names}
    if len(set(rates)) > 1:
        settings["learning rate"] = rates
    rows = {
        "run": [run.name for run in ticked],
        **settings,
        "best validation": [percent(run.best_val_accuracy) for run in ticked],
        "test": [percent(run.state.test_accuracy) for run in ticked],
        "time": [f"{run.seconds:.1f} s" for run in ticked],
    }
    if not settings:
        st.caption("These runs have the same settings.")
    st.dataframe(rows, hide_index=True, alt="The settings in which the ticked runs differ, and their results.")


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2%}"


def comparison(runs: RunManager, run_ids: list[str]) -> None:
    with errors_shown():
        found = [runs.get(run_id) for run_id in run_ids]
        if len(found) > MAX_COMPARED:
            st.caption(f"The first {MAX_COMPARED} of them are drawn.")
        drawn = [(run.name, run.snapshot(), run.config) for run in found]
        x_axis, smoothing, is_log = chart_looks()
        loss, right = comparison_figures(drawn, x_axis, smoothing, is_log)
        names = ", ".join(name for name, *_ in drawn[:MAX_COMPARED])
        charts = [
            (figure, f"{what} of {names}: training smoothed, validation as marks.")
            for figure, what in ((loss, "Loss"), (right, "Accuracy"))
        ]
        live("comparison", live_data(charts, revision=f"{x_axis} {' '.join(run_ids)}"))


with page("Runs") as runs:
    main(runs)
