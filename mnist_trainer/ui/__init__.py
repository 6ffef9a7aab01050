"""The dashboard's side of the package: the only place in it that imports Streamlit."""
