"""The versions of libtpu whose programs this project was tested with, and the line about any other
version.

Everything that reads, predicts or simulates programs of libtpu calls `untested`: `timeline`,
`play`, the rehearsal of `python -m flaxasync.verify`, and the dry run of the training script.
"""

TESTED_LIBTPU = ("0.0.50.1", "0.0.51", "0.0.52")  # the first one is what `jax[tpu]` installs


def installed_libtpu() -> str:
    """Returns the version of libtpu that is installed; "" if there is none, or it is a nightly
    build.
    """
    # not above: it takes a fifth of the time in which a small text is read
    import importlib.metadata

    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:  # a nightly build has another name
        return ""


def untested(version: str) -> str | None:
    """Returns a line about programs of this version of libtpu if it was not tested; None if it was.

    >>> untested("0.0.99")
    'compiled by libtpu 0.0.99, which was not tested: predictions and checks were tested with 0.0.50.1, 0.0.51, 0.0.52'
    """
    if version in TESTED_LIBTPU:
        return None
    if version:
        named = f"libtpu {version}, which was not tested"
    else:
        named = "a libtpu whose version is not known"
    return (
        f"compiled by {named}: predictions and checks were tested with {', '.join(TESTED_LIBTPU)}"
    )
