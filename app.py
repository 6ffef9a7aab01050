"""The home page: what this is, what it runs on, the latest run, and where to go next."""

import streamlit as st

from mnist_trainer.ui.frame import page, plain, settings_line, status_badge

with page("Home") as runs:
    from mnist_trainer.devices import all_devices

    st.title("MNIST Trainer")
    st.markdown(
        "Train a network to read handwritten digits and watch it learn, on the CPU or on a GPU. "
        "Then draw a digit, and watch it being read."
    )
    with st.container(horizontal=True):
        if st.button("Train a network", type="primary", icon=":material/model_training:"):
            st.switch_page("pages/train.py")
        if st.button("Draw a digit", icon=":material/draw:"):
            st.switch_page("pages/draw.py")

    left, right = st.columns(2)
    with left, st.container(border=True, height="stretch"):
        st.subheader("Device")
        with st.spinner("Trying the devices …"):
            devices = all_devices()
        best = next(device for device in devices if device.is_available)
        st.markdown(f"**{best.label}** — the fastest that works here, and the default.")
        for device in devices:
            if not device.is_available:
                st.caption(str(device))

    with right, st.container(border=True, height="stretch"):
        st.subheader("Latest run")
        run = runs.latest()
        if run is None:
            st.markdown("None yet. Training one takes a few seconds.")
        else:
            with st.container(horizontal=True, vertical_alignment="center"):
                status_badge(run)
                st.markdown(plain(run.name))
            if run.state.test_accuracy is not None:
                st.metric("Test accuracy", f"{run.state.test_accuracy:.2%}", help="Of 10,000 images it never saw.")
            st.caption(settings_line(run))
        for problem in runs.damaged().values():
            st.warning(plain(problem))

    st.caption(
        f"Runs and data are kept in {plain(runs.home)}. MNIST: LeCun, Cortes and Burges, CC BY-SA 3.0; "
        "50,000 images to train on, 10,000 to validate, 10,000 to test."
    )
