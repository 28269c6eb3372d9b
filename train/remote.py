"""Recognizes locations in an object store, which a run refuses before it makes anything.

Without this check `gs://bucket/run` would silently become a local folder of that name.
"""

from train.errors import InputError


def require_local(location: str, field: str) -> None:
    """Checks that a location is a path of this machine.

    Args:
      location: The path that was given.
      field: The field of the configuration that names it, for the message.

    Raises:
      InputError: It is a URL such as gs://bucket/run.
    """
    scheme, found, _ = location.partition("://")
    if found:
        raise InputError(
            f"{field} must be a path of this machine: got {location}. A {scheme}:// location can be given as a folder "
            "where the bucket is mounted, for example with gcsfuse or mount-s3"
        )
